"""Which code is trusted to keep no state of the user's: the standard library, torch and numpy.

What such code does is known by its versions, so an account of Python state (`waterflow.account`)
does not look into it. Everything else counts as the user's, installed packages included.
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import importlib.util
import os
import sys
import sysconfig
from types import CodeType, FunctionType, ModuleType
from typing import Any

_PACKAGES = ("torch", "torchgen", "functorch", "numpy", "waterflow")
_OWN_PARTS = ("waterflow.partitioner", "waterflow.executor", "waterflow.allocator_ext")
#: Part of this package, but as good as the user's: code that is trained.
_TRAINED = "waterflow.models"
#: Part of this package, too, and as good as the user's where it is asked what steps do.
_INTEGRATIONS = "waterflow.integrations"
#: The standard library's, for older Pythons; torch's first step imports what is made of it.
_BACKPORT = "typing_extensions.py"
#: Packages that are told of results, and look at no tensor that nobody has handed them.
_REPORTERS = frozenset(
    {
        *("optuna", "ray", "hyperopt", "nevergrad", "mlflow", "wandb", "tensorboard"),
        *(
            "tensorboardX",
            "tqdm",
            "rich",
            "loguru",
            "matplotlib",
            "seaborn",
            "plotly",
            "bokeh",
            "PIL",
            "pandas",
        ),
        *("scipy", "sklearn", "sqlalchemy", "yaml", "requests", "joblib", "psutil", "packaging"),
    }
)
#: In them, what holds numbers and texts alone, thousands after as many trials.
_RECORDS = ("optuna.storages.", "optuna.trial._frozen.", "optuna.distributions.")
#: Told by the interpreter: a class of C's may have something else of that name for its objects.
_module_of = type.__dict__["__module__"].__get__
#: Their modules keep switches and hooks that users set.
_SWITCHED = ("torch.nn", "torch.optim", "torch.distributions")


def _folders(*packages: str) -> tuple[str, ...]:
    found = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        # Where its first file is: an editable installation has further places to search.
        found += [os.path.dirname(spec.origin)] if spec is not None and spec.origin else []
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in found)


@functools.cache
def _standard_folders() -> tuple[str, ...]:
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in found if folder)


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    found = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    found |= {folder for folder in sys.path if "-packages" in folder}
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in found if folder)


@functools.cache
def _trusted_folders() -> tuple[str, ...]:
    return _folders(*_PACKAGES, *_OWN_PARTS)


@functools.cache
def _trained_folders() -> tuple[str, ...]:
    return _folders(_TRAINED)


@functools.cache
def _switched_folders() -> tuple[str, ...]:
    return _folders(*_SWITCHED)


@functools.cache
def is_standard_file(filename: str) -> bool:
    """Whether a source file is one of the standard library."""
    if filename.startswith("<frozen"):
        return True
    path = os.path.realpath(filename)
    installed = path.startswith(_installed_folders())
    return (
        os.path.basename(path) == _BACKPORT if installed else path.startswith(_standard_folders())
    )


@functools.cache
def is_trusted_file(filename: str) -> bool:
    """Whether a source file is of the standard library, torch, numpy or this package."""
    if filename.startswith("<"):
        return filename.startswith(("<frozen", "<__array_function__"))
    path = os.path.realpath(filename)
    if path.startswith(_trained_folders()):
        return False
    return is_standard_file(filename) or path.startswith(_trusted_folders())


def is_trusted_code(code: CodeType) -> bool:
    """Whether code is of the standard library, torch, numpy or this package."""
    return is_trusted_file(code.co_filename)


def is_generated_code(code: CodeType) -> bool:
    """Whether the standard library has written code: a named tuple's, which makes a tuple of values
    and nothing else, whoever's it is; a data class's of trusted code, where that can be found."""
    if code.co_filename != "<string>":
        return False
    if code.co_name == "<lambda>" and code.co_names == ("_tuple_new",):
        return _is_of_named_tuple(code)
    functions = [each for each in gc.get_referrers(code) if type(each) is FunctionType]
    return bool(functions) and all(
        is_trusted_name(each.__globals__.get("__name__")) for each in functions
    )


def _is_of_named_tuple(code: CodeType) -> bool:
    try:
        twin = collections.namedtuple("Twin", code.co_varnames[1:]).__new__.__code__
    except ValueError:  # no names for fields
        return False
    return (twin.co_code, twin.co_consts) == (code.co_code, code.co_consts)


@functools.cache
def keeps_switches(filename: str) -> bool:
    """Whether a file's globals hold what users set, as torch's hooks for all modules."""
    return os.path.realpath(filename).startswith(_switched_folders())


def is_trusted_name(module_name: Any) -> bool:
    """Whether a module, known by its name, is trusted."""
    if not isinstance(module_name, str) or module_name == "__main__":
        return False
    return _is_trusted_module(module_name, _file_of(sys.modules.get(module_name)))


@functools.cache
def _is_trusted_module(name: str, filename: str | None) -> bool:
    if filename is not None:
        return is_trusted_file(filename)
    root = name.partition(".")[0]
    if (name + ".").startswith(_TRAINED + "."):
        return False
    return name in sys.builtin_module_names or root in _PACKAGES or root in sys.stdlib_module_names


def _file_of(module: ModuleType | None) -> str | None:
    filename = None if module is None else module.__dict__.get("__file__")
    return filename if isinstance(filename, str) else None


def is_trusted_class(kind: type) -> bool:
    """Whether a class is defined by trusted code."""
    return is_trusted_name(_module_of(kind))


def is_of_trusted_classes(value: object) -> bool:
    """Whether an object's class is defined by trusted code, and all that it is derived from."""
    return all(map(is_trusted_class, type(value).__mro__))


