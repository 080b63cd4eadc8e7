"""AntMan's Table 2: two jobs on one GPU of 32 GB, and five ways to deal with the second.

    python -m benchmarks.cluster_two_jobs --json

Job A (GCN, 3.5 GB, no quota, 43 minutes alone) runs when job B (ResNet-50, 30 GB, with a quota,
91.1 minutes alone) comes 26 minutes later. What is taken from the paper beside those figures: B on
28.5 of its 30 GB takes 541.6 minutes (so the row "UMem" says how fast it is with so little, and is
no test of ours). All else follows from the policies and from the rules for memory. None: failed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any, ClassVar

GB = 10**9
ALONE = {"A": 43.0, "B": 91.1}
COMES = 26.0
PUBLISHED: dict[str, tuple[float | None, float | None]] = {
    "preempt": (None, 91.1),
    "fifo": (43.0, 108.2),
    "pack": (43.1, None),
    "umem": (43.4, 541.6),
    "antman": (43.9, 91.8),
}
_SQUEEZED = (28.5 / 30.0, 91.1 / 541.6)


def jobs() -> list[Any]:
    from waterflow.cluster import JobSpec

    gcn = JobSpec(
        0,
        "A",
        0.0,
        1,
        ALONE["A"] * 60,
        guaranteed=False,
        memory=int(3.5 * GB),
        least_memory=int(0.5 * GB),
        utilization=0.1,
    )
    resnet = JobSpec(
        1,
        "B",
        COMES * 60,
        1,
        ALONE["B"] * 60,
        memory=30 * GB,
        least_memory=28 * GB,
        curve=(_SQUEEZED,),
        utilization=0.9,
    )
    return [gcn, resnet]


def minutes(how: str) -> tuple[float | None, float | None]:
    """Completion times of A and B; None where one never ends."""
    import math

    from waterflow.cluster import ClusterSpec, make_policy
    from waterflow.cluster.local.memory import all_or_nothing, coordinated, first_come
    from waterflow.cluster.simulator.core import Simulation

    rules = {"pack": all_or_nothing, "umem": first_come}
    policies: dict[str, Any] = {"preempt": _preempt(), "pack": _beside(), "umem": _beside()}
    found = Simulation(
        jobs(),
        ClusterSpec.of(1, 1, memory=32 * GB),
        policies.get(how) or make_policy(how),
        speeds=_speeds(),
        memory=rules.get(how, coordinated),
        memory_grows=how not in rules,
    ).run()
    times = [float(end - job.submit) / 60 for end, job in zip(found.finish, jobs(), strict=True)]
    a, b = (None if math.isnan(time) else time for time in times)
    return a, b


def _speeds() -> Any:
    from waterflow.cluster.simulator.measured import Measured

    return Measured()


def _preempt() -> Any:
    """Whoever has a claim takes the GPU; the other's work is lost: it is not started again."""
    from waterflow.cluster.policies.base import Policy
    from waterflow.cluster.state import ClusterState, Plan

    @dataclass
    class Preempt(Policy):
        name: ClassVar[str] = "preempt"

        def decide(self, state: ClusterState) -> Plan:
            waiting = [job for job in state.jobs.values() if not job.running]
            if any(job.spec.guaranteed for job in waiting):
                stop = tuple(i for i, job in state.jobs.items() if job.running)
                return Plan(stop=stop, start={j.spec.index: (0,) for j in waiting})
            fresh = [j for j in waiting if j.executed == 0]
            return Plan(start={j.spec.index: (0,) for j in fresh if state.free})

    return Preempt()


def _beside() -> Any:
    """Everybody starts at once on the one GPU."""
    from waterflow.cluster.policies.base import Policy
    from waterflow.cluster.state import ClusterState, Plan

    @dataclass
    class Beside(Policy):
        name: ClassVar[str] = "pack"
        shares: ClassVar[bool] = True

        def decide(self, state: ClusterState) -> Plan:
            return Plan(start={i: (0,) for i, job in state.jobs.items() if not job.running})

    return Beside()


def rows() -> list[dict[str, Any]]:
    found = []
    for how, (published_a, published_b) in PUBLISHED.items():
        a, b = minutes(how)
        found.append({
            "policy": how, "a": a, "b": b, "published_a": published_a, "published_b": published_b,
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    if parser.parse_args().json:
        print(json.dumps({"rows": rows()}))
        return

    def text(time: float | None) -> str:
        return "failed" if time is None else f"{time:.1f}"

    for row in rows():
        ours = f"{text(row['a']):>7} {text(row['b']):>7}"
        paper = f"{text(row['published_a']):>7} {text(row['published_b']):>7}"
        print(f"{row['policy']:8} A and B, minutes: {ours}   published: {paper}")


if __name__ == "__main__":
    main()
