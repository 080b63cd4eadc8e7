"""Builds a job without memory: its model, optimizer and batches are fake tensors."""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from waterflow.capture.tracing import TRACE_LOCK, JobMode, functions_of, is_of_job, users_line
from waterflow.common.errors import CaptureError, JobError
from waterflow.job.batch import FlatBatch, UnknownLeafError, flatten
from waterflow.job.epochs import begin_epoch
from waterflow.job.job import META_ALLOWED, Job

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class BuiltJob:
    """A job and its first batch, taken apart; `real` where it was built in memory after all."""

    job: Job
    batch: FlatBatch
    real: bool


class BuildError(Exception):
    """A factory, or the data of its job, raises without memory; the cause says what."""


def build(make: Callable[[], Job], what: str) -> BuiltJob:
    """Builds a job and takes the first batch of its data, without memory where that works.

    Python's, numpy's and torch's random streams are afterwards where they were before.

    Args:
        make: makes the job: model, optimizer and data, all new.
        what: what to call the factory in errors.

    Raises:
        JobError: the factory raises, its data has no batch, or it makes something else.
    """
    try:
        return build_fake(make, what)
    except BuildError:
        return build_real(make, what)


def build_fake(make: Callable[[], Job], what: str) -> BuiltJob:
    """Builds a job and takes its first batch without memory.

    Raises:
        BuildError: that does not work; in memory it may.
        JobError: as `build`.
    """
    mode = JobMode()
    with TRACE_LOCK, random_kept():
        try:
            with mode, _MetaOnHost(), _meta_allowed(), _conversions_in_place():
                job = make()
        except Exception as error:
            raise BuildError(what) from error
        _check_kind(job, what)
        try:
            with mode:
                batch = first_batch(job)
        except (JobError, CaptureError):
            raise
        except Exception:
            try:  # a loader that shuffles reads numbers: its batches may be real, the model not
                batch = first_batch(job)
            except Exception as error:
                raise BuildError(what) from error
    return BuiltJob(job, batch, real=False)


def build_real(make: Callable[[], Job], what: str) -> BuiltJob:
    """Builds a job in memory and takes its first batch.

    Raises:
        JobError: as `build`.
    """
    with random_kept():
        try:
            with _meta_allowed():
                job = make()
            _check_kind(job, what)
            return BuiltJob(job, first_batch(job), real=True)
        except (JobError, CaptureError) as error:
            raise type(error)(f"{what}: {error}") from error
        except Exception as error:
            lines = str(error).strip().splitlines()
            told = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
            raise JobError(
                f"{what} raises at {users_line(error, make)}: {told}. Mend it, and call it once by "
                "itself to see the whole traceback."
            ) from error


def first_batch(job: Job) -> FlatBatch:
    """The first batch of a job's data, taken apart.

    Raises:
        JobError: there is none.
        CaptureError: it may hide tensors.
    """
    found = next(begin_epoch(job.data, 0, job.accumulate), _NOTHING)
    if found is _NOTHING:
        raise JobError(f"job {job.name!r}: its data has no batch, so its step has no shapes")
    return flat_batch(job, found)


def flat_batch(job: Job, batch: Any) -> FlatBatch:
    """A batch taken apart.

    Raises:
        CaptureError: it may hide tensors.
    """
    try:
        return flatten(batch, job.batch_reads)
    except UnknownLeafError as error:
        raise CaptureError(
            f"job {job.name!r}: a batch holds a {error.args[0]}, which may hide tensors from the "
            "capture. Make batches of tensors, numbers, strings, sequences, mappings and data "
            "classes."
        ) from None


_NOTHING = object()


def name_of(make: Callable[..., Any]) -> str:
    """A factory as errors call it: its name and where it is written."""
    for function in functions_of(inspect.unwrap(make)):
        code = function.__code__
        return f"job factory {function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return f"job factory {make!r}"


def _check_kind(job: Any, what: str) -> None:
    if not isinstance(job, Job):
        raise JobError(f"{what} must return a waterflow.Job, it returned {job!r}")


class _MetaOnHost(TorchFunctionMode):
    """Tensors asked for on the device "meta" are made as if on the host.

    A model on "meta" is one whose memory somebody wanted to save; here nothing has memory, and a
    job's step runs on the host or on a GPU.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_meta(kwargs["device"]):
            kwargs["device"] = _HOST
        if func is torch.Tensor.to:
            args = tuple(_HOST if _is_meta(value) else value for value in args)
        return func(*args, **kwargs)


def _is_meta(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "meta"
    return isinstance(device, str) and device == "meta"


@contextlib.contextmanager
def _conversions_in_place() -> Iterator[None]:
    """``model.to(...)`` keeps its fake parameters, as it keeps real ones; torch would swap them.

    Swapping fails where anything refers to them weakly, and memos of fake tensors do. Requires
    TRACE_LOCK, as it patches torch.
    """
    original, owner = torch.nn.Module._apply, threading.get_ident()

    def apply(self: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        own = [parameter for parameter in self._parameters.values() if parameter is not None]
        if threading.get_ident() != owner or not all(map(is_of_job, own)):
            return original(self, fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)
        for parameter in own:
            _convert(parameter, fn)
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer if buffer is None else fn(buffer)
        return self

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = original  # type: ignore[method-assign]


def _convert(parameter: Any, fn: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        converted = fn(parameter)
    if converted is not parameter:
        parameter.data = converted
        parameter.fake_device = converted.device
    if parameter.grad is not None:
        parameter.grad = fn(parameter.grad)


@contextlib.contextmanager
def _meta_allowed() -> Iterator[None]:
    token = META_ALLOWED.set(True)
    try:
        yield
    finally:
        META_ALLOWED.reset(token)


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Afterwards Python's, numpy's and torch's random streams are where they were."""
    python, array = random.getstate(), np.random.get_state(legacy=False)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
