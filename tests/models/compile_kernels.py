"""Compile the Triton kernels for Ampere and Hopper and print the ptxas reports as JSON lines.

No GPU is needed. This is a separate process because kernels that were interpreted in a process
cannot be compiled there.
"""

import contextlib
import io
import itertools
import json
import os
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from models.add_layer_norm import triton_kernels as kernels

ARCHITECTURES = (80, 90)
WIDTHS = (384, 768, 1024, 4096, 8192)
DTYPES = ("bf16", "fp32")


def signature(kernel: triton.JITFunction, dtype: str) -> dict[str, str]:
    """Return the argument types: tensors in `dtype`, parameters and partial sums in float32."""
    wide = {"weight_ptr", "bias_ptr", "dweight_ptr", "dbias_ptr", "partial_ptr", "out_ptr"}
    constants = {p.name for p in kernel.params if p.is_constexpr}
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            types[name] = f"*{'fp32' if name in wide else dtype}"
        elif name == "eps":
            types[name] = "fp32"
        else:
            types[name] = "constexpr" if name in constants else "i32"
    return types


def compile_one(
    name: str, width: int, dtype: str, architecture: int, centred: bool
) -> dict[str, object]:
    """Compile one kernel as launched at this width and parse the ptxas report."""
    kernel = getattr(kernels, name)
    types = signature(kernel, dtype)
    values = {"BLOCK": triton.next_power_of_2(width), "CENTRED": centred}
    values |= {"ROWS": kernels.REDUCED_ROWS, "COLUMNS": kernels.REDUCED_COLUMNS, "D": width}
    stages = kernels.backward_stages(width, 2 if dtype == "bf16" else 4, tensors=3)
    values["STAGES"] = kernels.REDUCING_STAGES if name == "_reduce_kernel" else stages
    constants = {n: values.get(n, True) for n, kind in types.items() if kind == "constexpr"}
    # A launch specialises on divisibility by 16, which holds for the pointers and D.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (n, kind) in enumerate(types.items())
        if kind.startswith("*") or (n == "D" and kind == "i32")
    }
    warps = {
        "_forward_kernel": kernels.warps(width),
        "_backward_kernel": kernels.backward_warps(width),
        "_reduce_kernel": kernels.REDUCING_WARPS,
    }
    source = ASTSource(kernel, types, constants, aligned)
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": warps[name]},
        )
    text = report.getvalue()
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
    registers = re.search(r"Used (\d+) registers", text)
    return {
        "kernel": name,
        "width": width,
        "dtype": dtype,
        "architecture": architecture,
        "registers": int(registers[1]) if registers else None,
        "spilled_bytes": sum(spills) if spills else None,
        "shared_bytes": compiled.metadata.shared,
        "float64": ".f64" in compiled.asm["ptx"],
        "instructions_per_element": longest_loop(compiled.asm["sass"]) * 32 * warps[name] / width,
    }


def longest_loop(sass: str) -> int:
    """Return the number of instructions in the longest loop, or 0; each thread of 32 runs them."""
    instructions, labels, longest = 0, dict[str, int](), 0
    for line in sass.splitlines():
        label = re.fullmatch(r"(\w+):", line)
        branch = re.search(r"\bBRA (\w+);", line)
        if label:
            labels[label[1]] = instructions
        instructions += line.endswith(";")
        if branch and branch[1] in labels:
            longest = max(longest, instructions - labels[branch[1]])
    return longest


def main() -> None:
    """Print one line per kernel, width, dtype, architecture and norm."""
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # a kernel from the cache has no report
    names = ("_forward_kernel", "_backward_kernel")
    cases = [
        *itertools.product(names, WIDTHS, DTYPES, ARCHITECTURES, (True, False)),
        # It is the same for all of these.
        *(("_reduce_kernel", 384, "fp32", architecture, True) for architecture in ARCHITECTURES),
    ]
    for case in cases:
        print(json.dumps(compile_one(*case)), flush=True)


if __name__ == "__main__":
    main()
