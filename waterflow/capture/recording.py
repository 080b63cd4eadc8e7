"""Records the operators that code calls below autograd, while a mode below computes with them.

`make_fx` records the same graphs. It was left because it patches classes of torch for as long as it
traces, and takes most of a capture's time: it keeps symbolic numbers, decompositions and stack
traces up to date that nothing here reads, and writes each graph out as Python code.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from waterflow.capture.fast_fakes import detached
from waterflow.capture.formulas import check_operator
from waterflow.capture.questions import Asked, Question

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
#: Fresh tensors that Python numbers were made into: the graph's constant must stay as it is.
_COPIED = {_aten.lift_fresh.default: _aten.lift_fresh_copy.default}
#: Operators that ask for numbers of a layout.
_QUESTIONS = {_aten.size.default, _aten.stride.default, _aten.storage_offset.default}
#: Kinds of tensors that are no business of a class of somebody's own.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, FakeTensor})
#: Arguments that a graph keeps as they are: nothing about them can change.
_VALUES = (
    *(type(None), bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(eq=False)
class Recording:
    """A graph of operators below autograd.

    Attributes:
        graph: its nodes have ``meta["val"]``: the (fake) tensors that they stand for.
        constants: the tensors behind its ``get_attr`` nodes.
        outputs: the nodes that it ends in.
        mutated: what `forward.mutated_by` has found, None before it is asked.
        answers: what the code has asked of its batch, and what that has answered.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[fx.Node] = field(default_factory=list)
    mutated: frozenset[fx.Node] | None = None
    answers: tuple[tuple[Question, Hashable], ...] = ()

    def constant_of(self, node: fx.Node) -> Tensor:
        """The tensor behind a ``get_attr`` node."""
        return self.constants[str(node.target)]


def add_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Any = None,
    name: str | None = None,
) -> fx.Node:
    """``graph.call_function``, without a search for symbolic numbers, which captures do not have,
    and with the name that the target had before, or another."""
    node = graph.create_node("call_function", target, name=name or _name_of(target))
    # As `node.args = args`, which would put the node out of the graph's table and in again.
    object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)
    return node


@functools.cache
def _name_of(target: Callable[..., Any]) -> str:
    return str(fx.Graph().call_function(target).name)


