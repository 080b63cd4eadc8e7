"""Which calls of a step give something else each time, or touch the outside world.

The calls are those seen while a step ran (`_C.Observer`), so nothing hides behind a name. A C
function is pure if its module only computes; what a pure module has that is not pure is named here,
and so is what other modules have that is. All the rest, extension modules that nobody knows
included, is impure. Calls that torch makes itself are torch's affair, but for those that set what
operators ask for while they run, and for the few functions by which torch reads and writes files,
looks at the device's memory or starts compilers: these are known by their code.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import threading
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from waterflow.account.bytecode import catches
from waterflow.account.class_parts import is_a
from waterflow.account.code_names import IMPORTERS, Call, code_names
from waterflow.account.trust import is_package_file, is_standard_file, is_trusted_code
from waterflow.allocator_ext import _C
from waterflow.common import switches

if TYPE_CHECKING:
    from waterflow.account.account import Account

_TORCH = os.path.join(torch.__path__[0], "")
#: Modules of C functions that compute from their arguments, or move objects that an account sees.
_PURE = frozenset(
    {
        *("builtins", "math", "cmath", "operator", "_operator", "functools", "_functools", "_abc"),
        *("itertools", "collections", "_collections", "_bisect", "_heapq", "_statistics", "array"),
        *("copy", "copyreg", "_struct", "binascii", "zlib", "_sre", "re", "_string", "types"),
        *("_typing", "_json", "datetime", "_datetime", "unicodedata"),
        *("_weakref", "_weakrefset", "weakref", "_contextvars", "_warnings", "_md5", "_sha1"),
        *("_sha2", "_sha256", "_sha512", "_sha3", "_blake2", "_hashlib", "_imp", "_opcode"),
        *("_tokenize", "_codecs", "_ast", "_stat", "_csv", "_pickle", "numpy", "torch"),
    }
)
#: What is not pure in them, and why.
_IMPURE = {
    "builtins.open": "opens a file",
    "builtins.print": "prints",
    "builtins.input": "reads input",
    "builtins.breakpoint": "starts a debugger",
    "builtins.globals": "reads variables by names that no code shows",
    "builtins.eval": "runs code that no code shows",
    "builtins.exec": "runs code that no code shows",
    "datetime.datetime.now": "reads the clock",
    "datetime.datetime.utcnow": "reads the clock",
    "datetime.datetime.today": "reads the clock",
    "datetime.date.today": "reads the clock",
    **dict.fromkeys(
        (
            *("datetime.datetime.fromtimestamp", "datetime.date.fromtimestamp"),
            *("datetime.datetime.timestamp", "datetime.datetime.astimezone"),
        ),
        "goes by the time zone",
    ),
    **dict.fromkeys(("datetime.date.strftime", "datetime.time.strftime"), "goes by the locale"),
    "_csv.field_size_limit": "reads a setting",
    "_csv.get_dialect": "reads what was registered",
    "_csv.list_dialects": "reads what was registered",
    "_weakref.getweakrefcount": "looks at who refers to an object",
    "_weakref.getweakrefs": "looks at who refers to an object",
    "numpy.fromfile": "reads a file",
    "numpy.ndarray.tofile": "writes a file",
    "torch.TensorBase.data_ptr": "reads an address in memory",
    "torch.StorageBase.data_ptr": "reads an address in memory",
    "torch.TensorBase._version": "reads a tensor's version",
    "torch.TensorBase.untyped_storage": "looks at a tensor's memory",
    "torch.Event.elapsed_time": "reads the clock",
    "torch.Event.query": "asks the device",
    "torch.Stream.query": "asks the device",
}
#: What is pure in other modules.
_PURE_FUNCTIONS = frozenset(
    {
        *("sys.getrecursionlimit", "sys.intern", "sys.exc_info", "sys.getdefaultencoding"),
        *("sys.is_finalizing", "sys.exception", "sys.getfilesystemencoding", "posix.fspath"),
        *("_thread.lock.acquire", "_thread.lock.release", "_thread.lock.__enter__"),
        *("_thread.lock.__exit__", "_thread.RLock.acquire", "_thread.RLock.release"),
        *("_thread.RLock.__enter__", "_thread.RLock.__exit__", "_thread.allocate_lock"),
        *("_thread.RLock._is_owned", "sys.audit"),
    }
)
#: What of torch's own Python is not pure, by its file (with a slash at the end, all files below):
#: some functions, or all (None), and why.
_TORCHS_WORLDLY: dict[str, tuple[frozenset[str] | None, str]] = {
    "__init__.py": (frozenset({"is_warn_always_enabled"}), "reads a setting"),
    "_tensor.py": (frozenset({"is_shared"}), "looks at a tensor's memory"),
    **dict.fromkeys(
        ("random.py", "cuda/random.py"),
        (frozenset({"initial_seed", "seed"}), "reads or draws a seed"),
    ),
    **dict.fromkeys(
        ("serialization.py", "jit/_serialization.py", "export/__init__.py"),
        (frozenset({"save", "load"}), "reads or writes a file"),
    ),
    **dict.fromkeys(
        (
            *("package/package_importer.py", "package/package_exporter.py"),
            *("distributed/checkpoint/", "utils/model_zoo.py", "hub.py"),
        ),
        (None, "reads or writes a file"),
    ),
    **dict.fromkeys(
        ("cuda/memory.py", "accelerator/memory.py", "utils/collect_env.py"),
        (None, "asks the device"),
    ),
    "cuda/__init__.py": (
        frozenset({"utilization", "temperature", "power_draw", "clock_rate", "memory_usage"}),
        "asks the device",
    ),
    "cuda/streams.py": (frozenset({"elapsed_time", "query"}), "asks the device"),
    "utils/benchmark/": (None, "reads the clock"),
    "utils/cpp_extension.py": (None, "starts a compiler"),
}
#: What of that could not be taken back.
_FOR_GOOD = ("reads or writes a file", "starts a compiler")
#: What modules do whose functions are impure; for the message only.
_REASONS = {
    "time": "reads the clock",
    "_random": "draws random numbers",
    "numpy.random": "draws random numbers",
    "_io": "reads or writes a file",
    "io": "reads or writes a file",
    "posix": "asks the operating system",
    "nt": "asks the operating system",
    "_socket": "uses the network",
    "_posixsubprocess": "starts a process",
    "_thread": "deals with threads",
    "sys": "looks at the interpreter",
    "gc": "looks at the interpreter",
    "decimal": "reads a context of its own",
    "_decimal": "reads a context of its own",
}
#: Reads of attributes are no calls: these are looked for by name.
_IMPURE_ATTRIBUTES = {
    "_version": "reads a tensor's version",
    "f_locals": "reads another function's variables",
    "cache_info": "reads how often results were asked for",
    "__subclasses__": "looks for classes that no code shows",
}


class Impurity(NamedTuple):
    """A call of the user's code, or of an installed package's, that is not pure."""

    name: str
    file: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.name} {self.why} ({self.file}:{self.line})"


def is_seen_through(code: CodeType) -> bool:
    """Whether calls of this code count as its caller's: the standard library's and numpy's."""
    return is_standard_file(code.co_filename) or (
        is_trusted_code(code) and "numpy" in code.co_filename
    )


