"""Packings that pay are kept, others are undone."""

from __future__ import annotations

import pytest

from waterflow.partitioner.policies.packing import packing_gain, packing_pays

pytestmark = pytest.mark.virtual

#: Gandiva's Table 1: the gain of packing as many copies of a model on one P40 as are best.
TABLE_1 = {
    "VAE": 4.12,
    "super resolution": 2.60,
    "RHN": 0.46,
    "SCRNN": 0.39,
    "MI-LSTM": 0.17,
    "LSTM": -0.16,
    "ResNet-50": -0.13,
    "ResNeXt-50": -0.11,
}


@pytest.mark.parametrize("model", TABLE_1)
def test_gains_are_kept_and_losses_undone(model: str) -> None:
    gain = TABLE_1[model]
    assert packing_pays([(1 + gain) / 2] * 2, [1.0] * 2) == (gain > 0)


def test_each_job_counts_by_its_own_speed() -> None:
    assert packing_gain([5.0, 100.0], [10.0, 200.0]) == 1.0
    assert packing_gain([9.0, 60.0], [10.0, 200.0]) == pytest.approx(1.2)
