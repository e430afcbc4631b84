"""The Ray Serve application of `deploy`, which scales with the load of the last two seconds.

By default Ray waits for half a minute of load, which the clients of the test would compute.
"""

from functools import partial
from unittest.mock import patch

from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from deploy import ray_serve


def vitrine(arguments: ray_serve.Arguments) -> Application:
    """Return the application for `serve run`."""
    quick = partial(
        AutoscalingConfig, upscale_delay_s=0, metrics_interval_s=1, look_back_period_s=2
    )
    with patch.object(ray_serve, "AutoscalingConfig", quick):
        return ray_serve.vitrine(arguments)
