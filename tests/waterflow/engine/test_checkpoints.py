"""Runs that write checkpoints, and runs that go on from them: ends, errors, other jobs."""

import os
import resource
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from tests.support.data import cross_entropy, loader, pairs
from tests.support.differences import MEMORY, differences
from tests.support.models import Mlp, Noisy
from waterflow.checkpoint.store import CheckpointFolder
from waterflow.engine.events import CheckpointWritten

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def make(name="a", model=Noisy, width=6, **options):
    torch.manual_seed(1)
    net = model(width) if model is Mlp else model()
    settings = {"data": loader(), "epochs": 4, "seed": 3, **options}
    optimizer = settings.pop("optimizer", torch.optim.Adam)(net.parameters(), lr=0.01)
    if "scheduler" in settings:
        settings["scheduler"] = settings["scheduler"](optimizer)
    return wf.Job(name, model=net, optimizer=optimizer, loss=cross_entropy, **settings)


def run(jobs, **options):
    return wf.run(jobs, memory=MEMORY, threads=1, **options)


def cut_at(step):
    """A callback that ends its job with an error after so many steps."""

    def on_step(result):
        if result.step == step:
            raise RuntimeError("cut")

    return on_step


def written(folder, steps=5, every="5 steps", **options):
    """A run that ended by an error some steps after its checkpoint."""
    report = run(
        [make(on_step=cut_at(steps + 2), **options)], checkpoint=folder, checkpoint_every=every
    )
    assert report["a"].error == "cut"
    assert CheckpointFolder(folder).read("a").steps == steps


def plain(**options):
    job = make(**options)
    return job, wf.run_eager(job, threads=1)


def test_a_finished_job_is_finished_again(tmp_path):
    first = make()
    run([first], checkpoint=tmp_path, checkpoint_every="1h")
    again = make()
    again.loss = None  # it runs no more
    report = run([again], resume=tmp_path)
    job, eager = plain()
    assert (report["a"].state, report["a"].losses) == ("finished", eager.losses)
    assert report["a"].epochs == 4
    assert report["a"].epoch_ends == eager.epoch_ends
    assert report["a"].epoch_means() == eager.epoch_means()
    assert differences(job, again) == []


def test_a_job_that_its_callback_has_stopped_stays_stopped(tmp_path):
    def stop(result):
        return wf.STOP if result.step == 4 else None

    run([make(on_step=stop)], checkpoint=tmp_path)
    report = run([make(on_step=stop)], resume=tmp_path)
    assert (report["a"].state, report["a"].steps) == ("stopped", 4)


@pytest.mark.parametrize("policy", ["flow", "waterwave"])
def test_ctrl_c_ends_with_a_checkpoint_of_the_last_step(tmp_path, policy):
    def press(result):
        if result.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    jobs = [make("a", epochs=400), make("b", on_step=press), make("c", model=Mlp, epochs=400)]
    options = {"checkpoint": tmp_path, "resume": tmp_path, "policy": policy}
    with pytest.raises(wf.RunInterrupted) as stopped:
        run(jobs, **options)
    report = stopped.value.report
    assert report.interrupted
    assert {job.state for job in report} == {"stopped"}
    for job in report:
        kept = CheckpointFolder(tmp_path).read(job.name)
        assert (kept.state, kept.steps) == ("running", job.steps)
    steps = {job.name: job.steps for job in report}
    ends = {name: made + 5 for name, made in steps.items()}
    jobs = [
        make(name, model=Mlp if name == "c" else Noisy, epochs=None, steps=ends[name])
        for name in "abc"
    ]
    report = run(jobs, **options)
    for job in jobs:
        again, eager = plain(
            name=job.name, model=type(job.model), epochs=None, steps=ends[job.name]
        )
        assert report[job.name].losses == eager.losses
        assert report[job.name].resumed_steps == steps[job.name]
        assert differences(again, job) == []


def test_a_run_is_cut_again_and_again(tmp_path):
    for end in (2, 3, 7, 8):
        run(
            [make(on_step=cut_at(end))],
            checkpoint=tmp_path,
            checkpoint_every="1 step",
            resume=tmp_path,
        )
    final = make()
    report = run([final], checkpoint=tmp_path, resume=tmp_path)
    job, eager = plain()
    assert report["a"].losses == eager.losses
    assert report["a"].resumed_steps > 0
    assert differences(job, final) == []


