"""Whether somebody has put code of their own into torch, where every step may come across it.

An account meets such code where the user's own code names it. What torch's code calls by itself is
trusted, and is the same for all jobs of a process, but not in the next process. Methods that a
library has added to torch's classes, under names that torch's code does not know, it never calls.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import torch

from waterflow.account.class_parts import is_a
from waterflow.account.trust import is_trusted_class, is_trusted_code, is_trusted_name

#: Modules whose functions and classes a step may run, each with what is below it.
_RUN = (
    *("torch.nn.", "torch.optim.", "torch.autograd.", "torch.amp.", "torch.functional."),
    *("torch._tensor.", "torch.overrides.", "torch.utils.checkpoint.", "torch._VF."),
)
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
#: Where libraries put kernels of their own beside those for the host.
_ELSEWHERE = ("/Meta", "/CUDA", "/MPS", "/XPU", "/HPU", "/PrivateUse1")
_HEAP_TYPE = 1 << 9  # a flag of classes that are made at run time, as class statements do


def patched() -> str | None:
    """The first of torch's names under which there is somebody else's code; None: there is none."""
    for name, module in list(sys.modules.items()):
        if not ((name + ".").startswith(_RUN) or name == "torch"):
            continue
        if is_a(module, types.ModuleType):
            for part, value in list(vars(module).items()):
                found = _patch(name, value)
                if found is not None and part != "compile":  # which no captured step calls
                    return f"{name}.{part}{found}"
    return None


def foreign_kernel() -> str | None:
    """The first of torch's operators on the host that has a kernel of somebody's own, in Python;
    None: there is none. Torch itself makes some when they are first asked for, as `vmap` does."""
    names = list(torch.library._impls)
    found = {name for name in names if name.startswith("aten/") and not name.endswith(_ELSEWHERE)}
    if found:
        for module in _torchs_modules():
            for value in list(vars(module).values()):
                if is_a(value, torch.library.Library):
                    found -= value._op_impls
    return min(found, default=None)


def _torchs_modules() -> list[types.ModuleType]:
    """Those of torch's modules that have a file."""
    named = [module for name, module in list(sys.modules.items()) if name.startswith("torch.")]
    found = [module for module in named if is_a(module, types.ModuleType)]
    return [each for each in found if str(vars(each).get("__file__")).startswith(_TORCH)]


def _patch(module: str, value: Any) -> str | None:
    """The rest of the name of a patch in what a module has; empty where it is the whole."""
    if not is_a(value, type):
        return "" if _is_others(value) else None
    if value.__module__ != module and value is not torch.Tensor:
        return None if is_trusted_class(value) else ""
    for name, own in list(vars(value).items()):
        if _is_others(own) and _is_known_to_torch(value, name):
            return f".{name}"
    return None


def _is_known_to_torch(owner: type, name: str) -> bool:
    """Whether torch's code may come across an attribute of this name of one of its classes: the
    interpreter asks for it, another class has it, too, or a source file of torch's has the word."""
    if name.startswith("__") or any(hasattr(base, name) for base in owner.__mro__[1:]):
        return True
    return any(_has_word(str(module.__file__), name) for module in _torchs_modules())


@functools.cache
def _has_word(filename: str, word: str) -> bool:
    """Whether a source file has a word, or cannot be read."""
    if not filename.endswith(".py"):
        return False
    try:
        with open(filename, "rb") as file:
            return word.encode() in file.read()
    except OSError:
        return True


def _is_others(value: Any) -> bool:
    kind = type(value)
    if kind is types.FunctionType:
        code = value.__code__
        if code.co_filename.startswith(_TORCH) or is_trusted_code(code):
            return False
        own = str(value.__globals__.get("__name__"))  # data classes and named tuples make methods
        return not (is_trusted_name(own) or own.startswith("namedtuple_"))
    if kind in (types.MethodType, staticmethod, classmethod):
        return _is_others(value.__func__)
    if kind is functools.partial:
        return _is_others(value.func)
    if kind is property:
        return any(map(_is_others, (value.fget, value.fset, value.fdel)))
    is_made = kind.__flags__ & _HEAP_TYPE and not is_a(value, type)
    return bool(is_made and not is_trusted_class(kind) and "__call__" in dir(kind))