def observer() -> _C.Observer:
    """An observer whose calls `impure_calls` can judge."""
    return _C.Observer(is_seen_through)


_CATCHES = "catches errors that may come from its operators, and in a graph nobody does"

_entrance = threading.Lock()
#: How many threads have stopped collections, and whether there were any before the first did.
_inside = 0
_collects = False


@contextlib.contextmanager
def undisturbed(observer: AbstractContextManager[Any] | None = None) -> Iterator[None]:
    """Has nothing run inside that a garbage collection would run, finalizers and callbacks of other
    people's, and what does run observed, where an observer is given. Several threads may be inside
    at once: the first in stops collections, the last out lets them go on."""
    global _inside, _collects
    with _entrance:
        if not _inside:
            _collects = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        with observer or contextlib.nullcontext():
            yield
    finally:
        with _entrance:
            _inside -= 1
            if not _inside and _collects:
                gc.enable()


def impure_calls(calls: Iterable[Call], codes: Collection[CodeType] = ()) -> list[Impurity]:
    """The calls that are not pure.

    Args:
        calls: those seen by an `observer`.
        codes: the code that was executed, in which reads of attributes are looked for.
    """
    found = [
        Impurity(name, code.co_filename, line, why)
        for function, code, line in calls
        for name, why in _judged(function, is_trusted_code(code))
    ]
    users = [code for code in codes if not is_trusted_code(code)]
    for code in users:
        found += _attributes(code)
        if catches(code) and not is_package_file(code.co_filename):
            name, line = code.co_qualname, code.co_firstlineno
            found.append(Impurity(name, code.co_filename, line, _CATCHES))
    for code in codes:
        if (why := _why_worldly(code)) is not None:
            # Whoever calls it is not known; whose code has its name is what a user looks for.
            named = [one for one in users if code.co_name in code_names(one).names]
            where = named[0] if named else code
            found.append(Impurity(code.co_qualname, where.co_filename, where.co_firstlineno, why))
    return found


