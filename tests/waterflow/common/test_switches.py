"""Torch's process-wide switches: known, watched, and put back as they were."""

import pytest
import torch

from waterflow.allocator_ext import _C
from waterflow.common import switches

pytestmark = pytest.mark.cpu

CUDA, CUDNN, MKLDNN = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn


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
    "others' attention": (
        torch._C._set_sdp_use_overrideable,
        torch._C._get_overrideable_sdp_enabled,
        False,
    ),
    "order of attention": (
        torch._C._set_sdp_priority_order,
        torch._C._get_sdp_priority_order,
        [0, 1, 2, 3, 4],
    ),
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
#: The same of those that operators ask for while they run: no captured step has to look at them.
ASKED_FOR = {
    "precision": (*attribute(torch.backends, "fp32_precision"), "tf32"),
    "precision of mkldnn": (*attribute(MKLDNN, "fp32_precision"), "bf16"),
    "precision of convolutions": (*attribute(MKLDNN.conv, "fp32_precision"), "bf16"),
    "precision on a GPU": (*attribute(CUDA.matmul, "fp32_precision"), "tf32"),
    "mkldnn's determinism": (*attribute(MKLDNN, "deterministic"), True),
    "nnpack": (torch._C._set_nnpack_enabled, torch._C._get_nnpack_enabled, False),
    "anomalies": (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled, True),
    "reduced sums": (*attribute(CUDA.matmul, "allow_fp16_reduced_precision_reduction"), False),
    "sparse": (
        torch._C._set_check_sparse_tensor_invariants,
        torch._C._check_sparse_tensor_invariants,
        True,
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_torch_are_known_and_watched(name):
    put, get, other = SWITCHES[name]
    before, former, guards = switches.now(), get(), _C.Guards()
    switches.watch(guards)
    assert guards.holds()
    assert former != other
    try:
        put(other)
        assert switches.now() != before
        assert not guards.holds()
        put(former)
        assert guards.holds()
    finally:
        switches.put_back(before)


@pytest.mark.parametrize("name", SWITCHES | ASKED_FOR)
def test_switches_are_put_back(name):
    """The old ones that set several, too, so that nothing is left of a mix of old and new ones."""
    put, get, other = (SWITCHES | ASKED_FOR)[name]
    before, former = switches.now(), get()
    assert former != other
    put(other)
    assert get() == other
    assert switches.now() != before
    switches.put_back(before)
    assert switches.now() == before
    assert get() == former


def test_all_are_put_back_at_once():
    before = switches.now()
    formers = {name: get() for name, (_, get, _) in (SWITCHES | ASKED_FOR).items()}
    for put, _, other in (SWITCHES | ASKED_FOR).values():
        put(other)
    switches.put_back(before)
    assert switches.now() == before
    assert {name: get() for name, (_, get, _) in (SWITCHES | ASKED_FOR).items()} == formers


def test_what_sets_them_is_known_whoever_calls_it():
    assert switches.is_set_by(torch.set_num_threads)
    assert switches.is_set_by(torch._C._set_mkldnn_enabled)
    assert not switches.is_set_by(torch._C._set_sdp_use_flash)  # of which a graph has the outcome
    assert not switches.is_set_by(len)


def test_a_method_that_the_user_gives_all_modules_is_a_flag(monkeypatch):
    before, guards = switches.now(), _C.Guards()
    switches.watch(guards)

    def call(self, *arguments):
        return None

    monkeypatch.setattr(torch.nn.Module, "__call__", call)
    assert switches.now() != before
    assert not guards.holds()
    monkeypatch.undo()
    assert guards.holds()
