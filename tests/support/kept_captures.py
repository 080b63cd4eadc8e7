"""A job and ways to change it, for captures that one process keeps and another reads.

    python -m tests.support.kept_captures WAY ...

trains the job changed in each way, beside the eager loop, and prints a line of JSON for each: how
often its step was traced, and whether losses and weights were equal, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import waterflow as wf
from waterflow.common import switches
from waterflow.steps import capture_cache, step_builder

SOURCE = """
import os
import numpy as np
import torch
from torch import nn
from torch.nn import functional

SCALE = 2.0
TABLE = np.array([1.0, 0.5, 2.0], dtype=np.float32)
CLASSES = torch.tensor([1.0, 2.0, 1.0, 0.5])
NAMES = ("first",)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return x + self.norm(self.inner(x)).tanh()


class Net(nn.Module):
    def __init__(self, p=0.25):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.block = Block()
        self.drop = nn.Dropout(p)
        self.last = nn.Linear(16, 4)
        self.factor = 1.5
        self.order = [2, 3]

    def bent(self, x, slope=0.2):
        return functional.leaky_relu(x, slope)

    def forward(self, x):
        h = self.block(self.bent(self.first(x))) * self.factor
        for number in self.order:
            h = h + 1.0 / number
        if hasattr(self, "sweetened"):
            h = self.sweetened(h)
        return self.last(self.drop(h)) / SCALE * float(TABLE[1])


def make_loss(share, smoothing=0.0):
    def loss(model, batch):
        found = model(batch[0])
        return functional.cross_entropy(found, batch[1], CLASSES) * share
    return loss
