"""Footprints of jobs that never run: equal to those that do, without their memory."""

from __future__ import annotations

import random
import resource
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from tests.support.data import cross_entropy, squares
from tests.support.jobs import sgd
from tests.support.models import Cnn, Mlp, Normed
from waterflow.account.purity import observer, undisturbed
from waterflow.capture.fake_job import build
from waterflow.capture.tracing import is_of_job
from waterflow.common.errors import RunOnlyError
from waterflow.executor.device.select import get_device
from waterflow.executor.run.rng import JobRng
from waterflow.job.training_step import eager_step
from waterflow.models.task import Task
from waterflow.steps.job_steps import JobSteps
from waterflow.study.footprint import footprint_of, forecast
from waterflow.study.job_specs import job_of

pytestmark = pytest.mark.cpu


def job(model=None, optimizer=sgd, loss=cross_entropy, data=None, **options):
    model = Mlp() if model is None else model
    data = [(torch.randn(8, 4), torch.randint(3, (8,)))] if data is None else data
    return wf.Job(
        "mine",
        model=model,
        optimizer=optimizer(model.parameters()),
        loss=loss,
        data=data,
        **options,
    )


def prepared(made):
    """What preparing the same job for a run finds, by running its steps."""
    steps = JobSteps(made, get_device("cpu"), JobRng(0), torch.get_num_threads())
    batch = next(iter(made.data))
    ready = steps.preparer.prepare(batch)
    while ready.trial:
        before, seen = steps.trials.begin(), observer()
        with undisturbed(seen):
            eager_step(made, batch)
        steps.trials.end(ready, before, seen)
        ready = steps.preparer.prepare(batch)
    return steps, ready.specialization.first, ready.specialization.steady


def same(one, other):
    assert one.persistent_bytes == other.persistent_bytes
    assert one.boundary == other.boundary
    assert (one.first is None) == (other.first is None)
    for left, right in ((one.first, other.first), (one.steady, other.steady)):
        if left is not None:
            np.testing.assert_array_equal(left.events, right.events)
    np.testing.assert_array_equal(one.flops, other.flops)
    np.testing.assert_array_equal(one.moved_bytes, other.moved_bytes)


def clipped_adam():
    return job(optimizer=lambda p: optim.Adam(p, amsgrad=True, foreach=True), clip_grad_norm=0.5)


def tied_and_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    model[3].bias.requires_grad_(False)
    return job(model)


def weighted():
    weight = torch.ones(3)
    return job(loss=lambda model, b: F.cross_entropy(model(b[0]), b[1], weight=weight))


