"""What both traces (forward with backward, optimizer) need: one lock, one mode, clear errors."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from waterflow.partitioner.errors import CaptureError

#: make_fx patches process-wide state: one trace at a time.
TRACE_LOCK = threading.RLock()

WAYS_OUT = (
    "Ways out: change that line so that it does not depend on values or on Python state, or give "
    "the job capture=False (its steps run as eager Python: same numbers, no memory flow)."
)

_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


def users_line(error: BaseException | None, fallback: Callable[..., Any] | None = None) -> str:
    """Where in the user's code an error arose, as ``file:line in function``."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_FOLDERS)]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
    code = getattr(fallback, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    return "the model's code"


def capture_error(job: str, reason: str, where: str) -> CaptureError:
    """The error for a step that cannot be captured exactly."""
    return CaptureError(f"job {job!r} cannot be captured at {where}: {reason}. {WAYS_OUT}")


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no memory; foreign real tensors become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def trace(
    function: Callable[[Any], Any], mode: FakeTensorMode, tensors: list[torch.Tensor]
) -> fx.GraphModule:
    """Records every operator below autograd that ``function(tensors)`` calls on fake tensors."""

    def plain(tensors: Any) -> Any:  # make_fx looks at the signature; bound methods mislead it
        return function(tensors)

    with TRACE_LOCK, mode, torch.autograd.set_multithreading_enabled(False):
        return make_fx(plain, tracing_mode="real", _allow_non_fake_inputs=True)(tensors)


def nodes_so_far() -> int:
    """How many nodes the running trace has recorded."""
    mode = get_proxy_mode()
    assert mode is not None, "only inside a trace"
    return len(mode.tracer.graph.nodes)
