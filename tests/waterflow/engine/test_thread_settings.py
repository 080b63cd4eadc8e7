"""What numbers depend on and a thread has: a job's Python changes its own, nobody else's."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import waterflow as wf
from waterflow.executor.run.threads import ThreadSettings

pytestmark = pytest.mark.cpu

EPOCHS, BATCHES = 3, 8


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


class Sensitive(nn.Module):
    """Its numbers depend on both: a convolution's sums are split, and a term is denormal."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6 * 64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + ((x * 1e-20) * 1e-20) * 1e38 * 100
        return self.linear(torch.relu(self.norm(self.convolution(x))).flatten(1))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(4, (8,), generator=generator))
        for _ in range(BATCHES)
    ]


def make_job(name: str, **options: Any) -> wf.Job:
    torch.manual_seed(1)
    model = Sensitive()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    given = {"data": batches(), "epochs": EPOCHS, "seed": 0, "loss": cross_entropy, **options}
    return wf.Job(name, model=model, optimizer=optimizer, **given)


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Setting(list[Any]):
    """Data whose Python sets something in the middle of an epoch."""

    def __init__(self, change: Callable[[], Any]) -> None:
        super().__init__(batches())
        self._change = change

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number == 3:
                self._change()
            yield batch


def threads() -> None:
    torch.set_num_threads(2)


def denormals() -> None:
    torch.set_flush_denormal(True)


def once(change: Callable[[], Any]) -> dict[str, Any]:
    return {"on_step": lambda result: change() if result.step == 3 else None}


def in_loss(change: Callable[[], Any]) -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        change()
        return cross_entropy(model, batch)

    return {"loss": loss}


WAYS = {
    "callback": once,
    "loss": in_loss,
    "data": lambda change: {"data": Setting(change)},
    "evaluation": lambda change: {"evaluate": lambda model: change(), "evaluate_every": 5},
}


def loop(name: str, **options: Any) -> wf.JobReport:
    """What the plain loop makes of it on one thread, which has its settings back afterwards."""
    try:
        return wf.run_eager(make_job(name, **options), threads=1)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("policy", ["flow", "temporal"])
@pytest.mark.parametrize("change", [threads, denormals])
@pytest.mark.parametrize("way", WAYS)
def test_a_job_changes_its_own_and_nobody_elses(
    way: str, change: Callable[[], Any], policy: str
) -> None:
    torch.set_num_threads(1)
    expected, other = loop("one", **WAYS[way](change)), loop("two")
    assert expected.losses != other.losses  # they do depend on it
    one, two = make_job("one", **WAYS[way](change)), make_job("two")
    report = wf.run([one, two], memory="64MiB", threads=1, policy=policy)
    assert report.jobs["one"].losses == expected.losses
    assert report.jobs["one"].captured == "opaque step", report.jobs["one"].notes
    assert report.jobs["two"].losses == other.losses
    assert report.jobs["two"].captured == "captured", report.jobs["two"].notes
    assert ThreadSettings.here() == (1, False, 0)


@pytest.mark.parametrize(("change", "name"), [(threads, "num_threads"), (denormals, "flush")])
def test_a_job_that_insists_on_capture_ends_with_the_remedy(
    change: Callable[[], Any], name: str
) -> None:
    torch.set_num_threads(1)
    expected, other = loop("one", **once(change)), loop("two")
    one, two = make_job("one", capture=True, **once(change)), make_job("two", capture=True)
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([one, two], memory="64MiB", threads=1, policy="temporal")
    assert report.jobs["one"].losses == expected.losses[:3]
    assert name in str(report.jobs["one"].error)
    assert report.jobs["two"].losses == other.losses


def test_denormals_are_dealt_with_as_on_the_thread_that_submits() -> None:
    """Lanes are older than the setting, and keep theirs."""
    torch.set_num_threads(1)
    other = loop("two")
    with wf.Engine("64MiB", threads=1) as engine:
        torch.set_flush_denormal(True)
        one = make_job("one")
        first = engine.submit(one)
        torch.set_flush_denormal(False)
        second = engine.submit(make_job("two"))
        assert second.result().losses == other.losses
        found = first.result()
    torch.set_flush_denormal(True)
    expected = make_job("one")
    assert wf.run_eager(expected, threads=1).losses == found.losses != other.losses
    assert sys.float_info.min * 0.5 == 0.0  # the loop has kept it


def test_denormals_set_before_the_engine_are_captured() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    expected = wf.run_eager(make_job("one"), threads=1)
    report = wf.run([make_job("one", capture=True)], memory="64MiB", threads=1)
    assert report.jobs["one"].losses == expected.losses
    assert report.jobs["one"].captured == "captured"


class Scaled(TorchFunctionMode):
    """Makes every loss a little larger."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 1.25 if function is nn.functional.cross_entropy else result


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast that remembers nothing": lambda: torch.autocast(
        "cpu", torch.bfloat16, cache_enabled=False
    ),
    "function mode": Scaled,
}


class Entered:
    """A callback that enters a mode once and does not leave it."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        self._make = mode
        self.mode: Any = contextlib.nullcontext()

    def __call__(self, result: wf.StepResult) -> None:
        if result.step == 3:
            self.mode = self._make()
            self.mode.__enter__()


def in_half_precision(model: nn.Module, batch: Any) -> torch.Tensor:
    """Casts its weights once, and anew in the next step."""
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, batch)


