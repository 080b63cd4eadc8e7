"""What a snapshot of a job is: tensors, and fields that JSON can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class JobSnapshot:
    """A job as it was between two steps; nothing in it changes any more.

    Attributes:
        job: the job's name.
        state: "running" for one that is to go on; "finished" or "stopped" for one that has ended.
        fields: all but the tensors, as JSON has it.
        tensors: copies on the host, contiguous, by the names under which `fields` refers to them.
    """

    job: str
    state: str
    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def steps(self) -> int:
        """Steps that the job had made."""
        return int(self.fields["position"]["steps"])

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
