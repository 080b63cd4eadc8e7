"""For tests of policies: literal profiles, random ones, and the contract every policy must pass.

Needs hypothesis, which waterflow itself does not install. Use it on a policy of your own::

    @given(jobs=plan_jobs(), lanes=st.integers(1, 4), headroom=st.floats(0, 4))
    def test_contract(jobs, lanes, headroom):
        check_contract(MyPolicy(), jobs, lanes, headroom)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from waterflow.common.errors import BudgetError
from waterflow.partitioner.oracle import verify
from waterflow.partitioner.policies.base import PlanJob, Policy, temporal_need
from waterflow.partitioner.profile import EVENT, Profile
from waterflow.partitioner.schedule import Schedule


def step_profile(
    nodes: Sequence[Sequence[int]],
    *,
    seconds: Sequence[float] | None = None,
    persistent: int = 0,
    name: str = "",
) -> Profile:
    """A profile from what each node does: 8 allocates 8 bytes, -8 frees the last block of 8.

    ``[[4], [8], [2, -2, -8], [-4]]`` rises to 14 in its third node. ``seconds`` are zeros unless
    given; ValueError when a free has no block.
    """
    live: list[tuple[int, int]] = []  # (bytes, id)
    events: list[tuple[int, int, int]] = []
    blocks = 0
    for node, changes in enumerate(nodes):
        for change in changes:
            if change > 0:
                live.append((change, blocks))
                blocks += 1
            found = [at for at, block in enumerate(live) if block[0] == abs(change)]
            if not found:
                raise ValueError(f"node {node} frees {-change} bytes, live are {live}")
            events.append((node, change, live[found[-1]][1]))
            if change < 0:
                live.pop(found[-1])
    times = np.zeros(len(nodes)) if seconds is None else np.asarray(seconds)
    return Profile(np.array(events, dtype=EVENT), times, persistent, "fake", name)


def triangle(
    half: int, size: int = 1, *, node_seconds: float = 1.0, persistent: int = 0, name: str = ""
) -> Profile:
    """A step of ``half`` nodes that allocate ``size`` bytes each, and as many that free them."""
    nodes = [[size]] * half + [[-size]] * half
    return step_profile(
        nodes, seconds=[node_seconds] * (2 * half), persistent=persistent, name=name
    )


@st.composite
def rising_and_falling(draw: st.DrawFn) -> list[list[int]]:
    """Nodes of a step as training has them: temporaries, a rise, a fall, at times survivors."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
    temporary = draw(st.integers(0, 40))
    kept = draw(st.integers(0, len(sizes))) if draw(st.booleans()) else 0
    passing = [temporary, -temporary] if temporary else []
    rise = [[*passing, size] for size in sizes]
    fall = [[*passing, -size] for size in sizes[kept:][::-1]]
    return rise + fall


@st.composite
def any_shape(draw: st.DrawFn) -> list[list[int]]:
    """Nodes that allocate and free in any order."""
    nodes: list[list[int]] = []
    live: list[int] = []
    for changes in draw(st.lists(st.lists(st.integers(-20, 60), max_size=4), min_size=1)):
        node = []
        for change in changes:
            if change > 0:
                live.append(change)
                node.append(change)
            elif live:
                node.append(-live.pop(-change % len(live)))
        nodes.append(node)
    return nodes


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Random profiles of both kinds, with and without times."""
    nodes = draw(st.one_of(rising_and_falling(), any_shape()))
    pattern = draw(st.lists(st.sampled_from([1e-6, 1e-4, 0.01]), min_size=1, max_size=4))
    if draw(st.booleans()):
        pattern = [0.0]
    seconds = np.resize(np.array(pattern), len(nodes)).tolist()
    return step_profile(nodes, seconds=seconds, persistent=draw(st.integers(0, 100)))


@st.composite
def plan_jobs(draw: st.DrawFn, max_jobs: int = 6) -> list[PlanJob]:
    """One to ``max_jobs`` random jobs, some with a known boundary."""
    jobs = []
    for number in range(draw(st.integers(1, max_jobs))):
        profile = draw(profiles())
        boundary = draw(st.one_of(st.none(), st.integers(0, profile.num_nodes)))
        jobs.append(PlanJob(f"job-{number}", profile, boundary))
    return jobs


def check_contract(
    policy: Policy, jobs: Sequence[PlanJob], lanes: int, headroom: float
) -> Schedule:
    """Hold a policy to ``Policy``'s contract and return its schedule.

    The budget is what the jobs need one after another, enlarged by ``headroom`` times their largest
    peak. Raises PlanError or AssertionError.
    """
    own = [job.profile for job in jobs]
    need = temporal_need(own)
    budget = need + int(headroom * max(profile.transient_peak_bytes for profile in own))
    schedule = policy.schedule(jobs, budget, lanes)
    verify(schedule, own, budget)
    assert schedule.lanes == lanes
    assert schedule.policy == policy.name
    assert policy.schedule(list(jobs), budget, lanes) == schedule, "two calls, two schedules"
    refusal = ""
    try:
        policy.schedule(jobs, need - 1, lanes)
    except BudgetError as error:
        refusal = str(error)
    assert str(need) in refusal, f"{policy.name} did not say that the jobs need {need} bytes"
    assert all(job.name in refusal for job in jobs)
    return schedule
