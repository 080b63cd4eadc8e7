"""Steps planned into limits: what one puts away the others know, and a limit that is named is
enough."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import waterflow as wf
from waterflow.common.errors import BudgetError
from waterflow.executor.device.host import HostDevice
from waterflow.executor.plan.spilled_step import spill_all, spill_step
from waterflow.executor.run.rng import JobRng
from waterflow.job.training_step import eager_step
from waterflow.models.gpt2 import Gpt2, Gpt2Config
from waterflow.partitioner.spill import LimitTooSmallError
from waterflow.steps.job_steps import JobSteps

pytestmark = pytest.mark.cpu

SHORT, LONG = 8, 24


def next_token(model, ids):
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def prepared(lengths, layers=1, width=32, sentences=8, plain=False):
    """A language model with a captured step for texts of each length."""
    torch.manual_seed(0)
    model = Gpt2(Gpt2Config(vocabulary=40, width=width, layers=layers, heads=2, positions=32))
    batches = [torch.randint(40, (sentences, length)) for length in lengths]
    job = wf.Job(
        "reader",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-3, foreach=not plain),
        loss=next_token,
        data=batches,
    )
    steps = JobSteps(job, HostDevice(), JobRng(0), 1)
    eager_step(job, batches[0])
    steps.cache.collect_persistent()
    return steps, [steps.preparer.prepare(batch).specialization for batch in batches]


class Branches(torch.nn.Module):
    """Few rows go one way, many another: steps that do not use each other's parameters."""

    def __init__(self, few, many):
        super().__init__()
        self.few, self.many = (
            torch.nn.Sequential(torch.nn.Linear(16, n), torch.nn.Linear(n, 1)) for n in (few, many)
        )

    def forward(self, rows):
        return (self.few if len(rows) < 10 else self.many)(rows)


def branching(few, many, rows):
    torch.manual_seed(0)
    model = Branches(few, many)
    batches = [torch.randn(4, 16), torch.randn(rows, 16)]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=False)
    job = wf.Job("b", model, optimizer, lambda m, b: m(b).square().mean(), batches)
    steps = JobSteps(job, HostDevice(), JobRng(0), 1)
    for batch in batches:
        eager_step(job, batch)
    steps.cache.collect_persistent()
    return steps, [steps.preparer.prepare(batch).specialization for batch in batches]


def needs(steps, specialization):
    return steps.persistent.final_bytes + specialization.steady.memory.extent


@pytest.fixture(scope="module")
def long_texts():
    steps, (specialization,) = prepared([LONG])
    origin = steps.spiller.origins[specialization]
    early, use = steps.spiller._looked_at(origin, None)
    return early, use, steps.persistent.full_bytes


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1), spare=st.integers(0, 4096))
def test_the_limit_that_is_named_is_accepted(long_texts, share, spare):
    early, use, full = long_texts

    def plan(limit):
        spilled = spill_step(early.compiled.lowered, use, full, limit, alignment=64)
        assert spilled.needs(full) <= limit
        return spilled

    limit = int(share * (full + early.memory.extent))
    enough = None
    try:
        plan(limit)
    except LimitTooSmallError as error:
        enough = error.smallest
    if enough is not None:
        assert enough > limit
        plan(enough)
        plan(enough + spare)


