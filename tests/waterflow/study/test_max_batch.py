"""max_batch: what it promises, a run on the CPU confirms."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.tables import soaked
from tests.support.zoo_jobs import BERT, CNN, LSTM, TABLE, jobs_of

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("kept_captures")]


def test_the_largest_batch_trains_and_one_more_does_not():
    budget = 8 << 20
    found = wf.max_batch([BERT, BERT], budget, hardware="cpu")
    (solo, same), (batch, other) = found.solo, found.policies["flow"].batch
    assert solo == same
    assert batch == other < solo
    assert wf.run(jobs_of(BERT, batch=solo), memory=budget, threads=1).ok
    with pytest.raises(wf.BudgetError):
        wf.run(jobs_of(BERT, batch=solo + 1), memory=budget, threads=1)
    together = jobs_of(BERT, BERT, batch=batch)
    report = wf.run(together, memory=budget, policy="flow", threads=1)
    assert report.ok
    assert report.peak_bytes <= budget
    spans = {span.job: (span.start, span.stop) for span in report.spans}
    assert len(spans) == 2


def test_the_largest_batch_of_a_step_of_ones_own():
    budget = 1 << 20
    found = wf.max_batch([small_gan, small_gan], budget, hardware="cpu")
    solo, together = found.solo[0], found.policies["flow"].batch[0]
    plan = wf.plan([small_gan(solo), small_gan(solo + 1)], budget, hardware="cpu")
    assert [job.solo_bytes <= budget for job in plan.jobs] == [True, False]
    assert 1 < together < solo
    pairs = wf.pair([small_gan, TABLE], "8MiB", hardware="cpu")
    assert pairs[0].names == ("small_gan", TABLE)
    jobs = [small_gan(together), small_gan(together)]
    for job, name in zip(jobs, "ab", strict=True):
        job.name = name
    report = wf.run(jobs, memory=budget * 21 // 20, threads=1)
    assert report.ok
    assert {job.captured for job in report} == {"captured"}


def small_gan(batch: int) -> wf.Job:
    """Two networks in one step of one's own."""
    maker, critic = nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
    of_maker, of_critic = (torch.optim.Adam(net.parameters()) for net in (maker, critic))

    def step(real: torch.Tensor) -> torch.Tensor:
        made = maker(torch.randn(len(real), 8))
        of_critic.zero_grad()
        (critic(made.detach()) - critic(real)).mean().exp().backward()
        of_critic.step()
        of_maker.zero_grad()
        loss = -critic(made).mean()
        loss.backward()
        of_maker.step()
        return loss

    return wf.Job(
        "gan",
        model=[maker, critic],
        optimizers=[of_maker, of_critic],
        step=step,
        data=[torch.randn(batch, 32)] * 4,
        epochs=2,
        capture=True,
    )


def test_policies_are_in_the_order_that_they_should_be():
    found = wf.max_batch([BERT, BERT], "64MiB").policies
    assert found["waterwave-s"].ratio <= found["waterwave"].ratio <= found["flow"].ratio
    assert found["flow"].ratio == found["temporal"].ratio
    assert found["temporal"].outlook.overlap == 0


def test_flow_reaches_the_bound_that_two_sets_of_parameters_leave():
    budget = 1 << 30
    found = wf.max_batch([BERT, BERT], budget)
    held = wf.plan([f"{BERT}:batch=2"], budget).jobs[0].persistent_bytes
    bound = (budget - 2 * held) / (budget - held)
    assert found.policies["flow"].ratio >= 0.99 * bound


def test_different_jobs_keep_their_proportion():
    found = wf.max_batch([BERT, LSTM], "32MiB")
    shares = [n / solo for n, solo in zip(found.policies["flow"].batch, found.solo, strict=True)]
    assert shares[0] == pytest.approx(shares[1], abs=0.02)
    assert found.policies["flow"].ratio == pytest.approx(sum(shares) / 2)


def test_more_memory_overlaps_more():
    frontier = wf.max_batch([CNN, CNN], "64MiB", frontier=True).frontier["flow"]
    ratios, overlaps = zip(*frontier, strict=True)
    assert list(ratios) == sorted(ratios)
    assert overlaps[0] > 0.9  # both fit side by side
    assert overlaps[-1] < overlaps[0]


def test_nothing_is_allocated_for_a_model_that_fits_no_machine():
    def enormous(batch: int) -> wf.Job:
        model = nn.Linear(200_000, 200_000)  # 149 GiB of parameters
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
        return wf.Job("x", model, optimizer, loss, [torch.randn(batch, 200_000)])

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = wf.max_batch([enormous], "400GiB")
    assert found.solo[0] > 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # in KiB


def test_json_of_max_batch():
    found = json.loads(wf.max_batch([BERT, BERT], "64MiB").to_json())
    assert found["memory_bytes"] == 64 << 20
    assert [job["name"] for job in found["jobs"]] == [f"{BERT}-1", f"{BERT}-2"]
    flow = found["policies"]["flow"]
    assert flow["batch"][0] < found["jobs"][0]["solo"]
    assert {"ratio", "peak_bytes", "syncs_per_step", "overlap"} <= set(flow)


def unchanging(batch: int) -> wf.Job:
    return jobs_of(TABLE, batch=4)[0]


def raising(batch: int) -> wf.Job:
    raise RuntimeError("no such file: weights.bin")


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: wf.max_batch([BERT], "100KiB"), wf.BudgetError, "a batch of 1 needs"),
        soaked(lambda: wf.max_batch(jobs_of(BERT), "1GiB"), wf.JobError, "its batch is fixed"),
        (lambda: wf.max_batch([f"{BERT}:batch=2"], "1GiB"), wf.JobError, "its batch is fixed"),
        (lambda: wf.max_batch([raising], "1GiB"), wf.JobError, "no such file: weights.bin"),
        (lambda: wf.max_batch([unchanging], "1GiB"), wf.JobError, "do not depend on the batch"),
    ],
)
def test_wrong_input_is_told_clearly(ask: Callable[[], object], error, message):
    with pytest.raises(error, match=message):
        ask()
