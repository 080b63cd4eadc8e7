"""Elastic-Tiresias (Amoeba, section 6.3): Tiresias, with two rules that change jobs' sizes.

R1: where more than N jobs would wait, all jobs outside the first queue run on half of their GPUs.
R2: where nobody waits and GPUs are idle, they go one by one to the job that gains most by one more,
(t(p+1) - t(p)) / t(p), with t(p) its throughput on p GPUs.

A plan is made from the sizes that jobs asked for, then R1 and R2 are applied to it, and only the
outcome is carried out: so the rules never undo each other in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from waterflow.cluster.policies.sizing import (
    Draft,
    grow,
    keep_or_stop,
    place,
    start_waiting,
)
from waterflow.cluster.policies.tiresias import Tiresias, new_ranks
from waterflow.cluster.state import ClusterState, JobState, Plan

#: Service quanta of the first two queues, GPU seconds (Amoeba, section 6.3).
LIMITS = (1e4, 2e5)
#: The paper does not say N; see docs/cluster.md for a sweep.
MOST_WAITING = 10


class ElasticTiresias(Tiresias):
    """Tiresias that shrinks jobs under load and grows them when GPUs are idle."""

    name = "elastic-tiresias"
    source = "Amoeba, section 6.3"
    summary = "Tiresias; jobs shrink where many wait and grow where GPUs are idle"
    resizes = True

    def __init__(self, limits: Sequence[float] = LIMITS, most_waiting: int = MOST_WAITING) -> None:
        super().__init__(limits)
        self._most_waiting = most_waiting

    def decide(self, state: ClusterState) -> Plan:
        """Tiresias' plan, then R1 and R2, then places."""
        down = self._moved_down(state)
        draft = self._draft(state, down, halve=False)
        if draft.waiting(state) > self._most_waiting:
            draft = self._draft(state, down, halve=True)
        all_run = not draft.waiting(state)
        placed = place(state, draft, keep=all_run)
        if all_run:
            grow(state, draft, placed)
        ranks = new_ranks(state, down, draft.stops, draft.starts)
        kept = [job.spec.index for job in down if job.spec.index in draft.sizes]
        watch = self._watch(state, [*draft.starts, *kept], ranks)
        return Plan(
            stop=tuple(draft.stops), start=placed.start, move=placed.move, ranks=ranks, watch=watch
        )

    def _draft(self, state: ClusterState, down: Sequence[JobState], *, halve: bool) -> Draft:
        draft = Draft(state.available, state.allowance(running=False))
        moved = {job.spec.index: job.level + 1 for job in down}
        for level in range(max(state.levels, 1 + max(moved.values(), default=0))):
            half = halve and level > 0
            if level < state.levels:
                running = sorted(state.running(level).values(), key=lambda job: job.rank)
                for job in running:
                    if job.spec.index not in moved:
                        keep_or_stop(draft, job, state.account(job), half=half)
                start_waiting(state.pending(level).walk(draft.allowance), draft, half=half)
            for job in down:
                if job.level + 1 == level:
                    keep_or_stop(draft, job, state.account(job), half=half)
        return draft
