"""Times contenders against each other in turn, each in a process that suits it.

Every contender is made once and stays; a turn is one slice of the same number of steps of each, so
that what disturbs the machine hits all alike. Between slices they give cached memory back: only one
needs room for its activations at a time. What cannot take part is recorded with its reason.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import median_ratio
from benchmarks.gpu.jobs import Case
from benchmarks.gpu.worker import Worker, WorkerError

_MODULE = "benchmarks.gpu.contenders"
_CALL_SECONDS = 150.0
_WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender: what it is, in how many processes, and with what environment.

    `unavailable` is the reason why it cannot run here at all; `first` is called in a new process
    before anything else. Entries with the same `place` share a process.
    """

    name: str
    kind: str
    jobs: int = 2
    processes: int = 1
    place: str = "native"
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    first: str | None = None
    unavailable: str | None = None


class Team:
    """The processes of all entries, kept from case to case."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def start(self, entries: Sequence[Entry]) -> None:
        """Starts the processes of all entries at once: each of them imports for seconds."""
        for entry in entries:
            if entry.unavailable is None:
                self.of(entry)

    def of(self, entry: Entry) -> list[Worker]:
        """The processes of an entry, new ones for those that have died."""
        return [self._worker(f"{entry.place}-{i}", entry) for i in range(entry.processes)]

    def _worker(self, place: str, entry: Entry) -> Worker:
        known = self._workers.get(place)
        if known is None or not known.alive:
            known = self._workers[place] = Worker(entry.environment)
        return known

    def discard(self, entry: Entry) -> None:
        """Ends an entry's processes: after some errors nobody knows what they hold."""
        for index in range(entry.processes):
            worker = self._workers.pop(f"{entry.place}-{index}", None)
            if worker is not None:
                worker.end()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()


@dataclass
class Standing:
    """What is known of one entry in one race; `reason` is why it is in it no longer."""

    entry: Entry
    reason: str | None = None
    opened: bool = False
    setup_seconds: float | None = None
    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self, case: Case, steps: int) -> dict[str, Any]:
        """The JSON form: times per step of all the entry's jobs together."""
        if not self.seconds:
            return {"step_ms": None, "reason": self.reason or "no time was left", **self.extra}
        seconds = statistics.median(self.seconds)
        found = {
            "step_ms": 1e3 * seconds / steps,
            "samples_per_second": self.entry.jobs * steps * case.batch / seconds,
            "host_ms_per_step": 1e3 * statistics.median(self.host_seconds) / steps,
            "setup_seconds": self.setup_seconds,
            "slices": self.seconds,
        }
        return {**found, **({"reason": self.reason} if self.reason else {}), **self.extra}


