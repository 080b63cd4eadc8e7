"""A job that goes first asks for more than it had: the others make room, and nobody fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.differences import assert_equal_to_eager
from tests.support.needs import needed
from tests.support.tables import crossed, soaked
from tests.support.waiting import wait_until
from waterflow.engine import surges
from waterflow.engine.events import MemoryLent
from waterflow.models.gpt2 import Gpt2, Gpt2Config

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

VOCABULARY = 60
SHORT, LONG = 12, 96


def texts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (8, length), generator=generator) for length in lengths]


def next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make_reader(lengths: tuple[int, ...], **options: Any) -> wf.Job:
    """A language model on texts of these lengths."""
    torch.manual_seed(0)
    config = Gpt2Config(vocabulary=VOCABULARY, width=32, layers=2, heads=2, positions=128)
    model = Gpt2(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    settings = {"data": texts(*lengths), "seed": 0, "capture": True, **options}
    return wf.Job("reader", model=model, optimizer=optimizer, loss=next_token, **settings)


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_wide(name: str = "other", **options: Any) -> wf.Job:
    """A perceptron whose weights, and what Adam keeps of them, are most of what it needs."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.1))
    ]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(16, 128, generator=generator) for _ in range(4)]
    data = [(one, torch.randint(10, (16,), generator=generator)) for one in rows]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    settings: dict[str, Any] = {"data": data, "steps": 40, "seed": 0, "capture": True, **options}
    settings = {"priority": "opportunistic", **settings}
    return wf.Job(name, model=model, optimizer=optimizer, loss=cross_entropy, **settings)


def needs() -> tuple[int, int, int]:
    """Bytes that the reader needs for short and for long texts, and the other job."""
    short, long = (needed(make_reader((length,) * 3)) for length in (SHORT, LONG))
    return short, long, needed(make_wide())


def lent(engine: wf.Engine) -> list[MemoryLent]:
    events: list[MemoryLent] = []
    engine.subscribe(lambda event: events.append(event) if isinstance(event, MemoryLent) else None)
    return events


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits rise soon."""
    monkeypatch.setattr(surges, "_LEAST_PATIENCE", 0.02)
    monkeypatch.setattr(surges, "_MOST_PATIENCE", 0.02)


class Until:
    """Data that go on until something has happened, the same ones for the plain loop after that."""

    def __init__(self, batches: list[Any], last: list[Any], reached: Any) -> None:
        self.batches, self.last, self.reached = batches, last, reached
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        while not self.reached():
            self.count += 1
            assert self.count < 20_000, "it never happens"
            yield self.batches[self.count % len(self.batches)]
        yield from self.last

    def again(self) -> list[Any]:
        given = [self.batches[n % len(self.batches)] for n in range(1, self.count + 1)]
        return [*given, *self.last]


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_longer_sequence_finds_its_memory_and_gives_it_back(
    share: float, impatient: None
) -> None:
    """Nobody fails: the other job is planned into what is left, or rests where nothing is, and has
    all its memory again when texts are short for a while."""
    _, long, wide = needs()
    told: list[MemoryLent] = []

    def is_over() -> bool:
        back = [event for event in told if event.limit is None]
        rests = [event for event in told if event.limit == 0]
        return bool(back) if share else bool(rests) and len(two.losses) > made[0] + 3

    made: list[int] = []
    data = Until(texts(SHORT, SHORT), texts(SHORT), is_over)
    surge = [*texts(*[SHORT] * 6, *[LONG] * 4)]

    class Reader:
        def __iter__(self) -> Iterator[Any]:
            yield from surge
            made.append(len(two.losses))
            yield from data

    reader = make_reader((), data=Reader(), priority="guaranteed")
    other = make_wide(steps=10**6)
    with wf.Engine(long + int(wide * share), threads=1, check=True) as engine:
        told = lent(engine)
        two = engine.submit(other)
        wait_until(lambda: two.losses)
        one = engine.submit(reader)
        assert one.result(300).state == "finished"
        two.stop()
    report = engine.report()
    assert engine.check_races() == []
    assert report.peak_bytes <= report.budget_bytes
    limits = [event.limit for event in told]
    assert limits[0] == 0
    assert told[0].first == ("reader",)
    if share:  # rests while it is planned, then comes back, and has more step by step
        assert next(limit for limit in limits if limit) < wide * 0.7
        assert limits.count(0) == 1
        assert None in limits
    fresh = make_reader((), data=[*surge, *data.again()])
    assert_equal_to_eager(reader, one.result(), fresh)
    assert_equal_to_eager(other, two.result(), make_wide(steps=len(two.losses)))
    said = [decision for decision in report.decisions if decision.job == "other"]
    assert (said[0].what, said[0].kind) == ("rests, as 'reader' asks for more", "waited")


def test_a_surge_that_comes_back_is_met_without_planning_anew(impatient: None) -> None:
    """The second one finds the other job's smaller steps: it does not rest for them."""
    _, long, wide = needs()
    told: list[MemoryLent] = []
    data = Until(texts(SHORT, SHORT), texts(LONG, LONG, SHORT), lambda: None in limits())

    def limits() -> list[int | None]:
        return [event.limit for event in told]

    class Reader:
        def __iter__(self) -> Iterator[Any]:
            yield from texts(*[SHORT] * 6, *[LONG] * 4)
            yield from data

    reader = make_reader((), data=Reader(), priority="guaranteed")
    other = make_wide(steps=10**6)
    with wf.Engine(long + int(wide * 0.6), threads=1) as engine:
        told = lent(engine)
        one, two = engine.submit(reader), engine.submit(other)
        assert one.result(300).state == "finished"
        two.stop()
    assert limits().count(0) <= 1
    after = limits()[limits().index(None) + 1 :]
    assert after[0] == next(limit for limit in limits() if limit)
    assert_equal_to_eager(other, two.result(), make_wide(steps=len(two.losses)))


