"""Report of a benchmark: the machine, and a picture of ratios."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

# Flags of /proc/cpuinfo that decide which precisions an engine has, and how fast they are.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_int8": "AMX-INT8",
    "amx_bf16": "AMX-BF16",
}


def machine() -> str:
    """Return the CPU, its instructions, the number of cores and the operating system."""
    return f"{cpu(_cpuinfo())}, {os.cpu_count()} CPUs, {platform.platform()}"


def _cpuinfo() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text("utf-8") if file.exists() else ""


def cpu(cpuinfo: str) -> str:
    """Return the CPU's name and class: which of the instructions that matter it has."""
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = fields.get("flags", "").split()
    instructions = [name for flag, name in _INSTRUCTIONS.items() if flag in flags]
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name + (f" with {', '.join(instructions)}" if instructions else "")


def draw_ratios(ratios: Mapping[str, Mapping[str, float]], title: str, file: Path) -> None:
    """Draw a group of bars per workload with one bar per contender.

    Args:
        ratios: Ratios by workload and contender.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    # Text stays text, and equal ratios give equal files.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ratios"})
    contenders = list(dict.fromkeys(name for of_group in ratios.values() for name in of_group))
    width = 0.8 / len(contenders)
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for number, name in enumerate(contenders):
        heights = [of_group[name] for of_group in ratios.values()]
        places = [group - 0.4 + (number + 0.5) * width for group in range(len(ratios))]
        bars = axis.bar(places, heights, 0.9 * width, label=name)
        axis.bar_label(bars, fmt="%.2f", fontsize=7)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(ratios)), list(ratios))
    axis.set_ylabel(title)
    axis.legend(ncols=2, fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