@pytest.mark.parametrize("policy", ["flow", "temporal"])
@pytest.mark.parametrize(
    ("capture", "callbacks"), [("auto", "lane"), (False, "lane"), (False, "caller")]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_that_a_callback_has_entered_holds_as_in_the_loop(
    mode: str, capture: Any, callbacks: str, policy: str
) -> None:
    torch.set_num_threads(1)
    entered, other = Entered(MODES[mode]), loop("two")
    try:
        expected = loop("one", on_step=entered)
    finally:
        entered.mode.__exit__(None, None, None)
    assert expected.losses[:3] == other.losses[:3]
    assert expected.losses[3:] != other.losses[3:]
    one = make_job("one", on_step=Entered(MODES[mode]), capture=capture)
    # One cache for all threads remembers casts: whoever leaves autocast empties it for the first.
    beside = cross_entropy if mode == "autocast" else in_half_precision
    two = make_job("two", loss=beside, capture=False)
    report = wf.run([one, two], memory="64MiB", threads=1, policy=policy, callbacks=callbacks)
    assert report.jobs["one"].losses == expected.losses
    assert report.jobs["two"].losses == loop("two", loss=beside).losses
    assert ThreadSettings.here() == (1, False, 0)
    assert loop("two").losses == other.losses  # nor is anything left on this thread


def test_a_callback_that_switches_gradients_off_ends_its_job_as_the_loop() -> None:
    def switch(result: wf.StepResult) -> None:
        torch.set_grad_enabled(result.step != 3)

    one, two = make_job("one", on_step=switch), make_job("two")
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([one, two], memory="64MiB", threads=1)
    assert len(report.jobs["one"].losses) == 3
    assert "does not depend on any parameter" in str(report.jobs["one"].error)
    assert len(report.jobs["two"].losses) == EPOCHS * BATCHES


def test_a_mode_that_is_left_again_is_nothing() -> None:
    def looks(result: wf.StepResult) -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            result.model(batches()[0][0])

    report = wf.run([make_job("one", on_step=looks)], memory="64MiB", threads=1)
    assert report.jobs["one"].losses == loop("one", on_step=looks).losses
    assert report.jobs["one"].captured == "captured", report.jobs["one"].notes


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)


def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, batch) * SCALE.get()


def rescale(result: wf.StepResult) -> None:
    SCALE.set(SCALE.get() * 1.25)


def set_all(result: wf.StepResult) -> None:
    if result.step == 3:
        threads()
    if result.step == 5:
        denormals()


@pytest.mark.parametrize("callbacks", ["lane", "caller"])
@pytest.mark.parametrize("options", [{"on_step": rescale, "loss": scaled}, {"on_step": set_all}])
def test_what_callbacks_change_for_eager_steps_holds_on_whatever_thread(
    options: dict[str, Any], callbacks: str
) -> None:
    torch.set_num_threads(1)
    expected = contextvars.copy_context().run(lambda: loop("one", **options))
    assert expected.losses != loop("two").losses
    one = make_job("one", capture=False, **options)
    report = wf.run([one, make_job("two")], memory="64MiB", threads=1, callbacks=callbacks)
    assert report.jobs["one"].losses == expected.losses
    assert report.jobs["two"].losses == loop("two").losses
    assert SCALE.get() == 1.0
    assert ThreadSettings.here() == (1, False, 0)


def flushes() -> bool:
    return sys.float_info.min * 0.5 == 0.0


def casts_to_half() -> bool:
    return torch.get_autocast_dtype("cpu") == torch.float16


def has_default_device() -> bool:
    return torch.get_default_device().type == "meta"


#: What tells of something that belongs to a thread, and what makes it so or not.
BY_THREAD: dict[str, tuple[Callable[[], Any], Callable[[bool], Any]]] = {
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda there: torch.set_autocast_enabled("cpu", there),
    ),
    "type of autocast": (
        casts_to_half,
        lambda there: torch.set_autocast_dtype("cpu", torch.float16 if there else torch.bfloat16),
    ),
    "default device": (
        has_default_device,
        lambda there: torch.set_default_device("meta" if there else None),
    ),
    "denormals": (flushes, torch.set_flush_denormal),
    "threads": (
        lambda: torch.get_num_threads() == 2,
        lambda there: torch.set_num_threads(2 if there else 1),
    ),
    "variable": (lambda: SCALE.get() == 2.0, lambda there: SCALE.set(2.0 if there else 1.0)),
}


def moving(name: str, places: str, seen: list[bool]) -> wf.Job:
    """A job whose Python moves it to and fro at these places, and sees it at all."""
    is_there, put = BY_THREAD[name]

    def visit(place: str, moves: bool = True) -> bool:
        found = bool(is_there())
        seen.append(found)
        if place in places and moves:
            put(not found)
        return found

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, batch) * (2.0 if visit("loss") else 1.0)

    def on_step(result: wf.StepResult) -> None:
        visit("callback", result.step % 3 == 0)

    return make_job(
        "one",
        loss=loss,
        on_step=on_step,
        evaluate=lambda model: visit("evaluation"),
        evaluate_every=5,
    )


@pytest.mark.parametrize("callbacks", ["lane", "caller"])
@pytest.mark.parametrize("places", ["loss", "callback", "evaluation", "loss and callback"])
@pytest.mark.parametrize("name", BY_THREAD)
def test_all_of_a_jobs_python_sees_what_any_of_it_has_set(
    name: str, places: str, callbacks: str
) -> None:
    """Also where callbacks are made on another thread while the job's own is amid a step."""
    torch.set_num_threads(1)
    reset = BY_THREAD[name][1]
    expected: list[bool] = []
    try:
        loop = wf.run_eager(moving(name, places, expected), threads=1)
    finally:
        reset(False)
    assert len(set(expected)) == 2
    found: list[bool] = []
    report = wf.run(
        [moving(name, places, found)], memory="64MiB", threads=1, callbacks=callbacks
    ).jobs["one"]
    assert found == expected
    assert report.losses == loop.losses
    assert not BY_THREAD[name][0]()
