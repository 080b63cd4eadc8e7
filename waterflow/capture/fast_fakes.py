"""Operators on fake tensors, asked of their kernels for the device "meta" alone.

torch's own mode for fake tensors takes 0.1 to 0.5 ms for an operator, most of it for what captures
never have: symbolic sizes, several devices, tensors whose values are known, keys for a cache that
batches of other shapes miss. Where there is none of that, it ends up calling the kernel for the
device "meta" and wrapping what comes back; so does this, at once. Everything else, and each
operator that raises, is left to torch's mode.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_impls import has_meta, op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, torch_decomp_decompositions
from torch.nn import Parameter

from waterflow.capture.fast_layouts import may_write_in_place, rule_of, writes_in_place

_aten = torch.ops.aten
_META = torch.device("meta")
_empty = _aten.empty.memory_format
#: torch's mode has rules of its own for these that only matter to symbolic sizes, or devices.
_RULED_FOR_OTHERS = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.copy_.default),
        *(_aten.select.int, _aten.slice.Tensor),
        *(_aten.zeros_like.default, _aten.ones_like.default, _aten.empty_like.default),
    }
)
#: Operators whose results are not told by layouts, or that torch's mode has to see.
_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_ASIDE = frozenset({_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default})


def fast_result(
    mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    """What an operator returns for fake tensors of a mode; NotImplemented where torch's own mode
    has to be asked.

    Args:
        mode: whose `__torch_dispatch__` runs.
        func: the operator.
        args, kwargs: its arguments.
    """
    rule, kwargs = rule_of(func), kwargs or {}
    in_place = may_write_in_place(func)
    if mode.in_kernel_invocation or not (rule or in_place or _is_plain(func)):
        return NotImplemented
    device = _common_device(mode, args, kwargs)
    if device is None:
        return NotImplemented
    if in_place and writes_in_place(args, kwargs):
        return args[0]
    layout = None if rule is None else rule(args, kwargs)
    if layout is not None:
        return new_fake(mode, *layout, device)
    if not _is_plain(func):
        return NotImplemented
    try:
        result = _on_meta(mode, func, args, kwargs)
    except Exception:  # torch's mode raises it as users know it
        return NotImplemented
    return _wrapped(mode, result, device)


def new_fake(
    mode: FakeTensorMode, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """A new contiguous fake tensor."""
    return fake_of(mode, _empty(shape, dtype=dtype, device=_META), device)


def twin_of(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    """``mode.from_tensor(tensor)``: the fake tensor that stands for a real one in the mode, but for
    its gradient."""
    twin = _twin_of_whole(mode, tensor)
    return mode.from_tensor(tensor, static_shapes=True) if twin is None else twin


def _twin_of_whole(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor | None:
    """None where torch's own is to be asked: for what is not a whole storage, or not the first
    tensor of it."""
    converter = mode.fake_tensor_converter.meta_converter
    describer = getattr(converter, "describer", None)
    if describer is None or describer.copy_data or torch.is_inference_mode_enabled():
        return None
    if not _is_whole(tensor):
        return None
    storage = tensor.untyped_storage()
    if tensor in describer.lookup_tensor or storage in describer.lookup_storage:
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        meta = _empty(tensor.shape, dtype=tensor.dtype, device=_META)
        if meta.stride() != tensor.stride():  # of a dimension of one, it may be any
            return None
        twin = fake_of(mode, meta.requires_grad_(tensor.requires_grad), tensor.device)
    if type(tensor) is Parameter:
        twin._is_param = True  # type: ignore[attr-defined]
    converter.tensor_memo[describer.get_tensor_id(tensor)] = twin
    converter.storage_memo[describer.get_storage_id(storage)] = twin.untyped_storage()
    return twin


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but the contiguous values of a storage, and no result of
    anything that autograd knows."""
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.device == _META or not tensor.is_contiguous() or not tensor.is_leaf:
        return False
    if tensor._is_view() or hasattr(tensor, "_is_buffer") or tensor.storage_offset():
        return False
    if tensor.requires_grad and getattr(tensor, "grad_dtype", tensor.dtype) != tensor.dtype:
        return False
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    return torch._C._dispatch_keys(tensor).raw_repr() == _plain_keys(tensor.device)


