"""Builds the C++ extension against the installed torch; all other metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("allocator_ext", "allocator_ext/core")
    for path in (ROOT / folder).glob("*.cpp")
)

setup(
    ext_modules=[
        CppExtension(
            "waterflow.allocator_ext._C",
            SOURCES,
            include_dirs=[str(ROOT / "allocator_ext")],
            extra_compile_args=["-O3", "-g1", "-fvisibility=hidden", "-Wall", "-Wextra"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
