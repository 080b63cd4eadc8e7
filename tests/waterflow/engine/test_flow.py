"""Jobs that flow: each at its own pace, within the budget, and nobody forgotten."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from tests.support.differences import assert_equal_to_eager
from tests.support.waiting import wait_until
from waterflow.allocator_ext import _C
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.rng import JobRng
from waterflow.partitioner.profile import Profile
from waterflow.steps.job_steps import JobSteps

pytestmark = pytest.mark.cpu

ENDLESS = 10**9
UNIT = 64  # bytes; the arena's alignment


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [
        (
            torch.randn(size, 16, generator=generator),
            torch.randint(4, (size,), generator=generator),
        )
        for size in sizes
    ]


def make_job(name: str, width: int = 32, dropout: float = 0.0, **options: Any) -> wf.Job:
    """A perceptron; plain SGD unless given, so that there is no first step apart."""
    torch.manual_seed(width)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise([16, width, width, width]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh(), nn.Dropout(dropout)]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    options.setdefault("optimizer", torch.optim.SGD)
    options["optimizer"] = options["optimizer"](model.parameters(), lr=0.1)
    settings = {"data": batches(32), "loss": cross_entropy, "seed": 0, **options}
    return wf.Job(name, model=model, **settings)


def engine(memory: str | int = "64MiB", **options: Any) -> wf.Engine:
    return wf.Engine(memory, policy="flow", threads=1, **options)


def run(jobs: list[wf.Job], memory: str | int = "64MiB") -> wf.Report:
    return wf.run(jobs, memory=memory, policy="flow", threads=1)


@dataclass
class OneAtATime:
    """A callback of several jobs that notices when two of them are in it at once."""

    order: list[str] = field(default_factory=list)
    collisions: int = 0
    _inside: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, result: wf.StepResult) -> None:
        free = self._inside.acquire(blocking=False)
        self.collisions += not free
        self.order.append(result.job)
        time.sleep(0.0005)
        if free:
            self._inside.release()


def overlap(report: wf.Report) -> float:
    """Part of the busy time during which both lanes work."""
    ends = [(span.start, 1) for span in report.spans] + [(span.stop, -1) for span in report.spans]
    working, before, busy, both = 0, 0.0, 0.0, 0.0
    for moment, change in sorted(ends):
        busy += (moment - before) * (working > 0)
        both += (moment - before) * (working > 1)
        working, before = working + change, moment
    return both / busy


# Paces


def test_a_short_job_makes_many_steps_while_a_long_one_makes_one() -> None:
    with engine() as flowing:
        long = flowing.submit(make_job("long", 512, data=batches(512), steps=ENDLESS))
        short = flowing.submit(make_job("short", 8, data=batches(4), steps=ENDLESS))
        wait_until(lambda: min(len(long.losses) - 8, len(short.losses) - 100) > 0)
        flowing.stop_all()
    report = flowing.report()
    spans = report.spans
    is_long = spans.job == spans.names.index("long")
    beside = []
    for step in np.unique(spans.step[is_long])[2:]:
        mine = is_long & (spans.step == step)
        begun, ended = spans.start[mine].min(), spans.stop[mine].max()
        inside = ~is_long & (spans.start > begun) & (spans.stop < ended)
        beside.append(len(np.unique(spans.step[inside])))
    assert np.mean(beside) >= 3, beside
    assert report.deviations == 0


@dataclass
class Company:
    """What was seen of three jobs that flowed together on two lanes, and of a fourth."""

    shares: dict[str, float]  # of the lanes' time, once all three had been there for a while
    joined: wf.JobReport
    steps_after_stop: int
    races: list[Any]
    callback: OneAtATime
    report: wf.Report


@pytest.fixture(scope="module")
def company() -> Company:
    """Three jobs; a fourth joins and stops itself; then one is stopped from another's callback."""
    callback = OneAtATime()
    weights = {"a": 1.0, "b": 3.0, "c": 3.0}
    at_stop: list[int] = []
    stops_c = threading.Event()
    made = {
        # Long enough for the lanes to be what is short, not the Python between the steps.
        name: make_job(name, 128, data=batches(256), weight=weight, on_step=callback, steps=ENDLESS)
        for name, weight in weights.items()
    }
    known: dict[str, wf.JobHandle] = {}
    submitted = threading.Event()

    def stop_at_five(result: wf.StepResult) -> None:
        callback(result)
        if result.step == 5:
            submitted.wait(300)
            known["joining"].stop()

    def stop_c(result: wf.StepResult) -> None:
        """Meanwhile `c` ends the step that it makes, and has its own callback only after this."""
        callback(result)
        if stops_c.is_set() and not at_stop:
            at_stop.append(len(handles["c"].losses))
            handles["c"].stop()

    made["a"].on_step = stop_c
    joining = make_job("joining", 48, on_step=stop_at_five, steps=ENDLESS)
    with engine(check=True) as flowing:
        handles = {name: flowing.submit(job) for name, job in made.items()}
        # Whoever was checked later than the others catches up first.
        wait_until(lambda: min(len(handle.losses) for handle in handles.values()) >= 50)
        caught_up = float(flowing.report().spans.stop.max())
        wait_until(lambda: min(len(handle.losses) for handle in handles.values()) >= 300)
        shares = shares_of_time(flowing.report().spans, caught_up)
        known["joining"] = flowing.submit(joining)
        submitted.set()
        joined = known["joining"].result(timeout=300)
        before = {name: len(handle.losses) for name, handle in handles.items()}
        wait_until(lambda: all(len(h.losses) > before[name] + 3 for name, h in handles.items()))
        stops_c.set()
        after_stop = handles["c"].result(timeout=300).steps
        flowing.stop_all()
        for handle in handles.values():
            handle.result(timeout=300)
        races = flowing.check_races()
    return Company(shares, joined, after_stop - at_stop[0], races, callback, flowing.report())


