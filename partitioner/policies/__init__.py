"""Policies by name: each turns profiles and a budget into a schedule."""

from __future__ import annotations

import difflib

from waterflow.common.errors import JobError
from waterflow.partitioner.policies.base import PlanJob, Policy
from waterflow.partitioner.policies.flow import Flow
from waterflow.partitioner.policies.temporal import Temporal
from waterflow.partitioner.policies.time_slice import TimeSlice
from waterflow.partitioner.policies.waterwave import WaterWave
from waterflow.partitioner.policies.waterwave_s import WaterWaveS

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Flow, Temporal, TimeSlice, WaterWave, WaterWaveS)
}
"""The policy classes by the names that users write; each can be made without arguments."""

COMPARED = tuple(name for name, policy in POLICIES.items() if policy.quantum is None)
"""Those that differ where all jobs fit together."""


def get_policy(name: str) -> Policy:
    """The policy called ``name``; JobError with the nearest names when there is none."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=2, cutoff=0.5) or sorted(POLICIES)
        raise JobError(f"there is no policy {name!r}; did you mean {' or '.join(near)}?")
    return POLICIES[name]()


__all__ = [
    "COMPARED",
    "POLICIES",
    "Flow",
    "PlanJob",
    "Policy",
    "Temporal",
    "TimeSlice",
    "WaterWave",
    "WaterWaveS",
    "get_policy",
]
