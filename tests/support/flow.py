"""Profiles of steps that can flow."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from waterflow.partitioner.profile import Profile
from waterflow.partitioner.testing import profiles

UNIT = 64  # bytes; an arena's alignment
AMPLE = 1 << 40


def in_units(profile: Profile) -> Profile:
    """The profile in whole units of memory, as an arena's log has them, with nothing that stays."""
    events = profile.events.copy()
    events["bytes"] *= UNIT
    lasting = np.setdiff1d(events["id"], events["id"][events["bytes"] < 0])
    last = [
        (profile.num_nodes - 1, -events["bytes"][events["id"] == i][0], i) for i in lasting.tolist()
    ]
    events = np.concatenate([events, np.array(last, dtype=events.dtype)])
    return Profile(events, profile.node_seconds, 0, "measured", profile.name)


def flowing_profiles() -> st.SearchStrategy[Profile]:
    return profiles().map(in_units).filter(lambda profile: profile.transient_peak_bytes > 0)
