"""The ledger of what a job holds between steps: parameters, buffers, the optimizer's state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parameter import is_lazy as is_unmade

from waterflow.executor.data.staging import BatchPrefetcher
from waterflow.executor.device.base import Device
from waterflow.executor.device.storages import storage_bytes
from waterflow.job.gradients import held_gradients, is_private
from waterflow.job.job import Job
from waterflow.job.optimizer_state import (
    Layout,
    StateEntries,
    plain_entries,
    trained_parameters,
)
from waterflow.partitioner.graph.step_graph import Input
from waterflow.steps.prepared import PreparedStep, Specialization
from waterflow.steps.specializations import Specializations

_AS_THEY_ARE = contextlib.nullcontext()


class PersistentTensors:
    """A job's persistent tensors, as they were when they were last collected.

    Attributes:
        tensors: parameters, buffers and the optimizer's state, by what they are to a step; of a
            job with a step of its own the gradients that the step has left, too, as far as they are
            the job's alone.
        state_exists: whether the optimizer has state.
        full_bytes: bytes of all that persists at most, the optimizer's state included.
        away: what is not in the arena between steps, but in a slower tier.
        away_bytes: bytes of that, once all of it is there.
        version: counts the changes of the set of tensors.
        were_replaced: whether the model was ever given other tensors.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        specializations: Specializations,
        prefetcher: BatchPrefetcher | None = None,
    ) -> None:
        """Args beyond the obvious.

        specializations: whose constants stay between steps, too.
        prefetcher: whose device input does; None where there is none.
        """
        self._job = job
        self._device = device
        self._specializations = specializations
        self._prefetcher = prefetcher
        self.tensors: dict[Input, torch.Tensor] = {}
        self.state_exists = False
        self.full_bytes = 0
        self.version = 0
        self.away: frozenset[Input] = frozenset()
        self.away_bytes = 0
        self.were_replaced = False
        self._lent = False  # the gradients, to a step of the user's own
        self._leaves: list[tuple[Input, torch.Tensor]] = []  # of such a job
        #: The jobs for which an arena knows the storage of a tensor, by an alias of it.
        self.users: Callable[[torch.Tensor], Collection[int]] = _nobody
        self._noted: set[tuple[Input, int, int]] = set()
        self._bytes: tuple[Hashable, int] = (None, 0)  # of what, and how many
        self._entries = StateEntries(job.optimizer)
        self._plain = plain_entries(job.optimizer)

    def collect(self) -> bool:
        """Looks at the job's tensors as they are now.

        Returns:
            Whether state of the optimizer has gone or has another layout, so that captures may
            know what is there no longer; or what is no tensor has come or gone by itself.
        """
        former = self.tensors
        self.tensors = persistent_tensors(self._job)
        if self._job.step is not None:
            self._leaves = list(_leaves(self._job))
            self.tensors.update(self._own_gradients(former))
        self.state_exists = any(meaning.kind == "state" for meaning in self.tensors)
        self._entries = StateEntries(self._job.optimizer)
        before, self._noted = self._noted, _identities(self.tensors)
        plain, self._plain = self._plain, plain_entries(self._job.optimizer)
        if before == self._noted:
            return plain != self._plain
        self.version += 1
        changed = {meaning.kind for meaning, *_ in before - self._noted}
        self.were_replaced = self.were_replaced or bool(changed - {"state", "gradient"})
        return bool(_state_layouts(former) - _state_layouts(self.tensors))

    def note_size(
        self,
        steps: Iterable[PreparedStep] = (),
        created: Iterable[torch.Tensor] = (),
    ) -> None:
        """Raises the final size to what is there, where it is more.

        Args:
            steps: whose constants are to be counted, too.
            created: tensors like those that a first step will add.
        """
        constants = [tensor for step in steps for tensor in step.graph.constants]
        held = [*self.tensors.values(), *self._specializations.constants(), *constants]
        size = self._size(held) + storage_bytes(created, self._device)
        self.full_bytes = max(self.full_bytes, size)

    def keep_away(self, inputs: frozenset[Input], size: int) -> None:
        """From now on these are in the arena only while a step needs them.

        Args:
            inputs: what they are to a step.
            size: their bytes, as the arena counts them.
        """
        if inputs != self.away:
            self.version += 1
        self.away, self.away_bytes = inputs, size

    @property
    def final_bytes(self) -> int:
        """Bytes that the job holds between steps at most, its state included."""
        return self.full_bytes - self.away_bytes

    @property
    def _input_bytes(self) -> int:
        return 0 if self._prefetcher is None else self._prefetcher.size

    def _size(self, tensors: Iterable[torch.Tensor]) -> int:
        return storage_bytes(tensors, self._device) + self._input_bytes

    @property
    def bytes(self) -> int:
        """Bytes that the job holds between steps, now."""
        constants = self._specializations.constants()
        key = (self.version, tuple(map(id, constants)), self._input_bytes, self.away)
        if self._bytes[0] != key:
            self._bytes = key, self._size(self.all())
        return self._bytes[1]

    def all(self) -> list[torch.Tensor]:
        """Every tensor that should live in the arena while the job is in it."""
        here = (tensor for meaning, tensor in self.tensors.items() if meaning not in self.away)
        return [*here, *self._specializations.constants()]

    def all_away(self) -> list[torch.Tensor]:
        """Every tensor that is in the arena only while a step needs it."""
        return [tensor for meaning, tensor in self.tensors.items() if meaning in self.away]

    @property
    def entries(self) -> StateEntries:
        """The entries of the optimizer's state; others after it was collected anew."""
        return self._entries

    def state_holds(self) -> bool:
        """Whether the optimizer's state has the entries that it had when it was last collected."""
        try:
            return self._entries.holds(self._job.optimizer)
        except Exception:  # the optimizer can be looked at no more: whoever collects meets it again
            return False

    def has_all(self, state: Iterable[Hashable]) -> bool:
        """Whether all these entries of the optimizer's state are there."""
        return all(Input("state", key) in self.tensors for key in state)

    def inputs_of(self, step: PreparedStep) -> dict[Input, torch.Tensor]:
        """The job's persistent tensors, and those that the step knows as constants."""
        constants = {Input("constant", i): t for i, t in enumerate(step.graph.constants)}
        return {**self.tensors, **constants}

    def put_state(self, step: PreparedStep, made: Mapping[Hashable, torch.Tensor]) -> None:
        """After a first step: what it made becomes the optimizer's state."""
        optimizer = self._job.optimizer
        parameters = trained_parameters(optimizer)
        entries: dict[Any, Any] = {**made, **step.graph.plain_state}
        layout = step.optimizer.state_after if step.optimizer is not None else []
        for index, keys in enumerate(layout):
            if keys:
                state = {key: entries[index, key] for key in keys if (index, key) in entries}
                optimizer.state[parameters[index]] = state

    def put_back_buffers(self, specialization: Specialization) -> None:
        """After an eager step: buffers that it gave new tensors have their own again, as graphs
        know them, with the new values."""
        for name in specialization.forward.reassigned:
            owner, _, attribute = name.rpartition(".")
            buffers = self._job.root.get_submodule(owner)._buffers
            own, now = self.tensors[Input("buffer", name)], buffers.get(attribute)
            if now is not None and now is not own and Layout.of(now) == Layout.of(own):
                with torch.no_grad():
                    own.copy_(now)
                buffers[attribute] = own

    def gradients_lent(self) -> AbstractContextManager[None]:
        """Inside, eager steps of the user's own run, whose code may keep the gradients that it
        finds or makes: it is given copies of those that are the job's alone, and what it leaves
        goes into these where nobody else has it. Where somebody has, they are so no longer."""
        return self._gradients_lent() if self._leaves and not self._lent else _AS_THEY_ARE

    @contextlib.contextmanager
    def _gradients_lent(self) -> Iterator[None]:
        owned = [(own, leaf) for leaf in self._leaves if (own := self._own(*leaf)) is not None]
        leaves = [leaf for _, (_, leaf) in owned]
        with held_gradients(leaves):
            for own, (_, leaf) in owned:
                leaf.grad = own.clone()
        self._lent = True
        try:
            yield
        finally:
            self._lent = False
        theirs = [(own, leaf) for own, (_, leaf) in owned if self._may_be_taken(own, leaf)]
        with torch.no_grad(), held_gradients(leaves):
            for own, leaf in theirs:
                own.copy_(leaf.grad)  # type: ignore[arg-type]
                leaf.grad = own

    def _own(self, meaning: Input, leaf: torch.Tensor) -> torch.Tensor | None:
        own = self.tensors.get(meaning)
        return own if own is not None and leaf.grad is own else None

    @property
    def gradients_hold(self) -> bool:
        """Whether the gradients that there are between two steps are those known here; while steps
        have them, as far as is known."""
        if self._lent or not self._leaves:
            return True
        return all(leaf.grad is self.tensors.get(meaning) for meaning, leaf in self._leaves)

    def _may_be_taken(self, own: torch.Tensor, leaf: torch.Tensor) -> bool:
        if leaf.grad is None or Layout.of(leaf.grad) != Layout.of(own):
            return False
        return self._is_private(leaf)

    def _is_private(self, leaf: torch.Tensor) -> bool:
        assert leaf.grad is not None
        return is_private(leaf, aliases=bool(self.users(leaf.grad)))

    def _own_gradients(self, known: Mapping[Input, torch.Tensor]) -> dict[Input, torch.Tensor]:
        """The gradients that there are between two steps and that nobody else has: the code of a
        step may keep some, or have views of their memory.

        Args:
            known: those that are known to be the job's alone.
        """
        return {
            meaning: leaf.grad  # type: ignore[misc]
            for meaning, leaf in self._leaves
            if leaf.grad is not None
            and leaf.grad.layout == torch.strided
            and (leaf.grad is known.get(meaning) or self._is_private(leaf))
        }

    def put_back_gradients(self) -> None:
        """The tensors that graphs write to are the gradients again, as they are."""
        for meaning, leaf in self._leaves:
            if meaning in self.tensors:
                leaf.grad = self.tensors[meaning]


