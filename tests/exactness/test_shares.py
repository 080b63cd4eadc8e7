"""A job that is given another's capture would have captured the same, whatever its Python does."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
from torch import fx

from tests.exactness.cases import CASES
from tests.support.steps import first_batch, steps_of
from waterflow.common.errors import CaptureError
from waterflow.job.batch import flatten
from waterflow.job.training_step import eager_step
from waterflow.steps.shared_captures import SharedCaptures
from waterflow.steps.trials import TrialNeeded

pytestmark = [pytest.mark.cpu, pytest.mark.soak, pytest.mark.usefixtures("one_thread")]


def words(graph: fx.Graph) -> Iterator[str]:
    """What a graph computes from what; parts of results that nobody takes have no order."""
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and not node.users:
            continue
        names[node] = f"%{len(names)}"
        arguments = fx.map_arg((node.args, node.kwargs), names.__getitem__)
        yield f"{node.meta.get('input', node.target)} {arguments!r}"


def built(subject, captures):
    """The graphs of a job's steps, in words, and who has captured them; None where nobody can."""
    steps = steps_of(subject.job, captures=captures)
    try:
        if subject.job.step is not None:  # its first one makes what a graph finds
            eager_step(subject.job, first_batch(subject.job))
            steps.cache.collect_persistent()
        made = steps.builder.build(flatten(first_batch(subject.job)))
    except (CaptureError, TrialNeeded, RuntimeError, TypeError, AttributeError):
        return None, None
    found = [[*words(step.graph.graph)] for step in made.steps]
    return (found, made.forward.reassigned), steps.builder.shared_with


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_capture_is_given_to_nobody_who_would_have_another(name, live):
    case, captures = CASES[name], SharedCaptures()
    with case.around():
        built(case.fresh(not live), captures)
        given, owner = built(case.fresh(live), captures)
        if owner is None:
            return
        own, again = (built(case.fresh(live), SharedCaptures())[0] for _ in range(2))
    assert given == own or own != again  # the first check finds steps that never repeat
