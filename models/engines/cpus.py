"""The CPUs that this process may use: their number, and their instructions."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

# Maximum number of threads of an engine. More cost throughput, and thousands start for minutes.
MAX_THREADS = 16 * (os.cpu_count() or 1)


def available_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs in this process's affinity mask, limited by cgroup CPU quotas.

    A fractional quota is rounded up.

    Args:
        root: Root of the file system with the cgroup files.
    """
    # macOS has no os.sched_getaffinity.
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    return int(max(1, min(allowed, *_quotas(root))))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's cgroup and of those around it, in CPUs.

    A systemd service has its quota in its own cgroup, and a container in the root of its view.
    """
    try:
        groups = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    except OSError:
        groups = []
    yield math.inf
    # Lines are NUMBER:CONTROLLERS:PATH, and cgroup v2 has no controllers.
    for line in (*groups, "0::/", "1:cpu:/"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "cpu.max"
        elif "cpu" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/cpu", "cpu.cfs_quota_us"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount):
                yield _quota(folder / name)


def _quota(file: Path) -> float:
    """Return the quota in a file, in CPUs, rounded up; without one, infinity."""
    try:
        quota = file.read_text().split()
    except OSError:
        return math.inf
    if len(quota) == 1:  # cgroup v1 stores the period in a separate file
        quota.append(file.with_name("cpu.cfs_period_us").read_text().strip())
    return math.inf if quota[0] in ("max", "-1") else math.ceil(int(quota[0]) / int(quota[1]))


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
