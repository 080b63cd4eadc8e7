"""On whose thread callbacks run, what they may wait for, and how Ctrl-C leaves them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from tests.support.engine_parts import make_job
from tests.support.tables import crossed
from waterflow.engine.callbacks import Callbacks
from waterflow.engine.events import EngineEnded, StepDone

pytestmark = pytest.mark.cpu

INPUT = torch.ones(64, 4)
ROOT = Path(__file__).resolve().parents[3]


def test_callbacks_run_in_the_thread_that_waits() -> None:
    connection = sqlite3.connect(":memory:")  # of this thread only
    connection.execute("create table steps (job text, step int, value real)")

    def note(result: wf.StepResult) -> None:
        assert threading.current_thread() is threading.main_thread()
        row = result.job, result.step, (result.evaluation or {}).get("value")
        connection.execute("insert into steps values (?, ?, ?)", row)

    jobs = [
        make_job(name, on_step=note, evaluate=lambda model: 1.5, evaluate_every=2) for name in "abc"
    ]
    report = wf.run(jobs, "8MiB", threads=1, callbacks="caller")
    assert report.ok, [job.error for job in report]
    rows = connection.execute("select * from steps order by job, step").fetchall()
    expected = [(name, step, None if step % 2 else 1.5) for name in "abc" for step in range(1, 5)]
    assert rows == expected


def test_whoever_waits_makes_them() -> None:
    seen: list[str] = []

    def note(result: wf.StepResult) -> None:
        seen.append(threading.current_thread().name)

    with wf.Engine("8MiB", threads=1, callbacks="caller") as engine:
        first = engine.submit(make_job("a", on_step=note))
        assert first.result().state == "finished"
        assert seen == ["MainThread"] * 4
        second = engine.submit(make_job("b", on_step=note))
        waiting = threading.Thread(target=second.result, name="waits")
        waiting.start()
        waiting.join()
    assert seen[4:] == ["waits"] * 4


def test_a_wrong_word_is_an_error() -> None:
    with pytest.raises(wf.JobError, match=r"callbacks must be one of 'lane', 'caller', got 'main'"):
        wf.Engine("8MiB", callbacks="main")


@pytest.mark.parametrize("callbacks", ["lane", "caller"])
def test_a_callback_that_would_wait_for_ever_is_an_error(callbacks: str) -> None:
    handles: dict[str, wf.JobHandle] = {}

    def wait(result: wf.StepResult) -> None:
        handles["b"].result()

    with wf.Engine("8MiB", threads=1, callbacks=callbacks) as engine:
        engine.hold()
        handles["a"] = engine.submit(make_job("a", on_step=wait))
        handles["b"] = engine.submit(make_job("b", steps=2000))
        engine.release()
        found = handles["a"].result()
        handles["b"].stop()
    assert found.state == "failed"
    assert re.match(r"job 'a': its callback waits for the end of 'b'", found.error)


@pytest.mark.parametrize("callbacks", ["lane", "caller"])
def test_a_callback_may_change_its_engine(callbacks: str) -> None:
    def shrink(result: wf.StepResult) -> None:
        if result.step == 2:
            engine.resize("4MiB")

    with wf.Engine("8MiB", threads=1, callbacks=callbacks) as engine:
        engine.submit(make_job("a", on_step=shrink))
    assert engine.report().ok
    assert engine.budget == 4 << 20


def test_jobs_come_as_they_end() -> None:
    with wf.Engine("8MiB", threads=1) as engine, wf.Engine("8MiB", threads=1) as other:
        held = engine.submit(make_job("long", steps=10**6))
        short = [engine.submit(make_job("short")), other.submit(make_job("elsewhere"))]
        ended = wf.as_completed([held, *short])
        assert {next(ended).name, next(ended).name} == {"short", "elsewhere"}
        with pytest.raises(TimeoutError, match=r"1 jobs have not ended within 0\.05 s: 'long'"):
            next(wf.as_completed([held], timeout=0.05))
        held.stop()
        assert next(ended) is held
        assert next(ended, None) is None
    assert [handle.name for handle in wf.as_completed(short)] == ["short", "elsewhere"]


def test_events_can_be_iterated() -> None:
    async def watch() -> list[Any]:
        events = engine.events()
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        engine.submit(make_job("a"))
        closing = asyncio.get_running_loop().run_in_executor(None, engine.close)
        heard = [await first, *[event async for event in events]]
        await closing
        return heard

    engine = wf.Engine("8MiB", threads=1)
    heard = asyncio.run(watch())
    assert [event.step for event in heard if isinstance(event, StepDone)] == [1, 2, 3, 4]
    assert isinstance(heard[-1], EngineEnded)


def test_events_are_heard_from_the_call_on_and_end_for_whoever_comes_late() -> None:
    async def heard(events: Any) -> list[Any]:
        return [event async for event in events]

    engine = wf.Engine("8MiB", threads=1)
    early = engine.events()
    engine.submit(make_job("a"))
    engine.close()
    told = asyncio.run(asyncio.wait_for(heard(early), 10))
    assert [event.step for event in told if isinstance(event, StepDone)] == [1, 2, 3, 4]
    assert isinstance(told[-1], EngineEnded)
    for _ in range(2):
        assert asyncio.run(asyncio.wait_for(heard(engine.events()), 10)) == [EngineEnded()]
    assert asyncio.run(asyncio.wait_for(heard(early), 10)) == []


def test_who_leaves_the_events_early_is_told_no_more() -> None:
    async def first(events: Any) -> Any:
        async for event in events:
            return event

    async def left_by_another_task(events: Any) -> list[Any]:
        waiting = asyncio.ensure_future(anext(events, None))
        await asyncio.sleep(0.05)
        await events.aclose()
        return [await waiting, *[event async for event in events]]

    with wf.Engine("8MiB", threads=1) as engine:
        assert asyncio.run(asyncio.wait_for(left_by_another_task(engine.events()), 30)) == [None]
        events = engine.events()
        dropped = weakref.ref(events)
        engine.submit(make_job("a"))
        assert asyncio.run(asyncio.wait_for(first(events), 30)) is not None
        del events
        gc.collect()
        assert dropped() is None
    assert engine.report().ok


PRELUDE = """
import os, signal, sys, threading, time
import waterflow as wf
from tests.support.engine_parts import make_job
"""


def run_program(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=250,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


MADE = ["wf.Engine('8MiB', threads=1)", "wf.Engine('8MiB').__enter__()"]


@pytest.mark.parametrize(("callbacks", "made"), crossed([False, True], MADE))
def test_an_engine_that_nobody_closes_ends_with_the_process(made: str, callbacks: bool) -> None:
    on_step = "begun.set() or time.sleep(0.001)" if callbacks else "begun.set()"
    ended = run_program(f"""
        begun = threading.Event()
        engine = {made}
        engine.submit(make_job("a", steps=10**7, on_step=lambda result: {on_step}))
        begun.wait()
        sys.exit(3)
    """)
    assert ended.returncode == 3, ended.stderr
    assert "engine is at work: 'a' stopped before the end" in ended.stderr
    assert "Use `with wf.Engine(...)" in ended.stderr


def test_an_engine_whose_jobs_have_ended_says_nothing() -> None:
    ended = run_program("""
        print(wf.Engine("8MiB", threads=1).submit(make_job("a")).result().state)
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "finished\n", "")


