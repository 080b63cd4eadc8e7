"""NASNet-A mobile has the published size and multiplications; its cells are those of figure 4.

The cells are also run from a table of operations, with all padding spelt out.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.vision import traced
from waterflow.models.nasnet import (
    NASNET_MOBILE,
    NasNet,
    NormalCell,
    ReductionCell,
    Separable,
)

pytestmark = pytest.mark.cpu

#: Figure 4: five sums of two operations. Input 0 is the last output, 1 the one before, 2 the first
#: sum and so on. "sep" operations have their own weights, in this order.
NORMAL = [
    (("sep5", 0), ("sep3", 1)),
    (("sep5", 1), ("sep3", 1)),
    (("mean", 0), ("none", 1)),
    (("mean", 1), ("mean", 1)),
    (("sep3", 0), ("none", 0)),
]
REDUCTION = [
    (("sep5", 0), ("sep7", 1)),
    (("max", 0), ("sep7", 1)),
    (("mean", 0), ("sep5", 1)),
    (("mean", 2), ("none", 3)),
    (("sep3", 2), ("max", 0)),
]
#: What is concatenated: what the figure draws into the output.
NORMAL_JOINED, REDUCTION_JOINED = (1, 2, 3, 4, 5, 6), (3, 4, 5, 6)


def padded(x, kernel, stride, value=0.0):
    """As many places as windows need to give size / stride, rounded up; an odd one at the end."""
    margins = []
    for size in (x.shape[3], x.shape[2]):
        missing = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        margins += [missing // 2, missing - missing // 2]
    return F.pad(x, margins, value=value)


def mean(x, stride):
    real = padded(torch.ones_like(x), 3, stride)
    return F.avg_pool2d(padded(x, 3, stride), 3, stride) / F.avg_pool2d(real, 3, stride)


def largest(x, stride):
    return F.max_pool2d(padded(x, 3, stride, -torch.inf), 3, stride)


def separable(x, module, kernel, stride):
    parts = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.BatchNorm2d)]
    assert len(parts) == 6
    for depthwise, pointwise, norm in (parts[:3], parts[3:]):
        assert depthwise.kernel_size == (kernel, kernel)
        x = padded(x.relu(), kernel, stride)
        x = F.conv2d(x, depthwise.weight, stride=stride, groups=x.shape[1])
        x = norm(F.conv2d(x, pointwise.weight))
        stride = 1
    return x


def halved(x, module):
    x = x.relu()
    shifted = torch.zeros_like(x)
    shifted[:, :, :-1, :-1] = x[:, :, 1:, 1:]
    parts = (module.even, x), (module.odd, shifted)
    return module.norm(torch.cat([F.conv2d(y[:, :, ::2, ::2], p.weight) for p, y in parts], 1))


def from_the_table(cell, x, before):
    normal = isinstance(cell, NormalCell)
    stride = 1 if normal else 2
    twice = before.shape[2] > x.shape[2]
    states = [cell.squeeze(x), halved(before, cell.fit) if twice else cell.fit(before)]
    modules = iter([part for part in cell.children() if isinstance(part, Separable)])
    for block in NORMAL if normal else REDUCTION:
        results = []
        for operation, number in block:
            step = stride if number < 2 else 1
            if operation.startswith("sep"):
                results.append(separable(states[number], next(modules), int(operation[3]), step))
            elif operation == "none":
                results.append(states[number])
            else:
                results.append({"mean": mean, "max": largest}[operation](states[number], step))
        states.append(results[0] + results[1])
    return torch.cat([states[i] for i in (NORMAL_JOINED if normal else REDUCTION_JOINED)], 1)


def test_maps_and_multiplications():
    """4 @ 1056: stages of 4 cells, 1,056 channels at the end; 564 million multiplications."""
    shapes, multiplications = traced(NASNET_MOBILE)
    wanted = [(44, 56), (88, 28)]
    wanted += [(264, 28)] * 4 + [(352, 14)] + [(528, 14)] * 4 + [(704, 7)] + [(1056, 7)] * 4
    assert shapes["stem"] == (2, 32, 111, 111)
    found = [shapes[f"cells.{number}"] for number in range(16)]
    assert found == [(2, channels, side, side) for channels, side in wanted]
    assert shapes[""] == (2, 1000)
    assert round(multiplications / 1e6) == 564  # table 3 of Zoph et al.


@pytest.mark.parametrize("size", [64, 85])
def test_cells_are_those_of_figure_4(size):
    """Maps of even and odd sizes, all kinds of fitting, statistics of batch norm that matter."""
    torch.manual_seed(0)
    model = NasNet(classes=5, cells=2, stages=3, filters=8, stem=6).eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, std=0.3)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
            nn.init.normal_(part.bias, std=0.3)
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        x = before = model.stem(images)
        for cell in model.cells:
            x, before = from_the_table(cell, x, before), x
        wanted = model.fc(x.relu().mean((2, 3)))
        torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-4)


def test_what_the_cells_read():
    """Each output reads the two before it; only the first cell reads one thing twice."""
    with torch.device("meta"):
        cells = NASNET_MOBILE.model().cells
    kinds = [type(cell).__name__[0] + type(cell.fit).__name__[0] for cell in cells]
    stage = ["NH", "NS", "NS", "NS"]  # a halving, then 1x1 kernels, before the operations
    assert kinds == ["RI", "RH", *stage, "RS", *stage, "RS", *stage]
    assert sum(isinstance(cell, ReductionCell) for cell in cells) == 4


@pytest.mark.parametrize("filters", [0, 6])
def test_filters_that_cannot_be(filters):
    with pytest.raises(ValueError, match=f"{filters} filters: .* multiple of 4"):
        NasNet(filters=filters)


@pytest.mark.parametrize("numbers", [{"cells": 0}, {"stages": 0}])
def test_no_cells(numbers):
    with pytest.raises(ValueError, match="use 1 or more of both"):
        NasNet(**numbers)
