"""The budget of a device's engine changes while jobs run: memory is unmapped, and mapped again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import waterflow as wf
from tests.support.differences import assert_same_numbers
from tests.support.fake_cuda import FakeDriver, nothing_left
from tests.support.fake_device import FakeCudaDevice
from tests.support.jobs import MODELS

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("one_thread")]

MIB = 1 << 20
PIECE = 64 * MIB


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = FakeDriver()
    driver.reset()
    driver.memory(1 << 30)
    with nothing_left(driver):
        yield driver
    driver.reset()


def resized(driver: FakeDriver, changes: dict[int, str]) -> tuple[dict[int, int], Any, Any]:
    """Trains two jobs; what the device had taken after each change of the budget."""
    job, other = MODELS["cnn_shuffled"](epochs=4), MODELS["encoder"](epochs=4)
    taken: dict[int, int] = {}
    with wf.Engine("256MiB", device=FakeCudaDevice(), threads=1) as engine:

        def change(result: wf.StepResult) -> None:
            if result.step in changes:
                engine.resize(changes[result.step])
                taken[result.step] = driver.live("memory_bytes")

        job.on_step = change
        engine.submit(job)
        engine.submit(other)
    report = engine.report()
    for one in (job, other):
        expected = MODELS[one.name](epochs=4)
        assert_same_numbers(expected, wf.run_eager(expected, threads=1), one, report[one.name])
    return taken, report, engine


def test_it_shrinks_and_grows(driver: FakeDriver) -> None:
    driver.delay(100, seed=1)
    taken, report, engine = resized(driver, {3: "128MiB", 6: "40MiB", 9: "320MiB"})
    assert taken == {3: 128 * MIB, 6: PIECE, 9: 320 * MIB}
    assert engine.budget == 320 * MIB
    assert report.budget_bytes == 320 * MIB
    assert driver.live("memory_bytes") == 0


def test_a_budget_that_the_device_does_not_have_changes_nothing(driver: FakeDriver) -> None:
    job = MODELS["cnn"](epochs=3)
    errors: list[str] = []
    with wf.Engine("128MiB", device=FakeCudaDevice(), threads=1) as engine:

        def change(result: wf.StepResult) -> None:
            if result.step == 3:
                driver.memory(192 * MIB)
                with pytest.raises(wf.JobError, match="does not have so much") as caught:
                    engine.resize("512MiB")
                errors.append(str(caught.value))
                assert driver.live("memory_bytes") == 128 * MIB

        job.on_step = change
        engine.submit(job)
    assert errors
    expected = MODELS["cnn"](epochs=3)
    assert_same_numbers(expected, wf.run_eager(expected, threads=1), job, engine.report()["cnn"])


def test_what_does_not_fit_is_refused(driver: FakeDriver) -> None:
    job = MODELS["cnn"](epochs=3)
    refused: list[str] = []
    with wf.Engine("128MiB", device=FakeCudaDevice(), threads=1) as engine:

        def change(result: wf.StepResult) -> None:
            if result.step == 3:
                with pytest.raises(wf.BudgetError, match="'cnn' holds") as caught:
                    engine.resize("4KiB")
                refused.append(str(caught.value))

        job.on_step = change
        engine.submit(job)
    assert refused
    assert engine.report().ok


def test_a_smaller_budget_is_kept_by_spilling(driver: FakeDriver) -> None:
    """What does not fit any more is planned into what is left, where the run may spill."""
    with pytest.raises(wf.BudgetError) as caught:
        wf.run([MODELS["cnn"]()], "1KiB", device=FakeCudaDevice(), threads=1)
    need = int(str(caught.value).split("needs ")[1].split()[0])
    job, device = MODELS["cnn"](epochs=3), FakeCudaDevice()
    with wf.Engine(2 * need, device=device, threads=1, spill=True) as engine:
        job.on_step = lambda result: engine.resize(int(need * 0.85)) if result.step == 4 else None
        engine.submit(job)
    expected = MODELS["cnn"](epochs=3)
    assert_same_numbers(expected, wf.run_eager(expected, threads=1), job, engine.report()["cnn"])
    assert any(step.spill for step in engine._queue.jobs[0].steps.cache.steps())