class Scaled(nn.Module):
    """Keeps a tensor that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.scale = torch.full((3,), 2.0)

    def forward(self, x):
        return self.net(x) * self.scale


def tensor_rate():
    return job(optimizer=lambda p: optim.Adam(p, lr=torch.tensor(0.1)))


JOBS = {
    "momentum": job,
    "clipped_adam": clipped_adam,
    "tied_and_frozen": tied_and_frozen,
    "weighted": weighted,
    "plain_tensor": lambda: job(Scaled()),
    "tensor_rate": tensor_rate,
    "hooks_and_buffers": lambda: job(Normed(), data=[(torch.randn(8, 4), torch.randint(3, (8,)))]),
}


@pytest.mark.parametrize("name", JOBS)
def test_forecast_is_what_preparing_for_a_run_finds(name):
    told, (steps, first, steady) = forecast(JOBS[name]), prepared(JOBS[name]())
    assert told.name == "mine"
    assert told.source == "fake"
    assert told.persistent_bytes == steps.persistent.final_bytes
    assert told.boundary == steady.compiled.boundary
    assert len(told.flops) == len(told.moved_bytes) == told.steady.num_nodes
    assert told.flops.dtype == told.moved_bytes.dtype == np.int64
    if name == "hooks_and_buffers":  # its first steps are trials; a kernel takes more than results
        assert first is None
        assert told.steady.num_nodes == steady.memory.profile.num_nodes
        return
    assert (told.first is None) == (first is None)
    np.testing.assert_array_equal(told.steady.events, steady.memory.profile.events)
    if first is not None:
        np.testing.assert_array_equal(told.first.events, first.memory.profile.events)


def test_state_that_the_first_step_creates_becomes_persistent():
    told = forecast(job, alignment=1)
    parameters = 4 * (4 * 6 + 6 + 6 * 3 + 3)
    assert told.first.surviving_bytes == parameters
    assert told.persistent_bytes == 2 * parameters
    assert told.steady.surviving_bytes == 0


def test_nothing_is_allocated_for_a_model_of_forty_gigabytes():
    def huge():
        return job(
            nn.Linear(100_000, 100_000),
            lambda p: optim.AdamW(p, fused=True),
            squares,
            [torch.zeros(1000, 100_000)],
        )

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = forecast(huge)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    matrix = 4 * 100_000 * 100_000
    assert 3 * matrix < told.persistent_bytes < 3.01 * matrix
    assert told.steady.transient_peak_bytes > matrix
    assert told.flops.max() == 2 * 1000 * 100_000 * 100_000


def on_meta():
    with torch.device("meta"):
        model = Mlp()
    return job(model)


def moved_to_meta():
    model = Mlp().to("meta").to_empty(device="meta").to(torch.device("meta"))
    return job(model)


META = Mlp().to("meta")


@pytest.mark.parametrize("make", [on_meta, moved_to_meta, lambda: job(META)])
def test_models_on_meta_count_as_ones_on_the_host(make):
    same(forecast(make), footprint_of(job()))


def test_only_a_forecast_takes_models_on_meta():
    forecast(lambda: job(META))
    with pytest.raises(wf.JobError, match="its model is on meta"):
        job(META)


def on_gpu():
    model = nn.Linear(4, 3)
    for name, parameter in list(model.named_parameters()):  # `.cuda()` asks for the driver
        setattr(model, name, nn.Parameter(torch.empty_like(parameter, device="cuda")))
    return job(model, lambda p: optim.Adam(p, foreach=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_job_on_a_gpu_is_refused_where_there_is_none():
    """Torch's autograd has no threads for it there: going on would end the process."""
    with pytest.raises(wf.JobError, match="'mine': its model is on cuda:0, and torch finds no GPU"):
        forecast(on_gpu)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_job_on_a_gpu_holds_a_device_input_and_leaves_numbers_on_the_host():
    told = forecast(on_gpu, alignment=512)
    tensors = 3 * 2  # weight and bias, with two moments each; their step counts stay on the host
    device_input = 2  # both tensors of the batch
    assert told.persistent_bytes == 512 * (tensors + device_input)
    assert all(size % 512 == 0 for size in told.steady.events["bytes"])


CONVERSIONS = {
    "moved": lambda model: model.to("cpu"),
    "doubled": lambda model: model.double(),
    "halved": lambda model: model.to(torch.bfloat16),
    "channels": lambda model: model.to(memory_format=torch.channels_last),
    "emptied": lambda model: model.to_empty(device="cpu"),
}


@pytest.mark.parametrize("before_optimizer", [True, False])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_keep_parameters_as_they_do_in_memory(name, before_optimizer):
    def make():
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
        model[2].weight = model[0].weight
        if before_optimizer:
            CONVERSIONS[name](model)
        made = job(model, loss=squares, data=[torch.randn(2, 4, 8, 8)])
        if not before_optimizer:
            CONVERSIONS[name](model)
        made.data = [torch.randn(2, 4, 8, 8).to(model[0].weight.dtype)]
        return made

    built = build(make, "it")
    assert not built.real
    real = make()
    assert built.job.model[2].weight is built.job.model[0].weight
    held = {id(p) for group in built.job.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in built.job.model.parameters()}
    for fake, tensor in zip(built.job.model.parameters(), real.model.parameters(), strict=True):
        assert (fake.dtype, fake.stride()) == (tensor.dtype, tensor.stride())
    if name in ("doubled", "channels"):
        same(forecast(make), footprint_of(real))


def recurrent():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.GRU(4, 3, batch_first=True)

        def forward(self, x):
            return self.net(x)[0][:, -1]

    data = [(torch.randn(8, 5, 4), torch.randint(3, (8,)))]
    return job(Last(), data=data)


def test_recurrent_layers_are_not_built_in_memory():
    """They keep lists of their weights beside the weights."""
    made = []

    def make():
        made.append(recurrent())
        return made[-1]

    same(forecast(make), footprint_of(recurrent()))
    assert [is_of_job(job.model.net.weight_ih_l0) for job in made] == [True]


def reads_a_number():
    width = int(torch.linspace(0, 12, 3)[1].item())
    return job(Mlp(width))


def test_a_factory_that_reads_numbers_is_called_again_in_memory():
    assert build(reads_a_number, "it").real
    same(forecast(reads_a_number), footprint_of(job()))


def shuffled():
    data = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    return job(data=DataLoader(data, batch_size=8, shuffle=True))


def test_a_loader_that_shuffles_makes_no_model_real():
    built = build(shuffled, "it")
    assert not built.real
    assert built.job.model.one.weight.untyped_storage().device.type == "meta"
    same(forecast(shuffled), footprint_of(job()))


