"""The engine on a real GPU. Everything that needs none is tested on the stand-in driver."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.differences import assert_same_numbers
from tests.support.jobs import MODELS, OPTIMIZERS, SCHEDULERS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

JOBS = {**MODELS, **SCHEDULERS, **OPTIMIZERS}
#: Jobs whose numbers eager PyTorch itself repeats on a GPU, with deterministic algorithms on.
REPEATED = [
    name
    for name in ("cnn", "cnn_shuffled", "encoder", "tied", "partly", "custom", "plain")
    if name in JOBS
]


@pytest.fixture(scope="module", autouse=True)
def _deterministic() -> Iterator[None]:
    """cuBLAS needs its variable before its first use: check.sh sets nothing, so warn only."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def on_gpu(name: str) -> wf.Job:
    """A job of the table, its model on the GPU."""
    job = JOBS[name]()
    job.model.to("cuda")  # the parameters stay the objects that the optimizer has
    return job


def run(jobs: list[wf.Job], **options: Any) -> wf.Report:
    return wf.run(jobs, **{"memory": "256MiB", "device": "cuda", **options})


@pytest.mark.parametrize("name", REPEATED)
def test_solo(name):
    expected, job = on_gpu(name), on_gpu(name)
    eager = wf.run_eager(expected)
    assert_same_numbers(expected, eager, job, run([job])[name])


@pytest.mark.parametrize("policy", ["temporal", "waterwave", "waterwave-s", "flow"])
def test_together(policy):
    jobs = {name: on_gpu(name) for name in REPEATED}
    report = run(list(jobs.values()), policy=policy)
    for name, job in jobs.items():
        expected = on_gpu(name)
        assert_same_numbers(expected, wf.run_eager(expected), job, report[name])
    assert 0 < report.peak_bytes <= report.budget_bytes
    assert report.syncs > 0


def test_the_race_checker_accepts_the_run():
    with wf.Engine("256MiB", device="cuda", check=True) as engine:
        for name in REPEATED:
            engine.submit(on_gpu(name))
    assert engine.report().ok
    assert engine.check_races() == []


def test_eager_steps_and_callbacks():
    expected, job = on_gpu("cnn"), on_gpu("cnn")
    expected.capture = job.capture = False
    seen: list[float] = []
    job.on_step = lambda result: seen.append(result.loss)
    report = run([job, on_gpu("tied")])
    assert report["cnn"].losses == seen == wf.run_eager(expected).losses


def test_memory_comes_from_the_arena_and_goes_back():
    free_before, _ = torch.cuda.mem_get_info()
    taken: list[int] = []
    job = on_gpu("plain")
    job.on_step = lambda result: taken.append(torch.cuda.mem_get_info()[0])
    assert run([job], memory="1GiB").ok
    assert free_before - min(taken) >= 1 << 30
    torch.cuda.empty_cache()
    assert free_before - torch.cuda.mem_get_info()[0] < 256 << 20
    assert torch.cuda.memory_allocated() >= 0
    assert "allocated_bytes.all.current" in torch.cuda.memory_stats()


def test_out_of_memory_ends_one_job():
    hog, job, expected = on_gpu("cnn"), on_gpu("tied"), on_gpu("tied")
    hog.name, hog.capture = "hog", False
    own = hog.loss
    hog.loss = lambda model, batch: own(model, batch) + torch.ones(1 << 28, device="cuda").sum() * 0
    report = run([hog, job], memory="128MiB")
    assert report["hog"].state == "out_of_memory"
    assert_same_numbers(expected, wf.run_eager(expected), job, report["tied"])


def test_benchmark_mode_and_half_precision():
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return model(batch).square().mean()

        data = [torch.randn(8, 3, 32, 32) for _ in range(4)]
        job = wf.Job("half", model=model, optimizer=optimizer, loss=loss, data=data, epochs=3)
        with pytest.warns(wf.OpaqueStepWarning, match="cudnn.benchmark is on"):
            report = run([job])
        assert report.ok, report["half"].error
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before


def test_kernels_that_add_in_no_fixed_order_are_captured():
    """No loop repeats an embedding's gradient bit for bit; all else has to be the same."""

    def tokens():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 512), nn.Flatten(), nn.Linear(512 * 64, 10)).cuda()
        data = [torch.randint(4, (256, 64)) for _ in range(8)]
        return wf.Job(
            "tokens",
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            loss=lambda model, batch: model(batch).logsumexp(-1).mean(),
            data=data,
            epochs=2,
        )

    torch.use_deterministic_algorithms(False)
    try:
        report = run([tokens()])["tokens"]
        eager = wf.run_eager(tokens())
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
    assert report.captured == "captured"
    assert report.losses[0] == eager.losses[0]
    assert report.losses == pytest.approx(eager.losses, rel=1e-3)


def test_bad_input():
    with pytest.raises(wf.JobError, match="smaller budget"):
        wf.Engine("100TiB", device="cuda")
    with pytest.raises(wf.JobError, match="no CUDA device 99"):
        wf.Engine("1MiB", device="cuda:99")
    with pytest.raises(wf.JobError, match=r"is on cpu.*cuda"):
        run([JOBS["plain"]()])


def test_a_kernel_that_breaks_the_context():
    program = """
        import torch, waterflow as wf

        def job(name, bad):
            torch.manual_seed(0)
            model = torch.nn.Embedding(8, 4).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = [torch.zeros(4, dtype=torch.long)] * 6 + [torch.full((4,), bad)] + [
                torch.zeros(4, dtype=torch.long)] * 6
            loss = lambda model, batch: model(batch).square().mean()
            return wf.Job(name, model=model, optimizer=optimizer, loss=loss, data=data)

        try:
            wf.run([job("good", 0), job("bad", 10**6)], memory="64MiB", device="cuda")
        except wf.DeviceLostError as lost:
            assert "is lost" in str(lost), lost
            assert len(lost.report["good"].losses) >= 3, lost.report
            print("lost as it should be")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert "lost as it should be" in done.stdout, done.stderr[-2000:]
