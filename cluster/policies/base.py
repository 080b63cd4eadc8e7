"""The contract of a policy.

A policy is asked after every event (jobs came, ended, reached what was watched for, nodes failed or
came back) and answers with a `Plan`. Its `decide` is a function of the state alone: the policy has
settings, fixed when it is made, and remembers nothing; what has to last goes into the plan's
ranks or its memory, which the next state has. It reads no clock and no file, and imports no torch.
No policy exceeds a quota: it looks at jobs that wait along `state.pending(level).walk(allowance)`,
with what `state.allowance()` says is left, and the simulator refuses a plan that gives more.
`waterflow.cluster.testing` checks a plan against all that must hold whatever the policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from waterflow.cluster.pending import Rank
from waterflow.cluster.state import ClusterState, JobState, Plan


class Policy(ABC):
    """Decides who runs where.

    Attributes:
        name: what the command line calls it.
        source: the paper, or the simulator, that it comes from.
        summary: what it does, in half a line.
        shares: it puts several jobs on one GPU.
        knows_opportunistic: jobs without a claim come after all others, and so are outside of
            quotas; under other policies every job counts against its tenant's.
        resizes: jobs run on more or fewer GPUs than they asked for.
        turns_on_servers: jobs that share take turns on all GPUs of their server, not on one.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    summary: ClassVar[str]
    shares: ClassVar[bool] = False
    knows_opportunistic: ClassVar[bool] = False
    resizes: ClassVar[bool] = False
    turns_on_servers: ClassVar[bool] = False

    def level(self, job: JobState) -> int:
        """The queue that a new job goes to."""
        return 0

    def level_after_stop(self, job: JobState) -> int:
        """The queue that a job waits in whose node has failed, or that a plan says no rank for."""
        return job.level

    def rank(self, job: JobState, now: float, turn: int) -> Rank:
        """A job's place in its queue, asked when it comes and when it stops: first come, first."""
        return (job.spec.index,)

    @abstractmethod
    def decide(self, state: ClusterState) -> Plan:
        """What is to change now."""
