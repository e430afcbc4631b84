"""Build the CPU kernels of the fused operator if torch and a C++ compiler are installed.

The package works without the kernels: the operator then calls torch functions, which are equally
exact but slower. To build the kernels, install torch first, then this package with
`pip install --no-build-isolation`.
"""

from setuptools import Extension, setup

try:
    from torch.utils.cpp_extension import include_paths, library_paths
except (ImportError, OSError):  # torch is not installed, or its shared libraries are missing
    extensions = []
else:
    extensions = [
        Extension(
            "models.add_layer_norm._cpu",
            sources=["models/add_layer_norm/cpu_kernels.cpp"],
            depends=["models/add_layer_norm/cpu_rows.h"],
            include_dirs=include_paths(),
            library_dirs=library_paths(),
            libraries=["torch_cpu"],
            # Oldest torch that the kernels run with, which determines their stable ABI: 2.11.
            define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
            extra_compile_args=["-O3", "-std=c++17", "-fno-math-errno", "-fvisibility=hidden"],
            py_limited_api=True,
            optional=True,  # if the compiler is missing, the build continues without the kernels
        )
    ]

setup(ext_modules=extensions)
