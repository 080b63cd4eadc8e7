"""What a job's callbacks and data can reach: whether data may be fetched ahead of them, and whether
they look at gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

import torch
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from waterflow.account.account import Account
from waterflow.account.purity import undisturbed
from waterflow.account.trust import (
    Packages,
    is_of_trusted_classes,
    is_package_file,
    is_trusted_code,
)
from waterflow.account.writes import may_change
from waterflow.capture.data_tensors import (
    LIMITS,
    identities_of_batches,
    makes_batches_anew,
    memories_of,
    tensors_of_batches,
)
from waterflow.capture.gradient_use import (
    function_of,
    made_before,
    names_gradients_as_words,
    uses_gradients,
)
from waterflow.capture.plain_python import met_by_plain
from waterflow.capture.torchs_calls import has_hooks
from waterflow.executor.data.batches import tensors_behind
from waterflow.job.job import Job
from waterflow.job.several import optimizers_in, schedulers_in

#: What runs when an object is made, and then no more.
_MAKERS = ("__init__", "__post_init__")


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
    if not _has_callbacks(job) and _steps_by_torchs_code(job):
        tensors = tensors_of_batches(job.data) if plain else tensors_behind(job.data)
        if tensors is not None:
            return memories_of(tensors).is_disjoint(memories_of(written))
    changed = {"written": [*written], "optimizer": job.optimizer, "scheduler": job.scheduler}
    if _has_callbacks(job):
        changed.update(model=job.root, on_step=job.on_step)
    rest = Account.take(changed, limits=LIMITS)
    # By way of another job, a callback may change that one's data, too.
    if not rest.is_whole or rest.instances(Job):
        return False
    changing = memories_of(rest.own_objects)
    known = identities_of_batches(job.data) if plain else None
    if known is not None:
        batches = memories_of(tensors_of_batches(job.data) or ())
        return batches.is_disjoint(changing) and not rest.has_any(known)
    data = Account.take({"data": job.data}, limits=LIMITS)
    if data.unwalkable or data.reaches(rest):
        return False
    behind = memories_of(data.own_objects)
    if not behind.is_disjoint(changing):
        return False
    # No code makes a list's. Another's may write to memory that the steps read as another object.
    return plain or not any(
        may_change(data, each) or not behind.is_disjoint(memories_of(each.own_objects))
        for each in read
    )


def may_select_ahead(job: Job, written: Iterable[torch.Tensor]) -> bool:
    """The same of batches for which nothing is drawn, as torch's own code selects them from
    tensors: callbacks may draw between them, as long as they plainly leave those alone.

    Args:
        job: whose steps are captured.
        written: the tensors that these steps write to.
    """
    tensors = tensors_behind(job.data)
    if tensors is None or not all(map(_is_torchs, schedulers_in(job.scheduler))):
        return False
    called, data = met_by_plain([job.on_step, job.root]), met_by_plain([job.data])
    if called is None or data is None or called.changes_given:
        return False
    if not {*map(id, called.changed)}.isdisjoint(map(id, data.objects)):
        return False
    return _steps_by_torchs_code(job) and memories_of(tensors).is_disjoint(memories_of(written))


def callbacks_use_gradients(job: Job) -> bool:
    """Whether a callback or scheduler may read ``p.grad`` or step an optimizer."""
    roots: dict[str, Any] = {"on_step": job.on_step, "scheduler": job.scheduler}
    if job.step is not None:  # whose gradients are there between two steps, for evaluations, too
        roots["evaluate"] = job.evaluate
    if all(root is None for root in roots.values()):
        return False
    stepped = schedulers_in(job.scheduler)
    uses = functools.partial(uses_gradients, own=_optimizers_of(job), stepped=stepped)
    return _shows(roots, Packages.BUT_REPORTERS, uses, unknown=True)


def data_use_gradients(job: Job) -> bool:
    """Whether code of the user's that makes batches may. Data that reach more than can be looked at
    are held to be what most data are."""
    if type(job.data) in (list, tuple) or tensors_behind(job.data) is not None:
        return False
    # What packages make batches by is about other gradients, where it names any.
    roots = {"data": job.data, "its code": function_of(job.data)}
    uses = functools.partial(
        uses_gradients,
        own=_optimizers_of(job),
        counts=_is_users,
        names=names_gradients_as_words,
        makes=False,  # by what has made the data, a model's batches lead to its optimizer
    )
    return _shows(roots, Packages.NONE, uses, unknown=False)


def _shows(
    roots: dict[str, Any], packages: Packages, uses: Callable[[Account], bool], unknown: bool
) -> bool:
    """Whether what code between steps reaches shows that it uses gradients; `unknown`: the answer
    where it reaches too much."""
    reached = _reached(roots, packages, {})
    if not reached.is_whole or not uses(reached):
        return unknown and not reached.is_whole
    # Perhaps it was only the code by which a trainer has made its optimizer.
    made = {id(kind): _MAKERS for kind in made_before(reached)}
    return not made or uses(_reached(roots, packages, made))


def _reached(
    roots: dict[str, Any], packages: Packages, skip: Mapping[int, tuple[str, ...]]
) -> Account:
    """All that code between steps reaches, but for the optimizers of torch's schedulers, whose own
    code may well look at gradients: in steps."""
    more = list(filter(_is_torchs, schedulers_in(roots.get("scheduler"))))
    with undisturbed():  # what callbacks reach may be tens of thousands of objects
        while True:
            skip = {**skip, **{id(each): ("optimizer",) for each in more}}
            found = Account.take(
                roots, skip=skip, executed_only=True, packages=packages, limits=LIMITS
            )
            met = (*found.instances(LRScheduler), *found.instances(ReduceLROnPlateau))
            more = [each for each in met if id(each) not in skip]
            if not more:
                return found


def _optimizers_of(job: Job) -> tuple[torch.optim.Optimizer, ...]:
    return job.optimizer, *optimizers_in(job.optimizer)


def _is_users(code: CodeType) -> bool:
    return not (is_trusted_code(code) or is_package_file(code.co_filename))


def _steps_by_torchs_code(job: Job) -> bool:
    """Whether no code of the user's runs between a batch and the next, beside that of the data and
    of callbacks, but that of captured steps, which change the tensors that they write to and
    nothing else."""
    optimizer = job.optimizer
    everybodys = (
        optimizer_module._global_optimizer_pre_hooks,
        optimizer_module._global_optimizer_post_hooks,
    )
    return (
        job.scheduler is None
        and is_of_trusted_classes(optimizer)
        and not (has_hooks(optimizer) or any(everybodys))
        and vars(optimizer).keys().isdisjoint(("step", "zero_grad"))
    )


def _has_callbacks(job: Job) -> bool:
    return job.on_step is not None or not all(map(_is_torchs, schedulers_in(job.scheduler)))


def _is_torchs(scheduler: Any) -> bool:
    return isinstance(scheduler, (LRScheduler, ReduceLROnPlateau))
