"""An optimizer's state and hyperparameters, in full precision and as they are.

`Optimizer.load_state_dict` casts state to its parameter's type, so it is not what brings back every
bit; for optimizers with a ``state_dict`` of their own, which may hold more, theirs is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from waterflow.checkpoint.model import copy_into
from waterflow.checkpoint.values import Json, NotExpressibleError, Packer, Unpacker
from waterflow.job.job import Job
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.several import OptimizerSet, optimizers_in

#: Plain values that torch's optimizers keep for themselves and that change no number.
_NOTES = frozenset(("_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured"))
_PLAIN = (bool, int, float, str, type(None))


def class_name(thing: Any) -> str:
    """The full name of an object's class."""
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _names(job: Job, optimizer: Optimizer) -> list[list[str]]:
    """The names of each group's parameters; a number for those that are not the model's."""
    known = {id(parameter): name for name, parameter in job.root.named_parameters()}
    places = {id(p): f"#{i}" for i, p in enumerate(trained_parameters(optimizer))}
    return [
        [known.get(id(p), places[id(p)]) for p in group["params"]]
        for group in optimizer.param_groups
    ]


def _has_own_form(optimizer: Optimizer) -> bool:
    return type(optimizer).state_dict is not Optimizer.state_dict


def _own_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer counts in attributes of its own."""
    own = vars(optimizer).items()
    return {k: v for k, v in own if type(v) in _PLAIN and k not in _NOTES}


def pack_optimizer(job: Job, packer: Packer) -> Json:
    """The job's optimizer as JSON, its tensors in the packer.

    Raises:
        NotExpressibleError: its state holds something that cannot be kept.
    """
    if isinstance(job.optimizer, OptimizerSet):
        members = enumerate(job.optimizer.members)
        return {
            "class": class_name(job.optimizer),
            "members": [_pack(job, each, packer, f"optimizers.{n}") for n, each in members],
        }
    return _pack(job, job.optimizer, packer, "optimizer")


def _pack(job: Job, optimizer: Optimizer, packer: Packer, where: str) -> Json:
    packed: dict[str, Json] = {
        "class": class_name(optimizer),
        "parameters": _names(job, optimizer),
        "others": _pack_others(job, optimizer, packer, where),
    }
    if _has_own_form(optimizer):
        return packed | {"own": packer.pack(optimizer.state_dict(), f"{where}.state_dict()")}
    groups = [
        {
            key: packer.pack(value, f"{where}.param_groups.{place}.{key}")
            for key, value in group.items()
            if key != "params"
        }
        for place, group in enumerate(optimizer.param_groups)
    ]
    numbers = packer.pack(_own_numbers(optimizer), where)
    state = _pack_state(job, optimizer, packer, where)
    return packed | {"groups": groups, "state": state, "numbers": numbers}


def _pack_others(job: Job, optimizer: Optimizer, packer: Packer, where: str) -> list[Json]:
    """The trained parameters that are not the model's."""
    own = {id(parameter) for parameter in job.root.parameters()}
    return [
        [place, packer.tensor(parameter, f"{where}.#{place}")]
        for place, parameter in enumerate(trained_parameters(optimizer))
        if id(parameter) not in own
    ]


def _pack_state(job: Job, optimizer: Optimizer, packer: Packer, where: str) -> Json:
    parameters = trained_parameters(optimizer)
    names = [name for group in _names(job, optimizer) for name in group]
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    found: list[Json] = []
    for key, entries in optimizer.state.items():
        place = places.get(id(key))
        if place is None:
            if not isinstance(key, str):
                raise NotExpressibleError(f"{where}.state's key, a {class_name(key)},")
            found.append([key, packer.pack(entries, f"{where}.state.{key}")])
            continue
        packed = packer.pack(dict(entries), f"{where}.state.{names[place]}")
        found.append([{"parameter": place}, packed])
    return found


def misfits(job: Job, packed: Json) -> Iterator[str]:
    """What keeps the job's optimizer from taking this state, as a part of a sentence each."""
    optimizer = job.optimizer
    if isinstance(optimizer, OptimizerSet) and "members" in packed:
        here, there = len(optimizer.members), len(packed["members"])
        if here != there:
            yield f"there are {here} optimizers, the checkpoint had {there}"
        for member, kept in zip(optimizer.members, packed["members"], strict=False):
            yield from _misfits(job, member, kept)
    else:
        yield from _misfits(job, optimizer, packed)


