"""The order of the loop: fetch, step, scheduler, callback, and only then the next fetch."""

from __future__ import annotations

import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader, Dataset

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.differences import MEMORY
from tests.support.models import Mlp

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning"),
]

POLICIES = ("flow", "waterwave", "temporal")
CAPTURES = pytest.mark.parametrize("capture", ["auto", False], ids=["captured", "opaque"])


class Log:
    """Notes what happens when, in a file's manner: nobody's step reads it."""

    def __init__(self):
        self.lines = []


class Batches:
    """Batches that are made when they are asked for."""

    def __init__(self, log, steps=6):
        self.log, self.steps = log, steps

    def __iter__(self):
        self.log.lines.append("begin")
        for number in range(self.steps):
            self.log.lines.append(f"fetch {number + 1}")
            yield rows(8)
        self.log.lines.append("end")


class NotedLR(optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer, log):
        self.log = None
        super().__init__(optimizer, lambda step: 1 / (1 + step))
        self.log = log

    def step(self, *arguments):
        if self.log is not None:
            self.log.lines.append("scheduler")
        super().step(*arguments)


def job_of(log, name="a", stop_at=None, scheduler=False, every="step", **options):
    torch.manual_seed(11)
    net = Mlp()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    log.seen = []

    def on_step(result):
        log.lines.append(f"callback {result.step}")
        log.seen.append((result.learning_rates, net.one.weight.sum().item(), result.loss))
        return wf.STOP if result.step == stop_at else None

    if scheduler:
        options |= {"scheduler": NotedLR(optimizer, log), "scheduler_every": every}
    options.setdefault("data", Batches(log))
    options.setdefault("on_step", on_step)
    return wf.Job(name, model=net, optimizer=optimizer, loss=cross_entropy, seed=5, **options)


def of_the_loop(**options):
    log = Log()
    report = wf.run_eager(job_of(log, **options), threads=1)
    return log, report


def of_the_engine(policy, beside=True, **options):
    log = Log()
    others = [job_of(Log(), "b", data=[rows(8)] * 20, on_step=None)] if beside else []
    report = wf.run([job_of(log, **options), *others], memory=MEMORY, policy=policy, threads=1)
    assert report.ok, [job.error for job in report]
    return log, report.jobs["a"]


@CAPTURES
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("every", ["step", "epoch"])
def test_all_happens_in_the_order_of_the_loop(policy, capture, every):
    options = {"scheduler": True, "every": every, "epochs": 2}
    expected, report = of_the_loop(**options)
    log, found = of_the_engine(policy, capture=capture, **options)
    assert log.lines == expected.lines
    assert log.seen == expected.seen
    assert found.losses == report.losses


@CAPTURES
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stop_at", [1, 3])
def test_stop_fetches_no_further_batch(policy, capture, stop_at):
    expected, report = of_the_loop(stop_at=stop_at)
    log, found = of_the_engine(policy, capture=capture, stop_at=stop_at)
    assert log.lines == expected.lines
    assert log.lines[-1] == f"callback {stop_at}"
    assert (found.state, found.losses) == ("stopped", report.losses)


@CAPTURES
@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_step_fetches_no_further_batch(policy, capture):
    expected, _ = of_the_loop(steps=3)
    log, found = of_the_engine(policy, capture=capture, steps=3)
    assert log.lines == expected.lines
    assert found.state == "finished"


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_callback_unknown_data_still_wait_for_the_step(policy):
    """They may look at the model: pseudo-labels, replay buffers."""

    class Looking(Batches):
        def __iter__(self):
            for x, y in [rows(8)] * 6:
                yield x + self.model.two.bias.detach().sum(), y

    def job():
        data = Looking(Log())
        made = job_of(Log(), data=data, on_step=None)
        data.model = made.model
        return made

    expected = wf.run_eager(job(), threads=1).losses
    report = wf.run([job()], memory=MEMORY, policy=policy, threads=1).jobs["a"]
    assert report.losses == expected


class Slow(Dataset):
    """A data set that notes how far it has been read."""

    def __init__(self, log):
        self.log = log
        self.x, self.y = rows(8)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        self.log.lines.append(index)
        return self.x[index % 8], self.y[index % 8]


def test_a_callback_sees_the_data_set_as_in_the_loop():
    def job():
        log = Log()
        read = []
        made = job_of(
            log,
            data=DataLoader(Slow(log), batch_size=8),
            on_step=lambda result: read.append(len(log.lines)),
        )
        return made, read

    plain, expected = job()
    wf.run_eager(plain, threads=1)
    given, found = job()
    assert wf.run([given], memory=MEMORY, threads=1).ok
    assert found == expected == [8, 16, 24, 32, 40, 48]


def test_a_callbacks_changes_reach_the_very_next_step():
    def job():
        log = Log()
        made = job_of(log)

        def on_step(result):
            with torch.no_grad():
                made.model.one.weight.mul_(0.5)
            if result.step == 2:
                made.optimizer.param_groups[0]["lr"] = 0.01
            if result.step == 4:
                made.model.two.bias.requires_grad_(False)

        made.on_step = on_step
        return made

    expected = wf.run_eager(job(), threads=1).losses
    for policy in POLICIES:
        report = wf.run([job()], memory=MEMORY, policy=policy, threads=1).jobs["a"]
        assert report.losses == expected, (policy, report.error)
