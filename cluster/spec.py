"""What is asked for: jobs as users submit them, clusters as they are bought."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

from waterflow.common.errors import JobError

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as it is submitted; what a policy may know of it before it has run.

    Attributes:
        index: its number in the trace, from 0; what plans and states call it by.
        name: what the trace calls it.
        submit: seconds since the trace's begin.
        gpus: GPUs it asks for; it starts with all of them or not at all.
        steps: training steps until it is done.
        step_seconds: seconds per step on `gpus` GPUs, alone.
        model: a name in the tables of speeds; "" where the trace has none.
        tenant: whose quota it counts against.
        guaranteed: it has a claim to its tenant's quota; an opportunistic job runs on what is left.
        memory: bytes on each GPU at its most; 0 where the trace does not say.
        least_memory: bytes it can be squeezed to, as the planner's memory curve says; 0: `memory`.
        curve: (share of `memory`, speed) from small to large: how fast it is on less, of its speed
            on all, as the planner's memory curve says; none: nothing is known.
        utilization: share of the time in which it keeps its GPUs busy, 0 to 1.
        adaptive: it declares that it can grow into idle GPUs and shrink again (Gandiva, 4.1).
        batch: samples per step over all GPUs; 0 where the trace does not say.
        line: where the trace has it; 0: it is from no file.
        stages: seconds of a step on the host, on the GPU and on the network, where a trace says.
    """

    index: int
    name: str
    submit: float
    gpus: int
    steps: float
    step_seconds: float = 1.0
    model: str = ""
    tenant: str = ""
    guaranteed: bool = True
    memory: int = 0
    least_memory: int = 0
    curve: tuple[tuple[float, float], ...] = ()
    utilization: float = 1.0
    adaptive: bool = False
    batch: int = 0
    stages: tuple[float, ...] = ()
    line: int = field(default=0, compare=False)

    @property
    def called(self) -> str:
        """Its name, and where the trace has it, for messages."""
        return f"job {self.name!r}" + (f" (line {self.line})" if self.line else "")

    @property
    def seconds(self) -> float:
        """How long it takes on its GPUs, alone."""
        return self.steps * self.step_seconds

    @property
    def floor(self) -> int:
        """Bytes on each GPU below which it cannot run."""
        return self.least_memory or self.memory


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A machine: its GPUs and the bytes of memory of each."""

    gpus: int
    memory: int = 32 * GIB


@dataclass(frozen=True)
class ClusterSpec:
    """Machines, and how many GPUs each tenant has a claim to (none named: to all)."""

    nodes: tuple[NodeSpec, ...]
    quotas: Mapping[str, int] = field(default_factory=dict)
    sharing: int = 2  # jobs on one GPU at the most

    def __post_init__(self) -> None:
        for number, node in enumerate(self.nodes):
            if node.gpus < 1:
                raise JobError(
                    f"node {number} has {node.gpus} GPUs: a node needs at least one; leave nodes "
                    "without GPUs out"
                )
        if not self.nodes:
            raise JobError("the cluster has no GPUs: give it at least one node (--nodes 1)")
        if any(node.memory < 0 for node in self.nodes):
            raise JobError("a node's GPUs have less than no memory: give 0 GiB or more")
        if self.sharing < 1:
            raise JobError(f"sharing is {self.sharing}: jobs on one GPU are at least 1")
        for tenant, gpus in self.quotas.items():
            if gpus < 0:
                raise JobError(f"tenant {tenant!r} has a quota of {gpus} GPUs: give 0 or more")
        firsts = (0, *accumulate(node.gpus for node in self.nodes))
        owner = tuple(n for n, node in enumerate(self.nodes) for _ in range(node.gpus))
        object.__setattr__(self, "_firsts", firsts)
        object.__setattr__(self, "_largest", max(node.gpus for node in self.nodes))
        object.__setattr__(self, "_owner", owner)

    @classmethod
    def of(
        cls,
        nodes: int,
        gpus_per_node: int = 8,
        *,
        memory: int = 32 * GIB,
        quotas: Mapping[str, int] | None = None,
        sharing: int = 2,
    ) -> ClusterSpec:
        """`nodes` equal machines."""
        if nodes < 1:
            raise JobError(f"the cluster has {nodes} nodes and so no GPUs: give 1 or more")
        return cls((NodeSpec(gpus_per_node, memory),) * nodes, dict(quotas or {}), sharing)

    @classmethod
    def load(cls, path: Path) -> ClusterSpec:
        """Read a TOML file: `[[node]]` with count, gpus, memory_gib; `[quotas]`; sharing.

        Raises:
            JobError: it cannot be read, or says something that is not known or wrong.
        """
        try:
            text = tomllib.loads(path.read_text())
            _known(path, text, ("node", "quotas", "sharing"))
            nodes = tuple(node for row in text["node"] for node in _nodes(path, row))
            quotas = {k: _whole(path, f"quota {k}", v) for k, v in text.get("quotas", {}).items()}
            sharing = _whole(path, "sharing", text.get("sharing", 2))
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise JobError(
                f"{path} does not describe a cluster ({type(error).__name__}: {error}); write "
                "tables like [[node]] with count = 20, gpus = 8, memory_gib = 32"
            ) from error
        return cls(nodes, quotas, sharing)

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return int(self._firsts[-1])

    @property
    def largest(self) -> int:
        """GPUs of the largest node."""
        return int(self._largest)

    @property
    def firsts(self) -> Sequence[int]:
        """The number of each node's first GPU, and at last the number of all GPUs."""
        return self._firsts

    @property
    def owner(self) -> Sequence[int]:
        """The node of each GPU."""
        return self._owner

    _firsts: Any = field(init=False, repr=False, compare=False, default=())
    _largest: Any = field(init=False, repr=False, compare=False, default=0)
    _owner: Any = field(init=False, repr=False, compare=False, default=())


def _nodes(path: Path, row: Mapping[str, Any]) -> tuple[NodeSpec, ...]:
    """The equal machines of a [[node]]."""
    _known(path, row, ("count", "gpus", "memory_gib"))
    count = _whole(path, "count", row.get("count", 1))
    if count < 1:
        raise JobError(f"{path}: count is {count}: a [[node]] is one machine or more")
    return (
        NodeSpec(_whole(path, "gpus", row["gpus"]), in_bytes(row.get("memory_gib", 32))),
    ) * count


def in_bytes(gib: float) -> int:
    """The memory of a GPU.

    Raises:
        JobError: it is no number of GiB.
    """
    if not math.isfinite(gib):
        raise JobError(f"a GPU's memory is {gib} GiB: give a number of GiB, like 32")
    return int(float(gib) * GIB)


def _known(path: Path, table: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in table:
        if name not in names:
            near = get_close_matches(name, names, n=1) or names
            raise JobError(f"{path}: nobody knows what {name!r} is; near: {', '.join(near)}")


def _whole(path: Path, what: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise JobError(f"{path}: {what} is {value!r}: write a whole number")
    return value
