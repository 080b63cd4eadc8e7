"""What holds for every model of the zoo: its size, that it learns, and learns together as alone."""

import pytest
import torch

import waterflow as wf
from tests.support.differences import MEMORY, assert_same_numbers
from tests.support.tables import thinned
from waterflow.models.zoo import FULL, SMALL, TASKS

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

#: As the papers, or the public implementations, count them.
PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "inception_v3": 27_161_264,
    "nasnet_mobile": 5_289_978,
    "vgg16": 138_357_544,
    "bert_base": 109_514_298,
    "gpt2": 124_439_808,
    "tacotron2": 28_193_153,
    "lstm_lm": 19_780_400,
    "vae": 652_824,
    "espcn": 22_729,
    "gcn": 1_433 * 16 + 16 * 7,
    "deepfm": 39_000 * 11 + 391 * 400 + 2 * 401 * 400 + 401,
}

#: By how much thirty steps lower the loss at least, and the rate of learning where the usual one
#: is for millions of parameters or steps.
LEARNING = {
    "resnet50_small": (0.2, None),
    "resnet152_small": (0.2, None),
    "inception_v3_small": (0.2, None),
    "nasnet_mobile_small": (0.5, None),
    "vgg16_small": (0.75, None),
    "bert_base_small": (0.3, 0.01),
    "gpt2_small": (0.3, 0.01),
    "tacotron2_small": (0.85, 0.03),
    "lstm_lm_small": (0.9, None),
    "vae_small": (0.8, None),
    "espcn_small": (0.6, None),
    "gcn_small": (0.7, 0.03),
    "deepfm_small": (0.3, 0.01),
}

each_small_task = pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)


def job(task, name="alone", batches=3, epochs=1, rate=None):
    """Equal jobs, but for the name; a graph needs more nodes than others need samples."""
    torch.manual_seed(3)
    model = task.model()
    data = [task.batch(20 if task.unit == "nodes" else 4) for _ in range(batches)]
    optimizer = task.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if rate is None else rate
    return wf.Job(
        name, model=model, optimizer=optimizer, loss=task.loss, data=data, epochs=epochs, seed=5
    )


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_parameters(task):
    with torch.device("meta"):
        model = task.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == task.parameters


def test_parameters_are_those_of_the_papers():
    assert {task.name: task.parameters for task in FULL} == PARAMETERS


@each_small_task
def test_thirty_steps_lower_the_loss(task):
    share, rate = LEARNING[task.name]
    losses = wf.run_eager(job(task, batches=1, epochs=30, rate=rate), threads=1).losses
    assert sum(losses[-3:]) < share * sum(losses[:3])


#: They take long, with operators that others have as well.
LONG = ("inception_v3_small", "resnet152_small", "vgg16_small")


@pytest.mark.parametrize(
    "task",
    thinned(SMALL, [task for task in SMALL if task.name not in LONG]),
    ids=lambda task: task.name,
)
def test_co_trained_as_alone(task):
    alone = job(task)
    expected = wf.run_eager(alone, threads=1)
    jobs = [job(task, name) for name in ("one", "two")]
    report = wf.run(jobs, memory=MEMORY, threads=1)
    assert len(expected.losses) == 3
    for each in jobs:
        assert_same_numbers(alone, expected, each, report.jobs[each.name])
        assert report.jobs[each.name].captured == "captured", report.jobs[each.name].notes