"""


class Parts:
    """What a way changes: the source of model and loss, then what is made of it."""

    def __init__(self) -> None:
        self.source = SOURCE
        self.share = 0.75
        self.make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda model: (
            torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.02)
        )
        self.change_model: Callable[[Any], None] = lambda model: None
        self.change_batch: Callable[[Any], Any] = lambda batch: batch
        self.options: dict[str, Any] = {}
        self.seed = 0

    def edit(self, old: str, new: str) -> None:
        assert old in self.source
        self.source = self.source.replace(old, new)

    def job(self) -> wf.Job:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(self.source, namespace)
        torch.manual_seed(self.seed)
        model = namespace["Net"]()
        batch = torch.randn(12, 8), torch.arange(12) % 4
        self.change_model(model)
        optimizer = self.make_optimizer(model)
        options = {"steps": 4, "seed": 1, "capture": True, **self.options}
        data = [self.change_batch(batch)] * 40
        loss = namespace["make_loss"](self.share)
        return wf.Job("a", model=model, optimizer=optimizer, loss=loss, data=data, **options)


Way = Callable[[Parts], Any]
#: Ways that leave the traces what they are: read.
SAME: dict[str, Way] = {}
#: Ways after which the kept traces must not be used.
OTHER: dict[str, Way] = {}


def _edits(name: str, old: str, new: str) -> None:
    OTHER[name] = lambda parts: parts.edit(old, new)


def _optimizers(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    OTHER[name] = lambda parts: setattr(parts, "make_optimizer", make)


def _models(name: str, change: Callable[[Any], Any]) -> None:
    OTHER[name] = lambda parts: setattr(parts, "change_model", change)


def _batches(name: str, change: Callable[[Any], Any]) -> None:
    OTHER[name] = lambda parts: setattr(parts, "change_batch", change)


def _options(name: str, **options: Any) -> None:
    OTHER[name] = lambda parts: parts.options.update(options)


@contextlib.contextmanager
def _called(before: Callable[[], Any], after: Callable[[], Any]) -> Iterator[None]:
    before()
    try:
        yield
    finally:
        after()


def _process(name: str, before: Callable[[], Any], after: Callable[[], Any]) -> None:
    OTHER[name] = lambda parts: _called(before, after)


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


SAME["nothing"] = lambda parts: None
SAME["a learning rate"] = lambda parts: setattr(
    parts, "make_optimizer", lambda m: torch.optim.AdamW(m.parameters(), 0.003, weight_decay=0.02)
)
SAME["betas and decay"] = lambda parts: setattr(
    parts,
    "make_optimizer",
    lambda m: torch.optim.AdamW(m.parameters(), 0.01, betas=(0.8, 0.95), weight_decay=0.3),
)
SAME["weights"] = lambda parts: setattr(parts, "seed", 5)
SAME["a comment"] = lambda parts: parts.edit("SCALE = 2.0", "# a line more\n\nSCALE = 2.0")

_edits("forward's code", ".tanh()", ".sigmoid()")
_edits("a constant in the code", "1.0 / number", "2.0 / number")
_edits("an operator", "x + self.norm", "x - self.norm")
_edits("a default", "slope=0.2", "slope=0.3")
_edits("a default of the constructor", "p=0.25", "p=0.5")
_edits("a global", "SCALE = 2.0", "SCALE = 3.0")
_edits("a global's kind", "SCALE = 2.0", "SCALE = 2")
_edits("a global array", "[1.0, 0.5, 2.0]", "[1.0, 0.25, 2.0]")
_edits("a global tensor's strides", "1.0, 0.5])", "1.0, 0.5]).repeat_interleave(2)[::2]")
_edits("a global tensor's values", "[1.0, 2.0, 1.0, 0.5]", "[1.0, 2.0, 1.0, 0.75]")
_edits("an attribute", "self.factor = 1.5", "self.factor = 1.25")
_edits("a list's order", "[2, 3]", "[3, 2]")
_edits("a subclass", "\n\ndef make_loss", "\n\nclass Net(Net):\n    pass\n\ndef make_loss")
_edits("an override", "class Block(nn.Module)", "class Block(nn.Sequential)")
_edits("a keyword of an operator", "CLASSES)", "CLASSES, reduction='sum')")
_edits("a variable of the environment", "* self.factor", "* float(os.environ.get('WAY', 1.5))")
_edits("metrics", "* share", "* share, {'one': found.sum()}")
OTHER["a closure's value"] = lambda parts: setattr(parts, "share", 0.5)
_models("dropout's p", lambda model: setattr(model.drop, "p", 0.5))
_models("epsilon", lambda model: setattr(model.block.norm, "eps", 1e-3))
_models("a submodule in eval mode", lambda model: model.block.eval())
_models("a frozen parameter", lambda model: model.first.bias.requires_grad_(False))
_models("tied weights", lambda model: setattr(model.block.inner, "bias", model.first.bias))
_models("other strides", lambda model: _transposed(model.block.inner))
_models("a forward hook", lambda model: model.block.register_forward_hook(_double))
_models("a parameter's hook", lambda model: model.last.weight.register_hook(_double_gradient))
_models("one buffer more", lambda model: model.register_buffer("more", torch.ones(2)))
_models("a module's momentum", lambda model: setattr(model.block.norm, "momentum", 0.2))
_models("another module", lambda model: setattr(model, "drop", nn.Dropout1d(0.25)))
_models("a method of the object's own", lambda model: setattr(model, "bent", torch.relu))
_optimizers("amsgrad", lambda m: torch.optim.AdamW(m.parameters(), 0.01, amsgrad=True))
_optimizers("no decay", lambda m: torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.0))
_optimizers("foreach", lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=True))
_optimizers("fused", lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True))
_optimizers("maximize", lambda m: torch.optim.AdamW(m.parameters(), 0.01, maximize=True))
_optimizers("another optimizer", lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.9))
_optimizers("an order", lambda m: torch.optim.AdamW([*m.parameters()][::-1], 0.01))
_optimizers(
    "two groups",
    lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()], 0.01, weight_decay=0.02),
)
_optimizers("fewer parameters", lambda m: torch.optim.AdamW([*m.parameters()][:3], 0.01))
_batches("a batch's size", lambda batch: tuple(part[:8].clone() for part in batch))
_batches("a batch's strides", lambda batch: (batch[0].t().contiguous().t(), batch[1]))
_batches("a batch's kind", list)
_batches("a batch of more tensors", lambda batch: (*batch, batch[0]))
_options("clipping", clip_grad_norm=0.5)
_options("other clipping", clip_grad_value=0.1)
_options("autocast", autocast=torch.bfloat16)
_options("accumulation", accumulate=2)
_process(
    "deterministic algorithms",
    lambda: torch.use_deterministic_algorithms(True),
    lambda: torch.use_deterministic_algorithms(False),
)
_process(
    "no mkldnn",
    lambda: torch._C._set_mkldnn_enabled(False),
    lambda: torch._C._set_mkldnn_enabled(True),
)
_process(
    "precision of products",
    lambda: torch.set_float32_matmul_precision("medium"),
    functools.partial(switches.put_back, switches.now()),  # "highest" leaves others as it sets them
)
_process(
    "no fast path of attention",
    lambda: torch.backends.mha.set_fastpath_enabled(False),
    lambda: torch.backends.mha.set_fastpath_enabled(True),
)
OTHER["a patched function"] = lambda parts: _patched(
    nn.functional, "leaky_relu", lambda x, slope: torch.relu(x)
)
OTHER["a patch below torch's own code"] = lambda parts: _patched(
    nn.functional, "dropout", lambda x, p=0.5, training=True, inplace=False: x * 1.0
)
OTHER["a patched class"] = lambda parts: _patched(
    nn.Linear, "forward", lambda self, x: x @ self.weight.t() + self.bias
)


OTHER["a method added to all modules"] = lambda parts: _added("sweetened", lambda self, x: x * 1.25)
SAME["a method added that nobody calls"] = lambda parts: _added("salted", lambda self, x: x * 1.25)


@contextlib.contextmanager
def _added(name: str, method: Any) -> Iterator[None]:
    setattr(nn.Module, name, method)
    try:
        yield
    finally:
        delattr(nn.Module, name)


def _transposed(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())


def _double(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _double_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


OTHER["a hook of all modules"] = lambda parts: _global_hook()


@contextlib.contextmanager
def _global_hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(_scaled_linear)
    try:
        yield
    finally:
        handle.remove()


def _scaled_linear(module: Any, args: Any, output: Any) -> Any:
    return output * 1.5 if type(module) is nn.Linear else output


@contextlib.contextmanager
def counting() -> Iterator[list[str]]:
    """Inside, captures are kept however small they are; what is yielded grows with each trace."""
    traces: list[str] = []
    trace, least = step_builder.trace_forward, capture_cache.LEAST_SECONDS

    def traced(job: wf.Job, *others: Any) -> Any:
        traces.append(job.name)
        return trace(job, *others)

    step_builder.trace_forward, capture_cache.LEAST_SECONDS = traced, 0.0
    try:
        yield traces
    finally:
        step_builder.trace_forward, capture_cache.LEAST_SECONDS = trace, least


def train(name: str, **options: Any) -> dict[str, Any]:
    """Trains the job changed in one way, and the same in the eager loop.

    Args:
        name: of the way.
        options: of the job, in place of its own.
    """
    parts = Parts()
    found = (SAME | OTHER)[name](parts)
    parts.options.update(options)
    with found if hasattr(found, "__enter__") else contextlib.nullcontext(), counting() as traces:
        eager, job = parts.job(), parts.job()
        report = wf.run([job], memory="64MiB", lanes=1, threads=1)
        losses = wf.run_eager(eager, threads=1).losses
    same = np.array_equal(np.array(report["a"].losses), np.array(losses), equal_nan=True)
    weights = zip(job.model.state_dict().values(), eager.model.state_dict().values(), strict=True)
    return {
        "way": name,
        "traces": len(traces),
        "captured": report["a"].captured,
        "error": report["a"].error,
        "equal": bool(same and all(torch.equal(one, other) for one, other in weights)),
    }


if __name__ == "__main__":
    os.environ["WATERFLOW_TIERS"] = "off"
    for way in sys.argv[1:]:
        print(json.dumps(train(way)), flush=True)
