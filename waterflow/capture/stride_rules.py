"""Layouts of results where torch's description of a kernel differs from the kernel.

A capture sees tensors as torch describes its kernels' results. For some, above all gradients of
transposed tensors, the description has other strides than the kernel; what autograd does next may
depend on that (a view, or a copy), and the captured step would fail, or compute in another order
than the eager one. The rules here are those of the kernels of torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from waterflow.capture.device_guard import keep_device_guard
from waterflow.capture.fast_fakes import fast_result

aten = torch.ops.aten

_DEVICE = torch.ops.prim.device.default
_GROUPED_MM = getattr(getattr(aten, "_grouped_mm", None), "default", None)
_product_of_groups = getattr(_meta_registrations, "_create_grouped_mm_output_tensor", None)


def _arguments_of_groups(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    return a, b, offs, out_dtype or a.dtype


class CaptureMode(FakeTensorMode):
    """A mode in which tensors have shapes and no memory; foreign real tensors become constants.

    Results are laid out as the kernels do it.
    """

    def __init__(self) -> None:
        keep_device_guard()
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and the wrapper that keeps dynamo out takes its time."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        if func == _GROUPED_MM and _product_of_groups is not None:
            with self:  # its description admits bfloat16 only, the host's kernel other types, too
                return _product_of_groups(*_arguments_of_groups(*args, **(kwargs or {})))
        result = fast_result(self, func, args, kwargs)
        if result is NotImplemented:
            result = super().__torch_dispatch__(func, types, args, kwargs or {})
        rule = _RULES.get(func)
        if rule is None and func in _HOST_RULES and args[0].device.type == "cpu":
            rule = _HOST_RULES[func]
        if rule is None:
            return result
        first = result[0] if isinstance(result, tuple) else result
        if not isinstance(first, Tensor):
            return result
        strides, *looks_at = rule
        return self._laid_out(result, strides(first.shape, *(args[index] for index in looks_at)))

    def _laid_out(self, result: Any, strides: tuple[int, ...]) -> Any:
        """The result, or each of several that has the first one's shape, with these strides."""
        if isinstance(result, tuple):
            shape = result[0].shape
            same = [isinstance(part, Tensor) and part.shape == shape for part in result]
            return tuple(
                self._laid_out(part, strides) if alike else part
                for part, alike in zip(result, same, strict=True)
            )
        if result.stride() == strides or result.dim() != len(strides):  # one number, summed up
            return result
        with self:
            return torch.empty_strided(
                result.shape, strides, dtype=result.dtype, device=result.device
            )


def _contiguous(shape: torch.Size, _: Tensor) -> tuple[int, ...]:
    return _in_format(shape, torch.contiguous_format)


def _suggested(shape: torch.Size, like: Tensor) -> tuple[int, ...]:
    """Channels last if that is how the tensor lies, contiguous otherwise."""
    return _in_format(shape, suggest_memory_format(like))


@functools.cache
def _group_norm_keeps_format() -> bool:
    """Whether the host's kernel lays its result out as what it is given: from torch 2.14 on."""
    given = torch.empty(1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    found = torch.native_group_norm(given, None, None, 1, 2, 4, 1, 1e-5)[0]
    return not found.is_contiguous()


def _of_group_norm(shape: torch.Size, like: Tensor) -> tuple[int, ...]:
    return (_suggested if _group_norm_keeps_format() else _contiguous)(shape, like)


def _in_format(shape: torch.Size, memory_format: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def _elementwise(_: torch.Size, *operands: Tensor) -> tuple[int, ...]:
    """The order of dimensions stays, gaps and repetitions go."""
    return tuple(compute_elementwise_output_strides(*operands))


#: By operator: the rule, which has the shape of the result, and the places of the arguments that it
#: looks at.
_RULES: dict[Any, tuple[Any, ...]] = {
    aten.mse_loss_backward.default: (_contiguous, 1),
    aten.smooth_l1_loss_backward.default: (_contiguous, 1),
    aten.huber_loss_backward.default: (_contiguous, 1),
    aten._log_softmax_backward_data.default: (_contiguous, 0),
    aten.native_layer_norm_backward.default: (_contiguous, 1),
    aten.binary_cross_entropy.default: (_elementwise, 0),
    aten.binary_cross_entropy_backward.default: (_elementwise, 1),
    aten.elu_backward.default: (_elementwise, 0, 5),
    aten.hardtanh_backward.default: (_elementwise, 0, 1),
    aten.hardswish_backward.default: (_elementwise, 0, 1),
    aten.hardsigmoid_backward.default: (_elementwise, 0, 1),
    aten.softplus_backward.default: (_elementwise, 0, 1),
    aten.logit_backward.default: (_elementwise, 0, 1),
}
#: Of kernels that lay things out otherwise on a GPU.
_HOST_RULES: dict[Any, tuple[Any, ...]] = {
    aten.native_batch_norm.default: (_suggested, 0),
    aten.native_batch_norm_backward.default: (_suggested, 1),
    aten.native_group_norm.default: (_of_group_norm, 0),
    aten.native_group_norm_backward.default: (_of_group_norm, 1),
    aten.log_sigmoid_forward.default: (_contiguous, 0),
    aten.reflection_pad2d.default: (_suggested, 0),  # as torch's description says from 2.12 on
    aten.reflection_pad2d_backward.default: (_suggested, 1),
    aten.replication_pad2d.default: (_suggested, 0),
    aten.replication_pad2d_backward.default: (_suggested, 1),
    aten.channel_shuffle.default: (_suggested, 0),
}