def _misfits(job: Job, optimizer: Optimizer, packed: Json) -> Iterator[str]:
    name = class_name(optimizer)
    if name != packed["class"]:
        yield f"the optimizer is a {name}, the checkpoint's was a {packed['class']}"
        return
    own, kept = _names(job, optimizer), packed["parameters"]
    if len(own) != len(kept):
        yield f"the optimizer has {len(own)} parameter groups, the checkpoint's had {len(kept)}"
        return
    for place, (here, there) in enumerate(zip(own, kept, strict=True)):
        if here != there:
            yield (
                f"the optimizer's group {place} holds {len(here)} parameters and the checkpoint's "
                f"{len(there)}, or in another order: {_first_difference(here, there)}"
            )


def _first_difference(here: list[str], there: list[str]) -> str:
    for one, other in zip(here, there, strict=False):
        if one != other:
            return f"{one} in place of {other}"
    more = here[len(there) :] or there[len(here) :]
    return f"{more[0]} is in one of them only"


def unpack_optimizer(job: Job, packed: Json, unpacker: Unpacker) -> None:
    """Gives the job's optimizer the state; it must fit (`misfits`)."""
    members = packed.get("members", [packed])
    for optimizer, kept in zip(optimizers_in(job.optimizer), members, strict=True):
        _unpack(optimizer, kept, unpacker)


def _unpack(optimizer: Optimizer, packed: Json, unpacker: Unpacker) -> None:
    parameters = trained_parameters(optimizer)
    for place, kept in packed["others"]:
        copy_into(parameters[place], unpacker.view(kept))
    if "own" in packed:
        optimizer.load_state_dict(unpacker.unpack(packed["own"]))
        return
    for group, kept in zip(optimizer.param_groups, packed["groups"], strict=True):
        for key, value in kept.items():
            _set(group, key, unpacker.unpack(value))
    vars(optimizer).update(unpacker.unpack(packed["numbers"]))
    optimizer.state.clear()
    for key, entries in packed["state"]:
        found: Any = key if isinstance(key, str) else parameters[key["parameter"]]
        optimizer.state[found] = unpacker.unpack(entries)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Sets a hyperparameter; a tensor keeps its identity, as schedulers hold it."""
    former: Any = group.get(key)
    are_tensors = isinstance(former, torch.Tensor) and isinstance(value, torch.Tensor)
    if are_tensors and (former.shape, former.dtype) == (value.shape, value.dtype):
        copy_into(former, value)
    else:
        group[key] = value


def pack_scheduler(job: Job, packer: Packer) -> Json:
    """The job's scheduler as JSON, None where there is none.

    Raises:
        NotExpressibleError: its state cannot be kept, or it does not tell it.
    """
    if job.scheduler is None:
        return None
    has = all(hasattr(job.scheduler, name) for name in ("state_dict", "load_state_dict"))
    if not has:
        raise NotExpressibleError(
            f"scheduler, a {class_name(job.scheduler)}, has no state_dict and load_state_dict, so "
            "its state"
        )
    state = job.scheduler.state_dict()  # type: ignore[attr-defined]
    return {"class": class_name(job.scheduler), "state": packer.pack(state, "scheduler")}


def scheduler_misfits(job: Job, packed: Json) -> Iterator[str]:
    """What keeps the job's scheduler from taking this state, as a part of a sentence each."""
    here = None if job.scheduler is None else class_name(job.scheduler)
    there = None if packed is None else packed["class"]
    if here != there:
        yield f"the scheduler is {here or 'missing'}, the checkpoint's was {there or 'missing'}"


def unpack_scheduler(job: Job, packed: Json, unpacker: Unpacker) -> None:
    """Gives the job's scheduler the state; it must fit (`scheduler_misfits`)."""
    if packed is not None:
        job.scheduler.load_state_dict(unpacker.unpack(packed["state"]))  # type: ignore[union-attr]
