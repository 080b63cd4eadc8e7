"""What starting, stopping, moving and resizing a job costs, in seconds without progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from waterflow.cluster.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. The defaults of all are 0: what other simulators charge has to be asked for.

    Attributes:
        start: before a job's first step, each time it is given GPUs after it had none.
        resume: in addition, where it has run before (load the checkpoint).
        move: a running job goes on elsewhere (Gandiva, section 6.1: 1 to 3.5 s).
        grow: a running job gets more GPUs (Amoeba, section 5: 1.07 to 1.14 s).
        shrink: a running job gets fewer (Amoeba: unnoticeable).
        every_event: what each running job loses at every event whatsoever: an artefact of Muri's
            simulator; None elsewhere.
    """

    start: float = 0.0
    resume: float = 0.0
    move: float = 0.0
    grow: float = 0.0
    shrink: float = 0.0
    every_event: Callable[[JobSpec], float] | None = None


#: What the papers measured on their systems.
MEASURED = Costs(resume=1.0, move=3.5, grow=1.14)
#: Elastic training by stopping and starting again (Amoeba, section 5: about 30 s).
STOP_RESUME = Costs(resume=30.0, move=30.0, grow=30.0, shrink=30.0)
FREE = Costs()
COSTS = {"free": FREE, "measured": MEASURED, "stop-resume": STOP_RESUME}
