"""Which callbacks may run at the same time: those that plainly mind their own business.

Users are promised that callbacks run one at a time, so that what several of them have in common (a
table of results, a file, a plot) needs no lock. A callback that evaluates its job's model for
milliseconds and notes a number has nothing in common with another of its kind, and nobody can tell
whether they took turns.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import DataLoader

from waterflow.account.changeable import keys_of
from waterflow.account.changing_names import HARMLESS
from waterflow.account.code_names import code_names
from waterflow.capture.plain_python import Met, met_by_plain

#: Modules that compute; of packages, these and what functions and classes come from.
_COMPUTING = frozenset(
    {"torch", "torch.nn", "torch.nn.functional", "numpy", "math", "time", "waterflow"}
)
_PACKAGES = frozenset({"torch", "numpy", "math", "operator", "itertools", "functools", "time"})
#: Names of theirs that are everybody's affair: files, processes, switches, casts that all threads
#: have in common.
_OF_EVERYBODY = frozenset(
    {
        *("save", "load", "savez", "savez_compressed", "savetxt", "loadtxt", "tofile", "memmap"),
        *("distributed", "multiprocessing", "hub", "jit", "onnx", "utils", "profiler", "backends"),
        *("library", "overrides", "monitor", "autocast", "cached", "seed", "ops", "_C", "_dynamo"),
    }
)
_SWITCHES = ("set_", "use_", "manual_seed", "sdpa_kernel", "compile", "enable", "disable")
#: Built-in functions that show something to somebody, or do not say what they look at.
_SHOWING = frozenset({"print", "setattr", "delattr", "getattr", "hasattr", "vars", "dir"})


class OwnBusiness(NamedTuple):
    """What a callback has to do with, by identities.

    Attributes:
        reached: what it reads.
        changed: the containers of these in which it notes something.
    """

    reached: frozenset[int]
    changed: frozenset[int]

    @classmethod
    def of(cls, callback: Callable[..., Any], model: nn.Module) -> OwnBusiness | None:
        """Of a callback that has nothing to do with anything else but its job's model; None where
        that is not plain."""
        met = met_by_plain([callback, model])
        if met is None or met.changes_given or not _computes_only(met):
            return None
        if any(isinstance(one, DataLoader) and one.num_workers for one in met.objects):
            return None  # its workers are those of whoever goes through it
        reached = frozenset(key for one in met.objects for key in keys_of(one))
        return cls(reached, frozenset(map(id, met.changed)))

    def is_beside(self, other: OwnBusiness) -> bool:
        """Whether neither changes what the other reaches."""
        return self.changed.isdisjoint(other.reached) and other.changed.isdisjoint(self.reached)


def _computes_only(met: Met) -> bool:
    """Whether code that is plain has nothing of libraries but what computes."""
    for code in met.codes:
        names = code_names(code)
        if not names.names.isdisjoint(_OF_EVERYBODY):
            return False
        if any(name.startswith(_SWITCHES) for name in names.names):
            return False
        if not all(map(_is_harmless, names.global_names)):
            return False
    return all(map(_computes, met.libraries))


def _is_harmless(name: str) -> bool:
    """Whether a global variable is none of Python's own, or one that is nobody else's affair."""
    found = getattr(builtins, name, None)
    raised = isinstance(found, type) and issubclass(found, BaseException)
    return found is None or raised or name in HARMLESS - _SHOWING


def _computes(value: Any) -> bool:
    """Whether a library's object is one by which code computes."""
    if isinstance(value, ModuleType):
        return value.__name__ in _COMPUTING
    known = value if isinstance(getattr(value, "__module__", None), str) else type(value)
    return str(known.__module__).partition(".")[0] in _PACKAGES
