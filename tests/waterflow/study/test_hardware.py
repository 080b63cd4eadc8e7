"""Estimated times: the roofline of a device."""

from __future__ import annotations

import numpy as np
import pytest

import waterflow as wf
from waterflow.study.hardware import HARDWARE, Hardware, get_hardware

pytestmark = pytest.mark.virtual


def test_a_node_takes_its_arithmetic_or_its_traffic_whichever_is_longer():
    device = Hardware(name="x", flops=1e12, bandwidth=1e9)
    flops = np.array([2_000_000_000, 10, 0])
    moved = np.array([1000, 3_000_000, 0])
    seconds = device.seconds(flops, moved)
    assert seconds[0] == pytest.approx(2e-3, rel=0.01)
    assert seconds[1] == pytest.approx(3e-3, rel=0.01)
    assert seconds[2] == 0.0  # a view: nothing is launched


def test_devices_by_name():
    assert {get_hardware(name).name for name in HARDWARE} == set(HARDWARE)
    assert get_hardware("cpu").alignment == 64
    with pytest.raises(wf.JobError, match="did you mean 'v100'"):
        get_hardware("V10")
