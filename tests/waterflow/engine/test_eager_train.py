"""Jobs that begin with eager steps have the loop's numbers, on one thread, and are captured later
where that pays."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from tests.support.waiting import wait_until
from waterflow.allocator_ext import _C
from waterflow.engine.eager_steps import EagerSteps
from waterflow.engine.eager_train import _Train
from waterflow.engine.events import StepDone
from waterflow.executor.run.lanes import Lanes
from waterflow.steps import side_by_side
from waterflow.steps import tiers as tiers_module
from waterflow.steps.side_by_side import SideBySide
from waterflow.steps.step_builder import StepBuilder

pytestmark = pytest.mark.cpu

POLICIES = ["flow", "temporal", "waterwave"]


@pytest.fixture(autouse=True)
def tiers_are_on(monkeypatch):
    monkeypatch.setenv("WATERFLOW_TIERS", "on")


@pytest.fixture
def captures_pay(monkeypatch):
    """Every capture is expected to pay after two steps."""
    monkeypatch.setattr(tiers_module, "_CAPTURE_SECONDS", 0.0)
    monkeypatch.setattr(tiers_module, "_CAPTURE_SECONDS_PER_TENSOR", 0.0)
    monkeypatch.setattr(tiers_module, "_JOIN", 0.0)
    monkeypatch.setattr(tiers_module, "_LOOKS_OF_CAPTURE", 0.0)
    monkeypatch.setattr(tiers_module, "_LOOKS_OF_JOIN", 0.0)


class Net(nn.Module):
    """Draws, counts in a buffer, and has a layer whose input may have any length."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(32, 4)

    def forward(self, rows):
        return self.last(self.drop(torch.relu(self.norm(self.first(rows)))))


def loss(model, batch):
    rows, labels = batch
    return nn.functional.cross_entropy(model(rows), labels)


def rows_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(length, 6, generator=generator)
    return rows, torch.randint(4, (length,), generator=generator)


