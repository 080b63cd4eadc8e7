"""Small clusters and jobs for tests of policies and of the simulator."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from waterflow.cluster.policies.base import Policy
from waterflow.cluster.simulator.speeds import Plain
from waterflow.cluster.spec import ClusterSpec, JobSpec
from waterflow.cluster.state import ClusterState, JobState, Speeds
from waterflow.cluster.store import StateStore

DATA = Path(__file__).parents[1] / "cluster" / "data"


def job(index: int, submit: float = 0.0, gpus: int = 1, seconds: float = 100.0, **more) -> JobSpec:
    return JobSpec(index, more.pop("name", f"j{index}"), submit, gpus, seconds, **more)


def state_of(
    cluster: ClusterSpec,
    policy: Policy,
    waiting: Iterable[JobSpec] = (),
    running: Iterable[tuple[JobSpec, tuple[int, ...], float]] = (),
    now: float = 0.0,
    speeds: Speeds | None = None,
) -> ClusterState:
    """A state in which jobs wait, and others run on some GPUs since some time."""
    store = StateStore(cluster, speeds or Plain())
    store.now = now
    store.turn = 1
    for spec in waiting:
        fresh = JobState(
            spec, left=spec.steps, since=spec.submit, opportunistic=not spec.guaranteed
        )
        _put(store, policy, fresh, now)
    for spec, gpus, since in running:
        done = JobState(
            spec,
            gpus,
            left=spec.steps,
            step_time=spec.step_seconds,
            since=since,
            ready=since,
            first_start=since,
            opportunistic=not spec.guaranteed,
        )
        _put(store, policy, done, now)
    return store


def _put(store: StateStore, policy: Policy, fresh: JobState, now: float) -> None:
    values = {name: getattr(fresh, name) for name in JobState.__slots__}
    values["level"] = policy.level(fresh)
    values["rank"] = policy.rank(fresh, now, 0)
    store.put(JobState(**values))


def public_trace(name: str) -> Path:
    """A large public trace in the folder WATERFLOW_TRACES; skips the test where it is not there."""
    path = Path(os.environ.get("WATERFLOW_TRACES", "")) / name
    if "WATERFLOW_TRACES" not in os.environ or not path.exists():
        pytest.skip(f"WATERFLOW_TRACES has no {name}")
    return path
