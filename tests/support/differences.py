"""Everything that training changes in a job, and where two jobs differ in it."""

from __future__ import annotations

import torch

import waterflow as wf

MEMORY = "256MiB"


def remains(job):
    """Parameters, buffers, optimizer state and hyperparameters, by name."""
    found = {f"parameter {name}": p for name, p in job.model.named_parameters()}
    found |= {f"buffer {name}": b for name, b in job.model.named_buffers()}
    for number, group in enumerate(job.optimizer.param_groups):
        found |= {f"group {number} {k}": v for k, v in group.items() if k != "params"}
        for index, parameter in enumerate(group["params"]):
            state = job.optimizer.state.get(parameter, {})
            found |= {f"state {number}.{index} {k}": v for k, v in state.items()}
    return found


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.stride() == right.stride()
            and torch.equal(left, right)
        )
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and left == right


def differences(left, right):
    """Names of what two trained jobs do not have in common, bit for bit."""
    one, other = remains(left), remains(right)
    names = one.keys() | other.keys()
    missing = object()
    return [n for n in sorted(names) if not equal(one.get(n, missing), other.get(n, missing))]


def assert_same_numbers(expected, expected_report, job, report):
    """Whether a job has trained exactly as the plain loop did."""
    assert report.state == expected_report.state, report.error
    assert report.losses == expected_report.losses
    assert report.epoch_ends == expected_report.epoch_ends
    assert len(report.epoch_ends) == report.epochs
    assert differences(expected, job) == []


def assert_equal_to_eager(job, report, fresh):
    """Whether a job has trained without an error, as the plain loop trains `fresh`: the same job,
    not yet trained."""
    assert report.error is None
    assert report.losses == wf.run_eager(fresh, threads=1).losses
    for name, value in fresh.model.state_dict().items():
        assert torch.equal(job.model.state_dict()[name], value), name


def solo(job, policy="temporal"):
    """Runs one job alone."""
    return wf.run([job], memory=MEMORY, policy=policy, threads=1).jobs[job.name]
