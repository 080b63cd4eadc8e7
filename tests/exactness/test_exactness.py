"""Whatever the user's Python does between and inside the steps, numbers are the plain loop's."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

import waterflow as wf
from tests.exactness.case import STEPS, Case, Subject, bits, differences, filler, outcome_of
from tests.exactness.cases import CASES
from tests.support.differences import MEMORY

POLICIES = ("flow", "waterwave", "waterwave-s", "temporal")
NAMES = list(CASES)
#: The ordinary run tries each case under one policy; neighbours in the table under different ones.
TURN = [(name, POLICIES[number % 4]) for number, name in enumerate(NAMES)]
REST = [(name, policy) for name in NAMES for policy in POLICIES if (name, policy) not in TURN]

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("one_thread"),
]


def plain(case: Case, live: bool = True) -> tuple[Subject, wf.JobReport, dict[str, Any]]:
    """The job trained by the plain loop, and what it leaves behind."""
    with case.around():
        subject = case.fresh(live)
        try:
            report = wf.run_eager(subject.job, threads=1)
        except Exception as error:
            kind = type(error).__name__
            report = wf.JobReport(name=subject.job.name, state="failed", error_type=kind)
    return subject, report, outcome_of(subject, report)


@functools.cache
def expected_of(name: str) -> tuple[wf.JobReport, dict[str, Any]]:
    _, report, left = plain(CASES[name])
    return report, left


@functools.cache
def filler_losses(name: str, steps: int) -> Any:
    """The losses of the job beside, which is alone here but in the same context."""
    with CASES[name].around():
        return bits(wf.run_eager(filler(steps), threads=1).losses)


def check(name: str, policy: str, graphs: bool = True) -> None:
    """Runs a case beside another job, and compares both with what the plain loop leaves behind."""
    case = CASES[name]
    expected, left = expected_of(name)
    with case.around():
        subject = case.fresh()
        if not graphs:
            subject.job.capture = False
        others = [] if case.alone else [filler(expected.steps)]
        done = wf.run([subject.job, *others], memory=MEMORY, policy=policy, threads=1)
    report = done.jobs["case"]
    why = f"{report.captured}: {report.error or report.notes}"
    if "refused" in case.expected and graphs:
        assert (report.state, report.error_type) == ("failed", "CaptureError"), why
        return
    found = outcome_of(subject, report)
    assert differences(comparable(case, left), comparable(case, found)) == [], why
    if graphs:
        assert became(report) in case.expected, why
    if not case.alone:
        beside = done.jobs["filler"]
        assert bits(beside.losses) == filler_losses(name, expected.steps), beside.error


def comparable(case: Case, left: dict[str, Any]) -> dict[str, Any]:
    """What must be equal: nothing but the end where numbers cannot be, no losses after an error."""
    if not case.repeats:
        return {name: left[name] for name in ("the end", "extra")}
    if "fails" in case.expected:
        return {name: value for name, value in left.items() if not name.startswith("loss")}
    return left


def became(report: wf.JobReport) -> str:
    """Which of the outcomes a report tells of."""
    if report.state == "failed":
        return "fails"
    if report.captured == "opaque step":
        return "opaque"
    if report.captured != "captured":
        return report.captured
    return "recaptured" if report.recaptures else "captured"


@pytest.mark.parametrize(("name", "policy"), TURN, ids=NAMES)
def test_numbers_are_those_of_the_plain_loop(name, policy):
    check(name, policy)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "policy"), REST)
def test_numbers_are_those_of_the_plain_loop_under_every_policy(name, policy):
    check(name, policy)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "policy"), TURN, ids=NAMES)
def test_numbers_are_those_of_the_plain_loop_without_a_graph(name, policy):
    """What an opaque step rests on: the user's own Python, run by the engine."""
    check(name, policy, graphs=False)


@pytest.mark.soak  # a test of the table, not of the product
@pytest.mark.parametrize("name", NAMES)
def test_the_case_has_a_point(name):
    """The plain loop repeats itself, trains long enough, and gives other numbers without it."""
    case = CASES[name]
    report, left = expected_of(name)
    if case.repeats:
        assert differences(left, plain(case)[2]) == []
    if "fails" in case.expected:
        assert report.state == "failed"
        return
    if "refused" in case.expected:
        return
    assert report.steps >= STEPS
    if case.matters:
        assert differences(left, plain(case, live=False)[2]) != []


#: Whose user has asked for that, one whose note names an object that has no line, and two of whose
#: threads is known that their state is another, not by whom.
_NO_LINE = {
    *("wants_no_graph", "scripted_with_a_branch"),
    *("default_device_moved_by_the_loss", "default_device_moved_by_the_optimizer"),
}
OPAQUE = [n for n in NAMES if CASES[n].expected == ("opaque",) and n not in _NO_LINE]


@pytest.mark.parametrize("name", OPAQUE[::10])
def test_an_opaque_step_says_where(name):
    """The report names a file and a line, for every tenth of the cases that cannot be captured."""
    with CASES[name].around():
        subject = CASES[name].fresh()
        report = wf.run([subject.job], memory=MEMORY, threads=1).jobs["case"]
    assert any(re.search(r"\w+\.py\W+(line )?\d+", note) for note in report.notes), report.notes