class Recorder(TorchDispatchMode):
    """Records what is called inside it, for tensors that other modes give it.

    Tensors that it has not seen before become constants of the graph, by reference.
    """

    def __init__(self, notes_modes: bool = False) -> None:
        """`notes_modes`: each node knows whether gradient mode was on (``gradient_mode``)."""
        super().__init__()
        self._notes_modes = notes_modes
        self.recording = Recording()
        self._graph = self.recording.graph
        # Of tensors by their identities, which others may have once these are gone.
        self._nodes: dict[int, tuple[TensorWeakRef, fx.Node]] = {}
        self._is_off = False
        self._twins: dict[str, Tensor] = {}  # what the traced code has in place of constants
        #: Of torch's, that the traced code has called last; whoever sees that sets it.
        self.function: Callable[..., Any] | None = None
        #: What the code asks for values of its batch; None where it cannot.
        self.asked: Asked | None = None
        self._problem: Exception | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and the wrapper that keeps dynamo out takes its time."""
        return False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """What is called inside is not recorded."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def note(self, error: Exception) -> None:
        """An error on its way to the traced code ends the trace, at the latest in `check`: that may
        catch it, and do what it would do for no real tensor."""
        # Ends a recomputation of torch's within a backward pass, eager or traced.
        if type(error).__name__ != "_StopRecomputationError":
            self._problem = self._problem or error

    def check(self) -> None:
        """Raises the first error that was noted, whether or not the traced code has caught it."""
        if self._problem is not None:
            raise self._problem

    @property
    def size(self) -> int:
        """How many nodes there are by now."""
        return len(self._graph.nodes)

    def add_input(self, tensor: Tensor) -> fx.Node:
        """A tensor that is an input of the graph."""
        node = self._graph.placeholder(f"input_{self.size}")
        self._track(node, tensor)
        return node

    def add_constant(self, tensor: Tensor, twin: Tensor | None = None) -> fx.Node:
        """The node of a tensor that is none of the graph's own; `twin` stands for it from now
        on."""
        name = f"constant_{len(self.recording.constants)}"
        self.recording.constants[name] = tensor
        if twin is not None:
            self._twins[name] = twin
        node = self._graph.get_attr(name)
        self._track(node, tensor if twin is None else twin)
        return node

    def given_gradients(self) -> list[Tensor]:
        """The constants that a backward pass has given a gradient, or may have."""
        with torch._C.DisableTorchFunction():  # nothing here is the traced code's
            return [
                tensor
                for name, tensor in self.recording.constants.items()
                if tensor.is_leaf
                and tensor.requires_grad
                and (name not in self._twins or self._twins[name].grad is not None)
            ]

    def node_of(self, tensor: Tensor) -> fx.Node:
        """What stands for a tensor now."""
        reference, node = self._nodes.get(id(tensor), (None, None))
        if reference is None or node is None or reference() is not tensor:
            return self.add_constant(tensor)
        return node

    def add_call(self, target: Callable[..., Any], *arguments: Any) -> fx.Node:
        """Records a call that is not made."""
        return add_call(self._graph, target, tuple(map(self._argument, arguments)))

    def finish(self, outputs: Iterable[Tensor]) -> Recording:
        """The graph that ends in these tensors."""
        self.recording.outputs = [self.node_of(tensor) for tensor in outputs]
        if self.asked is not None:
            self.recording.answers = tuple(self.asked.answers.items())
        self._graph.output(self.recording.outputs)
        return self.recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types):
            return NotImplemented  # a class of somebody's own says first what it consists of
        if self._is_off or func is _DEVICE:
            return func(*args, **kwargs)
        try:
            return self._recorded(func, args, kwargs)
        except Exception as error:
            self.note(error)
            raise

    def _recorded(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        assert isinstance(func, OpOverload)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return self._value(func, args, kwargs)
        if _would_be_taken_apart(func, args):
            with self:
                return func.decompose(*args, **kwargs)
        func = _COPIED.get(func, func)
        check_operator(func, args, self.function)
        node = add_call(self._graph, func, *self._arguments(args, kwargs))
        if self._notes_modes:
            node.meta["gradient_mode"] = torch.is_grad_enabled()
        result = func(*args, **kwargs)
        self._track(node, result)
        return result

    def _value(self, func: OpOverload, args: Sequence[Any], kwargs: Any) -> Any:
        """A value that the code asks for."""
        try:
            return func(*args, **kwargs)  # a number that the mode below knows is a constant
        except DataDependentOutputException:
            if self.asked is None:
                raise
            answer = self.asked.answer(func, *self._arguments(args, kwargs), self._graph)
            if answer is None:
                raise
            return answer

    def _arguments(self, args: Sequence[Any], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        """The arguments of an operator, as a graph has them."""
        named = {key: self._argument(value) for key, value in kwargs.items()}
        return tuple(map(self._argument, args)), named

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (list, tuple)):
            return [*map(self._argument, value)]
        if not isinstance(value, _VALUES):
            kind = type(value)
            raise TypeError(f"an operator takes a {kind.__module__}.{kind.__qualname__}")
        return value

    def _track(self, node: fx.Node, value: Any) -> None:
        """What an operator has returned, or what came from outside, has this node from now on."""
        self._follow(node, value, _as_it_is(value))

    def _follow(self, node: fx.Node, value: Any, kept: Any) -> None:
        node.meta["val"] = kept
        if isinstance(value, Tensor):
            self._nodes[id(value)] = TensorWeakRef(value), node
        elif isinstance(value, (tuple, list)):
            for index, (part, of_part) in enumerate(zip(value, kept, strict=True)):
                taken = add_call(self._graph, operator.getitem, (node, index))
                self._follow(taken, part, of_part)


def _as_it_is(value: Any) -> Any:
    """A tensor of its own over the same storage: what becomes of the other does not show in it.

    Nor does it keep the other, or autograd's memory of where that came from. Autograd takes a
    gradient as it is where nobody else has it, and copies it where somebody does.
    """
    if isinstance(value, FakeTensor):
        return detached(value)
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return type(value)(map(_as_it_is, value))
    return value


def _would_be_taken_apart(func: OpOverload, arguments: Iterable[Any]) -> bool:
    """Whether autograd would have taken an operator apart; it only comes whole where autograd is
    out of the way, as in inference mode."""
    if func in _QUESTIONS or not func._can_decompose():
        return False
    tensor = next((value for value in arguments if isinstance(value, Tensor)), None)
    if tensor is None:
        return True
    key = torch._C._dispatch_key_for_device(tensor.device.type)
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
