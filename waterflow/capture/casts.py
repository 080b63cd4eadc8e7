"""Whether a job's Python enters ``torch.autocast``: which weights are cast already is kept in one
cache for all threads, and whoever leaves the context empties it.

A weight that is used twice inside is cast once, and its gradients are added up in the lower type;
emptied between, it is cast twice, and they are added up in single precision: other bits. The cache
of ``parametrize.cached`` and the switches of ``sdpa_kernel`` are everybody's, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint

from waterflow.account.account import Account
from waterflow.account.purity import undisturbed
from waterflow.account.trust import Packages, is_integration_file, is_trusted_code
from waterflow.account.walk import Limits
from waterflow.capture.python_kind import kind_of_python, python_of_job, rough_kind
from waterflow.common.environment import is_library_file
from waterflow.job.job import Job

#: Where a job can reach more, no package is looked into: one of them may enter it.
_LIMITS = Limits(objects=10_000, functions=400)
#: So many kinds of jobs are remembered.
_MOST_KINDS = 256
_KNOWN: dict[Hashable, Casts] = {}
#: Kinds of jobs, roughly, that can reach too much.
_TOO_LARGE: set[Hashable] = set()
#: Recomputing a forward pass enters autocast as it was, on or off.
_CHECKPOINT = checkpoint.__file__
_USES, _SWITCHES = ("autocast", "cached"), ("sdpa_kernel",)
_ENTERS = (*_USES, "checkpoint")


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
    kind = rough_kind(roots)
    try:
        with undisturbed():
            known = kind in _TOO_LARGE
            reached = _reached(roots, Packages.NONE if known else Packages.BUT_REPORTERS)
            if not (known or reached.is_whole):
                if len(_TOO_LARGE) < _MOST_KINDS:
                    _TOO_LARGE.add(kind)
                reached = _reached(roots, Packages.NONE)
    except Exception:  # objects that refuse to be looked at, or change meanwhile
        return Casts(enters=True, uses=True)
    codes = [one for one in reached.codes if _is_users(one) or not is_trusted_code(one)]
    holds = bool(reached.instances(torch.autocast)) or not reached.is_whole
    enters = (
        reached.packages is Packages.NONE
        or holds
        or _names(codes, _ENTERS)
        or _CHECKPOINT in map(_file_of, reached.codes)
    )
    users = [code for code in codes if _is_users(code)]
    return Casts(enters, holds or _names(users, _USES), _names(users, _SWITCHES))


def _reached(roots: dict[str, Any], packages: Packages) -> Account:
    return Account.take(roots, executed_only=True, packages=packages, limits=_LIMITS)


def _names(codes: Iterable[CodeType], words: Iterable[str]) -> bool:
    names = (name for code in codes for name in (*code.co_names, *code.co_freevars))
    return any(word in name for name in names for word in words)


def _file_of(code: CodeType) -> str:
    return code.co_filename


def _is_users(code: CodeType) -> bool:
    file = code.co_filename
    return is_integration_file(file) or not is_library_file(file)
