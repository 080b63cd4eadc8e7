"""What is a library's, and what around a job may change its step graph."""

import os
import sys
import types

import pytest
import torch

from waterflow.allocator_ext import _C
from waterflow.common import environment as environments
from waterflow.common.environment import (
    environment,
    is_library,
    is_library_file,
    process_flags,
    watch_flags,
)

pytestmark = pytest.mark.cpu


def test_what_a_version_stands_for():
    for name in ("torch", "torch.nn", "json", "sys", "waterflow.engine.engine"):
        assert is_library(name), name
    for name in ("__main__", "waterflow.models.resnet", "waterflow.models", "not_loaded"):
        assert not is_library(name), name


def test_a_module_is_the_users_by_its_file(tmp_path, monkeypatch):
    module = types.ModuleType("of_the_user")
    monkeypatch.setitem(sys.modules, "of_the_user", module)
    module.__file__ = str(tmp_path / "of_the_user.py")
    assert not is_library("of_the_user")
    assert is_library_file(os.__file__)
    assert is_library_file("<frozen importlib._bootstrap>")
    assert not is_library_file(str(tmp_path / "file.py"))


CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn


def attribute(holder, name):
    return lambda value: setattr(holder, name, value), lambda: getattr(holder, name)


#: How each switch is set, what it is, and another value.
SWITCHES = {
    "dtype": (torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    "matmul": (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium"),
    "deterministic": (
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled,
        True,
    ),
    "warned of": (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode, 1),
    "filled": (*attribute(torch.utils.deterministic, "fill_uninitialized_memory"), False),
    "mha": (
        torch.backends.mha.set_fastpath_enabled,
        torch.backends.mha.get_fastpath_enabled,
        False,
    ),
    "flash": (CUDA.enable_flash_sdp, CUDA.flash_sdp_enabled, False),
    "memory-efficient": (CUDA.enable_mem_efficient_sdp, CUDA.mem_efficient_sdp_enabled, False),
    "math": (CUDA.enable_math_sdp, CUDA.math_sdp_enabled, False),
    "cudnn's attention": (CUDA.enable_cudnn_sdp, CUDA.cudnn_sdp_enabled, False),
    "reduced": (
        CUDA.allow_fp16_bf16_reduction_math_sdp,
        CUDA.fp16_bf16_reduction_math_sdp_allowed,
        True,
    ),
    "mkldnn": (torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled, False),
    "cudnn": (*attribute(CUDNN, "enabled"), False),
    "benchmark": (*attribute(CUDNN, "benchmark"), True),
    "cudnn's determinism": (*attribute(CUDNN, "deterministic"), True),
    "tf32": (*attribute(CUDNN, "allow_tf32"), False),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_torch_are_flags_and_watched(name):
    put, get, other = SWITCHES[name]
    before, former, guards = process_flags(), get(), _C.Guards()
    watch_flags(guards)
    assert guards.holds()
    assert former != other
    try:
        put(other)
        assert process_flags() != before
        assert not guards.holds()
    finally:
        put(former)
    assert process_flags() == before
    assert guards.holds()


def test_a_method_that_the_user_gives_all_modules_is_a_flag(monkeypatch):
    before, guards = process_flags(), _C.Guards()
    watch_flags(guards)

    def call(self, *arguments):
        return None

    monkeypatch.setattr(torch.nn.Module, "__call__", call)
    assert process_flags() != before
    assert not guards.holds()
    monkeypatch.undo()
    assert guards.holds()


@pytest.fixture
def few_sources(monkeypatch):
    """Without this package's own files, which take time to read."""
    monkeypatch.setattr(environments, "_OWN_PACKAGES", ())


def test_equal_until_something_changes(few_sources, monkeypatch):
    before = environment()
    assert environment() == before
    with torch.autocast("cpu"):
        assert environment() != before
    with torch.no_grad():
        assert environment() != before
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert environment() != before


def test_the_text_of_the_users_files_counts(few_sources, tmp_path, monkeypatch):
    module, path = types.ModuleType("of_the_user"), tmp_path / "of_the_user.py"
    module.__file__ = str(path)
    path.write_text("x = 1")
    monkeypatch.setitem(sys.modules, "of_the_user", module)
    before = environment()
    path.write_text("x = 2")
    assert environment() != before
    path.unlink()
    with pytest.raises(OSError, match="of_the_user"):
        environment()


def test_the_packages_own_files_count_but_for_its_models():
    names = [line.split()[0] for line in environment().splitlines() if line.startswith("waterflow")]
    assert "waterflow/capture/forward.py" in names
    assert any(name.startswith("waterflow.partitioner/") for name in names)
    assert not any("/models/" in name for name in names)
