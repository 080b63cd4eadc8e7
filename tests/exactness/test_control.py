"""Whatever is asked of an engine while jobs run, in any order: numbers are the plain loop's."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import waterflow as wf
from tests.support.differences import assert_same_numbers
from tests.support.jobs import MODELS, OWN_STEPS, SCHEDULERS, TRAINING
from tests.support.needs import needed
from waterflow.models.gpt2 import Gpt2, Gpt2Config

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.cpu]

#: Without a scheduler that ends after as many steps as the table's jobs have.
JOBS = {
    name: build
    for name, build in {**MODELS, **TRAINING, **OWN_STEPS, **SCHEDULERS}.items()
    if not name.startswith("one_cycle")
}
#: Under which jobs share memory in other ways, with their options.
POLICIES: dict[str, dict[str, Any]] = {
    "flow": {},
    "temporal": {},
    "time-slice": {"quantum": "20ms"},
    "waterwave": {},
}
#: Those of them under which some go before others.
RANKED = ("flow", "time-slice")
MEMORY, SIZES = "64MiB", ("1MiB", "3MiB", "16MiB", "64MiB")
SHORT, LONG = 8, 24
EPOCHS = 8


def make_reader(epochs: int = 1, steps: int | None = None, **options: Any) -> wf.Job:
    """A language model whose texts are longer now and then, which takes most of its memory."""
    torch.manual_seed(0)
    config = Gpt2Config(vocabulary=40, width=32, layers=1, heads=2, positions=32)
    model = Gpt2(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    lengths = (SHORT, SHORT, LONG, SHORT)
    data = [torch.randint(40, (8, length), generator=generator) for length in lengths]
    return wf.Job(
        "reader",
        model=model,
        optimizer=optimizer,
        loss=next_token,
        data=options.pop("data", data),
        epochs=epochs,
        steps=steps,
        seed=0,
        **options,
    )


def next_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


JOBS["reader"] = make_reader


@functools.cache
def tight() -> int:
    """A budget in which the reader's long texts leave next to nothing to anybody else."""
    longest = make_reader(data=[torch.zeros(8, LONG, dtype=torch.long)] * 2, capture=True)
    return needed(longest) + 2048


jobs_of_a_run = st.lists(
    st.tuples(
        st.sampled_from(sorted(JOBS)),
        st.sampled_from(["auto", True]),
        st.sampled_from(["guaranteed", "normal", "opportunistic"]),
    ),
    min_size=2,
    max_size=4,
    unique_by=lambda one: one[0],
)
wishes = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.one_of(
            st.just(("suspend",)),
            st.just(("resume",)),
            st.tuples(st.just("priority"), st.sampled_from(["guaranteed", "opportunistic"])),
            st.tuples(st.just("weight"), st.sampled_from([0.5, 3.0])),
            st.tuples(st.just("limit"), st.sampled_from([0.6, 0.8, None])),
            st.tuples(st.just("resize"), st.sampled_from(SIZES)),
            st.just(("tight",)),
            st.just(("submit",)),
        ),
    ),
    min_size=3,
    max_size=12,
)


def make(name: str, **options: Any) -> wf.Job:
    build: Any = JOBS[name]
    if name == "reader" and "capture" in options:
        options["capture"] = True  # eager steps would need more than the tightest budget
    job: wf.Job = build(epochs=EPOCHS, steps=None)
    for option, value in options.items():
        setattr(job, option, value)
    return job


@functools.cache
def expected(name: str) -> tuple[wf.Job, wf.JobReport]:
    job = make(name)
    return job, wf.run_eager(job, threads=1)


