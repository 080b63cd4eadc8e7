"""Jobs as policies see them."""

from __future__ import annotations

from waterflow.partitioner import PlanJob


def named(*profiles):
    return [PlanJob(f"job-{number}", profile) for number, profile in enumerate(profiles)]
