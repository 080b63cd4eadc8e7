"""One call for a simulation: what `waterflow cluster simulate` and Python users do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from waterflow.cluster.local.coordinator import limits
from waterflow.cluster.policies import make_policy
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.simulator.core import Check, Progress, Simulation
from waterflow.cluster.simulator.costs import FREE, Costs
from waterflow.cluster.simulator.failures import NO_FAILURES, Failures
from waterflow.cluster.simulator.measured import Measured
from waterflow.cluster.simulator.muri import muri_limits
from waterflow.cluster.simulator.results import Results
from waterflow.cluster.simulator.speeds import Plain
from waterflow.cluster.spec import ClusterSpec, JobSpec
from waterflow.cluster.state import Speeds
from waterflow.cluster.tables import muri_overheads
from waterflow.cluster.traces import read_trace
from waterflow.common.errors import JobError

#: Simulators whose numbers were published; "" is our own.
COMPATIBLE = ("", "tiresias", "muri")
_MURI_SLOWER = 1.015  # its simulator's factor on all iteration times
_MURI_OVERHEAD = 10.0  # seconds, of a model that its table does not have


def simulate(
    trace: str | Path | Sequence[JobSpec],
    cluster: ClusterSpec,
    policy: str | Policy,
    *,
    format: str = "",
    compat: str = "",
    costs: Costs = FREE,
    speeds: Speeds | None = None,
    failures: Failures = NO_FAILURES,
    check: Check | None = None,
    progress: Progress | None = None,
) -> Results:
    """Simulate a policy on a trace; the same input gives the same results, bit for bit.

    `trace` is a file (its format is recognised, or `format` says it) or jobs. `speeds` are by
    default those that were measured (`waterflow.cluster.simulator.measured`). `compat` does as
    the simulator of Tiresias or of Muri did, artefacts included: without costs, failures or tables
    of speeds other than theirs. `check` is called with every state and plan
    (`waterflow.cluster.testing.check_plan`). Ctrl-C ends it with what it has found so far.

    Raises:
        JobError: a trace, a cluster or a name is wrong; says what, and the remedy.
    """
    if compat not in COMPATIBLE:
        near = get_close_matches(compat, COMPATIBLE[1:], n=1) or COMPATIBLE[1:]
        raise JobError(f"there is no simulator {compat!r} to be like; near: {', '.join(near)}")
    if compat and cluster.quotas:
        raise JobError(
            f"the simulator of {compat} knows no quotas: leave [quotas] out, or --compat"
        )
    jobs = read_trace(trace, format) if isinstance(trace, str | Path) else tuple(trace)
    chosen = make_policy(policy, compat) if isinstance(policy, str) else policy
    if compat == "muri":
        jobs, costs = as_muri(jobs, chosen.shares), replace(costs, every_event=_muri_overhead)
    speeds = speeds or (Plain() if compat else Measured())
    return Simulation(
        jobs,
        cluster,
        chosen,
        speeds=speeds,
        sharing=muri_limits if compat == "muri" else limits,
        costs=costs,
        failures=failures,
        check=check,
        progress=progress,
    ).run()


def as_muri(jobs: Sequence[JobSpec], classes: bool = False) -> tuple[JobSpec, ...]:
    """Jobs with the step times that Muri's simulator takes; it knows classes only for AntMan."""
    return tuple(
        replace(
            job,
            step_seconds=job.step_seconds * _MURI_SLOWER,
            guaranteed=job.guaranteed or not classes,
        )
        for job in jobs
    )


def _muri_overhead(spec: JobSpec) -> float:
    return muri_overheads().get((spec.gpus, spec.model), _MURI_OVERHEAD)