def grant(engine: wf.Engine, handle: wf.JobHandle, wish: tuple[Any, ...]) -> None:
    """What is refused, or comes too late, changes nothing."""
    with contextlib.suppress(wf.JobError, wf.BudgetError):
        match wish:
            case ("suspend",):
                handle.suspend()
            case ("resume",):
                handle.resume()
            case ("priority", priority):
                handle.set_priority(priority)
            case ("weight", weight):
                handle.set_weight(weight)
            case ("limit", None):
                handle.set_memory_limit(None)
            case ("limit", share):
                need = engine.report()[handle.name].solo_peak_bytes
                if need and handle._job.may_spill:  # else what it says is of eager steps
                    handle.set_memory_limit(int(need * share))
            case ("tight",):
                engine.resize(tight())
            case ("resize", size):
                engine.resize(size)


def check(chosen: list[tuple[str, Any, str]], asked: list[tuple[int, Any]], policy: str) -> None:
    left = [make(name, capture=capture) for name, capture, _ in chosen]
    if policy in RANKED:
        for job, (_, _, rank) in zip(left, chosen, strict=True):
            job.priority = rank
    jobs = list(left)
    options = POLICIES[policy]
    with wf.Engine(MEMORY, policy=policy, threads=1, check=True, **options) as engine:
        handles = [engine.submit(left.pop(0)), engine.submit(left.pop(0))]
        for place, wish in asked:
            made = sum(len(handle.losses) for handle in handles)
            until = time.monotonic() + 0.05
            while time.monotonic() < until and sum(len(h.losses) for h in handles) < made + 3:
                time.sleep(0.001)
            if wish == ("submit",) and left:
                handles.append(engine.submit(left.pop(0)))
            grant(engine, handles[place % len(handles)], wish)
        with contextlib.suppress(wf.BudgetError):
            engine.resize(MEMORY)
        handles += [engine.submit(job) for job in left]
    assert engine.check_races() == []
    report = engine.report()
    assert report.peak_bytes <= report.budget_bytes
    for job in jobs:
        reference, reference_report = expected(job.name)
        assert_same_numbers(reference, reference_report, job, report[job.name])


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(chosen=jobs_of_a_run, asked=wishes, policy=st.sampled_from(sorted(POLICIES)))
@example(
    chosen=[
        ("cnn", True, "opportunistic"),
        ("reader", True, "guaranteed"),
        ("encoder", True, "opportunistic"),
    ],
    asked=[(0, ("tight",)), (1, ("priority", "opportunistic")), (1, ("submit",))],
    policy="flow",
)
@example(
    chosen=[("reader", True, "guaranteed"), ("encoder", True, "normal")],
    asked=[(0, ("tight",)), (0, ("suspend",)), (0, ("resume",))],
    policy="flow",
)
def test_a_few_orders_of_wishes(
    chosen: list[tuple[str, Any, str]], asked: Any, policy: str
) -> None:
    check(chosen, asked, policy)


@pytest.mark.soak
@pytest.mark.timeout(3600)  # of all orders together
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(chosen=jobs_of_a_run, asked=wishes, policy=st.sampled_from(sorted(POLICIES)))
def test_many_orders_of_wishes(chosen: list[tuple[str, Any, str]], asked: Any, policy: str) -> None:
    check(chosen, asked, policy)


@pytest.mark.parametrize("capture", ["auto", True])
@pytest.mark.filterwarnings("ignore::waterflow.JobFailedWarning")
def test_an_impossible_limit_harms_nobody_else(capture: Any) -> None:
    """It is refused, or, where no step is captured yet, ends the job that has it; both tell why."""
    reader, encoder = make("reader", capture=capture), make("encoder", capture=capture)
    refused: wf.BudgetError | None = None
    with wf.Engine(MEMORY, threads=1, check=True) as engine:
        engine.submit(reader)
        handle = engine.submit(encoder)
        try:
            handle.set_memory_limit(230)
        except wf.BudgetError as error:
            refused = error
    report = engine.report()
    told = refused or report["encoder"].error
    assert "cannot be planned into 230 bytes" in str(told)
    assert "Give it that much or more" in str(told)
    assert_same_numbers(*expected("reader"), reader, report["reader"])
    if refused:
        assert_same_numbers(*expected("encoder"), encoder, report["encoder"])
