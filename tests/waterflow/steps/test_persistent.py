"""The ledger of persistent tensors: what is in it, when it changes, how large the job becomes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.jobs import adam
from tests.support.models import Mlp
from tests.support.steps import first_batch, job_of, specialization
from waterflow.executor.device.host import HostDevice
from waterflow.job.training_step import eager_step
from waterflow.partitioner.graph.step_graph import Input
from waterflow.steps.persistent import PersistentTensors, is_lazy, persistent_tensors
from waterflow.steps.specializations import Specializations

pytestmark = pytest.mark.cpu


def ledger_of(job, kept=None):
    kept = Specializations() if kept is None else kept
    found = PersistentTensors(job, HostDevice(), kept)
    found.collect()
    return found


def trained(job):
    eager_step(job, first_batch(job))


def test_tensors_are_known_by_what_they_are_to_a_step():
    job = job_of(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), optimizer=adam)
    trained(job)
    found = persistent_tensors(job)
    assert found[Input("parameter", "0.weight")] is job.model[0].weight
    assert found[Input("buffer", "1.running_mean")] is job.model[1].running_mean
    state = job.optimizer.state[job.model[0].bias]
    assert found[Input("state", (1, "exp_avg"))] is state["exp_avg"]


def test_tensors_without_memory_are_left_out():
    job = job_of(lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)))
    assert {meaning.key for meaning in persistent_tensors(job)} == {"1.weight", "1.bias"}
    assert is_lazy(job.model)
    assert not is_lazy(nn.Linear(1, 1))


def test_state_that_comes_is_a_new_version_and_nothing_lost():
    job = job_of(optimizer=adam)
    ledger = ledger_of(job)
    version = ledger.version
    assert not ledger.state_exists
    assert ledger.state_holds()
    trained(job)
    assert not ledger.state_holds()
    assert not ledger.collect()
    assert ledger.state_holds()
    assert ledger.state_exists
    assert ledger.version == version + 1
    assert not ledger.were_replaced
    assert ledger.has_all([(0, "exp_avg"), (3, "step")])
    assert not ledger.has_all([(0, "momentum_buffer")])


def test_values_may_change_without_a_new_version():
    job = job_of()
    trained(job)
    ledger = ledger_of(job)
    version = ledger.version
    trained(job)
    assert ledger.state_holds()
    ledger.collect()
    assert ledger.version == version


def test_state_that_goes_is_told():
    job = job_of(optimizer=adam)
    trained(job)
    ledger = ledger_of(job)
    job.optimizer.state.clear()
    assert ledger.collect()
    assert not ledger.state_exists


def test_state_of_the_same_layout_may_be_replaced():
    job = job_of(optimizer=adam)
    trained(job)
    ledger = ledger_of(job)
    version = ledger.version
    state = job.optimizer.state[job.model.one.weight]
    state["exp_avg"] = state["exp_avg"].clone()
    assert not ledger.collect()
    assert ledger.version == version + 1
    assert not ledger.were_replaced


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_given_other_tensors_is_noted(in_place):
    job = job_of()
    ledger = ledger_of(job)
    if in_place:
        job.model.one.weight.data = torch.zeros(6, 4)
    else:
        job.model.one.weight = nn.Parameter(torch.zeros(6, 4))
    ledger.collect()
    assert ledger.were_replaced


def test_the_final_size_counts_constants_and_what_is_to_come_and_never_falls():
    kept = Specializations()
    ledger = ledger_of(job_of(), kept)
    ledger.note_size()
    before = ledger.final_bytes
    assert before == ledger.bytes > 0
    kept.add("x", specialization(constants=[torch.zeros(1024)]))
    assert ledger.bytes == before + 4096
    assert len(ledger.all()) == 5
    ledger.note_size(created=[torch.zeros(2048)])
    assert ledger.final_bytes == before + 4096 + 8192
    kept.clear()
    ledger.note_size()
    assert ledger.final_bytes == before + 4096 + 8192
    assert ledger.bytes == before


def test_a_batchs_device_input_counts():
    job = job_of()
    plain, prefetcher = ledger_of(job), SimpleNamespace(size=4096)
    ledger = PersistentTensors(job, HostDevice(), Specializations(), prefetcher)
    ledger.collect()
    assert ledger.bytes == plain.bytes + 4096


def test_what_a_first_step_makes_becomes_the_state():
    job = job_of(optimizer=adam)
    made = {(1, "exp_avg"): torch.ones(6)}
    step = SimpleNamespace(
        graph=SimpleNamespace(plain_state={(1, "count"): 3}),
        optimizer=SimpleNamespace(state_after=[{}, {"exp_avg": None, "count": 3}, {}, {}]),
    )
    ledger_of(job).put_state(step, made)
    assert dict(job.optimizer.state) == {
        job.model.one.bias: {"exp_avg": made[1, "exp_avg"], "count": 3}
    }


class Averaging(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(5)], ids=["same layout", "another"])
def test_a_buffer_that_was_reassigned_gets_its_own_tensor_back(other):
    job = job_of(Averaging)
    ledger, own = ledger_of(job), job.model.mean
    made = specialization()
    made.forward = SimpleNamespace(reassigned=["mean"])
    job.model.mean = other
    ledger.put_back_buffers(made)
    if other.shape == own.shape:
        assert job.model.mean is own
        assert own.tolist() == [1.0] * 4
    else:
        assert job.model.mean is other
