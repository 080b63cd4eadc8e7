"""Speeds from what others have measured; where nobody has, none is made up.

- More or fewer GPUs: ElasticFlow's A100 tables, at the nearest batch; a model that is not in them
  scales like their geometric mean.
- Several nodes: Chronus' table; a model that is not in it loses nothing.
- Beside another: Gavel's V100 pairs, less those whose two rates equal the isolated ones exactly
  (they were not measured); others as `beside_unknown` says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, log

from waterflow.cluster.spec import JobSpec
from waterflow.cluster.tables import load_json

_RENAMED = {"resnet50": "resnet50", "vgg19": "vgg16", "inception_v3": "inception3"}


class Measured:
    """Tables of V100 and A100 GPUs."""

    def step_time(self, spec: JobSpec, gpus: int, nodes: int) -> float:
        """See `Speeds`."""
        least = 1 if gpus <= 8 else -(-gpus // 8)
        time = spec.step_seconds
        if gpus != spec.gpus:
            time *= scaling(spec.model, spec.batch, spec.gpus) / scaling(
                spec.model, spec.batch, gpus
            )
        return time / locality(spec.model, gpus, nodes) if nodes > least else time

    def shared(self, spec: JobSpec, other: JobSpec) -> float:
        """See `Speeds`."""
        found = _beside(spec.model, other.model)
        return beside_unknown(spec, other) if found is None else found


def beside_unknown(spec: JobSpec, other: JobSpec) -> float:
    """Both get what they use while it adds up to one GPU; beyond that each its part of it."""
    return 1.0 / max(1.0, spec.utilization + other.utilization)


@cache
def scaling(model: str, batch: int, gpus: int) -> float:
    """Steps per second on so many GPUs, of those on one, with the same batch over all of them."""
    counts = load_json("elasticflow_a100")["gpus"]
    return _interpolated(counts, _curve(model, batch), gpus)


@cache
def _curve(model: str, batch: int) -> tuple[float, ...]:
    table: Mapping[str, Mapping[str, Sequence[float | None]]]
    table = load_json("elasticflow_a100")["iterations_per_second"]
    name = _RENAMED.get(model, model)
    if name not in table:
        curves = [_curve(known, 256) for known in sorted(table) if known != "resnet50_cifar10"]
        return tuple(exp(sum(map(log, at)) / len(at)) for at in zip(*curves, strict=True))
    nearest = min(table[name], key=lambda known: (abs(int(known) - batch), int(known)))
    rates = table[name][nearest]
    first = next(rate for rate in rates if rate)
    known = [rate / first for rate in rates if rate]
    # Where larger counts were not measured, they are taken to bring nothing.
    return tuple(known + [known[-1]] * (len(rates) - len(known)))


def _interpolated(counts: Sequence[int], values: Sequence[float], gpus: int) -> float:
    at = bisect_left(counts, gpus)
    if at == len(counts):
        return values[-1]
    if counts[at] == gpus or at == 0:
        return values[at]
    low, high = counts[at - 1], counts[at]
    return values[at - 1] + (values[at] - values[at - 1]) * (gpus - low) / (high - low)


@cache
def locality(model: str, gpus: int, nodes: int) -> float:
    """Speed on so many nodes, of that on as few as can be."""
    table = load_json("chronus_locality").get(model)
    if not isinstance(table, dict):
        return 1.0
    measured = table[min(table, key=lambda known: (abs(int(known) - gpus), int(known)))]
    nearest = min(measured, key=lambda known: (abs(int(known) - nodes), int(known)))
    return min(float(measured[nearest]), 1.0)


@cache
def _beside(model: str, other: str) -> float | None:
    table = load_json("gavel_v100")
    names = table["names"]
    if model not in names or other not in names:
        return None
    found = table["speed_beside"][names.index(model)][names.index(other)]
    # 0 in the table: the two did not fit the memory of a V100 together.
    return None if found is None else max(float(found), 1e-3)
