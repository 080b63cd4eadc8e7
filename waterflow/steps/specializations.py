"""The specializations of a job that are kept, by the signature of their batches."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from waterflow.steps.prepared import PreparedStep, Specialization

#: Captures kept for batches of one signature: what a step reads may change back and forth.
_KEPT = 4


class Specializations:
    """A job's kept specializations.

    See `StepCache` for who changes it when. Whoever looks gets copies: a list of its own is what
    makes it safe to look while another thread adds or drops.
    """

    def __init__(self) -> None:
        self._by_signature: dict[Hashable, list[Specialization]] = {}

    def __len__(self) -> int:
        """How many signatures are known, those included that have nothing now."""
        return len(self._by_signature)

    def __contains__(self, signature: Hashable) -> bool:
        return signature in self._by_signature

    def of(self, signature: Hashable) -> list[Specialization]:
        """What is kept for such batches, right or not, the latest last."""
        return list(self._by_signature.get(signature, ()))

    def valid(self, signature: Hashable) -> Specialization | None:
        """What is kept for such batches and still right; None where there is nothing."""
        kept = self.of(signature)
        return next((one for one in kept if one.assumptions.hold()), None)

    def announce(self, signature: Hashable) -> None:
        """Knows the signature from now on, though nothing may come of it."""
        self._by_signature.setdefault(signature, [])

    def add(self, signature: Hashable, specialization: Specialization) -> None:
        """Keeps one more; the oldest of too many for a signature go."""
        kept = self._by_signature.setdefault(signature, [])
        kept.append(specialization)
        del kept[:-_KEPT]

    def drop(self, specialization: Specialization) -> None:
        """Keeps it no longer."""
        for kept in self._by_signature.values():
            if specialization in kept:
                kept.remove(specialization)

    def clear(self) -> None:
        """Keeps nothing, and knows no signature."""
        self._by_signature.clear()

    def all(self) -> list[Specialization]:
        """All that is kept, for whatever batches."""
        return [one for kept in list(self._by_signature.values()) for one in list(kept)]

    def steps(self) -> list[PreparedStep]:
        """All prepared steps."""
        return [step for specialization in self.all() for step in specialization.steps]

    def constants(self) -> list[torch.Tensor]:
        """The tensors that steps know as constants."""
        return [tensor for step in self.steps() for tensor in step.graph.constants]
