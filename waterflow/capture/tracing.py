"""What both traces (forward with backward, optimizer) need: one lock, one mode, clear errors."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from waterflow.account.purity import observer
from waterflow.capture.asked_kinds import as_if_real, asker_among
from waterflow.capture.device_guard import keep_device_guard
from waterflow.capture.fast_fakes import twin_of
from waterflow.capture.formulas import as_it_runs, check_function
from waterflow.capture.questions import Asked
from waterflow.capture.recording import Recorder, Recording
from waterflow.common.errors import CaptureError
from waterflow.common.text import text_of

#: A trace puts back what it has changed in the process: one at a time.
TRACE_LOCK = threading.RLock()

Kind = TypeVar("Kind", bound=CaptureError)

WAYS_OUT = (
    "Ways out: change that line so that it does not depend on values or on Python state, or give "
    "the job capture=False (its steps run as eager Python: same numbers, no memory flow)."
)

_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def _is_users(filename: str) -> bool:
    if filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename:
        return False
    return not filename.startswith(_LIBRARY_FOLDERS)


def functions_of(callable_: Callable[..., Any] | None) -> list[FunctionType]:
    """The Python functions behind a callable: a method's, an object's, a partial's."""
    while isinstance(callable_, functools.partial):
        callable_ = callable_.func
    called = vars(type(callable_)).get("__call__")
    candidates = [callable_, getattr(callable_, "__func__", None), called]
    return [item for item in candidates if isinstance(item, FunctionType)]


def users_line(error: BaseException | None, fallback: Callable[..., Any] | None = None) -> str:
    """Where in the user's code an error arose, as ``file:line in function``."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [frame for frame in frames if _is_users(frame.filename)]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
    for function in functions_of(fallback):
        code = function.__code__
        return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    return "the model's code"


def reason_of(error: Exception) -> str:
    """What an error during a trace means, in one line."""
    if isinstance(error, DataDependentOutputException):
        return (
            f"the step needs the value of a tensor ({error.func}: .item(), if, float() and the "
            f"like), and a captured step runs without asking{_remedy(error)}"
        )
    text = text_of(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


#: Parts of torch that look at values, by their files, and how to do without.
_ASKING = {
    "distributions/": "torch.distributions checks its arguments unless made with "
    "validate_args=False",
    "optim/swa_utils.py": "AveragedModel asks whether it is its first update; call "
    "update_parameters in on_step, between two steps",
    "amp/grad_scaler.py": "GradScaler looks for infinities, of which bfloat16 has none: make it "
    "with enabled=False",
    "nn/utils/clip_grad.py": "clipping looks at the norm where error_if_nonfinite=True; leave "
    "that out, and let Job(stop_on_nan=True) end the job",
}


def _remedy(error: Exception) -> str:
    """Behind an error's reason: how to do without the value that a part of torch has asked for."""
    torchs = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for part, remedy in _ASKING.items():
            if frame.filename.startswith(f"{torchs}/{part}"):
                return f": {remedy}"
    return ""


class StateMovedError(CaptureError):
    """The step changes state that later steps read; perhaps only once, as a cache does.

    Users see a `CaptureError`; this one tells who prepares batches that a trial may help.
    """


def capture_error(
    job: str,
    reason: str,
    where: str,
    kind: type[Kind] = CaptureError,  # type: ignore[assignment]
) -> Kind:
    """The error for a step that cannot be captured exactly."""
    message = f"job {job!r} cannot be captured at {where}: {reason}. {WAYS_OUT}"
    return kind(message, f"{reason} ({where})")


class JobMode(FakeTensorMode):
    """A mode to build a whole job in, without memory: to a capture its tensors are real ones."""

    def __init__(self) -> None:
        keep_device_guard()
        super().__init__(allow_non_fake_inputs=True)


def is_of_job(tensor: Any) -> bool:
    """Whether a tensor is fake because its whole job is, and not because a capture made it."""
    return isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, JobMode)


