"""Fixtures of all tests of `models`."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Run torch on one thread, here and in subprocesses.

    The test models are too small for more: beside one busy core, the barriers between two threads
    made an export 2 to 5 times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)