def _why_worldly(code: CodeType) -> str | None:
    """Why a function of torch's own Python is not pure; None where it is, or is none of torch's."""
    is_function = code.co_flags & inspect.CO_OPTIMIZED  # and no body of a module or a class
    return _why_worldly_at(code.co_filename, code.co_name) if is_function else None


@functools.cache
def _why_worldly_at(filename: str, name: str) -> str | None:
    if not filename.startswith(_TORCH):
        return None
    path = filename[len(_TORCH) :]
    for place, (names, why) in _TORCHS_WORLDLY.items():
        is_there = path.startswith(place) if place.endswith("/") else path == place
        if is_there and (names is None or name in names):
            return why
    return None


#: Modules of the standard library whose functions touch what lies outside of Python's objects.
_WORLDLY = frozenset(
    {
        *("asyncio", "ctypes", "fileinput", "ftplib", "gc", "glob", "http", "importlib", "io"),
        *(
            "logging",
            "mmap",
            "multiprocessing",
            "os",
            "pathlib",
            "pickle",
            "pty",
            "queue",
            "select",
        ),
        *("selectors", "shelve", "shutil", "signal", "smtplib", "socket", "sqlite3"),
        *("subprocess", "sys", "tempfile", "threading", "time", "urllib", "webbrowser"),
    }
)
#: Methods by which objects of such modules are used.
_WORLDLY_NAMES = frozenset(
    {
        *("read_text", "write_text", "read_bytes", "write_bytes", "unlink", "touch", "mkdir"),
        *("readline", "readlines", "writelines", "sendall", "recv", "urlopen", "popen"),
        *("debug", "info", "warning", "exception", "critical"),
    }
)


def may_touch_the_world(account: Account) -> str | None:
    """What among all that an account has met could do something that cannot be taken back, or not
    even be seen afterwards; None if there is nothing. By names alone: much of it never does."""
    for function in account.built_ins:
        for name, _ in _judged(function):
            return name
    for library in account.libraries:
        if library.partition(".")[0] in _WORLDLY:
            return library
    for code in account.codes:
        if _why_worldly(code) in _FOR_GOOD:
            return code.co_qualname
        if not is_trusted_code(code) and (names := code_names(code).names & _WORLDLY_NAMES):
            return min(names)
    return None


def _judged(function: Any, by_a_library: bool = False) -> Iterator[tuple[str, str]]:
    if switches.is_set_by(function):
        yield function.__name__, "sets what operators ask for while they run"
    if by_a_library:
        return
    module = _module_of(function)
    root = module.partition(".")[0]
    name = f"{module}.{function.__qualname__}"
    short = f"{root}.{function.__qualname__}"
    if short in _IMPURE:
        yield name, _IMPURE[short]
    elif module.startswith("numpy.random"):
        yield name, _REASONS["numpy.random"]
    elif root not in _PURE and short not in _PURE_FUNCTIONS:
        yield name, _REASONS.get(root, "is not known to be pure")


def _module_of(function: Any) -> str:
    """The module of a C function, or of the class whose method it is."""
    owner: Any = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    if is_a(owner, types.ModuleType):
        return owner.__name__
    if owner is not None and type(owner).__name__ != "PyCapsule":
        kind = owner if is_a(owner, type) else type(owner)
        return next((base.__module__ for base in kind.__mro__ if _has(base, function)), "builtins")
    return str(getattr(function, "__module__", None) or "builtins")


def _has(kind: type, function: Any) -> bool:
    return function.__name__ in kind.__dict__ and kind.__module__ != "builtins"


def _attributes(code: CodeType) -> Iterator[Impurity]:
    names = code_names(code).names
    for name in names & _IMPURE_ATTRIBUTES.keys():
        yield Impurity(name, code.co_filename, code.co_firstlineno, _IMPURE_ATTRIBUTES[name])
    if {"sys", "modules"} <= names or not IMPORTERS.isdisjoint(names):
        why = "reads modules by names that no code shows"
        yield Impurity("sys.modules", code.co_filename, code.co_firstlineno, why)
