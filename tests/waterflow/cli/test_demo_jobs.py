import pytest
import torch

from waterflow.cli.demo_jobs import Size, make_tasks

pytest.importorskip("sklearn")
pytestmark = pytest.mark.cpu

SMALL = Size(rates=(0.01, 0.001), batch=352, width=16)


def test_every_call_makes_the_same_jobs_anew():
    tasks, again = make_tasks(SMALL), make_tasks(SMALL)
    assert [task.job.name for task in tasks] == [task.job.name for task in again]
    assert len({task.job.name for task in tasks}) == 6
    for task, other in zip(tasks, again, strict=True):
        one, two = task.job.model.state_dict(), other.job.model.state_dict()
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert task.job.model is not other.job.model


def test_making_them_leaves_the_callers_randomness_alone():
    before = torch.get_rng_state()
    make_tasks(SMALL)
    assert torch.equal(torch.get_rng_state(), before)


def test_accuracy_is_of_data_not_trained_on_and_leaves_the_mode():
    for task in make_tasks(SMALL):
        task.job.model.train()
        assert 0 <= task.accuracy() <= 1
        assert task.job.model.training
        assert task.accuracy() == task.accuracy()  # without dropout
