"""Why lanes have nothing to run: it is in the report of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import waterflow as wf
from tests.support.data import pairs
from tests.support.engine_parts import make_job
from waterflow.engine.idle import IdleTimes

pytestmark = pytest.mark.cpu


class SlowBatches(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            time.sleep(0.01)
            yield item


def test_lanes_that_wait_for_data_say_so() -> None:
    job = make_job("slow", data=SlowBatches(pairs(sizes=(4,) * 30)), steps=30)
    report = wf.run([job], memory="8MiB", threads=1, lanes=1)
    assert 0.1 < report.idle_seconds["data"] <= report.seconds
    assert "jobs" not in report.idle_seconds


def test_lanes_without_a_job_say_so() -> None:
    job = make_job("one", data=pairs(sizes=(4,) * 8), steps=30)
    job.model.register_forward_pre_hook(lambda *_: time.sleep(0.01))  # so its steps are eager
    report = wf.run([job], memory="8MiB", threads=1, lanes=3)
    assert report.idle_seconds["jobs"] > 0.1
    assert "memory" not in report.idle_seconds


@pytest.mark.virtual
def test_waits_at_gates_are_memory_and_nothing_else() -> None:
    idle = IdleTimes()
    idle.add("python", 3.0)
    idle.add("data", 1.0)
    idle.add("data", -1.0)
    assert idle.seconds(waited_for_memory=2.0) == {"python": 1.0, "data": 1.0, "memory": 2.0}
    assert idle.seconds(waited_for_memory=0.0) == {"python": 3.0, "data": 1.0}
