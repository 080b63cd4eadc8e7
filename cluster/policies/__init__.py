"""The policies, by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from waterflow.cluster.policies.antman import AntMan
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.elastic_tiresias import ElasticTiresias
from waterflow.cluster.policies.fifo import Fifo
from waterflow.cluster.policies.fjf import FitJobFirst
from waterflow.cluster.policies.gandiva import Gandiva
from waterflow.cluster.policies.gittins import Gittins
from waterflow.cluster.policies.lpjf import LongestPendingFirst
from waterflow.cluster.policies.muri_antman import MuriAntMan
from waterflow.cluster.policies.nop import Nop
from waterflow.cluster.policies.room import Yarn
from waterflow.cluster.policies.sjf import SmallestJobFirst
from waterflow.cluster.policies.srsf import ShortestRemainingService
from waterflow.cluster.policies.srtf import ShortestRemainingTime
from waterflow.cluster.policies.tiresias import Las, Tiresias
from waterflow.cluster.policies.waterflow import Waterflow
from waterflow.common.errors import JobError

_ALL: tuple[type[Policy], ...] = (
    Nop,
    Fifo,
    FitJobFirst,
    SmallestJobFirst,
    LongestPendingFirst,
    ShortestRemainingTime,
    ShortestRemainingService,
    Las,
    Tiresias,
    Gittins,
    ElasticTiresias,
    AntMan,
    Gandiva,
    Waterflow,
)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _ALL}

#: How the simulators that published numbers differ from the policies' own settings.
_COMPATIBLE: dict[str, dict[str, Callable[[], Policy]]] = {
    "tiresias": {
        "lpjf": lambda: LongestPendingFirst(skips=True),
        "las": lambda: Las(wakes="tiresias"),
        "tiresias": lambda: Tiresias(wakes="tiresias"),
    },
    "muri": {
        "srtf": lambda: ShortestRemainingTime(Yarn),
        "srsf": lambda: ShortestRemainingService(Yarn),
        "las": lambda: Las(wakes="muri"),
        "tiresias": lambda: Tiresias(wakes="muri"),
        "antman": MuriAntMan,
    },
}


def make_policy(name: str, compat: str = "") -> Policy:
    """The policy of that name, with its usual settings or those of a published simulator.

    Raises:
        JobError: there is none of that name.
    """
    if name not in POLICIES:
        near = get_close_matches(name, POLICIES, n=2) or list(POLICIES)
        raise JobError(f"there is no policy {name!r}; near: {', '.join(near)}")
    return _COMPATIBLE.get(compat, {}).get(name, POLICIES[name])()
