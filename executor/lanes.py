"""Lanes: worker threads over one arena, each with its own intra-op threads."""

from __future__ import annotations

import threading
from typing import Any

from waterflow.allocator_ext import _C
from waterflow.executor.threads import available_cpus, pin_here, set_threads_here, split_cpus


class Lanes:
    """A host arena of exactly the budget and the threads that run node groups over it.

    The thread that calls `run` is lane 0; the others wait for rounds. Not thread-safe: one thread
    drives it.
    """

    def __init__(self, budget: int, lanes: int, threads: int, default_threads: int) -> None:
        """Takes the arena.

        Args:
            budget: bytes that all jobs together may hold.
            lanes: how many node groups may run at once.
            threads: intra-op threads of each lane.
            default_threads: those of other threads.
        """
        _C.install_lane_allocator()
        self.budget = budget
        self.lanes = lanes
        self.threads = threads
        self.default_threads = default_threads
        self._cpus = available_cpus()
        self._lane_cpus = split_cpus(self._cpus, lanes, threads)
        self.arena: Any = _C.Arena.host(budget, lanes)
        _C.register_arena(self.arena)
        self._pool = _C.LanePool(self.arena, lanes)
        self._workers = [
            threading.Thread(target=self._serve, args=(lane,), name=f"waterflow-lane-{lane}")
            for lane in range(1, lanes)
        ]
        for worker in self._workers:
            worker.daemon = True
            worker.start()

    def _serve(self, lane: int) -> None:
        self.adopt_lane(lane)
        self._pool.serve(lane)

    def adopt_lane(self, lane: int) -> None:
        """Makes the calling thread a lane: its intra-op threads, its cores."""
        set_threads_here(self.threads, self.default_threads)
        if self._lane_cpus is not None:
            pin_here(self._lane_cpus[lane])

    def adopt_helper(self) -> None:
        """Gives the calling thread, whoever started it, a lane's intra-op threads on any core."""
        set_threads_here(self.threads, self.default_threads)
        pin_here(self._cpus)

    def run(self, round_: Any) -> tuple[list[BaseException | None], list[tuple[Any, ...]]]:
        """Runs a round; returns each job's error, and the spans of the groups executed."""
        return self._pool.run(round_)

    def scope(self, job: int) -> Any:
        """Context manager: CPU tensors that this thread makes come from the arena, as lane 0."""
        return _C.LaneScope(self.arena, 0, job)

    def close(self) -> None:
        """Ends the threads; the arena lives on until the last tensor in it is gone."""
        self._pool.shutdown()
        for worker in self._workers:
            worker.join()
        _C.retire_arena(self.arena)
