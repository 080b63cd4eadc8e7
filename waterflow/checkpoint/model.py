"""A job's model: its tensors, what its modules keep in plain attributes, which of it trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from waterflow.checkpoint.values import Json, Packer, Unpacker, copy_values
from waterflow.job.job import Job
from waterflow.job.optimizer_state import trained_parameters

#: Plain attributes of a module by their names: numbers, flags, texts.
Attributes = dict[str, dict[str, Any]]

_UNMADE = (UninitializedParameter, UninitializedBuffer)  # of lazy modules
_PLAIN = (bool, int, float, str, type(None))
_OWN = frozenset(("_parameters", "_buffers", "_modules"))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def attributes_of(model: nn.Module) -> Attributes:
    """The plain attributes of all modules, `training` among them."""
    return {
        name: {key: value for key, value in vars(module).items() if type(value) in _PLAIN}
        for name, module in model.named_modules()
    }


def _changed(before: Attributes, now: Attributes) -> Attributes:
    """What differs from before, or was not there."""
    found: Attributes = {}
    for name, own in now.items():
        known = before.get(name, {})
        new = {k: v for k, v in own.items() if k not in known or not _same(known[k], v)}
        if new:
            found[name] = new
    return found


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _loose_tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Tensors that are attributes of modules and neither parameters nor buffers."""
    registered = {id(tensor) for _, tensor in named_tensors(model)}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            loose = isinstance(value, torch.Tensor) and id(value) not in registered
            if loose and key not in _OWN and value.grad_fn is None:
                yield name, key, value


def pack_model(model: nn.Module, before: Attributes, packer: Packer) -> Json:
    """The model as JSON, its tensors in the packer.

    Args:
        model: the model.
        before: its plain attributes as they were when the user had made it.
        packer: where its tensors go.

    Raises:
        NotExpressibleError: something in it cannot be kept.
    """
    tensors = {name: packer.tensor(t, f"model.{name}") for name, t in named_tensors(model)}
    attributes = _changed(before, attributes_of(model))
    loose = [
        [name, key, packer.tensor(tensor, f"model.{name}.{key}".replace("..", "."))]
        for name, key, tensor in _loose_tensors(model)
    ]
    extra = {
        name: packer.pack(module.get_extra_state(), f"model.{name}'s extra state")
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
    return {
        "tensors": tensors,
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
        "attributes": packer.pack(attributes, "model"),
        "loose": loose,
        "extra": extra,
    }


def misfits(model: nn.Module, packed: Json, unpacker: Unpacker) -> Iterator[str]:
    """What keeps the model from taking this state, as a part of a sentence each."""
    own, kept = dict(named_tensors(model)), packed["tensors"]
    lacking, unknown = own.keys() - kept.keys(), kept.keys() - own.keys()
    if lacking:
        yield f"the model has {_listed(lacking)}, which the checkpoint has not"
    if unknown:
        yield f"the checkpoint has {_listed(unknown)}, which the model has not"
    for name, tensor in own.items():
        if name not in kept or isinstance(tensor, _UNMADE):
            continue
        saved = unpacker.view(kept[name])
        if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
            yield (
                f"{name} is {_described(tensor)} in the model and {_described(saved)} in the "
                "checkpoint"
            )


def unpack_model(model: nn.Module, packed: Json, unpacker: Unpacker) -> None:
    """Gives the model the state, in its own tensors; it must fit (`misfits`)."""
    trained = set(packed["trained"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (name in trained):
            parameter.requires_grad_(name in trained)
    modules = dict(model.named_modules())
    for name, tensor in named_tensors(model):
        copy_into(tensor, unpacker.view(packed["tensors"][name]))
    for name, attributes in unpacker.unpack(packed["attributes"]).items():
        modules[name].__dict__.update(attributes)
    for name, key, kept in packed["loose"]:
        former, saved = vars(modules[name]).get(key), unpacker.view(kept)
        fits = isinstance(former, torch.Tensor) and former.shape == saved.shape
        if fits and former.dtype == saved.dtype:  # type: ignore[union-attr]
            copy_into(former, saved)  # type: ignore[arg-type]
        else:
            modules[name].__dict__[key] = unpacker.tensor(kept)
    for name, state in packed["extra"].items():
        modules[name].set_extra_state(unpacker.unpack(state))


def _with_gradients(job: Job) -> dict[str, torch.Tensor]:
    """The leaves that a job's step may leave gradients at, by names."""
    found: dict[str, torch.Tensor] = dict(job.root.named_parameters())
    known = {id(parameter) for parameter in found.values()}
    for place, parameter in enumerate(trained_parameters(job.optimizer)):
        if id(parameter) not in known:
            found[f"#{place}"] = parameter
    return found


def pack_gradients(job: Job, packer: Packer) -> Json:
    """The gradients that a step of the user's own has left, as JSON; other steps begin without."""
    if job.step is None:
        return {}
    return {
        name: packer.tensor(parameter.grad, f"gradient.{name}")
        for name, parameter in _with_gradients(job).items()
        if parameter.grad is not None
    }


def unpack_gradients(job: Job, packed: Json, unpacker: Unpacker) -> None:
    """Gives the job's tensors these gradients."""
    if job.step is not None:
        for name, parameter in _with_gradients(job).items():
            parameter.grad = unpacker.tensor(packed[name]) if name in packed else None


def copy_into(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Gives a tensor the values, made first where it is a lazy module's."""
    if isinstance(tensor, _UNMADE):
        tensor.materialize(tuple(saved.shape), dtype=saved.dtype)
    copy_values(tensor.detach(), saved)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _listed(names: Any) -> str:
    first = sorted(names)
    shown = ", ".join(repr(name) for name in first[:3])
    return shown if len(first) <= 3 else f"{shown} and {len(first) - 3} more"