@functools.cache
def _plain_keys(device: torch.device) -> int:
    """What tells tensors of a device that are neither conjugated, negative, named, of inference
    mode, nor wrapped in any way."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch._C._dispatch_keys(_empty((0,), device=device)).raw_repr()


def detached(tensor: FakeTensor) -> FakeTensor:
    """A fake tensor over the same storage, without what autograd knows of the first."""
    mode = tensor.fake_mode
    twin = _on_meta(mode, _aten.detach.default, (tensor,), {})
    return _wrapped(mode, twin, tensor.fake_device)  # type: ignore[no-any-return]


@functools.cache
def _is_plain(func: Any) -> bool:
    """Whether torch's mode does no more for an operator than to call its kernel on "meta"."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func in _ASIDE:
        return False
    if any(tag in func.tags for tag in _TAGS) or not has_meta(func):
        return False
    if func in _RULED_FOR_OTHERS:
        return True
    if any(check(func) for check, _ in op_implementations_checks):
        return False
    return _is_described(func)


def _is_described(func: OpOverload) -> bool:
    """Whether torch's mode would not rather take the operator apart."""
    from torch._decomp import decomposition_table, meta_table

    if func in meta_table or FakeTensorMode.cpp_meta_supports_symint(FakeTensorMode, func):  # type: ignore[arg-type]
        return True
    if func in decomposition_table and torch_decomp_decompositions(func):
        return False
    return not func._can_decompose()


def _common_device(
    mode: FakeTensorMode, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.device | None:
    """The device of all tensors; None where they are not all plain fakes of it."""
    found: set[torch.device] = set()
    if not _note_devices(mode, args, found):
        return None
    if kwargs and not _note_devices(mode, kwargs.values(), found):
        return None
    return found.pop() if len(found) == 1 else None


def _note_devices(mode: FakeTensorMode, values: Iterable[Any], found: set[torch.device]) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None:
                return False
            if value.layout is not torch.strided:
                return False
            found.add(value.fake_device)
        elif kind is list or kind is tuple:
            if not _note_devices(mode, value, found):
                return False
        elif kind not in _VALUES:
            return False
    return True


#: Arguments that are neither tensors nor devices.
_VALUES = frozenset(
    {int, float, bool, str, complex, type(None), torch.dtype, torch.layout, torch.memory_format}
)


def _on_meta(
    mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls an operator's kernel for "meta"; torch's `in_kernel_invocation_manager`, unrolled."""
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        mode.in_kernel_invocation = True
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            return func(*args, **kwargs)
        finally:
            mode.in_kernel_invocation = False


def _wrapped(mode: FakeTensorMode, result: Any, device: torch.device) -> Any:
    if isinstance(result, FakeTensor):
        return result  # written in place
    if isinstance(result, Tensor):
        return fake_of(mode, result, device)
    if isinstance(result, (tuple, list)):
        return type(result)(_wrapped(mode, part, device) for part in result)
    return result


def fake_of(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> FakeTensor:
    """``FakeTensor(mode, tensor, device)``, whose attributes are those of one made so before."""
    known = mode.__dict__.setdefault("_attributes_of_fakes", {})
    # Functions that torch's function modes do not see (from_numpy) call operators with a mode on,
    # which would take a tensor of this module's own for one of the traced code's.
    with torch._C.DisableTorchFunction():
        if device not in known:
            first = FakeTensor(mode, tensor, device)
            known[device] = dict(vars(first))
            return first
        fake = Tensor._make_subclass(
            FakeTensor,
            tensor,
            tensor.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(known[device])
    return fake  # type: ignore[return-value]
