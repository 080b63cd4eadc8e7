"""Who has how much memory where there is too little for all, learnt by trying (AntMan, 3.3).

Jobs that live from what others leave have nobody to say who needs memory most. So memory goes to
whom it helps most: part of one job's is given to another, all are watched for a while, and what all
do together tells whether it stays so. The exchange that promises most, by what was seen of both
jobs so far, is tried first; once none of a size is worth it, smaller ones are tried, until those do
not matter either. The smallest part that counts ends it, so it takes a bounded number of trials.

Pure functions: the engine asks them with speeds that it has measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

#: An exchange has to bring so much more of what all do together, twice: less is noise.
MARGIN = 0.04
#: Parts of what can be shared that are exchanged first, and at last.
_FIRST_PART, _LAST_PART = 4, 16


class Holder(NamedTuple):
    """A job that is to share memory with others.

    Attributes:
        least: bytes below which it cannot be planned.
        most: bytes beyond which more is of no use to it.
        weight: what its speed counts beside the others'.
    """

    least: int
    most: int
    weight: float = 1.0


class MemoryShares(NamedTuple):
    """What is known of jobs that share memory.

    Attributes:
        holders: the jobs.
        limits: the bytes of each that are to be tried now, or to be kept where `is_settled`.
        part: bytes of an exchange.
        seen: of each job the limits it has had, with its speed there, relative to its first one.
        best: the limits that have brought most so far, and how much.
        brought: what they brought: the weighted sum of relative speeds; 0 before the first trial.
        first: the speeds at the first trial; none before.
        tried: exchanges (from, to) that were not worth it, from `best` and by this part.
        exchange: the one that `limits` are; None where they are no exchange.
        hoped: what they brought the first time, where they are tried once more; else 0.
    """

    holders: tuple[Holder, ...]
    limits: tuple[int, ...]
    part: int
    last_part: int
    seen: tuple[dict[int, float], ...]
    best: tuple[int, ...]
    brought: float = 0.0
    first: tuple[float, ...] = ()
    tried: frozenset[tuple[int, int]] = frozenset()
    exchange: tuple[int, int] | None = None
    hoped: float = 0.0
    is_settled: bool = False


def begin_sharing(holders: Sequence[Holder], memory: int) -> MemoryShares | None:
    """The first limits to try: what there is beyond the least is shared by what jobs could use.

    Args:
        holders: the jobs, at least one.
        memory: bytes for all of them.

    Returns:
        None where not even the least of all fits.
    """
    spare = memory - sum(holder.least for holder in holders)
    if spare < 0:
        return None
    wanted = sum(holder.most - holder.least for holder in holders)
    share = min(1.0, spare / wanted) if wanted else 0.0
    limits = tuple(h.least + int((h.most - h.least) * share) for h in holders)
    part, last = max(1, spare // _FIRST_PART), max(1, spare // _LAST_PART)
    seen: tuple[dict[int, float], ...] = tuple({} for _ in holders)
    return MemoryShares(tuple(holders), limits, part, last, seen, limits)


def next_shares(shares: MemoryShares, speeds: Sequence[float]) -> MemoryShares:
    """The shares after the limits have been tried.

    Args:
        shares: those that were tried.
        speeds: what each job did, in steps a second.
    """
    if shares.is_settled:
        return shares
    first = shares.first or tuple(max(speed, 1e-9) for speed in speeds)
    relative = [speed / one for speed, one in zip(speeds, first, strict=True)]
    seen = tuple(
        {**known, limit: speed}
        for known, limit, speed in zip(shares.seen, shares.limits, relative, strict=True)
    )
    brought = sum(h.weight * speed for h, speed in zip(shares.holders, relative, strict=True))
    after = shares._replace(first=first, seen=seen, hoped=0.0)
    if shares.exchange is not None and brought > shares.brought * (1 + MARGIN):
        if not shares.hoped:
            return after._replace(hoped=brought)  # once more, as it may have been chance
        brought = min(brought, shares.hoped)
    if brought > shares.brought * (1 + MARGIN):
        after = after._replace(best=shares.limits, brought=brought, tried=frozenset())
    elif shares.exchange is not None:
        after = after._replace(tried=shares.tried | {shares.exchange})
    return _next_exchange(after)


def without(shares: MemoryShares, place: int, limit: int) -> MemoryShares:
    """The shares where a job could not be planned into the limit that was to be tried."""
    holder = shares.holders[place]
    holders = list(shares.holders)
    holders[place] = holder._replace(least=min(holder.most, limit + 1))
    after = shares._replace(holders=tuple(holders))
    if shares.exchange is None:  # not even what all begin with
        return after._replace(is_settled=True)
    return _next_exchange(after._replace(tried=shares.tried | {shares.exchange}))


def _next_exchange(shares: MemoryShares) -> MemoryShares:
    """The exchange to try next, or none any more."""
    while True:
        found = [
            (_promise(shares, giver, taker), giver, taker)
            for giver in range(len(shares.holders))
            for taker in range(len(shares.holders))
            if giver != taker and (giver, taker) not in shares.tried
            if _exchanged(shares, giver, taker) != shares.best
        ]
        if found:
            _, giver, taker = max(found, key=lambda one: one[0])
            limits = _exchanged(shares, giver, taker)
            return shares._replace(limits=limits, exchange=(giver, taker))
        if shares.part <= shares.last_part:
            return shares._replace(limits=shares.best, exchange=None, is_settled=True)
        part = max(shares.last_part, shares.part // 2)
        shares = shares._replace(part=part, tried=frozenset())


def _exchanged(shares: MemoryShares, giver: int, taker: int) -> tuple[int, ...]:
    """The best limits so far with a part of one job's memory given to another, as far as the one
    can spare it and the other use it."""
    limits = list(shares.best)
    can_spare = limits[giver] - shares.holders[giver].least
    can_use = shares.holders[taker].most - limits[taker]
    part = max(0, min(shares.part, can_spare, can_use))
    limits[giver] -= part
    limits[taker] += part
    return tuple(limits)


def _promise(shares: MemoryShares, giver: int, taker: int) -> float:
    """What an exchange brings by what was seen; what was not seen is hoped for the best."""
    limits = _exchanged(shares, giver, taker)
    gain = _change(shares, taker, limits[taker])
    loss = _change(shares, giver, limits[giver])
    return (math.inf if gain is None else gain) + (0.0 if loss is None else loss)


def _change(shares: MemoryShares, place: int, limit: int) -> float | None:
    """By how much a job's weighted speed changes from the best limits to another one of its own,
    on straight lines between what was seen; None where nothing was seen on that side."""
    seen, now = shares.seen[place], shares.best[place]
    beyond = [one for one in seen if (one > now) == (limit > now) and one != now]
    if now not in seen or not beyond:
        return None
    near = min(beyond, key=lambda one: abs(one - limit))
    slope = (seen[near] - seen[now]) / (near - now)
    return shares.holders[place].weight * slope * (limit - now)
