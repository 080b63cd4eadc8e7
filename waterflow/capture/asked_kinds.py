"""Code that can see that a tensor is a trace's: such a step is not captured.

A fake tensor answers as the real one does, but for its class: ``isinstance(t, FakeTensor)`` and
``type(t) is torch.Tensor`` go another way in a trace. The way that is left out may ask for values
(transformers skip a mask that is all ones, unless they are traced), so that one comparison of
numbers would not find it. What runs in a trace is observed, and its names are looked at.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable
from types import CodeType

from waterflow.account.trust import is_generated_code, is_trusted_code

#: Names of fake tensors' class, their attributes, and what tells that they are.
_OF_FAKES = frozenset(
    {"FakeTensor", "FakeTensorMode", "is_fake", "is_fake_tensor", "fake_mode", "fake_device"}
)
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
    return not names.isdisjoint(_OF_FAKES) or _compares_types(code, names)


def _compares_types(code: CodeType, names: set[str]) -> bool:
    """Whether the class of something may be compared with that of tensors."""
    if names.isdisjoint(("type", "__class__")) or names.isdisjoint(_TENSORS):
        return False
    return any(one.opname in _COMPARISONS for one in dis.get_instructions(code))
