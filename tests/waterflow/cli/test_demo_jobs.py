import pytest
import torch

from waterflow.cli.demo_jobs import Size, Transformer, make_tasks

pytest.importorskip("sklearn")
pytestmark = pytest.mark.cpu

SMALL = Size(
    trials=((0.3, 4), (0.1, 5)),
    digits_batch=352,
    text_batch=4,
    text_steps=3,
    text_letters=20_000,
    text_width=16,
)


def test_every_call_makes_the_same_jobs_anew():
    tasks, again = make_tasks(SMALL), make_tasks(SMALL)
    assert [task.job.name for task in tasks] == [task.job.name for task in again]
    assert len({task.job.name for task in tasks}) == 3
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


def test_the_transformer_does_not_look_ahead():
    torch.manual_seed(0)
    model = Transformer(16).eval()
    letters = torch.randint(128, (1, 64))
    changed = letters.clone()
    changed[0, 40:] = 0
    with torch.no_grad():
        one, other = model(letters), model(changed)
    torch.testing.assert_close(one[:, :40], other[:, :40])
    assert not torch.equal(one[:, 41:], other[:, 41:])
