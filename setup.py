"""Builds the C++ extension against the installed torch; all other metadata is in pyproject.toml."""

import re
import sys
from pathlib import Path

import torch
from setuptools import find_packages, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension

ROOT = Path(__file__).parent
# The sources live in top-level folders; every one is installed under the `waterflow` name, so that
# generic names (`models`, `executor`) never collide with a user's own packages.
FOLDERS = {
    "waterflow": "waterflow",
    "waterflow.allocator_ext": "allocator_ext",
    "waterflow.cluster": "cluster",
    "waterflow.executor": "executor",
    "waterflow.models": "models",
    "waterflow.partitioner": "partitioner",
}
# What torch's own headers include. The second is not in all packages that have the first.
CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_config.h")


def cuda_version(folders: list[Path]) -> str | None:
    """The major version of the CUDA whose headers the folders have, if they have them all."""
    found = {name: f / name for name in CUDA_HEADERS for f in folders if (f / name).is_file()}
    if len(found) < len(CUDA_HEADERS):
        return None
    text = found["cuda_runtime_api.h"].read_text(errors="replace")
    version = re.search(r"#define CUDART_VERSION\s+(\d+)\d{3}\b", text)
    return version[1] if version else None


def cuda_headers() -> list[Path]:
    """Where the headers of the CUDA are that torch is built for: in a toolkit or pip's wheels."""
    wanted = (torch.version.cuda or "").split(".")[0]
    if not wanted:
        return []
    places = [[Path(home) / "include"] for home in (CUDA_HOME, "/usr/local/cuda") if home]
    places.append(sorted(Path(torch.__file__).parents[1].glob("nvidia/*/include")))
    for folders in places:
        if cuda_version(folders) == wanted:
            return [f for f in folders if any((f / name).is_file() for name in CUDA_HEADERS)]
    print(
        f'waterflow: warning: device="cuda" will not be available: torch is built for CUDA '
        f"{torch.version.cuda}, and no folder has the headers {' and '.join(CUDA_HEADERS)} of CUDA "
        f"{wanted}. Set CUDA_HOME to a toolkit of CUDA {wanted}, or install pip's packages that "
        f"have them (for CUDA 13: nvidia-cuda-runtime and nvidia-cuda-crt), and build again.",
        file=sys.stderr,
    )
    return []


def extension() -> CppExtension:
    """The extension; the part that needs CUDA's headers only where torch has CUDA, too."""
    headers = cuda_headers()
    cuda = ROOT / "allocator_ext" / "cuda"
    sources = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "allocator_ext").rglob("*.cpp")
        if headers or path.parent != cuda
    )
    # CUDA's runtime library needs no mention: libc10_cuda brings along the one torch runs with.
    return CppExtension(
        "waterflow.allocator_ext._C",
        sources,
        include_dirs=[str(folder) for folder in (ROOT / "allocator_ext", *headers)],
        # The C++ library is named, since a compiler that links it statically unless told otherwise
        # gives the extension a second one, whose streams and locales break on those of torch's.
        libraries=[*(["c10_cuda"] if headers else []), ":libstdc++.so.6"],
        define_macros=[("WATERFLOW_WITH_CUDA", None)] if headers else [],
        # The standard is said here: that of torch's own choice is another one in older versions.
        extra_compile_args=["-std=c++20", "-O3", "-g1", "-fvisibility=hidden", "-Wall", "-Wextra"],
    )


def packages() -> list[str]:
    """Every folder with an `__init__.py`, by the name under which it is installed."""
    inner = {name: find_packages(str(ROOT / folder)) for name, folder in FOLDERS.items()}
    return [*inner, *(f"{name}.{package}" for name, found in inner.items() for package in found)]


setup(
    packages=packages(),
    package_dir=FOLDERS,
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
)
