"""What a job's callbacks and data can reach: whether data may be fetched ahead of them, and whether
they look at gradients."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from waterflow.account.account import Account
from waterflow.account.purity import undisturbed
from waterflow.account.trust import Packages, is_of_trusted_classes, is_trusted_code
from waterflow.account.writes import may_change
from waterflow.capture.data_tensors import (
    LIMITS,
    identities_of_batches,
    makes_batches_anew,
    tensors_of_batches,
)
from waterflow.executor.data.batches import tensors_behind
from waterflow.executor.device.storages import storage_key
from waterflow.job.job import Job
from waterflow.job.several import optimizers_in, schedulers_in


def may_fetch_ahead(
    job: Job, written: Iterable[torch.Tensor], read: Iterable[Account] = ()
) -> bool:
    """Whether a batch fetched before the steps before it are done is the batch of the loop, and
    these steps are the loop's.

    So it is where no code of the user's makes it (a list), or where that code (a dataset behind
    torch's own loader, which makes each batch anew) reaches nothing that the step or a callback
    changes, and changes nothing that the step reads. A callback may end the job or draw random
    numbers, too; with one, only lists will do.

    Args:
        job: whose steps are captured.
        written: the tensors that these steps write to.
        read: all that they can read.
    """
    plain = type(job.data) in (list, tuple)
    if not plain and (_has_callbacks(job) or not makes_batches_anew(job.data)):
        return False
    if _runs_torchs_code_alone(job):
        tensors = tensors_of_batches(job.data) if plain else tensors_behind(job.data)
        if tensors is not None:
            return set(map(storage_key, tensors)).isdisjoint(map(storage_key, written))
    changed = {"written": [*written], "optimizer": job.optimizer, "scheduler": job.scheduler}
    if _has_callbacks(job):
        changed.update(model=job.root, on_step=job.on_step)
    rest = Account.take(changed, limits=LIMITS)
    # By way of another job, a callback may change that one's data, too.
    if not rest.is_whole or rest.instances(Job):
        return False
    known = identities_of_batches(job.data) if plain else None
    if known is not None:
        return not rest.has_any(known)
    data = Account.take({"data": job.data}, limits=LIMITS)
    if data.unwalkable or data.reaches(rest):
        return False
    return plain or not any(may_change(data, each) for each in read)  # no code makes a list's


def looks_at_gradients(job: Job) -> bool:
    """Whether a callback may read ``p.grad`` or step another optimizer."""
    roots: dict[str, Any] = {"on_step": job.on_step, "scheduler": job.scheduler}
    if job.step is not None:  # whose gradients are there between two steps, for evaluations, too
        roots["evaluate"] = job.evaluate
    elif not _has_callbacks(job):
        return False
    # A scheduler has the job's optimizer, whose own code may well look at gradients: in steps.
    skip = {id(each): ("optimizer",) for each in schedulers_in(job.scheduler) if _is_torchs(each)}
    with undisturbed():  # what callbacks reach may be tens of thousands of objects
        reached = Account.take(
            roots,
            skip=skip,
            executed_only=True,
            packages=Packages.BUT_REPORTERS,
            limits=LIMITS,
        )
    codes = [code for code in reached.codes if not is_trusted_code(code)]
    if not reached.is_whole or any(map(_names_gradients, codes)):
        return True
    own = job.optimizer, *optimizers_in(job.optimizer)
    optimizers = reached.instances(torch.optim.Optimizer)
    return not all(any(one is optimizer for one in own) for optimizer in optimizers)


#: Names about gradients by which nobody comes to see one.
_HARMLESS = re.compile(r"(no|enable|zero)_grad|requires_grad_?|(set|is)_grad_enabled")
#: Words that have nothing to do with gradients.
_OTHER_WORDS = re.compile(r"(up|down|de)grad(e[drs]?|ing|able|ation)|gradual(ly)?", re.IGNORECASE)


def _names_gradients(code: CodeType) -> bool:
    names = (name for name in code.co_names if "grad" in name and not _HARMLESS.fullmatch(name))
    return "grad" in code.co_consts or any("grad" in _OTHER_WORDS.sub("", name) for name in names)


def _runs_torchs_code_alone(job: Job) -> bool:
    """Whether no code of the user's runs between a batch and the next, beside that of the data, but
    that of captured steps, which change the tensors that they write to and nothing else."""
    optimizer = job.optimizer
    own = vars(optimizer)
    hooks: list[Any] = [optimizer_module._global_optimizer_pre_hooks]
    hooks += [optimizer_module._global_optimizer_post_hooks]
    hooks += [value for name, value in own.items() if "hooks" in name]
    return (
        not _has_callbacks(job)
        and job.scheduler is None
        and is_of_trusted_classes(optimizer)
        and not any(hooks)
        and own.keys().isdisjoint(("step", "zero_grad"))
    )


def _has_callbacks(job: Job) -> bool:
    return job.on_step is not None or not all(map(_is_torchs, schedulers_in(job.scheduler)))


def _is_torchs(scheduler: Any) -> bool:
    return isinstance(scheduler, (LRScheduler, ReduceLROnPlateau))
