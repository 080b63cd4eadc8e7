"""Lanes: worker threads over one arena, each with its own intra-op threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from waterflow.allocator_ext import _C
from waterflow.executor.device.base import Device
from waterflow.executor.run.threads import available_cpus, pin_here, set_threads_here, split_cpus


class _Helper(threading.local):
    """What a thread knows of itself: in the place of which lane it is."""

    lane: int | None = None


class Lanes:
    """An arena of exactly the budget and the threads that run node groups over it.

    The thread that calls `run` is lane 0; the others wait for rounds. Not thread-safe: one thread
    drives it, and within `run_on_all` each lane calls `run_step` for itself. What lanes share
    beyond that is the extension's, which has locks of its own.
    """

    def __init__(
        self, device: Device, budget: int, lanes: int, threads: int, default_threads: int
    ) -> None:
        """Takes the arena.

        Args:
            device: where the jobs train.
            budget: bytes that all jobs together may hold.
            lanes: how many node groups may run at once.
            threads: intra-op threads of each lane.
            default_threads: those of other threads.

        Raises:
            JobError: the device does not have the budget.
        """
        _C.install_lane_allocator()
        self.device = device
        self.budget = budget
        self.lanes = lanes
        self.threads = threads
        self.default_threads = default_threads
        self._cpus = available_cpus()
        self._lane_cpus = split_cpus(self._cpus, lanes, threads)
        self._helper = _Helper()
        self.arena: Any
        self.arena, executes = device.open(budget, lanes)
        self._committed = False
        self._failure: Exception | None = None
        _C.register_arena(self.arena)
        self._pool = _C.LanePool(self.arena, lanes, executes)
        self._workers = [
            threading.Thread(target=self._serve, args=(lane,), name=f"waterflow-lane-{lane}")
            for lane in range(1, lanes)
        ]
        for worker in self._workers:
            worker.daemon = True
            worker.start()

    def _serve(self, lane: int) -> None:
        try:
            self.adopt_lane(lane)
        except Exception as error:  # raised by the next round; a lane that is missing would hang it
            self._failure = error
        self._pool.serve(lane)

    def adopt_lane(self, lane: int) -> None:
        """Makes the calling thread a lane: its intra-op threads, its cores."""
        set_threads_here(self.threads, self.default_threads)
        if self._lane_cpus is not None:
            pin_here(self._lane_cpus[lane])
        self.device.adopt_lane(lane)

    def adopt_helper(self) -> None:
        """Gives the calling thread, whoever started it, a lane's intra-op threads on any core."""
        set_threads_here(self.threads, self.default_threads)
        pin_here(self._cpus)
        self._helper.lane = None

    def stand_in(self, lane: int) -> None:
        """The calling thread, a helper, gets the cores of a lane that waits for it. It keeps them
        until it is to `roam`: each move costs as much as a small step, with the interpreter's lock
        held."""
        if self._lane_cpus is not None and self._helper.lane != lane:
            pin_here(self._lane_cpus[lane])
            self._helper.lane = lane

    def roam(self) -> None:
        """The calling thread, a helper, may be on any core again, with all that it starts."""
        if self._helper.lane is not None:
            pin_here(self._cpus)
            self._helper.lane = None

    def commit(self) -> None:
        """Takes the budget's memory, if that has not been done yet.

        Raises:
            JobError: the device does not have it any more.
        """
        if not self._committed:
            self.device.commit(self.arena)
            self._committed = True

    def run(self, round_: Any) -> Any:
        """Executes a round, or queues it on the device; losses and spans are there after `wait`.

        Raises:
            RuntimeError: the device is lost.
        """
        if self._failure is not None:
            raise self._failure
        return self._pool.run(round_)

    def run_on_all(self, work: Callable[[int], None]) -> None:
        """Calls `work` with each lane's number on its thread; returns when all have returned.

        Raises what a lane raises.
        """
        if self._failure is not None:
            raise self._failure
        self._pool.run_on_all(work)

    def run_step(self, lane: int, step: Any, gate: Any, former: Any) -> Any:
        """Runs one step on the calling lane, or queues it, as its gate admits it.

        Within `run_on_all`. Behind `former`, the job's step before it, which may still be queued on
        another lane; None where it is known to be done. Raises RuntimeError where the device is
        lost.
        """
        return self._pool.run_step(lane, step, gate, former)

    def run_train(self, lane: int, step: Any, gate: Any, train: Any) -> Any:
        """Runs a step on the calling lane again and again: see the extension's `Train`.

        Within `run_on_all`, on a device on which a step is done when its call returns.
        """
        return _C.run_train(self._pool, lane, step, gate, train)

    def scope(self, job: int, more: Callable[[int], bool] | None = None) -> Any:
        """Context manager: the device's tensors of this thread come from the arena, as lane 0;
        where it has no room for so many bytes, `more` tells whether it has now."""
        return _C.LaneScope(self.arena, 0, job, more)

    def close(self) -> None:
        """Ends the threads; of the arena only what tensors still hold lives on."""
        self._pool.shutdown()
        for worker in self._workers:
            worker.join()
        _C.retire_arena(self.arena)
        with contextlib.suppress(RuntimeError):  # of a lost device nothing can be given back
            self.arena.give_back()
        self.device.close()
