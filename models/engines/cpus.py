"""The CPUs that this process may use: their number, and their instructions."""

import math
import os
from pathlib import Path

# Maximum number of threads of an engine. More cost throughput, and thousands start for minutes.
MAX_THREADS = 16 * (os.cpu_count() or 1)


def available_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs in this process's affinity mask, limited by the cgroup CPU quota.

    A fractional quota is rounded up.

    Args:
        root: Root of the file system with the cgroup files.
    """
    # macOS has no os.sched_getaffinity.
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    for file in ("sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        try:
            quota = (root / file).read_text().split()
        except OSError:
            continue
        if len(quota) == 1:  # cgroup v1 stores the period in a separate file
            quota.append((root / file).with_name("cpu.cfs_period_us").read_text().strip())
        if quota[0] not in ("max", "-1"):
            return max(1, min(allowed, math.ceil(int(quota[0]) / int(quota[1]))))
    return allowed


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the names of the CPU's instruction sets, as Linux lists them; elsewhere none.

    Args:
        root: Root of the file system with /proc.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
