"""Torch's own tables of operators, modules and optimizers train as the eager loop trains them.

Each case is trained both ways and compared by bits. What runs as eager Python is listed, so that
nothing stops being captured unnoticed.
"""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="torch's tables need it")

from benchmarks.coverage.suites import load
from benchmarks.coverage.trial import Kind, outcome_of

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

SHARDS = 6
#: Cases that run as eager Python, whole or in part: those of which some sample does.
OPAQUE = {
    "op_db": set(),
    "module_db": set(),
    "optim_db": set(),
}


def check(suite, names, samples=None):
    """None is refused or different, and those that are not captured are known."""
    table = load(suite) if samples is None else load(suite, samples=samples)
    found = {name: outcome_of(table.trials(name), audit="all") for name in names(table)}
    wrong = {name: str(one) for name, one in found.items() if one.kind > Kind.OPAQUE}
    assert not wrong
    opaque = {name: one.reason for name, one in found.items() if one.kind is Kind.OPAQUE}
    assert not {name: opaque[name] for name in opaque.keys() - OPAQUE[suite]}
    assert Kind.CAPTURED in {one.kind for one in found.values()}
