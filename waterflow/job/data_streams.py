"""Random generators that data draw from and that are not the job's own streams."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader


def generators_of(data: Any) -> list[torch.Generator]:
    """Those that torch's loader is sure to draw its batches' order from, or its workers' seeds.

    Without one of its own it draws from the streams of whoever goes through it.
    """
    if not isinstance(data, DataLoader):
        return []
    samplers = (data.sampler, getattr(data.batch_sampler, "sampler", None))
    found = [getattr(sampler, "generator", None) for sampler in samplers]
    found += [data.generator] if data.num_workers else []
    return [one for one in found if isinstance(one, torch.Generator)]