def shares_of_time(spans: Any, since: float) -> dict[str, float]:
    """What each job has had of the lanes since then."""
    names = np.array(spans.names)[spans.job]
    seconds = (spans.stop - spans.start) * (spans.start > since)
    used = {name: float(seconds[names == name].sum()) for name in spans.names}
    return {name: own / sum(used.values()) for name, own in used.items()}


def test_shares_of_the_lanes_follow_the_weights(company: Company) -> None:
    """Three times as much for each of the others: where the machine is busy, twice as much."""
    shares = company.shares
    assert 2 * shares["a"] < min(shares["b"], shares["c"]), shares


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_weights_that_are_none_are_refused(weight: Any) -> None:
    with pytest.raises(
        wf.JobError, match=f"'odd': weight must be a number above 0, got {weight!r}"
    ):
        make_job("odd", weight=weight)


def test_callbacks_of_different_jobs_never_run_at_the_same_time(company: Company) -> None:
    assert set(company.callback.order) == {"a", "b", "c", "joining"}
    assert company.callback.collisions == 0


def test_a_job_joins_while_others_flow_and_they_go_on(company: Company) -> None:
    others = [name for name in company.callback.order if name != "joining"]
    first = company.callback.order.index("joining")
    assert first >= 300 * 3
    assert len(others) - first >= 3 * 3


def test_a_stop_takes_effect_after_the_present_step(company: Company) -> None:
    assert (company.joined.state, company.joined.steps) == ("stopped", 5)
    assert company.report["c"].state == "stopped"
    assert company.steps_after_stop <= 1


def test_flowing_is_free_of_races(company: Company) -> None:
    assert company.races == []
    assert company.report.deviations == 0


# Memory


