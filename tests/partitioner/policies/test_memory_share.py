"""Memory goes to whom it helps most: never below the least, within the budget, to an end."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterflow.partitioner.policies.memory_share import (
    MARGIN,
    Holder,
    MemoryShares,
    begin_sharing,
    next_shares,
    without,
)

pytestmark = pytest.mark.virtual

Speed = Callable[[int, int], float]  # of a job at a limit

holders = st.lists(
    st.builds(
        lambda least, more, weight: Holder(least, least + more, weight),
        st.integers(1, 1000),
        st.integers(0, 5000),
        st.sampled_from([1.0, 1.0, 0.5, 3.0]),
    ),
    min_size=1,
    max_size=5,
)


def checked(shares: MemoryShares, memory: int) -> MemoryShares:
    assert sum(shares.limits) <= memory
    for limit, holder in zip(shares.limits, shares.holders, strict=True):
        assert holder.least <= limit <= holder.most
    return shares


def settled(shares: MemoryShares, memory: int, speed: Speed) -> tuple[MemoryShares, int]:
    """After all trials; and how many there were."""
    for trial in range(400):
        if shares.is_settled:
            return shares, trial
        speeds = [speed(place, limit) for place, limit in enumerate(shares.limits)]
        shares = checked(next_shares(shares, speeds), memory)
    raise AssertionError("it goes on for ever")


def gain_of(shares: MemoryShares, limits: tuple[int, ...], speed: Speed) -> float:
    """What all do together, as the rule counts it."""
    speeds = [speed(place, limit) for place, limit in enumerate(limits)]
    relative = [now / first for now, first in zip(speeds, shares.first, strict=True)]
    return sum(h.weight * one for h, one in zip(shares.holders, relative, strict=True))


@given(
    holders=holders, share=st.floats(0.0, 1.2), powers=st.lists(st.floats(0.05, 1.0), min_size=5)
)
def test_in_the_end_no_exchange_is_worth_it(
    holders: list[Holder], share: float, powers: list[float]
) -> None:
    """Whoever gains most has it: of speeds that rise less and less no part helps another more."""

    def speed(place: int, limit: int) -> float:
        return float((limit / holders[place].most) ** powers[place])

    least = sum(holder.least for holder in holders)
    memory = least + int(share * sum(holder.most - holder.least for holder in holders))
    shares = begin_sharing(holders, memory)
    assert shares is not None
    shares, trials = settled(checked(shares, memory), memory, speed)
    assert trials <= 200
    before = gain_of(shares, shares.limits, speed)
    assert before >= sum(holder.weight for holder in holders) * (
        1 - 1e-9
    )  # not worse than at first
    for giver, taker in itertools.permutations(range(len(holders)), 2):
        part = min(
            shares.last_part,
            shares.limits[giver] - holders[giver].least,
            holders[taker].most - shares.limits[taker],
        )
        limits = list(shares.limits)
        limits[giver] -= part
        limits[taker] += part
        assert gain_of(shares, tuple(limits), speed) <= before * (1 + MARGIN) + 1e-9


def test_memory_goes_to_whom_it_helps() -> None:
    """One job is as fast on a fifth of its memory, the other needs all: AntMan's Figure 10."""

    def speed(place: int, limit: int) -> float:
        return 10.0 if place == 0 else limit / 100

    shares = begin_sharing([Holder(200, 1000), Holder(200, 1000)], 1200)
    assert shares is not None
    assert shares.limits == (600, 600)
    shares, trials = settled(shares, 1200, speed)
    assert shares.limits == (200, 1000)
    assert trials < 16


@given(holders=holders, spare=st.integers(0, 20_000), seed=st.integers(0, 2**32 - 1))
def test_whatever_is_measured_it_keeps_to_the_limits_and_ends(
    holders: list[Holder], spare: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    memory = sum(holder.least for holder in holders) + spare
    shares = begin_sharing(holders, memory)
    assert shares is not None
    for _ in range(60):
        shares = checked(next_shares(shares, random.uniform(0.0, 2.0, len(holders))), memory)
    settled(shares, memory, lambda *_: 1.0)


@given(seed=st.integers(0, 2**32 - 1))
def test_noise_moves_little(seed: int) -> None:
    """Equal jobs whose speeds do not depend on memory: what was seen by chance moves nothing."""
    random = np.random.default_rng(seed)
    shares = begin_sharing([Holder(100, 1000)] * 3, 1500)
    assert shares is not None
    after, _ = settled(shares, 1500, lambda *_: 1.0 + random.normal(0.0, 0.005))
    assert after.limits == shares.limits


def test_a_limit_that_cannot_be_planned_is_not_tried_again() -> None:
    shares = begin_sharing([Holder(100, 1000), Holder(100, 1000)], 1000)
    assert shares is not None
    shares = next_shares(shares, [1.0, 1.0])
    giver, _ = shares.exchange or (0, 0)
    refused = shares.limits[giver]
    shares = without(shares, giver, refused)
    assert shares.holders[giver].least == refused + 1
    shares, _ = settled(shares, 1000, lambda place, limit: 1.0 + limit * (place != giver))
    assert shares.limits[giver] > refused


def test_what_does_not_fit_is_not_shared() -> None:
    assert begin_sharing([Holder(100, 200), Holder(100, 200)], 199) is None
