"""Whether a job's Python enters ``torch.autocast``: which weights are cast already is kept in one
cache for all threads, and whoever leaves the context empties it.

A weight that is used twice inside is cast once, and its gradients are added up in the lower type;
emptied between, it is cast twice, and they are added up in single precision: other bits. The cache
of ``parametrize.cached`` and the switches of ``sdpa_kernel`` are everybody's, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint

from waterflow.account.account import Account
from waterflow.account.purity import undisturbed
from waterflow.account.trust import is_trusted_code
from waterflow.account.walk import Limits
from waterflow.capture.python_kind import kind_of_python, python_of_job
from waterflow.common.environment import is_library_file
from waterflow.job.job import Job

#: Where a job can reach more, no package is looked into: one of them may enter it.
_LIMITS = Limits(objects=10_000, functions=400)
#: So many kinds of jobs are remembered.
_MOST_KINDS = 256
_KNOWN: dict[Hashable, Casts] = {}
#: Recomputing a forward pass enters autocast as it was, on or off.
_CHECKPOINT = checkpoint.__file__
_USES, _SWITCHES = ("autocast", "cached"), ("sdpa_kernel",)
_ENTERS = (*_USES, "checkpoint")
_INTEGRATIONS = str(Path(__file__).parents[1] / "integrations")


class Casts(NamedTuple):
    """What a job's Python may do with autocast, while its steps are eager.

    Attributes:
        enters: whether it may enter and leave it, switched on or off: it empties the cache.
        uses: whether it may have casts in the cache.
        switches: whether it may choose, for all threads, which kernels operators have.
    """

    enters: bool
    uses: bool
    switches: bool = False

    def disturb(self, other: Casts) -> bool:
        """Whether one of two jobs would empty the cache under the other, or change its kernels."""
        if self.switches or other.switches:
            return True
        return (self.uses and other.enters) or (other.uses and self.enters)


def casts_of(job: Job) -> Casts:
    """What the job's Python may do, by the names in the code that it can reach.

    Models of libraries enter autocast to switch it off, so there its name alone is no use of it.
    Jobs that are made of the same functions and classes, as trials are, are looked at once.
    """
    roots = python_of_job(job)
    kind = kind_of_python(roots)
    found = _KNOWN.get(kind) or _look(roots)
    if kind is not None and kind not in _KNOWN:
        if len(_KNOWN) >= _MOST_KINDS:
            _KNOWN.clear()
        _KNOWN[kind] = found
    return found if job.autocast is None else found._replace(enters=True, uses=True)


def _look(roots: dict[str, Any]) -> Casts:
    is_whole = True
    try:
        with undisturbed():
            reached = Account.take(roots, executed_only=True, limits=_LIMITS)
            if not reached.is_whole:
                is_whole = False
                reached = Account.take(roots, executed_only=True, limits=_LIMITS, own_code=True)
    except Exception:  # objects that refuse to be looked at, or change meanwhile
        return Casts(enters=True, uses=True)
    codes = [code for code in reached.codes if not is_trusted_code(code)]
    holds = bool(reached.instances(torch.autocast)) or not reached.is_whole
    names = not is_whole or _names(codes, _ENTERS) or _CHECKPOINT in map(_file_of, reached.codes)
    enters = holds or names
    users = [code for code in codes if _is_users(code)]
    return Casts(enters, holds or _names(users, _USES), _names(users, _SWITCHES))


def _names(codes: Iterable[CodeType], words: Iterable[str]) -> bool:
    names = (name for code in codes for name in (*code.co_names, *code.co_freevars))
    return any(word in name for name in names for word in words)


def _file_of(code: CodeType) -> str:
    return code.co_filename


def _is_users(code: CodeType) -> bool:
    file = code.co_filename
    return file.startswith(_INTEGRATIONS) or not is_library_file(file)