def is_everybodys(value: Any) -> bool:
    """Whether a function or class is what its module has under its name, and was not made for one
    job."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is value


@functools.cache
def is_reporters_file(filename: str) -> bool:
    """Whether a source file is of an installed package that only reports what it is told."""
    path = os.path.realpath(filename)
    found = [path[len(folder) :] for folder in _installed_folders() if path.startswith(folder)]
    return any(inside.split(os.sep)[0].removesuffix(".py") in _REPORTERS for inside in found)


def is_reporters_name(module_name: Any) -> bool:
    """Whether a module, known by its name, is of such a package."""
    return Packages.BUT_REPORTERS.passes_name(module_name)


@functools.cache
def is_integration_file(filename: str) -> bool:
    """Whether a source file is of this package's part that makes jobs of other libraries' trainers:
    its code stands for theirs."""
    return os.path.realpath(filename).startswith(_folders(_INTEGRATIONS))


@functools.cache
def is_package_file(filename: str) -> bool:
    """Whether a source file is of an installed package that is not trusted."""
    path = os.path.realpath(filename)
    return path.startswith(_installed_folders()) and not is_trusted_file(filename)


def is_package_class(kind: type) -> bool:
    """Whether a class is defined by an installed package that is not trusted."""
    filename = _file_of(sys.modules.get(_module_of(kind)))
    return filename is not None and is_package_file(filename)


class Packages(enum.Enum):
    """Which installed packages' code a walk goes through; with none, not even what is trusted."""

    ALL = enum.auto()
    BUT_REPORTERS = enum.auto()
    NONE = enum.auto()

    def passes_file(self, filename: str) -> bool:
        """Whether code of a source file is passed by."""
        if self is Packages.NONE:
            is_known = is_trusted_file(filename) or is_package_file(filename)
            return is_known and not is_integration_file(filename)
        return self is Packages.BUT_REPORTERS and is_reporters_file(filename)

    def passes_name(self, module_name: Any) -> bool:
        """Whether code of a module, known by its name, is."""
        if self is Packages.ALL or not isinstance(module_name, str):
            return False
        filename = _file_of(sys.modules.get(module_name))
        if filename is None:
            return self is Packages.NONE and is_trusted_name(module_name)
        return self.passes_file(filename)


def keeps_records(kind: type) -> bool:
    """Whether objects of a class, which is such a package's, hold numbers and texts alone."""
    name = kind.__dict__.get("__module__")
    return (str(name) + ".").startswith(_RECORDS) and is_reporters_name(name)


def is_own_class(kind: type) -> bool:
    """Whether a class is this package's own, but for the models that it trains."""
    name = str(kind.__dict__.get("__module__")) + "."
    return name.startswith("waterflow.") and not name.startswith(_TRAINED + ".")