class Lstm(torch.nn.Module):
    """A vocabulary that is large beside the rest."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(500, 64)
        self.layers = torch.nn.LSTM(64, 64, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(64, 500)

    def forward(self, ids):
        return self.head(self.layers(self.words(ids))[0])


def test_gaps_between_a_few_large_values_do_not_end_the_search_for_a_plan():
    torch.manual_seed(0)
    model, batch = Lstm(), torch.randint(500, (4, 9))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    job = wf.Job("a", model, optimizer, next_token, [batch])
    steps = JobSteps(job, HostDevice(), JobRng(0), 1)
    eager_step(job, batch)
    steps.cache.collect_persistent()
    origin = steps.spiller.origins[steps.preparer.prepare(batch).specialization]
    early, use = steps.spiller._looked_at(origin, None)
    full, lowered = steps.persistent.full_bytes, early.compiled.lowered
    everything = spill_all(lowered, use, full, alignment=64)
    limit = int((full + early.memory.extent) * 0.44)
    assert everything.needs(full) < limit
    planned = spill_step(lowered, use, full, limit, alignment=64)
    assert planned.needs(full) <= limit
    assert planned.moved_bytes < everything.moved_bytes / 2


@pytest.mark.parametrize("lengths", [(SHORT, LONG), (LONG, SHORT)])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.4])
def test_every_step_knows_what_others_have_put_away(lengths, share):
    steps, specializations = prepared(lengths)
    limit = int(max(needs(steps, one) for one in specializations) * share)
    steps.spiller.set_limit(limit)
    assert steps.spiller.problem is None
    away = steps.persistent.away
    assert away
    for one in specializations:
        step = one.steady
        assert needs(steps, one) <= limit
        assert step.spill is not None, "its inputs are not where it looks for them"
        known = {meaning for inputs in step.spill.away.values() for meaning in inputs}
        use = steps.spiller.origins[one].use
        used = {meaning for inputs in use.inputs.values() for meaning in inputs}
        assert away & used <= known


def test_planned_steps_go_with_their_job_and_wait_for_no_collection():
    gc.collect()
    gc.disable()
    try:
        steps, (specialization,) = prepared([LONG])
        steps.spiller.set_limit(needs(steps, specialization) // 2)
        planned = specialization.steady
        assert planned.spill is not None
        origin = steps.spiller.origins[specialization]
        gone = [weakref.ref(one) for one in (planned, planned.planned_from, origin)]
        del steps, specialization, planned, origin
        assert not any(one() for one in gone)
    finally:
        gc.enable()


@pytest.mark.parametrize("lengths", [(SHORT, LONG), (LONG, SHORT)])
def test_one_step_that_fits_does_not_hide_another_that_cannot(lengths):
    steps, _ = prepared(lengths)
    spiller = steps.spiller
    spiller.set_limit(1 << 10)
    assert isinstance(spiller.problem, BudgetError)
    smallest = [spiller._smallest(origin, None) for origin in spiller.origins.values()]
    assert steps.smallest_limit() == max(smallest)
    spiller.set_limit((min(smallest) + max(smallest)) // 2)
    assert isinstance(spiller.problem, BudgetError)
    enough = int(str(spiller.problem).split("takes ")[1].split(" ")[0])
    spiller.set_limit(enough)
    assert spiller.problem is None
    spiller.set_limit(None)
    assert spiller.problem is None
    assert not steps.persistent.away


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 32), min_size=1, max_size=3, unique=True),
    layers=st.integers(1, 2),
    width=st.sampled_from([8, 16, 40]),
    sentences=st.integers(1, 6),
    plain=st.booleans(),
    share=st.floats(0, 1),
)
def test_the_limit_that_is_named_is_enough_for_all_steps(
    lengths, layers, width, sentences, plain, share
):
    steps, _ = prepared(lengths, layers, width, sentences, plain)
    spiller = steps.spiller
    enough = steps.smallest_limit()
    for limit in (int(share * enough), enough - 1):  # what was away before is no help
        spiller.set_limit(limit)
        if spiller.problem is not None:
            assert f"takes {enough} bytes" in str(spiller.problem)
    for limit in (enough, enough + 64, enough):
        spiller.set_limit(limit)
        assert spiller.problem is None
        assert max(needs(steps, one) for one in spiller.origins) <= limit


@settings(max_examples=12, deadline=None)
@given(
    few=st.sampled_from([8, 64, 256]),
    many=st.sampled_from([8, 64, 256]),
    rows=st.integers(10, 100),
    share=st.floats(0.05, 1),
)
@example(few=64, many=64, rows=60, share=0.4)
def test_a_limit_is_enough_without_what_others_put_away(few, many, rows, share):
    steps, specializations = branching(few, many, rows)
    spiller = steps.spiller
    most = max(needs(steps, one) for one in specializations)
    spiller.set_limit(int(most * share))
    if spiller.problem is not None:
        enough = int(str(spiller.problem).split("takes ")[1].split(" ")[0])
        assert enough == steps.smallest_limit()
        spiller.set_limit(enough)
        assert spiller.problem is None
        assert max(needs(steps, one) for one in specializations) <= enough
