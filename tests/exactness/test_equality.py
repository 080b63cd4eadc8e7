"""The promise: every job's numbers are those of the plain eager loop, alone or co-trained."""

from __future__ import annotations

import pytest

import waterflow as wf
from tests.support.differences import MEMORY, assert_same_numbers, solo
from tests.support.hugging_face import HUGGING_FACE
from tests.support.jobs import MODELS, OPTIMIZERS, OWN_STEPS, SCHEDULERS, TRAINING

pytestmark = pytest.mark.usefixtures("one_thread")

JOBS = {**MODELS, **TRAINING, **OWN_STEPS, **SCHEDULERS, **OPTIMIZERS, **HUGGING_FACE}
#: Forms of one optimizer differ in the trace only; one of each runs among the others.
FORMS = ("_foreach", "_fused", "_left", "_ones")
#: A new shape is captured beside the job's own steps unless these draw random numbers.
TOGETHER = [name for name in JOBS if not name.endswith(FORMS)]


@pytest.fixture(scope="module")
def eager():
    """Each job trained by the plain loop, once, with its report."""
    done = {}

    def trained(name):
        if name not in done:
            job = JOBS[name]()
            done[name] = job, wf.run_eager(job, threads=1)
        return done[name]

    return trained


@pytest.mark.cpu
@pytest.mark.parametrize("name", list(JOBS))
def test_solo(name, eager):
    job = JOBS[name]()
    report = solo(job)
    assert_same_numbers(*eager(name), job, report)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "part"), [("temporal", 0), ("waterwave", 1), ("waterwave-s", 2), ("flow", 3)]
)
def test_together(policy, part, eager):
    names = TOGETHER[part::4]
    jobs = {name: JOBS[name]() for name in names}
    report = wf.run(list(jobs.values()), memory="1GiB", policy=policy, threads=1)
    for name, job in jobs.items():
        assert_same_numbers(*eager(name), job, report.jobs[name])


@pytest.mark.cpu
def test_other_jobs_change_nothing_for_one_that_draws(eager):
    """Random numbers, data loaders and eager steps beside each other, in two orders."""
    names = ["noisy_shuffled", "eager", "cnn_shuffled", "radam_plain"]
    for order in (names, names[::-1]):
        jobs = {name: JOBS[name]() for name in order}
        report = wf.run(list(jobs.values()), memory=MEMORY, threads=1)
        for name, job in jobs.items():
            assert_same_numbers(*eager(name), job, report.jobs[name])