def test_another_folder_has_all_of_the_first(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    run([make("a"), make("b", on_step=cut_at(7))], checkpoint=first, checkpoint_every="5 steps")
    run([make("a"), make("b", on_step=cut_at(6))], resume=first, checkpoint=second)
    assert CheckpointFolder(second).read("a").state == "finished"
    assert CheckpointFolder(second).read("b").steps == 5


def test_seconds_and_events(tmp_path):
    """Of a job of many steps some are due; each is told of."""
    from waterflow.engine.checkpoints import Checkpoints

    job = make(epochs=100)
    checkpoints = Checkpoints([job], tmp_path, 0.01, None)
    events = []
    with checkpoints.written(), wf.Engine(MEMORY, threads=1, checkpoints=checkpoints) as engine:
        engine.subscribe(lambda e: events.append(e) if type(e) is CheckpointWritten else None)
        engine.submit(job)
    steps = [event.steps for event in events]
    assert len(steps) >= 2
    assert steps == sorted(steps)
    assert all(event.size > 0 and event.seconds > 0 for event in events)
    assert CheckpointFolder(tmp_path).read("a").state == "finished"


def test_a_run_is_not_overwritten(tmp_path):
    written(tmp_path)
    with pytest.raises(wf.CheckpointError, match=r"the checkpoints of a run already.*resume="):
        run([make()], checkpoint=tmp_path)


def test_how_often_without_where():
    with pytest.raises(wf.JobError, match="no checkpoint= says where"):
        run([make()], checkpoint_every="5min")


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(wf.CheckpointError, match=r"no checkpoint at .*nowhere"):
        run([make()], resume=tmp_path / "nowhere")
    assert run([make()], checkpoint=tmp_path / "new", resume=tmp_path / "new").ok


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"model": Mlp, "width": 7}, r"one\.weight is float32 of shape \(7, 4\) in the model and"),
        ({"model": lambda: nn.Linear(4, 3)}, r"the model has 'bias', 'weight', which the"),
        ({"model": lambda: Noisy().double()}, r"one\.bias is float64 .* and float32"),
        ({"optimizer": torch.optim.AdamW}, r"the optimizer is a torch\.optim\.adamw\.AdamW, the"),
        (
            {"optimizer": lambda p, lr: torch.optim.Adam([{"params": [q]} for q in p], lr)},
            "the optimizer has 4 parameter groups, the checkpoint's had 1",
        ),
        (
            {"optimizer": lambda p, lr: torch.optim.Adam(list(p)[::-1], lr)},
            r"in another order: two\.bias in place of one\.weight",
        ),
        (
            {"scheduler": lambda o: torch.optim.lr_scheduler.ConstantLR(o)},
            r"the scheduler is torch.*ConstantLR, the checkpoint's was missing",
        ),
        ({"seed": 77}, "it has seed=77, the checkpoint's had"),
        ({"data": pairs()}, "the data has 2 batches an epoch, the checkpoint's had 3"),
        ({"epochs": None, "steps": 4}, "it has made 5 steps, in epoch 1, and is to have steps=4"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused(tmp_path, options, what):
    written(tmp_path)
    job = make(**options)
    before = [parameter.clone() for parameter in job.model.parameters()]
    with pytest.raises(wf.CheckpointError, match=f"job 'a': its checkpoint is of another.*{what}"):
        run([job], resume=tmp_path)
    assert all(map(torch.equal, before, job.model.parameters()))
    assert not job.optimizer.state


def test_a_finished_job_that_is_to_go_on_is_refused(tmp_path):
    run([make()], checkpoint=tmp_path)
    with pytest.raises(wf.CheckpointError, match="has finished with epochs=4 and is to have epo"):
        run([make(epochs=5)], resume=tmp_path)


def test_other_jobs_are_named(tmp_path):
    run([make("a"), make("b")], checkpoint=tmp_path)
    with pytest.raises(wf.CheckpointError, match="'c' is not in it, 'b' is not in this run"):
        run([make("a"), make("c")], resume=tmp_path)
    report = run([make("a"), make("c")], resume=tmp_path, resume_partly=True)
    assert report["a"].resumed_steps == report["a"].steps
    assert report["c"].resumed_steps == 0
    assert report["c"].ok
    assert CheckpointFolder(tmp_path).read("b").state == "finished"


def test_a_job_that_had_no_checkpoint_yet_begins(tmp_path):
    run([make("a", on_step=cut_at(1)), make("b")], checkpoint=tmp_path, checkpoint_every="5 steps")
    job = make("a")
    report = run([job, make("b")], resume=tmp_path)
    again, eager = plain()
    assert report["a"].losses == eager.losses
    assert differences(again, job) == []


def test_data_that_can_be_iterated_once_is_refused(tmp_path):
    job = make(data=(batch for batch in pairs()), epochs=1)
    with pytest.raises(
        wf.JobError, match="job 'a': its data is a generator, which can be iterated"
    ):
        run([job], checkpoint=tmp_path)
    data = DataLoader(TensorDataset(torch.zeros(4, 4)), num_workers=1, persistent_workers=True)
    with pytest.raises(wf.JobError, match="job 'a': its DataLoader has persistent_workers=True"):
        run([make(data=data)], resume=tmp_path)


def test_data_that_ends_early_is_named(tmp_path):
    class Short:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

    written(tmp_path, data=Short(pairs(sizes=(2,) * 5)), steps=4, every="4 steps")
    report = run([make(data=Short(pairs(sizes=(2,) * 3)))], resume=tmp_path)
    assert report["a"].error_type == "CheckpointError"
    assert "has 3 batches in epoch 0, of which its checkpoint has made 4" in report["a"].error


class Opaque:
    """A scheduler whose state is a function."""

    def __init__(self, optimizer):
        self.rule = lambda step: 0.01

    def step(self):
        """Nothing."""

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


class Silent:
    """A scheduler that tells nothing of its state."""

    def __init__(self, optimizer):
        """Nothing."""

    def step(self):
        """Nothing."""


@pytest.mark.parametrize(
    ("scheduler", "what"),
    [
        (Opaque, r"job 'b': scheduler\.rule is a builtins\.function cannot be kept"),
        (Silent, r"job 'b': scheduler, a .*Silent, has no state_dict and load_state_dict"),
    ],
)
def test_what_cannot_be_kept_is_named_and_stops_nobody(tmp_path, scheduler, what):
    jobs = [make("a"), make("b", scheduler=scheduler)]
    with pytest.warns(wf.CheckpointWarning, match=what) as seen:
        report = run(jobs, checkpoint=tmp_path, checkpoint_every="5 steps")
    assert len([each for each in seen if each.category is wf.CheckpointWarning]) == 1
    assert [job.state for job in report] == ["finished"] * 2
    assert CheckpointFolder(tmp_path).read("a").state == "finished"
    assert CheckpointFolder(tmp_path).read("b") is None


def test_a_full_disk_is_told_of_once_and_training_goes_on(tmp_path):
    written(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    job, options = make(), {"checkpoint_every": "1 step", "checkpoint": tmp_path}
    try:
        with pytest.warns(wf.CheckpointWarning) as seen:
            report = run([job], resume=tmp_path, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    texts = [str(each.message) for each in seen if each.category is wf.CheckpointWarning]
    assert len(texts) == 1
    assert "File too large. Training goes on, and the former checkpoint stays" in texts[0]
    again, eager = plain()
    assert report["a"].losses == eager.losses
    assert differences(again, job) == []
    assert CheckpointFolder(tmp_path).read("a").steps == 5


def test_warnings_that_are_errors_end_no_job(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", wf.CheckpointWarning)
        report = run([make(scheduler=Silent)], checkpoint=tmp_path, checkpoint_every="5 steps")
    assert report.ok


def test_without_checkpoints_nothing_is_kept(tmp_path):
    assert run([make()]).ok
    assert run([make()], resume=tmp_path / "r", checkpoint=tmp_path / "r").ok
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r"]