@dataclass
class Race:
    """Entries on one case."""

    case: Case
    team: Team
    standings: list[Standing]
    deadline: float

    def ask(self, standing: Standing, function: str, **arguments: Any) -> list[Any]:
        """Calls a function in all processes of an entry at once; an error takes the entry out."""
        left = min(_CALL_SECONDS, self.deadline - time.monotonic())
        if function == "open_contender":
            left /= 2  # one that takes for ever, compiling, leaves the others time to be measured
        if standing.reason is None and left <= 0:
            standing.reason = "no time was left"
        if standing.reason is not None:
            return []
        workers = self.team.of(standing.entry)
        try:
            for worker in workers:
                worker.ask(f"{_MODULE}:{function}", **arguments)
            return [worker.answer(left) for worker in workers]
        except WorkerError as error:
            standing.reason = f"{error.kind}: {str(error)[:300]}"
            print(f"{self.case}: {standing.entry.name}: {standing.reason}", file=sys.stderr)
            self._drop(standing, error)
            return []

    def _drop(self, standing: Standing, error: WorkerError) -> None:
        """Frees what it holds; its process too, where that may be broken or has more to say."""
        broken = error.kind in ("Timeout", "Death") or "CUDA error" in str(error)
        if not broken and standing.entry.processes == 1:
            self._close_one(standing)
            return
        self.team.discard(standing.entry)
        for other in self.standings:
            if other.opened and other.entry.place == standing.entry.place:
                other.opened = False
                other.reason = other.reason or f"its process ended with {standing.entry.name}"

    def _close_one(self, standing: Standing) -> None:
        if not standing.opened:
            return
        standing.opened = False
        for worker in self.team.of(standing.entry):
            try:
                name = standing.entry.name
                found = worker.call(f"{_MODULE}:close_contender", _CALL_SECONDS, name=name)
                standing.extra.update(found)
            except WorkerError as error:
                standing.extra["close_error"] = str(error)[:300]
                worker.end()

    def open(self, standing: Standing) -> None:
        """Makes the entry's jobs and warms them."""
        entry = standing.entry
        if entry.first is not None:
            self.ask(standing, entry.first)
        made = self.ask(
            standing,
            "open_contender",
            name=entry.name,
            kind=entry.kind,
            case=self.case.as_dict(),
            jobs=entry.jobs // entry.processes,
            options=dict(entry.options),
        )
        if made:
            standing.opened = True
            standing.setup_seconds = max(reply["setup_seconds"] for reply in made)

    def slice(self, standing: Standing, steps: int) -> bool:
        """Times a slice; the entry's slowest process counts."""
        replies = self.ask(standing, "measure_contender", name=standing.entry.name, steps=steps)
        if replies:
            standing.host_seconds.append(sum(reply["host_seconds"] for reply in replies))
            standing.seconds.append(max(reply["seconds"] for reply in replies))
        return bool(replies)

    def steps_per_slice(self, slice_seconds: float) -> int:
        """How many steps take about so long: asked of the first entry that runs; 0 if none does."""
        for standing in self.standings:
            if self.slice(standing, 5):
                seconds = standing.seconds.pop()
                standing.host_seconds.pop()
                return max(10, min(2000, round(5 * slice_seconds / seconds)))
        return 0

    def warm_up(self) -> None:
        """Lets the device's clocks rise, by the first entry that runs."""
        seconds = 0.01 if self.case.tiny else _WARM_UP_SECONDS
        for standing in self.standings:
            if self.ask(standing, "warm_up", device=self.case.device, seconds=seconds):
                return

    def close(self) -> None:
        """Ends all entries' jobs."""
        for standing in self.standings:
            self._close_one(standing)


def run_cases(
    cases: Sequence[tuple[str, str, int]],
    entries: Sequence[Entry],
    options: argparse.Namespace,
    deadline: float,
    note: Callable[[dict[str, Any]], None],
    *,
    watched: Sequence[str] = (),
    case_seconds: float = math.inf,
) -> list[str]:
    """Runs a race for each (model, dtype, batch), notes it, and returns those not reached."""
    missed = []
    with Team() as team:
        team.start(entries)
        for model, dtype, batch in cases:
            case = Case(
                model=model, dtype=dtype, batch=batch, device=options.device, tiny=options.tiny
            )
            now = time.monotonic()
            if now >= deadline:
                missed.append(str(case))
                continue
            note(
                run_race(
                    case,
                    entries,
                    team,
                    repeats=options.repeats,
                    slice_seconds=0.03 if options.tiny else 0.6,
                    deadline=min(deadline, now + case_seconds),
                    watched=watched,
                )
            )
    return missed


def run_race(
    case: Case,
    entries: Sequence[Entry],
    team: Team,
    *,
    repeats: int,
    slice_seconds: float,
    deadline: float,
    watched: Sequence[str] = (),
) -> dict[str, Any]:
    """Times all entries on a case, until the deadline (of time.monotonic).

    The CUDA calls of those in `watched` are counted too, after everything has been timed.
    """
    race = Race(case, team, [Standing(entry, entry.unavailable) for entry in entries], deadline)
    for standing in race.standings:
        race.open(standing)
    race.warm_up()
    steps = race.steps_per_slice(slice_seconds)
    for _ in range(repeats if steps else 0):
        for standing in race.standings:
            race.slice(standing, steps)
    for standing in race.standings:
        name = standing.entry.name
        if name in watched:
            for calls in race.ask(standing, "count_calls", name=name, steps=5):
                standing.extra["cuda_calls_per_step"] = calls
    race.close()
    found = {standing.entry.name: standing.as_dict(case, steps) for standing in race.standings}
    return {**case.as_dict(), "steps": steps, "contenders": found}


def ratio(result: Mapping[str, Any], above: str, below: str) -> float | None:
    """How many times longer `above` takes than `below`: the median of the turns both finished."""
    slices = [result["contenders"][name].get("slices") for name in (above, below)]
    if not all(slices):
        return None
    turns = min(len(part) for part in slices)
    return median_ratio(slices[0][:turns], slices[1][:turns])
