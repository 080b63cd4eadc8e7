"""The policies side by side on the CPU where memory is scarce, and the simulator beside the clock.

    python -m benchmarks.flow --json

Two small transformers, whose activations are most of their memory. The
budget is what both hold all the time plus a multiple of one's transient peak: at 1.02 hardly more
than one after another needs, at 2.0 both fit side by side. For each budget the time of the same
steps under `temporal`, `waterwave` and `flow`, in interleaved runs; `..._speedup` is temporal's
time over the policy's, `..._simulated` what the simulator says from measured profiles, and
`..._error` the simulated time of a round over the measured one, less one.
"""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks.common import arguments, interleaved, median_ratio, show
from waterflow.study.plan import plan

STEPS, LAYERS = 30, 3
POLICIES = ("temporal", "waterwave", "flow")
TIGHTNESS = (1.02, 1.5, 2.05)


def transformer(name: str, seed: int) -> wf.Job:
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(256, 64), encoder, nn.Linear(64, 256))
    text = torch.randint(256, (16, 65))

    def loss(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(b[:, :-1]).flatten(0, -2), b[:, 1:].flatten())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return wf.Job(name, model=model, optimizer=optimizer, loss=loss, data=[text] * STEPS, seed=0)


def jobs() -> list[wf.Job]:
    return [transformer("a", 1), transformer("b", 2)]


def seconds(budget: int, policy: str) -> float:
    report = wf.run(jobs(), memory=budget, policy=policy, threads=1)
    assert report.ok, [entry.error for entry in report]
    assert report.peak_bytes <= budget
    return report.seconds


def main() -> None:
    options = arguments(__doc__ or "", repeats=5)
    torch.set_num_threads(1)
    needs = plan(jobs(), "1GiB", hardware="cpu", measure=True)
    persistent = sum(job.persistent_bytes for job in needs.jobs)
    transient = max(job.solo_bytes - job.persistent_bytes for job in needs.jobs)
    result: dict[str, object] = {"persistent_bytes": persistent, "transient_bytes": transient}
    for tightness in TIGHTNESS:
        budget = persistent + int(transient * tightness)
        measures = {policy: lambda b=budget, p=policy: seconds(b, p) for policy in POLICIES}
        interleaved(measures, 1)
        found = interleaved(measures, options.repeats)
        forecast = plan(jobs(), budget, hardware="cpu", measure=True)
        for policy in POLICIES:
            key = f"{policy}_at_{tightness}"
            estimate = forecast.policies[policy]
            measured = statistics.median(found[policy]) / STEPS
            result[f"{key}_speedup"] = median_ratio(found["temporal"], found[policy])
            if estimate is not None:  # waterwave in its published form may not fit
                result[f"{key}_simulated"] = estimate.speedup
                result[f"{key}_error"] = estimate.seconds / measured - 1
    show(result, options.json)


if __name__ == "__main__":
    main()