def persistent_bytes(job: wf.Job) -> int:
    tensors = [*job.model.parameters(), *job.model.buffers()]
    return sum(-(-tensor.nbytes // UNIT) * UNIT for tensor in tensors)


def test_a_budget_that_just_admits_two_jobs_is_enough() -> None:
    """Their parameters, and one step at a time."""

    def make() -> list[wf.Job]:
        return [
            make_job("a", 48, data=batches(256), steps=30),
            make_job("b", 40, data=batches(200), steps=30),
        ]

    with pytest.raises(wf.BudgetError) as caught:
        run(make(), memory="1KiB")
    needs = dict(re.findall(r"'(\w)' needs (\d+) bytes", str(caught.value)))
    jobs = make()
    own = {job.name: persistent_bytes(job) for job in jobs}
    budget = sum(own.values()) + max(int(needs[name]) - own[name] for name in own)
    report = run(jobs, memory=budget)
    assert [job.state for job in report] == ["finished", "finished"]
    assert report.peak_bytes <= report.extent_bytes <= budget
    assert report.deviations == 0
    stops = {name: max(s.stop for s in report.spans if s.job == name) for name in own}
    starts = {name: min(s.start for s in report.spans if s.job == name) for name in own}
    assert max(starts.values()) < min(stops.values()), "they did not train together"
    for fresh, job in zip(make(), jobs, strict=True):
        assert report[job.name].losses == wf.run_eager(fresh, threads=1).losses
        assert all(map(torch.equal, job.model.parameters(), fresh.model.parameters()))


def test_whoever_waits_for_room_begins_when_one_has_ended_and_another_is_under_way() -> None:
    """Nobody is called back from his steps for that."""

    def make() -> list[wf.Job]:
        sizes = {"short": 30, "long": 4000, "waits": 30}
        return [make_job(name, 48, data=batches(64), steps=steps) for name, steps in sizes.items()]

    with pytest.raises(wf.BudgetError) as caught:
        run(make(), memory="1KiB")
    need = int(re.findall(r"'short' needs (\d+) bytes", str(caught.value))[0])
    report = run(make(), memory=need + persistent_bytes(make()[0]))
    assert [job.state for job in report] == ["finished"] * 3
    starts = {job.name: min(s.start for s in report.spans if s.job == job.name) for job in report}
    stops = {job.name: max(s.stop for s in report.spans if s.job == job.name) for job in report}
    assert stops["short"] <= starts["waits"] < stops["long"]
    for fresh in make():
        assert report[fresh.name].losses == wf.run_eager(fresh, threads=1).losses


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 4, 4))]
        for inputs, outputs in itertools.pairwise([1, 16, 32, 32]):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4))


