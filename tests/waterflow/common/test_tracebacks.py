"""Errors that are kept, as reports keep them, and what they keep alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import waterflow as wf
from tests.support.jobs import MODELS as JOBS
from waterflow.common.tracebacks import let_go_of_callers, let_go_of_frames
from waterflow.engine.loop import EngineLoop

Breaks = Callable[[wf.Job], None]


def breaks_in_its_step(job: wf.Job) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        if len(losses) == 3:
            raise ValueError("enough")
        losses.append(None)
        return plain(model, batch)

    plain, losses = job.loss, list[None]()
    assert plain is not None
    job.loss = loss


def asks_for_too_much(job: wf.Job) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        losses.append(None)
        too_much = torch.ones(64 << 20).sum() * 0 if len(losses) > 3 else 0
        return plain(model, batch) + too_much

    plain, losses = job.loss, list[None]()
    assert plain is not None
    job.loss = loss


def breaks_in_a_callback(job: wf.Job) -> None:
    def on_step(result: wf.StepResult) -> None:
        if result.step == 3:
            raise ValueError("enough")

    job.on_step = on_step


def breaks_in_its_data(job: wf.Job) -> None:
    class Data:
        def __iter__(self) -> Any:
            yield from plain
            raise OSError("the disk is gone")

    plain = list(job.data)[:3]
    job.data = Data()


def breaks_in_its_evaluation(job: wf.Job) -> None:
    def evaluate(model: Any) -> dict[str, float]:
        raise ValueError("enough")

    job.evaluate, job.evaluate_every = evaluate, 3


def breaks_on_a_batch(job: wf.Job) -> None:
    """Also in a captured step."""
    rows, labels = next(iter(job.data))
    job.data = [(rows, labels)] * 8 + [(rows, labels + 1000)]
    job.epochs, job.steps = None, 9


def breaks_its_optimizer(job: wf.Job) -> None:
    class Breaks(torch.optim.LBFGS):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            closure()
            raise ValueError("enough")

    job.optimizer = Breaks(job.model.parameters())


HOW = (
    *(breaks_in_its_step, asks_for_too_much, breaks_in_a_callback, breaks_in_its_data),
    *(breaks_in_its_evaluation, breaks_on_a_batch, breaks_its_optimizer),
)


@pytest.mark.parametrize("policy", ["flow", "temporal"])
@pytest.mark.parametrize("capture", ["auto", False])
@pytest.mark.parametrize("how", HOW)
def test_the_error_of_a_job_keeps_neither_the_engine_nor_other_jobs(
    how: Breaks, capture: Any, policy: str
) -> None:
    gc.collect()
    loops = {id(one) for one in gc.get_objects() if type(one) is EngineLoop}
    broken, other = JOBS["cnn"](), JOBS["noisy"]()
    broken.capture = other.capture = capture
    how(broken)
    model = weakref.ref(other.model)
    report = wf.run([broken, other], memory="64MiB", policy=policy, threads=1)
    assert report[other.name].state == "finished"
    del broken, other
    gc.collect()
    (error,) = [job.exception for job in report if job.exception is not None]
    assert error.__traceback__ is not None
    assert model() is None
    assert not [one for one in gc.get_objects() if type(one) is EngineLoop and id(one) not in loops]


def test_what_has_failed_is_gone_while_the_engine_goes_on() -> None:
    """As trials that fail do in a study of hours."""
    with wf.Engine("64MiB", threads=1) as engine:
        first, models = engine.submit(JOBS["noisy"]()), []
        for number in range(3):
            job = JOBS["cnn"]()
            job.name, job.capture = f"broken-{number}", False
            breaks_in_its_step(job)
            models.append(weakref.ref(job.model))
            handle = engine.submit(job)
            del job
            assert handle.result(60).exception is not None
        first.result(60)
        del handle
        last = JOBS["noisy"]()
        last.name = "last"
        engine.submit(last).result(60)
        gc.collect()
        assert [model() for model in models[:2]] == [None, None]


def test_frames_of_others_keep_their_variables() -> None:
    def inner(kept: torch.Tensor) -> None:
        raise ValueError("enough")

    def outer() -> None:
        here = torch.ones(3)
        references.append(weakref.ref(here))
        inner(torch.ones(2))

    references: list[weakref.ref[torch.Tensor]] = []
    try:
        outer()
    except ValueError as error:
        kept = error
    let_go_of_callers(kept)
    assert references[0]() is not None
    let_go_of_frames(kept)
    assert references[0]() is None


def test_an_error_that_is_its_own_cause_is_gone_through_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    let_go_of_frames(first)
    let_go_of_callers(first)