def test_ctrl_c_leaves_a_sleeping_callback() -> None:
    ended = run_program("""
        def sleep(result):
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(100)

        try:
            wf.run([make_job("a", on_step=sleep)], "8MiB", threads=1, callbacks="caller")
        except wf.RunInterrupted as stopped:
            print(stopped.report["a"].state, stopped.report.interrupted)
    """)
    assert (ended.returncode, ended.stdout) == (0, "stopped True\n"), ended.stderr


def test_ctrl_c_leaves_a_loop_of_runs() -> None:
    ended = run_program("""
        runs = 0
        def press(result):
            if result.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        try:
            while runs < 10:
                runs += 1
                wf.run([make_job("a", on_step=press)], "8MiB", threads=1)
        except KeyboardInterrupt as stopped:
            print(runs, stopped.report.interrupted)
    """)
    assert (ended.returncode, ended.stdout) == (0, "1 True\n"), ended.stderr


def test_a_second_ctrl_c_waits_for_no_callback_on_a_lane() -> None:
    started = time.monotonic()
    ended = run_program("""
        def sleep(result):
            for wait in (0.5, 1.0):
                threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(1000)

        try:
            wf.run([make_job("a", on_step=sleep)], "8MiB", threads=1)
        except KeyboardInterrupt:
            print("left")
    """)
    assert ended.stdout == "left\n", ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - started < 100


