"""What the prepared types say of themselves."""

from types import SimpleNamespace

import pytest

from waterflow.steps.prepared import PreparedStep, Specialization

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize(
    ("optimizer", "outputs", "creates"),
    [(object(), {"exp_avg": None}, True), (object(), {}, False), (None, {"gradient": None}, False)],
)
def test_a_first_step_is_one_whose_outputs_are_state(optimizer, outputs, creates):
    step = PreparedStep(SimpleNamespace(outputs=outputs), None, optimizer)
    assert step.creates_state is creates


def test_the_steps_of_a_specialization_are_those_there_are():
    first, steady = object(), object()
    assert Specialization(None, None).steps == []
    assert Specialization(None, None, steady=steady).steps == [steady]
    assert Specialization(None, None, first, steady).steps == [first, steady]
