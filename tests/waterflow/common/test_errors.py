import inspect
import pickle

import pytest

from waterflow.common import errors
from waterflow.common.errors import (
    CaptureError,
    DeviceLostError,
    RunInterrupted,
    WaterflowError,
)

pytestmark = pytest.mark.virtual

CLASSES = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if found.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", CLASSES)
def test_all_have_one_base_and_a_docstring(error):
    assert error.__doc__
    if error.__name__.endswith("Warning"):
        assert issubclass(error, UserWarning)
    elif error is RunInterrupted:
        assert issubclass(error, KeyboardInterrupt)  # ends what the run was part of
    else:
        assert issubclass(error, WaterflowError)


@pytest.mark.parametrize("error", CLASSES)
def test_they_cross_processes(error):
    back = pickle.loads(pickle.dumps(error("what was there")))
    assert type(back) is error
    assert str(back) == "what was there"


def test_those_with_a_builtin_meaning_are_caught_as_such():
    for error, builtin in (
        ("JobError", ValueError),
        ("RunOnlyError", ValueError),
        ("BudgetError", MemoryError),
        ("PlanError", RuntimeError),
        ("NonFiniteLossError", ArithmeticError),
        ("ReportError", ValueError),
    ):
        assert issubclass(getattr(errors, error), builtin)


def test_what_they_carry():
    assert CaptureError("long text", "the reason").reason == "the reason"
    assert CaptureError("long text").reason is None
    assert DeviceLostError("gone").report is None
    assert RunInterrupted("stopped").report is None