def fake_twin(
    mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device | None = None
) -> FakeTensor:
    """A fake leaf of the same layout, on `device` if given, that calls the same gradient hooks.

    A tensor on the device "meta", which has a layout and nothing else, counts as one of the host.
    """
    twin = twin_of(mode, tensor)
    if device is None and tensor.device.type == "meta":
        device = torch.device("cpu")
    if device is not None and device != tensor.device:
        layout = {"dtype": tensor.dtype, "device": device, "requires_grad": tensor.requires_grad}
        with mode:
            there = torch.empty_strided(tensor.shape, tensor.stride(), **layout)  # type: ignore[arg-type]
        assert isinstance(there, FakeTensor)
        twin = there
    twin.grad = None  # as after zero_grad; the mode brings a twin of an old gradient along
    for hook in (getattr(tensor, "_backward_hooks", None) or {}).values():
        twin.register_hook(hook)
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        twin.register_post_accumulate_grad_hook(hook)
    return twin


def trace(
    function: Callable[[Recorder, list[torch.Tensor]], Iterable[torch.Tensor]],
    mode: FakeTensorMode,
    tensors: list[torch.Tensor],
    reals: Sequence[torch.Tensor] = (),
    kind: type[RealTensors] | None = None,
    *,
    notes_modes: bool = False,
    code: Iterable[CodeType] | None = None,
    batch: Sequence[torch.Tensor] = (),
) -> Recording:
    """Records every operator below autograd that ``function(recorder, tensors)`` calls on fake
    tensors.

    Args:
        function: what to trace; returns the graph's outputs.
        mode: of the fake tensors.
        tensors: its argument.
        reals: the real tensors that the first of `tensors` stand for, wherever the code meets them.
        kind: of the mode that sees to that.
        notes_modes: whether each node is to know if gradient mode was on.
        code: all that can be executed; None: any.
        batch: the real tensors that the last of `tensors` stand for, which the code may ask for
            values (`questions`).

    Raises:
        Exception: of the traced code, or of the trace, even where that code has caught it.
    """
    recorder = Recorder(notes_modes)
    twins = {id(real): twin for real, twin in zip(reals, tensors, strict=False)}
    one_thread = torch.autograd.set_multithreading_enabled(False)
    # To observe takes half as long as to trace: there is as good as never any such code.
    asks = code is None or asker_among(code) is not None
    executed = observer() if asks else None
    with TRACE_LOCK, _quiet_log(), _uncompiled(), as_if_real(), mode, one_thread:
        inputs = list(map(recorder.add_input, tensors))
        recorder.asked = Asked(inputs[len(inputs) - len(batch) :], batch) if batch else None
        with (
            recorder,
            (kind or RealTensors)(mode, recorder, twins),
            executed or contextlib.nullcontext(),
        ):
            outputs = function(recorder, tensors)
        recorder.check()
        if executed is not None:
            _check_kinds(executed.codes())
        recording = recorder.finish(outputs)
    _forget_reals(mode)
    return recording


def _check_kinds(codes: Iterable[CodeType]) -> None:
    asker = asker_among(codes)
    if asker is not None:
        where = f"{asker.co_filename}:{asker.co_firstlineno} in {asker.co_name}"
        raise RuntimeError(f"it asks of which class a tensor is, or whether it is fake ({where})")