class Transformer(nn.Sequential):
    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(16, 4, 64, batch_first=True)
        super().__init__(nn.Linear(1, 16), layer, nn.Flatten(), nn.Linear(256, 4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


def measured(model: nn.Module, shape: tuple[int, ...]) -> Profile:
    """A step as the engine measures it."""
    images, labels = batches(32)[0]
    batch = images.reshape(32, *shape), labels
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = wf.Job("a", model=model, optimizer=optimizer, loss=cross_entropy, data=[batch], seed=0)
    steps = JobSteps(job, HostDevice(), JobRng(0), 1)
    prepared = steps.preparer.prepare(batch).specialization
    assert prepared is not None
    assert prepared.steady is not None
    return prepared.steady.memory.profile


@pytest.mark.parametrize(
    ("model", "shape"),
    [(Convolutions, (16,)), (Transformer, (16, 1)), (Recurrent, (16, 1))],
    ids=["cnn", "transformer", "lstm"],
)
def test_piles_of_real_steps_are_hardly_higher_than_their_live_peak(
    model: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    profile = measured(model(), shape)
    sizes = np.ascontiguousarray(profile.events["bytes"], np.int64)
    names = np.ascontiguousarray(profile.events["id"], np.int32)
    peak = profile.transient_peak_bytes
    assert len(sizes) > 50
    assert peak <= _C.pile_up(sizes, names, peak).extent <= 1.01 * peak
    assert _C.pile_up(sizes, names, int(1.1 * peak)).extent <= 1.1 * peak


# What interrupts


def test_a_batch_of_a_new_shape_in_the_middle() -> None:
    def make() -> list[wf.Job]:
        sizes = (8, 8, 8, 8, 5, 8, 5, 8)
        return [
            make_job("shapes", 24, data=batches(*sizes), epochs=3),
            make_job("steady", 32, steps=40),
        ]

    jobs = make()
    report = run(jobs)
    for job, fresh in zip(jobs, make(), strict=True):
        assert_equal_to_eager(job, report[job.name], fresh)
    assert report.deviations == 0


def test_learning_rates_change_from_step_to_step() -> None:
    def make() -> list[wf.Job]:
        job = make_job("rates", 24, steps=20)
        job.scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)

        def halve(result: wf.StepResult) -> None:
            if result.step % 6 == 0:
                for group in other.optimizer.param_groups:
                    group["lr"] /= 2

        other = make_job("callback", 32, steps=20, on_step=halve, optimizer=torch.optim.Adam)
        return [job, other]

    jobs = make()
    report = run(jobs)
    for job, fresh in zip(jobs, make(), strict=True):
        assert_equal_to_eager(job, report[job.name], fresh)
        lr = job.optimizer.param_groups[0]["lr"]
        assert lr == fresh.optimizer.param_groups[0]["lr"]
        assert lr < 0.1


def test_a_job_that_needs_the_engine_for_itself_takes_turns_with_those_that_flow() -> None:
    callback = OneAtATime()
    jobs = [
        make_job("a", 32, steps=2000, on_step=callback),
        make_job("b", 24, steps=2000, on_step=callback),
        make_job("eager", 16, steps=400, on_step=callback, capture=False),
    ]
    fresh = make_job("eager", 16, steps=400, capture=False)
    report = run(jobs)
    assert [job.state for job in report] == ["finished"] * 3
    assert_equal_to_eager(jobs[2], report["eager"], fresh)
    order = callback.order
    ends = {job.name: len(order) - 1 - order[::-1].index(job.name) for job in jobs}
    for flowing in ("a", "b"):
        before = order[: min(ends[flowing], ends["eager"])]
        together = before[before.index("eager") :]
        assert before.count("eager") >= 4
        assert together.count(flowing) >= 4, "it waited for the eager job to end"


class SlowBatches(list[Any]):
    """Batches that take a while to come, or wait for an event before the one at `stuck_at`."""

    def __init__(
        self,
        items: list[Any],
        seconds: float = 0.0,
        event: threading.Event | None = None,
        stuck_at: int = 0,
    ) -> None:
        super().__init__(items)
        self.seconds, self.event, self.stuck_at = seconds, event, stuck_at

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(super().__iter__()):
            time.sleep(self.seconds)
            if self.event is not None and number == self.stuck_at:
                self.event.wait(300)
            yield item


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("capture", [True, False])
def test_data_that_end_behind_a_last_evaluation_end_their_job(capture: bool) -> None:
    """At the last evaluation nothing tells that no step follows; while others are evaluated and
    the lanes are to be left, the data turn out to have ended."""
    stepped: list[str] = []

    def evaluated(name: str) -> wf.Job:
        def step_made(result: wf.StepResult) -> None:
            stepped.append(name)
            if len(stepped) == 5:  # all flow anew, with their last evaluations ahead of them
                engine_.submit(make_job("late", steps=1, capture=capture))
                time.sleep(0.3)

        def evaluate(model: nn.Module) -> float:
            time.sleep(0.05)  # time enough to look for a further batch
            return 1.0

        options = {"epochs": 1, "evaluate": evaluate, "evaluate_every": "epoch"}
        return make_job(name, on_step=step_made, capture=capture, **options)

    with engine(lanes=1) as engine_:
        handles = [engine_.submit(evaluated(f"job{number}")) for number in range(5)]
        results = [handle.result() for handle in handles]
    assert [len(result.evaluations) for result in results] == [1] * 5
    assert [len(result.losses) for result in results] == [1] * 5


def test_jobs_flow_together_though_none_can_fetch_ahead() -> None:
    """With dropout a batch is fetched after the step before it: then a job is never ready twice in
    a row, and must not be left out because it was not when the others set out."""
    items = batches(*[512] * 8)
    jobs = [
        make_job(f"j{width}", width, dropout=0.1, steps=25, data=SlowBatches(items, 0.004))
        for width in (250, 256)
    ]
    report = run(jobs)
    assert [job.state for job in report] == ["finished", "finished"]
    assert overlap(report) > 0.1


def test_a_loader_that_hangs_stops_nobody_else() -> None:
    event = threading.Event()
    stuck = SlowBatches(batches(*[32] * 8), event=event, stuck_at=5)
    try:
        with engine() as flowing:
            waiting = flowing.submit(make_job("waiting", 24, data=stuck, epochs=1))
            wait_until(lambda: len(waiting.losses) == 5)
            first = flowing.submit(make_job("first", 32, steps=20))
            second = flowing.submit(make_job("second", 16, steps=60))
            assert first.result(timeout=300).steps == 20
            assert second.result(timeout=300).steps == 60
            assert (waiting.status, len(waiting.losses)) == ("running", 5)
            event.set()
            assert waiting.result(timeout=300).steps == 8
    finally:
        event.set()


def test_a_step_leaves_the_gate_whatever_happens() -> None:
    """What it still holds at its end cannot be accounted for: somebody else has the place."""
    _C.install_lane_allocator()
    arena = _C.Arena.host(4 * UNIT, 2)
    _C.register_arena(arena)
    tape = _C.Tape(1, 0)
    tape.add_load(0, 0, [])  # and keeps what it has loaded
    tape.set_batch([torch.ones(UNIT // 4)])
    events = np.array([UNIT], np.int64), np.array([0], np.int32), np.array([1], np.int32)
    memory_plan = _C.MemoryPlan(events, np.array([0], np.int32), 1, [0], arena.version)
    step = _C.FlowStep((tape, memory_plan, 0, None), [(0, 1)], _C.Demand([4 * UNIT], [0, 0]))
    pool, gate = _C.LanePool(arena, 2, _C.LaneDevice()), _C.Gate(4 * UNIT, 2)
    _C.begin_plans(arena, [(memory_plan, 0)], _C.RoundMemory(UNIT, 4 * UNIT), True)
    assert arena.allocate_at(0, UNIT, 0, 1) is not None
    with pytest.raises(RuntimeError, match="where the allocator has another"):
        pool.run_step(0, step, gate)
    for lane in (1, 0):
        assert gate.try_begin(lane, _C.Demand([4 * UNIT], [0, 0]))
    assert gate.try_enter(1)
    tape.clear([0])
    _C.retire_arena(arena)


def test_a_step_that_fails_leaves_its_memory_to_the_others() -> None:
    """In memory for one step at a time; the job fails again and again under new names."""

    def bad(name: str) -> wf.Job:
        images, labels = batches(256)[0]
        return make_job(name, 40, data=[(images, labels)] * 3 + [(images, labels + 100)])

    job, fresh = (make_job("good", 40, data=batches(256), steps=40) for _ in range(2))
    with pytest.raises(wf.BudgetError) as caught:
        run([make_job("good", 40, data=batches(256), steps=40)], memory="1KiB")
    (need,) = re.findall(r"needs (\d+) bytes", str(caught.value))
    report = run([bad("one"), job, bad("two")], int(need) + 2 * persistent_bytes(job))
    for name in ("one", "two"):
        assert (report[name].state, report[name].steps) == ("failed", 3)
        assert "out of bounds" in str(report[name].error)
    assert_equal_to_eager(job, report["good"], fresh)


def foreign_threads() -> int:
    """Threads of this process that Python did not start, without those that are about to end:
    neither Python nor OpenMP waits for its own to be gone."""

    def now() -> int:
        return len(os.listdir("/proc/self/task")) - threading.active_count()

    looks = []
    for _ in range(20):
        looks.append(now())
        time.sleep(0.01)
    return min(looks)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system lists no threads")
@pytest.mark.parametrize("capture", [False, True, "auto"])
def test_only_the_lanes_keep_intra_op_threads(capture: Any) -> None:
    """Others' would make GNU's OpenMP put the lanes' to sleep after every kernel."""
    if not _C.release_intra_op_threads():
        pytest.skip("this torch's intra-op threads cannot be let go of")
    beside: list[int] = []

    def kernel() -> torch.Tensor:
        return torch.ones(1 << 18).exp_().sum()

    def data() -> Iterator[Any]:
        for batch in batches(*[2048] * 6):
            kernel()  # on the feeder's thread
            yield batch

    def look(result: wf.StepResult) -> None:
        kernel()  # on the lane's: its team is there
        beside.append(foreign_threads())

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # starts a pool of another kind, which stays
    before = foreign_threads()
    try:
        kernel()
        job = make_job("a", data=data(), on_step=look, capture=capture)
        assert wf.run([job], "64MiB", lanes=1, threads=2).ok
    finally:
        torch.set_num_threads(threads)
    assert min(beside[-3:]) == before + 1  # a thread may be about to fetch


def test_a_job_whose_optimizer_is_python_goes_on_when_its_whole_step_is() -> None:
    """Graphs that leave gradients behind are bound then, and no plan can hold them."""

    def make() -> wf.Job:
        counted: list[int] = []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            if len(batch[0]) < 32:
                counted.append(1)
            return cross_entropy(model, batch)

        options = {"data": batches(32, 32, 8), "epochs": 3, "optimizer": torch.optim.RAdam}
        return make_job("a", loss=loss, **options)

    job = make()
    report = wf.run([job, make_job("b", steps=20)], memory="64MiB", threads=1)
    report.raise_errors()
    assert report["a"].captured == "opaque step"
    assert report["a"].losses == wf.run_eager(make(), threads=1).losses