def _leaves(job: Job) -> Iterator[tuple[Input, torch.Tensor]]:
    """What may have gradients, by what a gradient there is to a step."""
    for meaning, leaf in parameters_of(job).items():
        yield Input("gradient", meaning.key), leaf


def parameters_of(job: Job) -> dict[Input, torch.Tensor]:
    """The parameters of the job's modules and, of a step of the user's own, those that belong to
    an optimizer alone."""
    found: dict[Input, torch.Tensor] = {
        Input("parameter", n): p for n, p in job.root.named_parameters()
    }
    if job.step is not None:
        known = set(map(id, found.values()))
        for index, parameter in enumerate(trained_parameters(job.optimizer)):
            if id(parameter) not in known:
                found[Input("parameter", index)] = parameter
    return found


def _nobody(tensor: torch.Tensor) -> Collection[int]:
    return ()


def persistent_tensors(job: Job) -> dict[Input, torch.Tensor]:
    """Parameters, buffers and the optimizer's state, as they are now.

    Tensors without plain memory of their own (sparse ones, parameters that are not made yet) are
    left out: steps that have them run eagerly.
    """
    found = parameters_of(job)
    found.update({Input("buffer", n): b for n, b in job.root.named_buffers()})
    state = job.optimizer.state
    for index, parameter in enumerate(trained_parameters(job.optimizer)):
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[Input("state", (index, key))] = value
    return {meaning: tensor for meaning, tensor in found.items() if _has_memory(tensor)}


def _has_memory(tensor: Any) -> bool:
    is_tensor = isinstance(tensor, torch.Tensor)  # modules hold whatever was put there
    return is_tensor and tensor.layout == torch.strided and not is_unmade(tensor)


def is_lazy(model: torch.nn.Module) -> bool:
    """Whether some of the model's tensors will be made by its first step."""
    return any(map(is_unmade, (*model.parameters(), *model.buffers())))


def _identities(tensors: Mapping[Input, torch.Tensor]) -> set[tuple[Input, int, int]]:
    return {(meaning, id(t), t.untyped_storage()._cdata) for meaning, t in tensors.items()}


def _state_layouts(tensors: Mapping[Input, torch.Tensor]) -> set[tuple[Input, Layout]]:
    return {(m, Layout.of(t)) for m, t in tensors.items() if m.kind == "state"}
