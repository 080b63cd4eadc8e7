"""Random streams as they stand: a job's own, and generators that the user's objects hold."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from waterflow.checkpoint.values import Json, Packer, Unpacker
from waterflow.executor.run.rng import JobRng, RngState, is_the_processs
from waterflow.job.job import Job

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

#: Of larger containers the items are not looked at: they are data.
_MOST_ITEMS = 64
_MOST_OBJECTS = 5_000


@dataclass(frozen=True)
class Streams:
    """Where all streams stand that a job's data and steps draw from.

    Attributes:
        own: the job's.
        generators: the states of those that its objects hold, by where they were found.
    """

    own: RngState
    generators: dict[str, Any]

    @classmethod
    def of(cls, rng: JobRng, generators: Mapping[str, Generator]) -> Streams:
        """As they stand now."""
        return cls(rng.state(), {path: _state_of(each) for path, each in generators.items()})

    def put_back(self, rng: JobRng, generators: Mapping[str, Generator]) -> None:
        """Puts the streams where these stood."""
        rng.restore(self.own)
        for path, state in self.generators.items():
            if path in generators:
                _set_state(generators[path], state)

    def pack(self, packer: Packer, where: str) -> Json:
        """The streams as JSON, their tensors in the packer."""
        own = {
            "host": self.own.host,
            "device": self.own.device,
            "python": self.own.python,
            "numpy": self.own.numpy,
        }
        return packer.pack({"own": own, "generators": self.generators}, where)

    @classmethod
    def unpack(cls, packed: Json, unpacker: Unpacker) -> Streams:
        """The streams that `pack` has packed."""
        values = unpacker.unpack(packed)
        return cls(RngState(**values["own"]), values["generators"])


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def generators_of(job: Job) -> dict[str, Generator]:
    """Generators that the job's data, loss and model hold, by where they were found.

    As far as attributes, small containers, closures and names of globals lead; not what an
    extension's objects hide.
    """
    roots = {"data": job.data, "loss": job.loss, "step": job.step}
    roots |= {f"model.{name}": vars(module) for name, module in job.root.named_modules()}
    found: dict[str, Generator] = {}
    seen: set[int] = set()
    ahead: deque[tuple[str, Any]] = deque(roots.items())
    while ahead and len(seen) < _MOST_OBJECTS:
        path, value = ahead.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            if not is_the_processs(value):
                found[path] = value
        else:
            ahead.extend((f"{path}.{name}", part) for name, part in _parts(value))
    return found


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a value holds, by names; nothing of the user's is run."""
    if isinstance(value, (str, bytes, int, float, complex, torch.Tensor, np.ndarray, ModuleType)):
        return ()
    if isinstance(value, (list, tuple)):
        return enumerate(value) if len(value) <= _MOST_ITEMS else ()
    if isinstance(value, dict):
        return list(value.items()) if len(value) <= _MOST_ITEMS else ()
    if isinstance(value, FunctionType):
        return _parts_of_code(value)
    if isinstance(value, MethodType):
        return (("__self__", value.__self__), ("__func__", value.__func__))
    if isinstance(value, functools.partial):
        return (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(value, type):
        return ()
    return list(getattr(value, "__dict__", {}).items())


def _parts_of_code(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """A function's closure, defaults, and generators among the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield "__defaults__", function.__defaults__
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, _KINDS):
            yield name, value
