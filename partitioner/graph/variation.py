"""Which numbers of a step need not come out the same twice, by whichever loop.

Some of a GPU's kernels add in no fixed order, unless torch's deterministic algorithms are on: the
gradient of an embedding does, so two runs of one eager step differ in their last bits there, and in
whatever is computed from them. Everything else repeats its bits.

Requires a captured graph of ATen operators; `varying` errs on the side of what varies.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import fx

from waterflow.partitioner.graph.effects import writes
from waterflow.partitioner.graph.step_graph import Input, StepGraph, tensors_of

#: Operators with such kernels, as torch's own list has them (`torch.use_deterministic_algorithms`)
#: and those of attention and convolutions that libraries choose.
_UNORDERED = re.compile(
    r"aten::_?("
    r"embedding_(dense_)?backward|embedding_bag_(dense_)?backward|"
    r"(unsafe_)?index_put(_impl)?|put|index_(add|copy|reduce)|index_select_backward|"
    r"scatter(_add|_reduce)?|gather_backward|repeat_interleave|"
    r"(adaptive_|fractional_)?(avg|max)_pool[123]d(_with_indices)?_backward|max_unpool[23]d|"
    r"upsample_\w+_backward(_aa)?|(reflection|replication)_pad[123]d_backward|"
    r"grid_sampler_[23]d_backward|nll_loss2d_(forward|backward)|(cudnn_)?ctc_loss(_backward)?|"
    r"histc|bincount|median|kthvalue|cumsum|"
    r"(scaled_dot_product_)?(flash|efficient|cudnn)_attention_backward|cudnn_rnn_backward|"
    r"convolution_backward"
    r")_?"
)
_CONVOLUTION_BACKWARD = "aten::convolution_backward"
_CONVOLUTIONS = ("aten::convolution", _CONVOLUTION_BACKWARD)
#: Each element of what these make depends on the elements at its own place of what they are given.
_ELEMENT_BY_ELEMENT = ("aten::_foreach_", "aten::_fused_")


@dataclass(frozen=True)
class Varying:
    """What of a step varies.

    Attributes:
        inputs: persistent tensors that it writes.
        outputs: of what it leaves behind, by their keys.
        loss: whether its loss does.
    """

    inputs: frozenset[Input] = frozenset()
    outputs: frozenset[Hashable] = frozenset()
    loss: bool = False

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.loss)


def varying(step: StepGraph) -> Varying:
    """What of the step varies, as torch's flags are now."""
    if torch.are_deterministic_algorithms_enabled() or not any(map(is_unordered, step.nodes)):
        return Varying()
    touched: set[int] = set()
    for node in step.nodes:
        _follow(node, touched)
    inputs = frozenset(
        meaning
        for meaning, node in step.inputs.items()
        if meaning.is_persistent and _touches(node, touched)
    )
    outputs = frozenset(key for key, node in step.outputs.items() if _touches(node, touched))
    return Varying(inputs, outputs, _touches(step.loss, touched))


def is_unordered(node: fx.Node) -> bool:
    """Whether the node's kernel may add in another order each time."""
    name = _name(node)
    if not _UNORDERED.fullmatch(name) or not _is_on_gpu(node):
        return False
    return name != _CONVOLUTION_BACKWARD or not torch.backends.cudnn.deterministic


def is_chosen_by_clock(node: fx.Node) -> bool:
    """Whether the node's kernel is the one that was fastest when its thread first asked: another
    thread, as another run of the loop, may choose one that computes other bits."""
    return torch.backends.cudnn.benchmark and _name(node) in _CONVOLUTIONS and _is_on_gpu(node)


def _follow(node: fx.Node, touched: set[int]) -> None:
    """Adds the memory to which the node brings what varies."""
    name = _name(node)
    if node.target is operator.getitem:
        return  # what it takes is the same memory
    if name.startswith(_ELEMENT_BY_ELEMENT):
        _follow_elements(node, touched)
    elif is_unordered(node) or any(_touches(source, touched) for source in node.all_input_nodes):
        for changed in (node, *writes(node)):
            touched.update(map(_memory, tensors_of(changed)))


def _follow_elements(node: fx.Node, touched: set[int]) -> None:
    lists = [value for value in node.args if isinstance(value, (list, tuple))]
    single = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, fx.Node)]
    all_vary = any(_touches(value, touched) for value in single)
    written = set(writes(node))
    for made, sources in zip_longest(tensors_of(node), zip_longest(*lists), fillvalue=None):
        given = [source for source in sources or () if isinstance(source, fx.Node)]
        if not (all_vary or any(_touches(source, touched) for source in given)):
            continue
        changed = [t for source in given if source in written for t in tensors_of(source)]
        touched.update(map(_memory, changed))
        if made is not None:
            touched.add(_memory(made))


def _name(node: fx.Node) -> str:
    """The operator's, without its overload's; "" of what is none."""
    return getattr(getattr(node.target, "_schema", None), "name", "")


def _is_on_gpu(node: fx.Node) -> bool:
    return any(t.is_cuda for each in (node, *node.all_input_nodes) for t in tensors_of(each))


def _touches(node: fx.Node, touched: set[int]) -> bool:
    return any(_memory(tensor) in touched for tensor in tensors_of(node))


def _memory(tensor: torch.Tensor) -> int:
    """What tensors of one memory have in common; a sparse one has its own."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)