def test_whose_evaluation_waits_for_its_thread_gives_no_memory_away() -> None:
    """Two evaluations ask for more than there is: one is in the caller's thread, and the other
    waits for that in the middle of its boundary, where it cannot be sent away."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(320, 16, generator=generator)
    labels = torch.randint(4, (320,), generator=generator)

    def evaluate(model: nn.Module) -> float:
        return float(F.cross_entropy(model(inputs), labels))

    def jobs() -> list[wf.Job]:
        made = []
        for number in range(6):
            torch.manual_seed(number)
            hidden = nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.3)
            model = nn.Sequential(*hidden, nn.Linear(64, 4))
            made.append(
                wf.Job(
                    f"job-{number}",
                    model=model,
                    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
                    data=[(inputs[at : at + 16], labels[at : at + 16]) for at in range(0, 320, 16)],
                    steps=20,
                    seed=number,
                    evaluate=evaluate,
                    evaluate_every=2,
                )
            )
        return made

    expected = {job.name: wf.run_eager(job, threads=1) for job in jobs()}
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = wf.run(jobs(), memory="300KiB", callbacks="caller", threads=1)
        for name, alone in expected.items():
            found = report[name]
            if found.ok:
                assert list(found.losses) == list(alone.losses)
                assert found.evaluations == alone.evaluations
            else:
                assert found.error_type == "OutOfMemoryError"


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("capture", [True, False])
def test_memory_for_an_evaluation_is_found_while_others_wait_for_its_thread(capture: bool) -> None:
    """One waits with its callback, another for the lock that this one has, in the caller's thread
    an evaluation wants more memory: nobody but that can go on."""
    sizes = itertools.count(1)

    def evaluate(model: nn.Module) -> float:
        time.sleep(0.02)  # the others' steps end meanwhile
        return float(torch.ones(next(sizes) << 18).sum())

    def note(result: wf.StepResult) -> None:
        time.sleep(0.001)

    job = make_job("evaluated", evaluate=evaluate, evaluate_every=1, steps=8, capture=capture)
    told = [make_job(f"told {n}", width=9 + n, on_step=note, steps=60) for n in range(2)]
    plain = [make_job(f"plain {n}", width=12 + n, steps=400, capture=capture) for n in range(2)]
    jobs = [job, *told, *plain]
    report = wf.run(jobs, "64MiB", threads=1, lanes=3, callbacks="caller")
    report.raise_errors()
    values = [evaluation.values["value"] for evaluation in report["evaluated"].evaluations]
    assert values == [float(number << 18) for number in range(1, 9)]
    assert [report[one.name].steps for one in jobs] == [8, 60, 60, 400, 400]


#: For so long a callback of these tests computes; beside another's, if it may.
LONG_SECONDS = 0.02


def timing(spans: list[tuple[float, float]]) -> Callable[[Any], None]:
    """A callback that plainly minds its own business, and notes when it ran."""

    def on_step(step: Any) -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < LONG_SECONDS:
            step.model(INPUT)
        spans.append((began, time.perf_counter()))

    return on_step


def meet(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    """Whether any two of these spans have a moment in common."""
    return any(a < d and c < b for a, b in one for c, d in other)


def run_timed(callbacks: dict[str, Callable[[Any], None]], steps: int = 12) -> None:
    """Trains a job with each callback; each has the losses of its loop."""
    jobs = [make_job(name, steps=steps, on_step=one) for name, one in callbacks.items()]
    report = wf.run(jobs, "8MiB", threads=1)
    assert report.ok, [job.error for job in report]
    expected = wf.run_eager(make_job("alone", steps=steps), threads=1).losses
    assert all(job.losses == expected for job in report)


def test_long_callbacks_that_mind_their_own_business_run_beside_each_other() -> None:
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in "abc"}
    run_timed({name: timing(spans[name]) for name in spans})
    assert all(len(found) == 12 for found in spans.values())
    assert any(meet(spans[one], spans[other]) for one, other in itertools.combinations(spans, 2))


def test_that_one_takes_long_is_known_of_others_of_its_code(monkeypatch: Any) -> None:
    asked: list[tuple[str, bool]] = []
    run = Callbacks.run

    def noted(self: Callbacks, job: str, function: Any, own: Any = None) -> Any:
        asked.append((job, own is not None))
        return run(self, job, function, own)

    monkeypatch.setattr(Callbacks, "run", noted)
    with wf.Engine("8MiB", threads=1) as engine:
        for name in "ab":
            job = make_job(name, steps=3, on_step=timing([]))
            assert engine.submit(job).result().ok
    assert asked == [("a", False), ("a", True), ("a", True), *[("b", True)] * 3]


def test_callbacks_with_something_in_common_run_one_at_a_time() -> None:
    together: list[tuple[float, float]] = []
    run_timed({name: timing(together) for name in "abc"})
    assert len(together) == 36
    assert not any(meet([one], [other]) for one, other in itertools.combinations(together, 2))


def test_a_callback_that_is_not_plain_runs_alone() -> None:
    """Nor does one that is begin while it runs."""
    own: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    shown: list[str] = []

    class Shown:
        def show(self, text: str) -> None:
            time.sleep(LONG_SECONDS / 2)
            shown.append(text)

    board = Shown()

    def on_step(step: Any) -> None:
        began = time.perf_counter()
        board.show(f"{step.loss}")
        others.append((began, time.perf_counter()))

    run_timed({"own": timing(own), "other": on_step})
    assert len(own) == len(others) == len(shown) == 12
    assert not meet(own, others)


def test_a_callback_beside_others_stops_its_job_and_fails_alone() -> None:
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in ("goes on", "stops")}

    def stopping(notes: list[tuple[float, float]]) -> Callable[[Any], Any]:
        note = timing(notes)

        def on_step(step: Any) -> Any:
            note(step)
            return wf.STOP if step.step == 5 else None

        return on_step

    def failing(step: Any) -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < LONG_SECONDS:
            step.model(INPUT)
        if step.step > 3:
            raise ValueError(step.step)

    callbacks = {
        "goes on": timing(spans["goes on"]),
        "stops": stopping(spans["stops"]),
        "fails": failing,
    }
    jobs = [make_job(name, steps=12, on_step=one) for name, one in callbacks.items()]
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run(jobs, "8MiB", threads=1)
    states = [(job.state, job.steps) for job in report]
    assert states == [("finished", 12), ("stopped", 5), ("failed", 4)]