class Grows(nn.Module):
    """In its second phase it has a second tower."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = 1
        self.first = nn.Linear(128, 64)
        self.second = nn.Sequential(
            *(layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.Tanh()))
        )
        self.last = nn.Linear(128, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        if self.phase == 2:
            made = made + self.last(self.second(x))
        return self.head(made)


def make_phases(**options: Any) -> wf.Job:
    torch.manual_seed(0)
    model = Grows()
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(512, 128, generator=generator) for _ in range(4)]
    data = [(one, torch.randint(10, (512,), generator=generator)) for one in rows]

    def on_step(result: wf.StepResult) -> None:
        if result.step == 8:
            model.phase = 2

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    settings: dict[str, Any] = {"data": data, "steps": 24, "seed": 0, "on_step": on_step, **options}
    return wf.Job("phases", model=model, optimizer=optimizer, loss=cross_entropy, **settings)


def in_second_phase() -> wf.Job:
    job = make_phases(capture=True, on_step=None)
    job.model.phase = 2  # type: ignore[assignment]
    return job


@pytest.mark.parametrize("capture", [True, soaked("auto"), False])
def test_a_second_phase(capture: Any) -> None:
    """Captured or eager, where the step asks for more in its middle."""
    job = make_phases(priority="guaranteed", capture=capture)
    other = make_wide(steps=200, capture=capture if capture is False else True)
    room = needed(in_second_phase()) + needed(make_wide()) // 8
    room = room if capture is True else room + (256 << 10)
    with wf.Engine(room, threads=1) as engine:
        told = lent(engine)
        two = engine.submit(other)
        wait_until(lambda: two.losses)
        one = engine.submit(job)
        assert one.result(300).state == "finished", one.result().error
    assert told[0].job == "other"
    assert engine.report().peak_bytes <= room
    assert_equal_to_eager(job, one.result(), make_phases())
    assert_equal_to_eager(other, two.result(), make_wide(steps=200))


@pytest.mark.parametrize(
    ("priority", "spare"), crossed(["normal", "opportunistic"], [0, 1 / 16, 3 / 16, 1 / 2])
)
def test_an_eager_step_has_others_rest_before_it_fails(priority: str, spare: float) -> None:
    """What its first step needs nobody knows, and who is there already is its equal, or goes before
    it; in what there is alone, it fits."""

    def make_eager() -> wf.Job:
        job = make_wide("eager", capture=False, priority=priority, steps=20)
        job.optimizer = torch.optim.Adam(job.model.parameters(), 1e-3, amsgrad=True)
        return job

    first, joins = make_wide(steps=60, priority="normal"), make_eager()
    larger = max(needed(make_wide()), needed(make_eager()))
    report = wf.run([first, joins], memory=int((1 + spare) * larger), threads=1)
    assert_equal_to_eager(first, report["other"], make_wide(steps=60))
    assert_equal_to_eager(joins, report["eager"], make_eager())


@pytest.mark.parametrize("capture", [True, False])
def test_a_guaranteed_job_rests_for_no_other(capture: bool) -> None:
    """Not in the middle of a step that ends otherwise, either."""
    first = make_wide(steps=60, priority="guaranteed", capture=capture)
    joins = make_wide("eager", capture=False, priority="opportunistic", steps=20)
    joins.optimizer = torch.optim.Adam(joins.model.parameters(), 1e-3, amsgrad=True)
    room = needed(make_wide(capture=capture)) * 5 // 4
    report = wf.run([first, joins], memory=room, threads=1)
    rested = [made for made in report.decisions if made.job == "other" and "rests" in made.what]
    assert rested == []
    assert_equal_to_eager(first, report["other"], make_wide(steps=60))
    assert report["eager"].state in ("finished", "out_of_memory")


def test_a_guaranteed_job_that_joins_finds_room() -> None:
    """Without it, it would wait for the end of the others."""
    wide = needed(make_wide())
    others = [make_wide(name, steps=10**6) for name in ("a", "b")]
    job = make_phases(priority="guaranteed", capture=True, on_step=None)
    room = max(2 * wide, needed(make_phases(capture=True, on_step=None)) + 4096)
    with wf.Engine(room, threads=1) as engine:
        handles = [engine.submit(other) for other in others]
        wait_until(lambda: all(handle.losses for handle in handles))
        assert engine.submit(job).result(300).state == "finished"
        made = [len(handle.losses) for handle in handles]
        pairs = list(zip(handles, made, strict=True))
        wait_until(lambda: all(len(handle.losses) > count for handle, count in pairs))
        engine.stop_all()
    for other, handle in zip(others, handles, strict=True):
        fresh = make_wide(other.name, steps=len(handle.losses))
        assert_equal_to_eager(other, handle.result(), fresh)


class Cyclic(nn.Module):
    """Leaves a tensor in a cycle at each step, as exceptions and closures do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kept: list[Any] = [torch.zeros(1 << 18)]
        kept.append(kept)
        return self.linear(inputs) + kept[0][0]


@pytest.mark.parametrize("jobs", [1, 2])
def test_garbage_ends_no_job(jobs: int) -> None:
    """It is collected before a step fails for want of room, though nobody collects otherwise."""

    def make(number: int) -> wf.Job:
        torch.manual_seed(number)
        model = Cyclic()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = [torch.randn(2, 4) for _ in range(30)]
        loss = lambda model, batch: model(batch).mean()  # noqa: E731
        return wf.Job(f"job-{number}", model, optimizer, loss, data, capture=False)

    gc.collect()
    gc.disable()
    try:
        report = wf.run([make(number) for number in range(jobs)], memory="8MiB")
    finally:
        gc.enable()
    for number in range(jobs):
        assert report[f"job-{number}"].losses == wf.run_eager(make(number)).losses
