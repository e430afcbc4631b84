"""The CPUs of this process."""

import math
import os
from pathlib import Path


def available_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs for this process: its affinity, limited by the cgroup's quota."""
    # macOS has no CPU affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    for file in ("sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        try:
            quota = (root / file).read_text().split()
        except OSError:
            continue
        if len(quota) == 1:  # cgroup v1 has a separate file for the period
            quota.append((root / file).with_name("cpu.cfs_period_us").read_text().strip())
        if quota[0] not in ("max", "-1"):
            return max(1, min(allowed, math.ceil(int(quota[0]) / int(quota[1]))))
    return allowed
