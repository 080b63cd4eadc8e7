"""How much memory eager steps take, found out by making two of them on copies.

A captured step's need is known from its graph; what the user's own Python asks for is known only
when it asks. A run that is refused names what would be enough, and has to know it for such steps,
too: so they are made beside the budget, on copies of the job's tensors and with random streams to
throw away, watched and undone as a trace is.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from waterflow.allocator_ext import _C
from waterflow.capture.caller import CallerContext
from waterflow.capture.own_error import InPlaceOf, copied
from waterflow.capture.shadow import Shadow, shadow_optimizer
from waterflow.capture.side_effects import TraceWatch
from waterflow.executor.run.rng import JobRng
from waterflow.job.job import Job
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.training_step import eager_step

#: The first makes the optimizer's state, the second has it.
_STEPS = 2
#: What they took is not what others will take to the byte: gaps differ with the addresses.
_MARGIN, _LEAST_MARGIN = 4, 256 << 10
#: Of the memory that is free; a step that takes more is not worth ending the process for.
_SHARE = 4


def eager_need(job: Job, batch: Any, rng: JobRng, caller: CallerContext) -> int | None:
    """Bytes that are enough for the job's eager steps on such batches, above what it holds now.

    None where that could not be found out: the step fails, takes more than a quarter of the memory
    that is free, or is a function of the user's own, which cannot be made on copies.

    Args:
        job: the job; on the host.
        batch: as the data made it; the user's Python sees a copy.
        rng: its random streams; copies are drawn from.
        caller: the context of its Python.
    """
    limit = _free_bytes() // _SHARE
    held = sum(tensor.nbytes for tensor in (*job.root.parameters(), *job.root.buffers()))
    if held > limit or job.step is not None:  # which knows the real modules and optimizers
        return None
    _C.install_lane_allocator()
    arena = _C.Arena.host(limit, 1)
    _C.register_arena(arena)
    try:
        with TraceWatch(job, rng, caller) as watch:
            watch.run(lambda: _make_steps(job, copy.deepcopy(batch), arena))
        taken = int(arena.statistics().extent)
    except Exception:  # whatever it is, the job itself will say so when it runs
        return None
    finally:
        _C.retire_arena(arena)
    return taken + max(taken // _MARGIN, _LEAST_MARGIN) + _history_bytes(job)


def largest_batch(job: Job, batch: Any) -> Any:
    """Of the job's batches the one with most bytes, where all are there already; else this one."""
    if not isinstance(job.data, (list, tuple)) or job.accumulate > 1:
        return batch
    return max([batch, *job.data], key=_bytes_of)  # the first of equal ones


def _bytes_of(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _history_bytes(job: Job) -> int:
    """What an optimizer that keeps a history (LBFGS: two vectors for each of its iterations) will
    hold more than after the first steps."""
    total = 0
    for group in job.optimizer.param_groups:
        most = group.get("history_size", 0)
        if job.total_steps is not None:
            most = min(most, group.get("max_iter", 1) * job.total_steps)
        total += 2 * most * sum(parameter.nbytes for parameter in group["params"])
    return total


def _make_steps(job: Job, batch: Any, arena: Any) -> None:
    own = {id(tensor): tensor for tensor in (*job.root.parameters(), *job.root.buffers())}
    own |= {id(parameter): parameter for parameter in trained_parameters(job.optimizer)}
    twins = {key: copied(tensor) for key, tensor in own.items()}
    shadow = Shadow(job.root, twins)
    twin = copy.copy(job)  # as it is: it has been checked
    twin.optimizer = _copied_optimizer(job.optimizer, shadow)
    twin.model, twin._root = job.model_in(shadow.model), shadow.model
    threading = torch.autograd.set_multithreading_enabled(False)
    with threading, InPlaceOf(twins), _C.LaneScope(arena, 0, 0):
        for _ in range(_STEPS):
            eager_step(twin, batch)


def _copied_optimizer(optimizer: torch.optim.Optimizer, shadow: Shadow) -> torch.optim.Optimizer:
    groups = [
        {**group, "params": [shadow.twin(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = type(optimizer.state)(getattr(optimizer.state, "default_factory", dict))
    for parameter, values in optimizer.state.items():
        state[shadow.twin(parameter)] = copy.deepcopy(values)
    found = shadow_optimizer(optimizer, groups, state)
    for name, value in vars(found).items():
        if name not in ("param_groups", "state"):
            vars(found)[name] = shadow.twin(value)  # LBFGS keeps a list of its parameters, too
    return found


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
