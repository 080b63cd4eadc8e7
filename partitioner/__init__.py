"""From what a step does to memory to what runs when: profiles, node groups, policies, oracle.

Everything here is a pure function of its input; no tensor is made and no device is touched.

    schedule = get_policy("waterwave").schedule([PlanJob("a", a), PlanJob("b", b)], budget)
    verify(schedule, [a, b], budget)
"""

from waterflow.partitioner.graph.order import bfs_depth_order
from waterflow.partitioner.groups import (
    NodeGroup,
    cut_at,
    num_allocation_groups,
    partition,
    two_groups_at,
    two_groups_at_peak,
)
from waterflow.partitioner.oracle import verify
from waterflow.partitioner.policies import POLICIES, PlanJob, Policy, get_policy
from waterflow.partitioner.profile import EVENT, Profile, node_times
from waterflow.partitioner.schedule import GroupRef, Schedule, planned_peak

__all__ = [
    "EVENT",
    "POLICIES",
    "GroupRef",
    "NodeGroup",
    "PlanJob",
    "Policy",
    "Profile",
    "Schedule",
    "bfs_depth_order",
    "cut_at",
    "get_policy",
    "node_times",
    "num_allocation_groups",
    "partition",
    "planned_peak",
    "two_groups_at",
    "two_groups_at_peak",
    "verify",
]