class _EagerHere:
    """How ``torch.compile`` acts (`torch.compiler.set_stance`): not at all on one thread.

    Attributes:
        thread: which; None: on none any more, as another one may have kept this to put it back.
    """

    def __init__(self, elsewhere: Any) -> None:
        self._elsewhere = elsewhere
        self.thread: int | None = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name == "stance" and threading.get_ident() == self.thread:
            return "force_eager"
        return getattr(self._elsewhere, name)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Inside, on this thread, what is under ``torch.compile`` is the Python that it was made from.

    Under a trace's modes it would be compiled piece by piece, for seconds, to make the same calls;
    and each time counts where torch compiles a function no more (``recompile_limit``), so that the
    job's own eager steps would run it otherwise than those of the plain loop.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    before = getattr(frames, "_stance", None)
    if before is None:  # nothing can be compiled yet, or this torch does it in another way
        yield
        return
    frames._stance = here = _EagerHere(before)
    try:
        yield
    finally:
        here.thread = None
        if frames._stance is here:
            frames._stance = before


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Keeps torch from logging its own frames wherever a description of an operator refuses its
    arguments: the error that it raises says the same, and what is made of it is ours to say."""
    thread = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    _FAKE_TENSOR_LOG.addFilter(is_of_others)
    try:
        yield
    finally:
        _FAKE_TENSOR_LOG.removeFilter(is_of_others)


def _forget_reals(mode: FakeTensorMode) -> None:
    """Lets go of the real tensors that the mode has made twins of.

    It keeps weak references to them, with which ``torch.utils.swap_tensors`` refuses a tensor.
    """
    describer = getattr(mode.fake_tensor_converter.meta_converter, "describer", None)
    for name in ("lookup_tensor", "lookup_storage"):
        known = getattr(describer, name, None)
        if known is not None:
            known.clear()


#: Leaves no operator behind that a trace could record.
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: What ``repr``, ``str``, ``format`` and the like ask.
_TEXTS = frozenset({torch.Tensor.__repr__, torch.Tensor.__format__})


class RealTensors(TorchFunctionMode):
    """Real tensors that the traced code meets become constants of the graph, by reference.

    Those that have a twin among the arguments of the traced code stand for it.

    Left to themselves the modes below would compute with some of them for real: the batch counter
    of a network that the loss function knows would count the trace as a step.
    """

    def __init__(
        self, mode: FakeTensorMode, recorder: Recorder, twins: dict[int, torch.Tensor]
    ) -> None:
        super().__init__()
        self._mode = mode
        self._recorder = recorder
        self._twins = twins
        self._kept: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except Exception as error:
            self._recorder.note(error)
            raise

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == _SET_DATA:
            raise RuntimeError("it assigns to .data (use torch.no_grad() and copy_() instead)")
        if func in _TEXTS:
            raise RuntimeError("it makes a text of a tensor, and a trace does not know its values")
        check_function(func, args, kwargs)
        self._recorder.function = func
        met: dict[int, torch.Tensor] = {}  # real tensors among the arguments, by their twins
        if _may_hold_reals((args, kwargs)):
            twin = functools.partial(self._twin, met=met)
            args, kwargs = tree_map_only(torch.Tensor, twin, (args, kwargs))
        result = as_it_runs(func, args, kwargs)(*args, **kwargs)
        return met.get(id(result), result)  # x += 1 leaves the same object in x

    def _twin(self, tensor: torch.Tensor, met: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in self._twins:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_of_job(tensor):
                return tensor
            if tensor.layout != torch.strided:
                return tensor
            with self._recorder.off():
                twin = fake_twin(self._mode, tensor)
            self._recorder.add_constant(tensor, twin)
            self._twins[id(tensor)] = twin
            self._kept.append(tensor)  # its identity is its key
        found = self._twins[id(tensor)]
        met[id(found)] = tensor
        return found


#: Arguments of operators that hold no tensor; most others are tensors, lists or tuples.
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, slice)


def _may_hold_reals(values: Iterable[Any]) -> bool:
    """Whether there may be a tensor among these that the running capture has not made."""
    for value in values:
        if isinstance(value, FakeTensor):
            if is_of_job(value):
                return True
        elif type(value) in (list, tuple):
            if _may_hold_reals(value):
                return True
        elif type(value) is dict:
            if _may_hold_reals(value.values()):
                return True
        elif not isinstance(value, _PLAIN):
            return True
    return False
