"""Node groups: contiguous runs of a step's nodes, the unit that a policy schedules.

Requires a profile; ensures that every node lies in exactly one group, groups are in execution
order and none is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from waterflow.partitioner.profile import Profile, node_times

FLOW_SHARE = 1 / 48
"""By how much of the peak a group of the policy `flow` changes the live bytes."""

FLOW_SECONDS = 100e-6
"""How long a group of the policy `flow` lasts at least."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes ``start`` up to but not including ``stop``, and what they do to memory.

    ``net_bytes`` is what is live after the group less what was live before; ``growth_bytes`` how
    far the live bytes rise above their start while it runs (never below 0). ``seconds`` is 0.0
    when unknown.
    """

    start: int
    stop: int
    net_bytes: int
    growth_bytes: int
    seconds: float

    @property
    def allocates(self) -> bool:
        """True for an allocation group (ANG), False for a deallocation group (DNG)."""
        return self.net_bytes > 0


def partition(profile: Profile, split_size: int) -> tuple[NodeGroup, ...]:
    """Cut a step where allocations or frees add up to ``split_size`` bytes (Waterwave, 4.4).

    There is always a cut after the node that reaches the peak, so that a rising series of groups
    is followed by a falling one. Raises ValueError when ``split_size`` is below 1.
    """
    if split_size < 1:
        raise ValueError(f"split_size must be at least 1 byte, it is {split_size}")
    cuts: list[int] = []
    total = 0
    peak_node = profile.peak_node
    for node, net in enumerate(profile.node_net().tolist()):
        total += net
        if abs(total) >= split_size or node == peak_node:
            cuts.append(node + 1)
            total = 0
    return cut_at(profile, cuts)


def cut_at(profile: Profile, nodes: Iterable[int]) -> tuple[NodeGroup, ...]:
    """Groups that begin at node 0 and at each of ``nodes``; the ends of the step cut nothing.

    Raises ValueError for a node outside the step.
    """
    size = profile.num_nodes
    cuts = sorted({0, *nodes})
    if cuts[0] < 0 or cuts[-1] > size:
        raise ValueError(f"profile {profile.name!r}: cuts {cuts} do not lie in 0..{size}")
    starts = np.array([cut for cut in cuts if cut < size])
    stops = np.append(starts[1:], size)
    live = profile.node_live()
    net = live[stops] - live[starts]
    growth = np.maximum.reduceat(profile.node_high(), starts) - live[starts]
    seconds = np.add.reduceat(profile.node_seconds, starts)
    columns = (starts, stops, net, growth, seconds)
    return tuple(map(NodeGroup, *(column.tolist() for column in columns)))


def partition_for_flow(profile: Profile) -> tuple[NodeGroup, ...]:
    """Cut a step where another one may want to take over what it has freed, or wait for it.

    A group changes the live bytes by about `FLOW_SHARE` of the transient peak and lasts at least
    `FLOW_SECONDS`, as each costs a look at the other lanes.
    """
    split = max(1, int(profile.transient_peak_bytes * FLOW_SHARE))
    ends = np.cumsum(node_times([profile])[0])
    cuts: list[int] = []
    begun = 0.0
    for group in partition(profile, split):
        if ends[group.stop - 1] - begun >= FLOW_SECONDS:
            cuts.append(group.stop)
            begun = float(ends[group.stop - 1])
    return cut_at(profile, cuts)


def two_groups_at_peak(profile: Profile) -> tuple[NodeGroup, ...]:
    """The step cut after its peak node (Waterwave, 5.1.3); one group if that is the last."""
    return cut_at(profile, [profile.peak_node + 1])


def two_groups_at(profile: Profile, boundary_node: int) -> tuple[NodeGroup, ...]:
    """The step cut where backward begins (Waterwave, 5.1.3); one group at either end."""
    return cut_at(profile, [boundary_node])


def num_allocation_groups(groups: Sequence[NodeGroup], profile: Profile) -> int:
    """How many groups come up to and with the peak: numANG of Waterwave's Algorithm 1, at least 1.

    Real curves have bumps: a group before the peak counts although its net may be negative.
    """
    return sum(group.start <= profile.peak_node for group in groups)
