"""Trains: steps made one after another in one call, until something calls for attention."""

from __future__ import annotations

import contextvars
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from waterflow.allocator_ext import _C
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.lanes import Lanes

pytestmark = pytest.mark.cpu

UNIT = 64  # bytes; the arena's alignment


@dataclass
class Track:
    """A step on a lane that adds up its batch; its loss is the sum."""

    lanes: Lanes
    tape: Any
    plan: Any
    step: Any
    gate: Any

    def run(self, *batches: torch.Tensor, signal: Any = None, **options: Any) -> Any:
        settings: dict[str, Any] = {"look": None, "seen": 0, "seconds": 60.0, **options}
        train = _C.Train(
            [[batch] for batch in batches],
            beside=_C.RoundMemory(2 * UNIT, 4096),
            keeps_blocks=True,
            signal=signal or _C.Signal(),
            **settings,
        )
        return self.lanes.run_train(0, self.step, self.gate, train)


@pytest.fixture
def track() -> Iterator[Track]:
    before = torch.get_num_threads()
    lanes = Lanes(HostDevice(), 4096, 1, 1, before)
    lanes.adopt_lane(0)
    lanes.commit()
    tape = _C.Tape(2, 0)
    tape.add_load(0, 0, [])
    kind = _C.ArgumentKind
    tape.add_operator("aten::sum", "", [(kind.SLOT, 0), (kind.CONSTANT, None)], [1], [0])
    tape.add_read_loss(1, [1])
    tape.set_transient([0, 1])
    sizes = np.array([UNIT, UNIT, -UNIT, -UNIT], np.int64)
    names = np.array([0, 1, 0, 1], np.int32)
    nodes = np.array([0, 1, 1, 2], np.int32)
    events = sizes, names, np.empty(0, np.int32)
    plan = _C.MemoryPlan(events, nodes, 3, [0, UNIT], lanes.arena.version)
    demand = _C.Demand([2 * UNIT, 2 * UNIT], [0, UNIT, 0])
    step = _C.FlowStep((tape, plan, 0, None), [(0, 1), (1, 3)], demand)
    try:
        yield Track(lanes, tape, plan, step, _C.Gate(4096, 1))
    finally:
        tape.clear([0, 1])
        lanes.close()
        torch.set_num_threads(before)


def ones(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


def test_every_batch_has_its_step_in_order(track: Track) -> None:
    made = track.run(*numbers(3, 1, 2))
    assert (made.losses, made.end, made.error) == ([3.0, 1.0, 2.0], _C.TrainEnd.ARRIVED, None)
    groups = [(lane, group) for lane, _, group, _, _ in made.spans()]
    assert groups == [(0, 0), (0, 1)] * 3
    starts = [start for *_, start, _ in made.spans()]
    assert starts == sorted(starts)
    assert made.seconds == pytest.approx(sum(stop - start for *_, start, stop in made.spans()))
    assert 0.0 < made.worked < 60.0
    assert track.plan.deviations == 0


def test_it_keeps_no_batch(track: Track) -> None:
    batches = numbers(1, 2)
    kept = list(map(weakref.ref, batches))
    track.run(*batches)
    del batches
    assert [reference() for reference in kept] == [None, None]


def test_a_call_ends_it_after_the_present_step(track: Track) -> None:
    signal = _C.Signal()
    signal.call()
    made = track.run(*numbers(1, 2), signal=signal, seen=1)
    assert made.losses == [1.0, 2.0], "that call has been seen to"
    made = track.run(*numbers(1, 2), signal=signal, seen=0)
    assert (made.losses, made.end) == ([1.0], _C.TrainEnd.CALLED)


def look_at(watched: dict[str, int], seen: list[int], act: Callable[[], None]) -> Any:
    """A look at a dictionary, with which something happens first."""

    def looking(_: None) -> None:
        seen.append(len(seen))
        act()

    first, then = _C.Guards(), _C.Guards()
    first.probe(looking, None, None)
    then.mapping(watched, None)
    return _C.Look([first, then], contextvars.copy_context())


def test_a_call_under_way_reaches_it(track: Track) -> None:
    signal, seen = _C.Signal(), list[int]()
    look = look_at({}, seen, signal.call)
    made = track.run(*numbers(*range(9)), look=look, signal=signal)
    assert (len(made.losses), made.end) == (1, _C.TrainEnd.CALLED)


def test_others_run_python_meanwhile(track: Track) -> None:
    signal = _C.Signal()
    waiting = threading.Thread(target=lambda: (time.sleep(0.05), signal.call()))
    waiting.start()
    made = track.run(*numbers(1) * 200_000, signal=signal)
    waiting.join()
    assert made.end == _C.TrainEnd.CALLED


def test_no_step_begins_after_its_time(track: Track) -> None:
    made = track.run(*numbers(1, 2), seconds=0.0)
    assert (made.losses, made.end) == ([1.0], _C.TrainEnd.LATE)


def test_each_train_begins_with_a_look(track: Track) -> None:
    watched, seen = {"x": 1}, list[int]()
    look = look_at(watched, seen, lambda: None)
    made = track.run(*numbers(*range(9)), look=look)
    assert (len(made.losses), seen) == (9, [0])
    watched["x"] = 2
    made = track.run(*numbers(1, 2), look=look)
    assert (made.losses, made.end) == ([], _C.TrainEnd.CHANGED)


def test_a_step_that_fails_leaves_those_before_it(track: Track) -> None:
    made = track.run(*numbers(1), torch.tensor([1j]), *numbers(3))
    assert (made.losses, made.end) == ([1.0], _C.TrainEnd.FAILED)
    assert isinstance(made.error, RuntimeError)
    assert track.run(*numbers(4)).losses == [4.0]


def test_a_loss_that_is_no_number_is_the_last_where_that_is_asked_for(track: Track) -> None:
    batches = numbers(1, math.nan, 2)
    assert len(track.run(*batches).losses) == 3
    made = track.run(*batches, finite_only=True)
    assert (len(made.losses), made.end) == (2, _C.TrainEnd.NOT_FINITE)


def test_memory_that_is_not_as_planned_ends_it(track: Track) -> None:
    made = track.run(*ones(1, 17, 1))
    assert (made.losses, made.end) == ([1.0, 17.0], _C.TrainEnd.DEVIATED)


def test_a_look_is_in_its_own_context() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    context = contextvars.copy_context()
    context.run(variable.set, 1)
    guards = _C.Guards()
    guards.probe(lambda asked: asked.get(), variable, 1)
    look = _C.Look([guards], context)
    assert look.holds()
    variable.set(2)
    assert look.holds()
    context.run(variable.set, 3)
    assert not look.holds()


def test_a_look_takes_what_it_can_look_at() -> None:
    with pytest.raises(TypeError, match="takes Guards"):
        _C.Look([object()], contextvars.copy_context())  # type: ignore[list-item]
    with pytest.raises(TypeError, match="takes a Context"):
        _C.Look([], {})  # type: ignore[arg-type]