def test_random_streams_stay_where_they_are():
    def draws():
        torch.manual_seed(1)
        random.random()
        np.random.rand()
        return shuffled()

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = states()
    forecast(draws)
    assert states() == before
    footprint_of(shuffled_job := shuffled())
    middle = states()
    footprint_of(shuffled_job)
    assert states() == middle


def test_footprint_of_changes_nothing_of_the_job():
    made = job(Cnn(), data=[(torch.randn(4, 1, 8, 8), torch.randint(3, (4,)))])
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    told = footprint_of(made)
    after = made.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not made.optimizer.state
    assert all(p.grad is None for p in made.model.parameters())
    made.loss(made.model, made.data[0]).backward()
    made.optimizer.step()
    trained = footprint_of(made)
    assert trained.first is None
    assert trained.persistent_bytes == told.persistent_bytes


def test_data_that_can_be_read_once_is_left_alone():
    batches = iter([(torch.randn(8, 4), torch.randint(3, (8,)))])
    made = job(data=batches)
    with pytest.raises(wf.JobError, match=r"read only once.*footprint_of\(job, batch="):
        footprint_of(made)
    batch = next(batches)
    same(footprint_of(made, batch=batch), footprint_of(job()))
    same(forecast(lambda: job(data=iter([batch]))), footprint_of(job()))


def broken():
    raise KeyError("no such data set")


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            broken,
            wf.JobError,
            r"factory broken \(.*raises at .*test_footprint.py:\d+ in broken: KeyE",
        ),
        (lambda: 7, wf.JobError, r"must return a waterflow.Job, it returned 7"),
        (lambda: job(data=[]), wf.JobError, r"'mine': its data has no batch"),
        (lambda: job(steps=0), wf.JobError, r"steps must be a positive whole number, got 0"),
        (lambda: job(data=[object()]), wf.CaptureError, r"a batch holds a builtins.object"),
        (lambda: job(capture=False), RunOnlyError, r"capture=False.*Run it for one step"),
        (lambda: job(keep_grads=True), RunOnlyError, r"to see gradients.*Run it for one step"),
        (lambda: job(optimizer=optim.LBFGS), RunOnlyError, r"LBFGS evaluates the loss by itself"),
        (lambda: job(optimizer=optim.RAdam), RunOnlyError, r"RAdam cannot be captured exactly"),
        (
            lambda: job(loss=lambda m, b: m(b[0]).sum() if m(b[0]).sum() > 0 else None),
            wf.CaptureError,
            r"'mine' cannot be captured at .*test_footprint.py",
        ),
    ],
)
def test_what_cannot_be_forecast_says_why(make, kind, message):
    with pytest.raises(kind, match=message) as caught:
        forecast(make)
    assert type(caught.value) is kind


def test_an_error_in_the_data_names_its_line():
    def batches():
        yield torch.zeros(1)[5]

    with pytest.raises(wf.JobError, match=r"test_footprint.py:\d+ in batches: IndexError"):
        forecast(lambda: job(data=batches()))


def test_a_large_model_is_not_built_to_find_another_error():
    """Only small ones are: here 40 GB would be asked for."""
    made = []

    def uncapturable():
        made.append(
            job(nn.Linear(100_000, 100_000), optim.RAdam, squares, [torch.ones(2, 100_000)])
        )
        return made[-1]

    with pytest.raises(RunOnlyError):
        forecast(uncapturable)
    assert len(made) == 1


def test_several_threads_forecast_at_once():
    found = {}

    def look(name):
        found[name] = forecast(JOBS[name])

    names = ["momentum", "tied_and_frozen", "momentum2"]
    JOBS["momentum2"] = job
    threads = [threading.Thread(target=look, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del JOBS["momentum2"]
    same(found["momentum"], found["momentum2"])
    same(found["tied_and_frozen"], forecast(tied_and_frozen))


TASK = Task(
    name="squares",
    unit="rows",
    parameters=20,
    model=lambda: nn.Linear(4, 4),
    loss=squares,
    batch=lambda count: torch.randn(count, 4),
    optimizer=lambda parameters: optim.SGD(parameters, lr=0.1),
)


def test_jobs_of_tasks():
    made = job_of(TASK, 5)
    assert (made.name, made.steps, made.loss) == ("squares", 1, squares)
    assert [tuple(batch.shape) for batch in made.data] == [(5, 4)]
    assert job_of(TASK, 2, "other").name == "other"
    told = forecast(lambda: job_of(TASK, 1000), alignment=1)
    assert told.persistent_bytes == 80
    assert told.steady.events["bytes"][0] == 16_000
