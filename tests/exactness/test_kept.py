"""A job that reads a capture from disk would have captured the same, whatever its Python does."""

from __future__ import annotations

import pytest

from tests.exactness.cases import CASES
from tests.exactness.test_shares import words
from tests.support.kept_captures import counting
from tests.support.steps import first_batch, steps_of
from waterflow.common.errors import CaptureError
from waterflow.job.batch import flatten
from waterflow.steps.trials import TrialNeeded

pytestmark = [pytest.mark.cpu, pytest.mark.soak, pytest.mark.usefixtures("one_thread")]


def built(subject, keeps):
    """The graphs of a job's steps, in words; None where nobody can capture them. They are kept on
    disk as if each had been checked."""
    steps = steps_of(subject.job, keeps_captures=keeps)
    try:
        made = steps.builder.build(flatten(first_batch(subject.job)))
    except (CaptureError, TrialNeeded, RuntimeError, TypeError, AttributeError):
        return None
    made.checked.update(made.steps)
    steps.builder.disk.note_checked(made)
    return [[*words(step.graph.graph)] for step in made.steps], made.forward.reassigned


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_capture_is_read_by_nobody_who_would_have_another(name, live, monkeypatch, tmp_path):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path))
    case = CASES[name]
    with case.around(), counting() as traces:
        built(case.fresh(not live), True)
        before = len(traces)
        found = built(case.fresh(live), True)
        if len(traces) > before or found is None:
            return
        own, again = (built(case.fresh(live), False) for _ in range(2))
    assert found == own or own != again  # the first check finds steps that never repeat
