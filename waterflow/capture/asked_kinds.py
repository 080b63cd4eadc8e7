"""Code that can see that a tensor is a trace's: such a step is not captured.

A fake tensor answers as the real one does, but for its class: ``isinstance(t, FakeTensor)`` and
``type(t) is torch.Tensor`` go another way in a trace. The way that is left out may ask for values,
so that one comparison of numbers would not find it. What runs in a trace is observed, and its names
are looked at. Where code gets the class as libraries do (transformers, which skip a mask of ones,
unless they are traced), it is told what it would be told in the loop.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from types import CodeType

import torch

from waterflow.account.code_names import code_names
from waterflow.account.trust import is_generated_code, is_trusted_code

#: Names of fake tensors' class, their attributes, and what tells that they are.
_OF_FAKES = frozenset({"FakeTensor", "FakeTensorMode", "is_fake", "fake_mode", "fake_device"})
#: Where code gets the class from that is told as the loop is (`as_if_real`), and where others do.
_PACKAGES, _MODULE = frozenset({"_subclasses", "torch._subclasses"}), "fake_tensor"
_TENSORS = frozenset({"Tensor", "Parameter"})
_COMPARISONS = frozenset({"IS_OP", "COMPARE_OP", "CONTAINS_OP"})


def asker_among(codes: Iterable[CodeType]) -> CodeType | None:
    """The first code that asks what kind of tensors there are; torch's own is known to compute the
    same for both."""
    # Whether code was generated takes a search through all objects: asked last.
    return next((one for one in codes if _asks(one) and not _is_others(one)), None)


def _is_others(code: CodeType) -> bool:
    """Whether code is torch's or Python's, or was made from the fields of a data class."""
    if code.co_filename == "<string>" and code.co_name == "__init__":
        return True  # one of torch's has a field of such a name
    return is_trusted_code(code) or is_generated_code(code)


@functools.lru_cache(maxsize=4096)
def _asks(code: CodeType) -> bool:
    names = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    names.update(constant for constant in code.co_consts if isinstance(constant, str))
    fakes = names & _OF_FAKES
    is_told = fakes == {"FakeTensor"} and _gets_the_class(code, names)
    return (bool(fakes) and not is_told) or _compares_types(code, names)


def _gets_the_class(code: CodeType, names: set[str]) -> bool:
    """Whether code gets the class of fake tensors where `as_if_real` has another for it, and has
    none that somebody got before."""
    has_one = "FakeTensor" in code_names(code).global_names or "FakeTensor" in code.co_freevars
    return not (has_one or names.isdisjoint(_PACKAGES) or _MODULE in names)


def _compares_types(code: CodeType, names: set[str]) -> bool:
    """Whether the class of something may be compared with that of tensors."""
    if names.isdisjoint(("type", "__class__")) or names.isdisjoint(_TENSORS):
        return False
    return any(one.opname in _COMPARISONS for one in dis.get_instructions(code))


class _Subclasses(types.ModuleType):
    """Torch's package of kinds of tensors, which `as_if_real` gives this class."""

    #: That traces; None: none.
    thread: int | None = None

    @property
    def FakeTensor(self) -> type:
        """The class of fake tensors, and one that no tensor is of to who is not to know."""
        is_traced = threading.get_ident() == _Subclasses.thread
        is_others = is_traced and not is_trusted_code(sys._getframe(1).f_code)
        return _NoTensor if is_others else vars(self)["FakeTensor"]

    @FakeTensor.setter
    def FakeTensor(self, kind: type) -> None:
        vars(self)["FakeTensor"] = kind


class _NoTensor:
    """Nothing is of this class."""


@contextlib.contextmanager
def as_if_real() -> Iterator[None]:
    """Inside, on this thread, code that asks ``torch._subclasses.FakeTensor`` of a tensor is told
    what the loop tells it; torch's own code has the class. One thread traces at a time."""
    torch._subclasses.__class__ = _Subclasses
    before, _Subclasses.thread = _Subclasses.thread, threading.get_ident()
    try:
        yield
    finally:
        _Subclasses.thread = before
