"""Who trains where on many GPUs: policies as pure functions, and a simulator that asks them.

Imports neither torch nor anything that does; public names are imported when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waterflow.cluster.policies import POLICIES, make_policy
    from waterflow.cluster.run import simulate
    from waterflow.cluster.simulator.results import Results
    from waterflow.cluster.spec import ClusterSpec, JobSpec, NodeSpec
    from waterflow.cluster.traces import read_trace

__all__ = [
    "POLICIES",
    "ClusterSpec",
    "JobSpec",
    "NodeSpec",
    "Results",
    "make_policy",
    "read_trace",
    "simulate",
]

_MODULES = {
    "POLICIES": "policies",
    "ClusterSpec": "spec",
    "JobSpec": "spec",
    "NodeSpec": "spec",
    "Results": "simulator.results",
    "make_policy": "policies",
    "read_trace": "traces",
    "simulate": "run",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        return globals().setdefault(name, getattr(module, name))
