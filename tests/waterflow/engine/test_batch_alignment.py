"""Batches that begin elsewhere than torch begins memory of its own, as slices and arrays do:
kernels may sum in another order there, and captured steps sum as the loop does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import waterflow as wf
from tests.support.differences import assert_equal_to_eager

pytestmark = pytest.mark.cpu

WIDTH, ROWS, CLASSES = 6, 9, 3
#: Of a whole data set, of which batches are slices: 216 bytes each, and 72.
IMAGES = torch.randn(ROWS * 24, WIDTH, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(ROWS * 24) % CLASSES


def slices(*numbers: int) -> list[Any]:
    """Slices, by their numbers."""
    starts = [ROWS * number for number in numbers]
    return [(IMAGES[at : at + ROWS], LABELS[at : at + ROWS]) for at in starts]


def skewed_by(skew: int, values: torch.Tensor) -> torch.Tensor:
    """The same so many bytes behind an address to which torch aligns."""
    room = np.empty(values.nbytes + 128, dtype=np.uint8)
    begin = -room.ctypes.data % 64 + skew
    array = room[begin : begin + values.nbytes].view(values.numpy().dtype).reshape(values.shape)
    array[...] = values.numpy()
    return torch.from_numpy(array)


def make(name: str, data: Iterable[Any], **options: Any) -> wf.Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    settings = {"seed": 0, "capture": True, "epochs": 3, "loss": of_pairs, **options}
    return wf.Job(name, model=model, optimizer=optimizer, data=data, **settings)


def of_names(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch["images"], batch["labels"]
    return functional.cross_entropy(model(images), labels)


def named(batches: Iterable[Any]) -> list[dict[str, torch.Tensor]]:
    return [{"images": images, "labels": labels} for images, labels in batches]


def of_pairs(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


ORDERS = {
    "aligned first": [0, 8, 16, 0, 8, 16, 1, 3, 5, 7, 2, 4],
    "in turn": list(range(12)),
    "skewed first": [1, 3, 5, 1, 3, 5, 0, 8, 16],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("form", ["pairs", "named"])
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_slices_have_the_numbers_of_the_loop(
    order: list[int], form: str, tiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATERFLOW_TIERS", tiers)

    def job() -> wf.Job:
        batches = slices(*order)
        return make("a", batches) if form == "pairs" else make("a", named(batches), loss=of_names)

    one = job()
    report = wf.run([one], "16MiB", threads=1)
    report.raise_errors()
    assert report["a"].captured == "captured"
    assert_equal_to_eager(one, report["a"], job())
    assert not report["a"].recaptures


@pytest.mark.parametrize("skews", itertools.product([0, 4, 8, 16, 36], [0, 8, 16, 40]), ids=str)
def test_arrays_have(skews: tuple[int, int]) -> None:
    def job() -> wf.Job:
        return make(
            "a",
            [(skewed_by(skews[0], x), skewed_by(skews[1], y)) for x, y in batches],
            loss=of_pairs,
        )

    batches = slices(0, 1, 2)
    one = job()
    report = wf.run([one], "16MiB", threads=1)
    report.raise_errors()
    assert_equal_to_eager(one, report["a"], job())


@pytest.mark.parametrize("policy", ["flow", "temporal", "waterwave"])
def test_several_jobs_of_other_alignment_under_a_tight_budget(policy: str) -> None:
    def jobs() -> list[wf.Job]:
        orders = [range(6), range(1, 7), [0, 8, 16], [1, 9]]
        return [make(f"{i}", slices(*one)) for i, one in enumerate(orders)]

    trained = jobs()
    with wf.Engine("64KiB", threads=1, policy=policy, check=True) as engine:
        for job in trained:
            engine.submit(job)
    assert engine.check_races() == []
    report = engine.report()
    report.raise_errors()
    for job, expected in zip(trained, jobs(), strict=True):
        assert_equal_to_eager(job, report[job.name], expected)


def test_views_with_gaps_have() -> None:
    wide = torch.randn(ROWS * 4, WIDTH + 3, generator=torch.Generator().manual_seed(2))

    def job() -> wf.Job:
        starts = [ROWS * number for number in range(4)]
        data = [(wide[at : at + ROWS, 1 : WIDTH + 1], LABELS[at : at + ROWS]) for at in starts]
        data += [
            (wide[at : at + ROWS, 1 : WIDTH + 1].t().contiguous().t(), y)
            for (_, y), at in zip(data, starts, strict=True)
        ]
        return make("a", data)

    one = job()
    report = wf.run([one], "16MiB", threads=1)
    report.raise_errors()
    assert_equal_to_eager(one, report["a"], job())