def make(name="a", *, lengths=(16,), steps=12, scheduled=False, seed=3, **options):
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if scheduled:
        options["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    options.setdefault("data", [rows_of(length, n) for n, length in enumerate(lengths)])
    return wf.Job(
        name, model=model, optimizer=optimizer, loss=loss, steps=steps, seed=seed, **options
    )


def assert_equal_to_loop(job, report, twin):
    losses = wf.run_eager(twin, threads=1).losses
    assert report.jobs[job.name].losses == losses
    for mine, theirs in zip(
        job.model.state_dict().values(), twin.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)


def run(jobs, memory="64MiB", **options):
    report = wf.run(jobs, memory=memory, threads=1, **options)
    assert all(job.ok for job in report), [(job.name, job.error) for job in report]
    return report


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_job_is_never_captured_and_has_the_numbers_of_the_loop(policy):
    jobs = [make(name, scheduled=name == "a") for name in "abc"]
    report = run(jobs, policy=policy)
    for job in jobs:
        found = report.jobs[job.name]
        assert found.captured == "eager"
        assert found.eager_steps == found.steps == 12
        assert "does not pay" in found.tiers[0] or "too few steps" in found.tiers[0]
        assert_equal_to_loop(job, report, make(scheduled=job.name == "a"))
    assert report.peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("captures_pay")
def test_a_job_goes_over_to_captured_steps_with_the_numbers_of_the_loop(policy):
    heard = []

    def on_step(result):
        heard.append(result.step)
        torch.rand(1)  # a callback draws from the job's stream, too

    options = {"scheduled": True, "steps": 40}
    jobs = [make("a", **options, on_step=on_step), make("b", **options)]
    report = run(jobs, policy=policy)
    assert heard == list(range(1, 41))
    for job, own in zip(jobs, ({"on_step": lambda result: torch.rand(1)}, {}), strict=True):
        found = report.jobs[job.name]
        assert found.captured == "captured", found.notes
        assert 2 <= found.eager_steps < found.steps
        assert "captured after" in found.tiers[0]
        twin = make(**options, on_step=(lambda result: torch.rand(1) and None) if own else None)
        assert_equal_to_loop(job, report, twin)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capture", ["auto", False])
def test_steps_and_callbacks_of_eager_steps_are_on_one_thread(policy, capture):
    threads, held = set(), threading.local()

    def scaled(model, batch):
        threads.add(threading.get_ident())
        return loss(model, batch) / (1 + getattr(held, "count", 0) % 3)

    def on_step(result):
        threads.add(threading.get_ident())
        held.count = getattr(held, "count", 0) + 1

    job, twin = make(capture=capture, on_step=on_step), make(on_step=on_step)
    job.loss = twin.loss = scaled
    report = run([job], policy=policy)
    assert len(threads) == 1
    assert_equal_to_loop(job, report, twin)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("captures_pay")
def test_what_keeps_changing_is_eager_until_it_settles(policy, monkeypatch):
    monkeypatch.setattr(StepBuilder, "runs_to_pay", lambda self, signature: 25.0)

    def annealed(name="a"):
        job = make(name, steps=480)

        def on_step(result):
            if result.step <= 120:
                job.model.drop.p = 0.25 / (1 + result.step // 12)

        job.on_step = on_step
        return job

    jobs = [annealed("a"), annealed("b")]
    report = run(jobs, policy=policy)
    for job in jobs:
        found = report.jobs[job.name]
        assert found.captured == "captured"
        assert found.notes == []
        assert found.recaptures == 1, "when it had settled"
        assert 120 < found.eager_steps < 450
        assert_equal_to_loop(job, report, annealed())


@pytest.mark.parametrize("capture", ["auto", True])
def test_seventy_shapes_kill_nobody(capture, monkeypatch):
    monkeypatch.setattr("waterflow.steps.step_cache.MAX_SHAPES", 3)
    lengths = range(2, 12)
    job = make(lengths=lengths, steps=30, capture=capture)
    report = run([job, make("b", steps=30)])
    found = report.jobs["a"]
    assert found.steps == 30
    assert found.captured == ("captured" if capture is True else "eager")
    assert_equal_to_loop(job, report, make(lengths=lengths, steps=30))


@pytest.mark.usefixtures("captures_pay")
def test_hot_shapes_are_captured_and_rare_ones_stay_eager():
    lengths = [16, 16, 16, 16, 5, 16, 16, 16, 16, 7]
    job = make(lengths=lengths, steps=60)
    report = run([job])
    assert_equal_to_loop(job, report, make(lengths=lengths, steps=60))
    assert report.jobs["a"].captured == "captured", report.jobs["a"].notes


def test_to_insist_is_to_capture_before_the_first_step():
    report = run([make(capture=True)])
    found = report.jobs["a"]
    assert found.captured == "captured", found.notes
    assert found.eager_steps == found.checks


def test_all_python_of_a_job_runs_on_one_thread_as_in_the_loop():
    threads = []

    class Data:
        def __iter__(self):
            for n in range(6):
                threads.append(threading.get_ident())
                yield rows_of(8, n)

        def __len__(self):
            return 6

    def on_step(result):
        threads.append(threading.get_ident())

    job = make(data=Data(), steps=None, epochs=3, on_step=on_step)
    noted = job.loss

    def noting(model, batch):
        threads.append(threading.get_ident())
        return noted(model, batch)

    job.loss = noting
    run([job, make("b")])
    assert len(threads) == 3 * 6 * 3
    # The first step, before it is known what room the job needs, has its callback on the engine's.
    assert len(set(threads[3:])) == 1


def test_a_shuffling_loader_is_read_as_by_the_loop():
    data = TensorDataset(*rows_of(40))

    def loader():
        return DataLoader(data, batch_size=16, shuffle=True)

    job = make(data=loader(), steps=None, epochs=4)
    report = run([job])
    assert_equal_to_loop(job, report, make(data=loader(), steps=None, epochs=4))


def test_what_a_job_does_in_the_middle_of_a_train_ends_nobody_else():
    def raising(result):
        if result.step == 5:
            raise ValueError("enough")

    def stopping(result):
        return wf.STOP if result.step == 6 else None

    class Torn:
        def __iter__(self):
            yield rows_of(8)
            yield rows_of(8)
            raise OSError("the disk is gone")

    jobs = [
        make("raises", on_step=raising, steps=50),
        make("stops", on_step=stopping, steps=50),
        make("torn", data=Torn(), steps=50),
        make("whole", steps=50),
    ]
    report = wf.run(jobs, memory="64MiB", threads=1)
    found = {job.name: (job.state, job.steps) for job in report}
    assert found == {
        "raises": ("failed", 5),
        "stops": ("stopped", 6),
        "torn": ("failed", 2),
        "whole": ("finished", 50),
    }
    assert "the disk is gone" in report.jobs["torn"].error
    assert_equal_to_loop(jobs[3], report, make("whole", steps=50))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_made_before_a_step_that_fails_is_told_of(policy):
    wrong = (torch.ones(2, 3), torch.zeros(2))
    jobs = [
        make("fails", data=[rows_of(8, n) for n in range(6)] + [wrong], steps=50),
        make("whole", steps=20),
    ]
    report = wf.run(jobs, memory="64MiB", threads=1, policy=policy)
    failed = report.jobs["fails"]
    assert (failed.state, failed.steps, len(failed.losses)) == ("failed", 6, 6)
    fine = make("fails", data=[rows_of(8, n) for n in range(6)], steps=6)
    assert failed.losses == wf.run_eager(fine, threads=1).losses
    assert_equal_to_loop(jobs[1], report, make("whole", steps=20))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_that_is_no_number_ends_a_job_that_asks_for_that_at_once(policy):
    x, y = rows_of(8)
    job = make("nan", data=[(x, y), (x, y), (x * float("inf"), y), (x, y)], steps=50)
    job.stop_on_nan = True
    report = wf.run([job, make("whole", steps=20)], memory="64MiB", threads=1, policy=policy)
    assert (report["nan"].state, report["nan"].steps) == ("failed", 3)
    assert report["whole"].ok


def test_a_scheduler_of_epochs_is_told_the_latest_loss():
    def plateau():
        job = make("plateau", lengths=(8, 12, 16), steps=12)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            job.optimizer, factor=0.5, patience=0
        )
        job.scheduler, job.scheduler_every = scheduler, "epoch"
        return job

    job, twin = plateau(), plateau()
    assert_equal_to_loop(job, run([job]), twin)
    assert job.optimizer.param_groups[0]["lr"] == twin.optimizer.param_groups[0]["lr"]


def test_whoever_listens_hears_of_each_step_of_a_train():
    heard = []
    with wf.Engine(memory="64MiB", threads=1) as engine:
        engine.subscribe(lambda event: heard.append(event) if type(event) is StepDone else None)
        engine.submit(make(steps=40)).result()
    assert [event.step for event in heard] == list(range(1, 41))


def test_a_job_is_stopped_within_a_step_and_another_may_join_meanwhile():
    with wf.Engine(memory="64MiB", threads=1) as engine:
        endless = engine.submit(make("endless", steps=10**9))
        wait_until(lambda: len(endless.losses) >= 20)
        joined = engine.submit(make("joined", steps=10)).result()
        assert joined.state == "finished"
        before = len(endless.losses)
        endless.stop()
        assert endless.result().state == "stopped"
    assert before > 0


def test_a_job_too_large_for_the_budget_is_refused_before_anything_has_run():
    job = make(data=[rows_of(4096)], steps=5)
    weights = [parameter.clone() for parameter in job.model.parameters()]
    with pytest.raises(wf.BudgetError, match=r"job .a.|.a. needs"):
        wf.run([job], memory="256KiB", threads=1)
    assert all(map(torch.equal, weights, job.model.parameters()))


def test_more_memory_than_the_steps_before_is_had_within_the_budget():
    lengths = [8] * 5 + [2048] + [8] * 5
    jobs = [make("a", lengths=lengths, steps=22), make("b", steps=60)]
    report = run(jobs, memory="16MiB")
    assert report.peak_bytes <= report.budget_bytes
    assert_equal_to_loop(jobs[0], report, make(lengths=lengths, steps=22))


class Hoarder(torch.optim.SGD):
    """Keeps so many MiB from its first step on."""

    size = 12

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"][:1]:
            if "hoard" not in self.state[parameter]:
                self.state[parameter]["hoard"] = torch.zeros(self.size << 18)
        return super().step(closure)


def hoarding(name, size=12, **options):
    job = make(name, **options)
    job.optimizer = Hoarder(job.model.parameters(), 0.01)
    job.optimizer.size = size
    return job


@pytest.mark.parametrize("policy", ["flow", "temporal"])
def test_what_a_step_keeps_has_its_place_though_the_step_filled_the_memory(policy):
    job, twin = hoarding("a"), hoarding("a")
    report = run([job], memory="20MiB", policy=policy)
    assert report.peak_bytes <= report.budget_bytes
    assert_equal_to_loop(job, report, twin)


@pytest.mark.parametrize("policy", ["flow", "temporal"])
def test_a_job_that_finds_no_place_for_what_it_keeps_ends_alone(policy):
    jobs = [hoarding("a"), hoarding("b", size=24), make("c", steps=40)]
    report = wf.run(jobs, memory="20MiB", policy=policy, threads=1)
    assert {job.name: job.state for job in report} == {
        **{"a": "finished", "b": "out_of_memory", "c": "finished"}
    }
    assert report.peak_bytes <= report.budget_bytes
    assert f"the budget is {20 << 20} bytes" in str(report["b"].error)
    assert_equal_to_loop(jobs[0], report, hoarding("a"))
    assert_equal_to_loop(jobs[2], report, make("c", steps=40))


@pytest.mark.parametrize("capture", [False, "auto"])
@pytest.mark.parametrize("policy", ["flow", "temporal", "time-slice"])
def test_jobs_that_keep_too_much_beside_each_other_take_turns(policy, capture):
    """Nobody knows it before they have made their first steps."""
    names = ["a", "b", "c"]
    jobs = [hoarding(name, capture=capture) for name in names]
    report = wf.run(jobs, memory="20MiB", policy=policy, threads=1)
    assert report.ok
    assert report.peak_bytes <= report.budget_bytes
    for job in jobs:
        assert_equal_to_loop(job, report, hoarding(job.name, capture=capture))
        needed = report[job.name].solo_peak_bytes
        assert needed < 13 << 20  # what it keeps is counted once


class Replacing(torch.optim.SGD):
    """Gives its parameters new memory at each step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - 0.1 * parameter.grad


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, Replacing])
def test_callbacks_see_tensors_that_nobody_takes_back(kind):
    def job(on_step=None):
        torch.manual_seed(3)
        model = Net()
        if kind is torch.optim.Adam:
            model.register_buffer("empty", torch.empty(0))
        optimizer = kind(model.parameters(), lr=0.01)
        data = [rows_of(16, number) for number in range(3)]
        return wf.Job("a", model, optimizer, loss, data, steps=9, seed=3, on_step=on_step)

    kept, inside = [], []

    def keep(result):
        for parameter in mine.model.parameters():
            kept.append((parameter.detach(), parameter.detach().clone()))
            inside.append(_C.is_in_arena(parameter.data_ptr()))
            inside.append(_C.is_in_arena(parameter.grad.data_ptr()))
        kept[:] = kept[-6:] if kind is Replacing else kept

    mine = job(keep)
    report = run([mine])
    assert report.jobs["a"].eager_steps == 9
    assert inside
    assert not any(inside)
    if kind is Replacing:  # the others' are written to
        assert all(torch.equal(view, value) for view, value in kept)
    assert_equal_to_loop(mine, report, job())


def test_a_train_beside_which_none_could_run_stays_where_it_is(monkeypatch):
    pinned = []

    monkeypatch.setattr(Lanes, "stand_in", lambda self, lane: pinned.append(lane))
    monkeypatch.setattr(EagerSteps, "is_fine", True)
    jobs = [make(name, steps=20) for name in "abc"]
    report = run(jobs, policy="flow")
    assert not pinned
    monkeypatch.setattr(EagerSteps, "is_fine", False)
    others = [make(name, steps=20) for name in "abc"]
    again = run(others, policy="flow")
    assert pinned
    for job, found in [*((job, report) for job in jobs), *((job, again) for job in others)]:
        assert_equal_to_loop(job, found, make(steps=20))


def numpy_batches():
    return [tuple(part.numpy() for part in rows_of(16, number)) for number in range(4)]


def sets_of_batches():
    return [{"rows": rows_of(16, number), "of": {number}} for number in range(4)]


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (numpy_batches, lambda batch: map(torch.as_tensor, batch)),
        (sets_of_batches, lambda batch: batch["rows"]),
    ],
)
def test_steps_on_batches_that_hide_what_they_hold_come_in_trains_too(monkeypatch, data, rows):
    """Handed over one by one they took more than twice as long as the loop's."""
    trains = []
    run_one = _Train.run
    monkeypatch.setattr(_Train, "run", lambda self, fed: (trains.append(self), run_one(self, fed)))

    def makes():
        return [make(name, steps=40, data=data(), seed=seed) for name, seed in (("a", 1), ("b", 2))]

    def by_rows(model, batch):
        return loss(model, tuple(rows(batch)))

    jobs, twins = makes(), makes()
    for job in (*jobs, *twins):
        job.loss = by_rows
    with pytest.warns(wf.OpaqueStepWarning, match="may hide tensors"):
        report = run(jobs, policy="flow")
    for job, twin in zip(jobs, twins, strict=True):
        assert_equal_to_loop(job, report, twin)
    assert len(trains) < 20  # of 80 steps


def test_jobs_that_are_never_captured_learn_that_they_lose_side_by_side(monkeypatch):
    seen = []
    monkeypatch.setattr(SideBySide, "note", lambda self, grain, ratio: seen.append((self, ratio)))
    monkeypatch.setattr(side_by_side, "_FINE_SECONDS", 0.0)
    jobs = [make(name, steps=1500, capture=False) for name in "ab"]
    report = run(jobs, policy="flow", lanes=2)
    for job in jobs:
        assert_equal_to_loop(job, report, make(steps=1500))
    assert seen
    assert len({learnt for learnt, _ in seen}) == 1, "of the engine, not of each job"


def test_steps_that_take_no_memory_come_in_trains_too(monkeypatch):
    """Each by itself they took a hundred times as long as the loop's."""
    trained = []
    make_train = EagerSteps.make

    def noting(self, batch, memory):
        trained.append(batch)
        return make_train(self, batch, memory)

    monkeypatch.setattr(EagerSteps, "make", noting)
    numbers = iter(range(40))
    model = nn.Linear(2, 2)
    job = wf.Job(
        "a",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data=[(1, 2)] * 40,
        step=lambda batch: float(next(numbers)),
        steps=40,
        capture=False,
    )
    report = run([job])
    assert report.jobs["a"].losses == [*map(float, range(40))]
    assert len(trained) >= 35


@pytest.mark.usefixtures("captures_pay")
def test_no_capture_begins_before_the_gradients_of_the_last_step_are_gone(monkeypatch):
    """A capture reads ``p.grad``, and torch 2.13 may not be asked for it in the middle of that."""
    drop, build = EagerSteps.drop_gradients, StepBuilder.build
    at_work = []

    def noting(function, name, seconds):
        def noted(*arguments):
            at_work.append(f"{name} begins")
            time.sleep(seconds)
            result = function(*arguments)
            at_work.append(f"{name} ends")
            return result

        return noted

    monkeypatch.setattr(EagerSteps, "drop_gradients", noting(drop, "drop", 0.02))
    monkeypatch.setattr(StepBuilder, "build", noting(build, "capture", 0.02))
    job = make(steps=12)
    report = run([job])
    assert report.jobs["a"].captured == "captured", report.jobs["a"].notes
    assert "capture begins" in at_work
    before, after = at_work[::2], at_work[1::2]
    assert [name.replace("begins", "ends") for name in before] == after, "two at once"
    assert_equal_to_loop(job, report, make(steps=12))


def in_half_precision(model, batch):
    """Uses each weight several times inside: autocast casts it once, for all of them."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = batch
        for _ in range(6):
            rows = torch.tanh(model(rows))
        return rows.float().square().mean()


def repeated(name, **options):
    torch.manual_seed(0)
    model = nn.Linear(48, 48)
    options = {"loss": in_half_precision, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    data = [torch.randn(32, 48)]
    return wf.Job(name, model=model, optimizer=optimizer, data=data, steps=60, seed=0, **options)


def test_nobody_empties_the_cache_of_weights_that_another_lane_has_cast(monkeypatch):
    """There is one for all threads, and whoever leaves autocast empties it."""
    monkeypatch.setattr(EagerSteps, "is_fine", False)
    given = {
        "loss": lambda model, batch: model(model(model(batch))).float().square().mean(),
        "autocast": torch.bfloat16,
    }
    ways = {"a": {}, "b": {}, "c": given, "d": given}
    jobs = [repeated(name, capture=False, **options) for name, options in ways.items()]
    report = run(jobs, lanes=2)
    for job in jobs:
        assert_equal_to_loop(job, report, repeated("twin", **ways[job.name]))


def sharing(base, *, own_step=False):
    """Two jobs that go through one module, each with a head of its own."""
    made = []
    for name in "ab":
        torch.manual_seed(1)
        head = nn.Linear(8, 3)
        model = nn.Sequential(base, head)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, 0.05)
        data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]

        def step(batch, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            return value

        what = {"step": step} if own_step else {"loss": loss}
        made.append(wf.Job(name, model=model, optimizer=optimizer, data=data, epochs=9, **what))
    return made


def normalized():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("base", [lambda: nn.Linear(4, 8), normalized])
def test_jobs_that_may_change_the_same_tensor_are_refused_before_anything_is_captured(base, policy):
    report = wf.run(sharing(base()), memory="8MiB", threads=1, policy=policy)
    assert report["a"].ok
    assert "share a tensor" in report["b"].error


def test_a_step_of_ones_own_may_change_whatever_it_shares():
    report = wf.run(sharing(normalized().eval(), own_step=True), memory="8MiB", threads=1)
    assert "share a tensor" in report["b"].error


@pytest.mark.parametrize("policy", POLICIES)
def test_jobs_may_read_the_same_tensors_that_nobody_changes(policy):
    def made():
        torch.manual_seed(0)
        return normalized().eval()

    jobs = sharing(made())
    report = wf.run(jobs, memory="8MiB", threads=1, policy=policy)
    for job, fresh in zip(jobs, sharing(made()), strict=True):
        assert_equal_to_loop(job, report, fresh)


class Counting(nn.Module):
    """Adds up its batches in a buffer, in eval mode, too, in a way that its code does not show."""

    def __init__(self):
        super().__init__()
        self.name = "seen"
        self.register_buffer(self.name, torch.zeros(()))

    def forward(self, rows):
        getattr(self, self.name).add_(1)
        return rows


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("captures_pay")
def test_what_a_capture_shows_of_shared_tensors_ends_its_job(policy):
    jobs = sharing(nn.Sequential(nn.Linear(4, 8).requires_grad_(False), Counting()).eval())
    for job in jobs:
        job.epochs, job.steps = None, 200
    report = wf.run(jobs, memory="8MiB", threads=1, policy=policy)
    assert not report.ok
    assert all("changes it" in job.error for job in report if not job.ok)


def with_radam(name="a", **options):
    """A job whose optimizer counts its steps in Python."""
    job = make(name, steps=60, **options)
    job.optimizer = torch.optim.RAdam(job.model.parameters(), 0.01)
    return job


@pytest.mark.usefixtures("captures_pay")
@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_where_the_optimizer_is_eager_python_the_step_is(policy):
    """So that it flows beside others'; and what it may need does not grow to all of the budget."""
    jobs = [with_radam("a"), with_radam("b"), make("c")]
    report = wf.run(jobs, "64MiB", threads=1, policy=policy)
    found = {report[name].captured: report[name] for name in "ab"}
    assert {"opaque step"} <= found.keys() <= {"opaque step", "eager"}
    assert "RAdam cannot be captured exactly" in found["opaque step"].notes[0]
    for job in jobs:
        expected = with_radam(job.name) if job.name in "ab" else make("c")
        assert report[job.name].losses == wf.run_eager(expected, threads=1).losses
    assert report.peak_bytes < 16 << 20


@pytest.mark.usefixtures("captures_pay")
@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
def test_that_is_found_out_once_for_all_who_look_alike():
    with wf.Engine("64MiB", threads=1) as engine:
        for name in "abc":
            found = engine.submit(with_radam(name)).result(300)
            assert found.ok
            assert found.captured == ("opaque step" if name == "a" else "eager")
    assert "not captured, as with one before: RAdam cannot be captured" in found.tiers[0]
    assert found.losses == wf.run_eager(with_radam(), threads=1).losses


@pytest.mark.usefixtures("captures_pay")
@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
@pytest.mark.parametrize("options", [{"capture": True}, {"memory_limit": "8MiB"}])
def test_a_captured_pass_before_it_is_kept_where_something_speaks_for_it(options):
    report = wf.run([with_radam(**options)], "64MiB", threads=1)
    assert report["a"].captured == "opaque optimizer"
    assert report["a"].losses == wf.run_eager(with_radam(), threads=1).losses


class HalfKept(torch.optim.SGD):
    """Keeps half of each gradient, instead of none of it."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / 2


def halve_later(optimizer):
    def on_step(result):
        if result.step == 3:
            optimizer.zero_grad = HalfKept.zero_grad.__get__(optimizer)

    return on_step


@pytest.mark.parametrize("way", ["class", "object", "torch's"])
def test_eager_steps_drop_gradients_as_the_optimizer_says(way, monkeypatch):
    def made():
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        kind = HalfKept if way == "class" else torch.optim.SGD
        optimizer = kind(model.parameters(), 0.05)
        data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
        on_step = halve_later(optimizer) if way == "object" else None
        what = {"loss": loss, "data": data, "epochs": 3, "capture": False}
        return wf.Job("a", model=model, optimizer=optimizer, on_step=on_step, **what)

    plain = wf.run_eager(made(), threads=1).losses
    if way == "torch's":
        monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", HalfKept.zero_grad)
    job = made()
    report = wf.run([job], memory="8MiB", threads=1)
    expected = wf.run_eager(made(), threads=1)
    assert report["a"].losses == expected.losses
    assert (expected.losses == plain) == (way != "torch's")
