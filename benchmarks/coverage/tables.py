"""Torch's own tables of modules, optimizers and operators, as cases."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

import waterflow as wf
from benchmarks.coverage.calls import Call, job_of, trains
from benchmarks.coverage.suites import Suite
from benchmarks.coverage.trial import Trial

# Importing them has forbidden the whole process to set the backends' flags as users do.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

#: Samples that share a job: what they cost together is little more than what one costs.
_TOGETHER = 12
#: Samples taken of one function, evenly spread; some have more than a thousand.
_SAMPLES = 36

MakeCalls = Callable[[], Iterator[Call]]


class _CallSuite(Suite):
    """Cases that are functions with many samples of arguments, of which so many are taken."""

    def __init__(self, calls: dict[str, MakeCalls], samples: int) -> None:
        self._calls = calls
        self._samples = samples

    def names(self) -> Sequence[str]:
        return list(self._calls)

    def trials(self, name: str) -> Sequence[Trial]:
        make = self._calls[name]
        usable = [index for index, call in enumerate(_seeded(make)) if trains(call)]
        spread = usable[:: -(-len(usable) // self._samples) or 1]
        groups = [spread[at : at + _TOGETHER] for at in range(0, len(spread), _TOGETHER)]
        return [_trial(make, group) for group in groups]


def _trial(make: MakeCalls, wanted: Sequence[int]) -> Trial:
    pieces = tuple(_trial(make, [index]) for index in wanted) if len(wanted) > 1 else ()
    label = "" if pieces else f"sample {wanted[0]}"
    return Trial(label, functools.partial(_job, make, frozenset(wanted)), pieces)


def _job(make: MakeCalls, wanted: frozenset[int]) -> wf.Job:
    return job_of([call for index, call in enumerate(_seeded(make)) if index in wanted])


def _seeded(make: MakeCalls) -> Iterator[Call]:
    torch.manual_seed(0)
    return make()


class Operators(_CallSuite):
    """The differentiable operators of ``op_db``; what needs a gradient is a parameter."""

    def __init__(self, samples: int = _SAMPLES) -> None:
        # Here, as it takes seconds to import.
        import torch.testing._internal.common_methods_invocations as invocations

        # The table seeds torch in each call of an operator that draws; here the job's seed does.
        table: Any = invocations
        table.wrapper_set_seed = operator.call
        found = filter(_is_differentiable, invocations.op_db)
        calls: dict[str, MakeCalls] = {
            op.formatted_name: functools.partial(_of_op, op) for op in found
        }
        super().__init__(calls, samples)


def _is_differentiable(op: Any) -> bool:
    return op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")


def _of_op(op: Any) -> Iterator[Call]:
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        args = (sample.input, *sample.args)
        yield Call(op.op, args, sample.kwargs, sample.output_process_fn_grad)


class Modules(_CallSuite):
    """The training samples of ``module_db``: the modules' parameters train, and their inputs."""

    def __init__(self, samples: int = _SAMPLES) -> None:
        calls: dict[str, MakeCalls] = {
            info.name: functools.partial(_of_module, info) for info in module_db
        }
        super().__init__(calls, samples)


def _of_module(info: Any) -> Iterator[Call]:
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    )
    for sample in samples:
        made = sample.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).to(torch.float32).train()
        given = sample.forward_input
        yield Call(module, given.args, given.kwargs)


class Optimizers(Suite):
    """Every optimizer of ``optim_db`` with each of its samples of arguments, on a small model."""

    def __init__(self) -> None:
        self._cases: dict[str, tuple[Any, dict[str, Any]]] = {
            f"{_name(info)}[{index}: {sample.desc}]": (info.optim_cls, sample.kwargs)
            for info in optim_db
            for index, sample in enumerate(info.optim_inputs_func(device="cpu"))
        }

    def names(self) -> Sequence[str]:
        return list(self._cases)

    def trials(self, name: str) -> Sequence[Trial]:
        return [Trial("", functools.partial(_optimizer_job, *self._cases[name]))]


def _name(info: Any) -> str:
    name: str = info.optim_cls.__name__
    return name


def _optimizer_job(optimizer: Any, kwargs: dict[str, Any]) -> wf.Job:
    sparse = optimizer is torch.optim.SparseAdam
    matrices_only = optimizer.__name__ == "Muon"
    table = nn.Embedding(7, 5, sparse=sparse)
    rest = [nn.Linear(5, 8, bias=not matrices_only), nn.Tanh(), nn.Linear(8, 3, bias=False)]
    model = nn.Sequential(table, *([] if sparse else rest))
    batches = [(torch.randint(7, (6,)), torch.randint(3, (6,))) for _ in range(8)]
    # Copies: where the learning rate is a tensor, a scheduler or the optimizer may change it.
    own = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in kwargs.items()}
    return wf.Job(
        "optimizer",
        model=model,
        optimizer=optimizer(model.parameters(), **own),
        loss=_cross_entropy,
        data=batches,
        seed=0,
    )


def _cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
