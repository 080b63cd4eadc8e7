"""Process-wide switches of torch's that change what a step computes: read, watched, put back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch

_TORCH = torch.__path__[0]
#: Where torch's Python tells switches to whoever asks, but for one that is always watched.
_ANSWERS, _WATCHED = os.path.join(_TORCH, "backends", ""), os.path.join(_TORCH, "backends", "mha")

#: What decides while a step is traced of which operators it is made: its graph has what was chosen.
_OF_TRACES = {
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
    "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
    "_get_math_sdp_allow_fp16_bf16_reduction": "_set_math_sdp_allow_fp16_bf16_reduction",
    "_check_sparse_tensor_invariants": "_set_check_sparse_tensor_invariants",
}
#: What operators ask for while they run: a step that sets it has others compute than its graph.
_OF_OPERATORS = {
    "_get_float32_matmul_precision": "_set_float32_matmul_precision",  # before what it sets, too
    "_get_mkldnn_enabled": "_set_mkldnn_enabled",
    "_get_mkldnn_deterministic": "_set_mkldnn_deterministic",
    "_get_nnpack_enabled": "_set_nnpack_enabled",
    "_get_cudnn_enabled": "_set_cudnn_enabled",
    "_get_cudnn_benchmark": "_set_cudnn_benchmark",
    "_get_cudnn_deterministic": "_set_cudnn_deterministic",
    "_get_cudnn_allow_tf32": "_set_cudnn_allow_tf32",  # this one, too
    "_get_deterministic_fill_uninitialized_memory": "_set_deterministic_fill_uninitialized_memory",
    "_get_cublas_allow_fp16_reduced_precision_reduction": (
        "_set_cublas_allow_fp16_reduced_precision_reduction"
    ),
    "_get_cublas_allow_bf16_reduced_precision_reduction": (
        "_set_cublas_allow_bf16_reduced_precision_reduction"
    ),
    "_get_cublas_allow_fp16_accumulation": "_set_cublas_allow_fp16_accumulation",
    "_get_cpu_allow_fp16_reduced_precision_reduction": (
        "_set_cpu_allow_fp16_reduced_precision_reduction"
    ),
    "_get_qengine": "_set_qengine",
}
#: The same for each kind of operator, those first from which the others inherit.
_PRECISIONS = (
    ("generic", "all"),
    *((backend, "all") for backend in ("mkldnn", "cuda")),
    *((backend, kind) for backend in ("mkldnn", "cuda") for kind in ("conv", "rnn", "matmul")),
)
#: Names of what sets those that operators ask for, and of what sets others to the same end.
_SETTERS = frozenset(
    {
        *_OF_OPERATORS.values(),
        *("_set_fp32_precision_setter", "_set_cublas_allow_tf32", "_set_onednn_allow_tf32"),
        *("_set_blas_preferred_backend", "_set_linalg_preferred_backend", "_set_sdp_use_fa3"),
        *("_set_sm_carveout_experimental", "_set_cudnn_depthwise_kernel", "set_num_threads"),
        *("_set_deterministic_algorithms", "set_anomaly_enabled", "set_flush_denormal"),
    }
)
_LINALG: Any = torch._C._LinalgBackend


class _Switch(NamedTuple):
    read: Callable[[], object]
    write: Callable[[Any], object]


def _switches() -> Iterator[_Switch]:
    yield _Switch(torch.get_default_dtype, torch.set_default_dtype)
    yield _Switch(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled)
    yield _Switch(_paths_of_einsum, lambda value: _set_paths_of_einsum(*value))
    yield _Switch(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch._C._set_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield _Switch(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    yield _Switch(
        lambda: tuple(torch._C._get_sdp_priority_order()),
        lambda value: torch._C._set_sdp_priority_order(list(value)),
    )
    yield _Switch(  # by its number, as others are plain values, too
        lambda: int(torch._C._get_linalg_preferred_backend()),  # type: ignore[call-overload]
        lambda value: torch._C._set_linalg_preferred_backend(_LINALG(value)),
    )
    for getter, setter in (_OF_TRACES | _OF_OPERATORS).items():
        if hasattr(torch._C, getter) and hasattr(torch._C, setter):  # releases of torch differ
            yield _of_torch(getattr(torch._C, getter), getattr(torch._C, setter))
    for pair in _PRECISIONS:
        yield _precision(*pair)


def _of_torch(read: Callable[[], object], write: Callable[..., object]) -> _Switch:
    return _Switch(read, lambda value: write(*value) if isinstance(value, tuple) else write(value))


def _paths_of_einsum() -> tuple[object, object]:
    einsum: Any = torch.backends.opt_einsum
    return einsum.enabled, einsum.strategy


def _set_paths_of_einsum(enabled: bool, strategy: str | None) -> None:
    einsum: Any = torch.backends.opt_einsum
    if einsum.strategy != strategy:  # which cannot be set where it means nothing
        with contextlib.suppress(ValueError):
            einsum.strategy = strategy
    if einsum.enabled != enabled:
        einsum.enabled = enabled


def _precision(backend: str, kind: str) -> _Switch:
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return _Switch(partial(read, backend, kind), partial(write, backend, kind))


_ALL = tuple(_switches())


def _value(switch: _Switch) -> object:
    try:
        return switch.read()
    except RuntimeError:  # somebody has set it by an old switch and by a new one
        return None


def now() -> tuple[object, ...]:
    """The switches as they are: equal for equal ones."""
    return (*map(_value, _ALL), *_users_methods(torch.nn.Module))


def put_back(before: tuple[object, ...]) -> None:
    """Sets what was changed since `before` was `now()`, but for methods that users give modules."""
    for switch, value in zip(_ALL, before, strict=False):
        if value is not None and _value(switch) != value:
            switch.write(value)


def watch(guards: Any) -> None:
    """Has guards of the extension (`_C.Guards`) hold as long as those that decide about operators
    are as they are."""
    guards.flags(torch.nn.Module, _users_methods)
    guards.keys(vars(torch.backends.mha), ["_is_fastpath_enabled"])


def watch_all(guards: Any, before: tuple[object, ...]) -> None:
    """The same as long as all of them are as `before`: for steps whose own Python asks for them."""
    guards.probe(_now, torch, before)


def _now(_: object) -> tuple[object, ...]:
    return now()


def are_asked_by(code: CodeType) -> bool:
    """Whether code is torch's that tells somebody a switch."""
    filename = code.co_filename
    return filename.startswith(_ANSWERS) and not filename.startswith(_WATCHED)


def is_set_by(function: object) -> bool:
    """Whether a C function sets something that operators ask for while they run."""
    return getattr(function, "__name__", None) in _SETTERS and (
        getattr(torch._C, function.__name__, None) == function  # type: ignore[attr-defined]
    )


def _users_methods(module: Any) -> tuple[object, object]:
    return _users(module.__call__), _users(module.__getattr__)


def _users(method: object) -> object:
    """A method of all modules, unless it is torch's own: traces wrap these for their while."""
    code = getattr(method, "__code__", None)
    return None if code is not None and code.co_filename.startswith(_TORCH) else method
