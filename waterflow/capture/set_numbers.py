"""Numbers that a job's callback sets and its steps read, such as an annealed weight of a loss.

A capture holds such a number fixed, and is in vain where it changes soon. Told by bytecode: of the
attributes of the job's modules those whose name the callback stores to and the steps' code names.
Only when a capture is made depends on it, never what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

from waterflow.account.code_names import code_names
from waterflow.account.trust import is_trusted_class, is_trusted_code
from waterflow.capture.python_kind import code_of
from waterflow.job.job import Job

_NUMBERS = (bool, int, float, complex)


class SetNumbers:
    """The numbers of one job, as they are now."""

    def __init__(self, job: Job, names: frozenset[str]) -> None:
        """Takes them.

        Args:
            job: whose.
            names: of the attributes that they are.
        """
        self._job = job
        self._names = names
        self._values = [
            (held, name, held[name])
            for held in map(vars, _modules(job))
            for name in sorted(names.intersection(held))
            if type(held[name]) in _NUMBERS
        ]

    @classmethod
    def of(cls, job: Job) -> SetNumbers | None:
        """Those of a job; None where its callback is not seen to set any that its steps read."""
        callback = code_of(job.on_step)
        if callback is None:
            return None
        kinds = [kind for kind in set(map(type, _modules(job))) if not is_trusted_class(kind)]
        called = [_method(kind, name) for name in code_names(callback).names for kind in kinds]
        setting = [code_names(code).stored for code in (callback, *called) if code is not None]
        steps = job.loss if job.step is None else job.step
        own = code_of(steps), *(_method(kind, "forward") for kind in kinds)
        reading = [code_names(code).names for code in own if code is not None]
        found = cls(job, frozenset[str]().union(*setting) & frozenset[str]().union(*reading))
        return found if found._values else None

    @property
    def text(self) -> str:
        """The first of them, in a user's words."""
        return f"the attribute {self._values[0][1]!r} of its model"

    def hold(self) -> bool:
        """Whether they are what they were."""
        return all(held.get(name) == value for held, name, value in self._values)

    def taken_anew(self) -> SetNumbers:
        """The same as they are now."""
        return SetNumbers(self._job, self._names)


def _method(kind: type, name: str) -> CodeType | None:
    """The code of a class's method; None where it has none of a user's."""
    function = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    if type(function) is not FunctionType or is_trusted_code(function.__code__):
        return None
    return function.__code__


def _modules(job: Job) -> Iterator[nn.Module]:
    yield from job.root.modules()
    if isinstance(job.loss, nn.Module):
        yield from job.loss.modules()
