"""Optimizers' traces for parameters of any shapes.

torch's own optimizers work on each parameter by itself, element by element: which operators they
call depends on types, devices and which parameters have gradients, never on sizes. So where all
that a step reads is contiguous, it is traced with stand-ins, each parameter a vector of a length
that nothing else has. In what is recorded such a length tells whose it is, and the trace is
given to jobs with parameters of other shapes: with their own layouts wherever a stand-in was. A
length anywhere else (an argument, a part of a vector) means that sizes matter after all, and the
trace is not shared so.

Nothing here proves that code does not look at sizes: that is known of the optimizers listed, as
long as their code is torch's. What comes of it is compared with the eager step before its first
use, as every graph is.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizers

from waterflow.account.trust import is_trusted_code
from waterflow.capture.fast_fakes import new_fake
from waterflow.capture.fast_layouts import is_canonical, strides_of
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.capture.tracing import is_of_job
from waterflow.job.job import Job
from waterflow.job.optimizer_state import Layout, StateLayout, trained_parameters

#: Those that work element by element on each parameter by itself, as torch has written them.
_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
    *(torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adamax, torch.optim.Adadelta),
)
#: The length of the first stand-in; the next parameter's is one more. No step has such numbers.
_LENGTH = 1_000_003
#: Attributes that schedulers, or fused kernels, add to an optimizer.
_ADDED = {
    *("step", "_opt_called", "_step_count"),
    *("_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"),
}


class SizesMatterError(Exception):
    """A trace has a stand-in's length in another place than a stand-in. Never a user's."""


@dataclass(frozen=True)
class AnyShapes:
    """What an optimizer's step works on, with stand-ins in place of the parameters.

    Attributes:
        parameters, gradients, state: layouts of the stand-ins, as `trace_optimizer` takes them.
        shapes: the real shape of each parameter.
    """

    parameters: list[Layout]
    gradients: list[Layout | None]
    state: StateLayout
    shapes: list[tuple[int, ...]]

    @classmethod
    def of(
        cls, job: Job, gradients: Sequence[Layout | None], state: StateLayout
    ) -> AnyShapes | None:
        """The stand-ins for a job's step; None where sizes or layouts may matter.

        Args:
            job: whose optimizer it is.
            gradients: layout of each parameter's gradient, None where there is none.
            state: layouts of the optimizer's state.
        """
        own, parameters = job.optimizer, trained_parameters(job.optimizer)
        if not _is_elementwise(own) or not _are_apart(parameters):
            return None
        layouts = [Layout.of(parameter) for parameter in parameters]
        found = cls([], [], [], [layout.shape for layout in layouts])
        for index, layout in enumerate(layouts):
            stands_for = _stand_in(index, layout)
            gradient = gradients[index]
            entries = {key: _entry(value, layout, index) for key, value in state[index].items()}
            if (gradient is not None and gradient != layout) or _UNFIT in entries.values():
                return None
            found.parameters.append(stands_for)
            found.gradients.append(None if gradient is None else stands_for)
            found.state.append(entries)
        return found

    def applied(self, trace: OptimizerTrace) -> OptimizerTrace:
        """A trace of stand-ins as one of the real parameters.

        Raises:
            SizesMatterError: a length stands where no stand-in is.
        """
        makes = _Values(self.shapes)
        values = {node: makes.value(node) for node in trace.recording.graph.nodes}
        before, after = map(makes.state, (trace.state_before, trace.state_after))
        return dataclasses.replace(trace, values=values, state_before=before, state_after=after)


_UNFIT = object()


def _entry(value: Any, parameter: Layout, index: int) -> Any:
    """A value of a parameter's state: the same for its stand-in."""
    if not isinstance(value, Layout) or value.shape == ():
        return value
    same = value.shape == parameter.shape and value.stride == parameter.stride
    return _stand_in(index, value) if same else _UNFIT


def _stand_in(index: int, layout: Layout) -> Layout:
    return Layout((_LENGTH + index,), (1,), layout.dtype, layout.device)


def _is_elementwise(own: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step is nothing but torch's own code."""
    kind: Any = type(own)
    if kind not in _ELEMENTWISE or not _is_untouched(kind):
        return False
    if vars(own).keys() - _attributes_of(kind) - _ADDED:
        return False
    step = vars(own).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        return False
    hooks = own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks
    everybodys = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    return not any((*hooks, *everybodys))


def _is_untouched(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether nobody has put code of their own into the class or its module."""
    holders = (kind, torch.optim.Optimizer, sys.modules[kind.__module__], optimizers)
    return all(is_trusted_code(code) for holder in holders for code in _codes_in(holder))


def _codes_in(holder: Any) -> Iterator[Any]:
    for value in vars(holder).values():
        if isinstance(value, FunctionType):
            yield value.__code__


@functools.cache
def _attributes_of(kind: Any) -> frozenset[str]:
    return frozenset(vars(kind([torch.zeros(2)], lr=0.1)))


def _are_apart(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether parameters are plain, contiguous, of several elements, and share no memory."""
    storages = set()
    for tensor in parameters:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or is_of_job(tensor)
        if not plain or tensor.layout != torch.strided or tensor.device.type == "meta":
            return False
        if tensor.dim() == 0 or tensor.numel() < 2 or not is_canonical(tensor):
            return False
        if not tensor.dtype.is_floating_point or tensor.is_conj() or tensor.is_neg():
            return False
        storages.add(tensor.untyped_storage()._cdata)
    return len(storages) == len(parameters)


class _Values:
    """Values of nodes for the real parameters; those over one storage share one here, too."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._made: dict[int, FakeTensor] = {}  # by the storages of the stand-ins

    def value(self, node: fx.Node) -> Any:
        _check_numbers((node.args, node.kwargs))
        return self._of(node.meta.get("val"))

    def state(self, state: StateLayout) -> StateLayout:
        return [{key: self._layout(value) for key, value in each.items()} for each in state]

    def _layout(self, value: Any) -> Any:
        if not isinstance(value, Layout):
            return value
        index = self._index(value.shape)
        if index is None:
            return value
        shape = self._shapes[index]
        return Layout(shape, strides_of(shape), value.dtype, value.device)

    def _of(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._of, value))
        if not isinstance(value, torch.Tensor):
            return value
        index, storage = self._index(value.shape), value.untyped_storage()
        if index is None:
            if storage.nbytes() >= _LENGTH:  # a part of a stand-in
                raise SizesMatterError
            return value
        whole = value.storage_offset() == 0 and storage.nbytes() == value.nbytes
        if not whole or not isinstance(value, FakeTensor):
            raise SizesMatterError
        made = self._made.get(storage._cdata)
        if made is None:
            made = new_fake(value.fake_mode, self._shapes[index], value.dtype, value.fake_device)
            self._made[storage._cdata] = made
        if made.dtype != value.dtype:
            raise SizesMatterError
        return made

    def _index(self, shape: tuple[int, ...]) -> int | None:
        """Whose stand-in has such a shape; None for what is no stand-in."""
        if len(shape) == 1 and 0 <= shape[0] - _LENGTH < len(self._shapes):
            return int(shape[0]) - _LENGTH
        if any(size >= _LENGTH for size in shape):
            raise SizesMatterError
        return None


def _check_numbers(value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for part in value:
            _check_numbers(part)
    elif isinstance(value, Mapping):
        _check_numbers(tuple(value.values()))
    elif isinstance(value, (int, float)) and abs(value) >= _LENGTH:
        raise SizesMatterError
