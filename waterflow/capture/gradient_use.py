"""Whether code that runs between two steps comes to see gradients, or steps an optimizer: by its
names, by the texts that it may read attributes by, and by what its calls of ``step`` may be of."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from waterflow.account.account import Account
from waterflow.account.bytecode import nested_codes
from waterflow.account.class_parts import in_slots, is_a
from waterflow.account.code_names import code_names
from waterflow.account.trust import is_trusted_class, is_trusted_code
from waterflow.allocator_ext import _C

#: Names about gradients by which nobody comes to see one.
_HARMLESS = re.compile(r"(no|enable|zero)_grad|requires_grad_?|(set|is)_grad_enabled")
#: Words that have nothing to do with gradients.
_OTHER_WORDS = re.compile(r"(up|down|de)grad(e[drs]?|ing|able|ation)|gradual(ly)?", re.IGNORECASE)
#: The attributes of a tensor that are its gradient, as texts given to `getattr`.
_GRADIENTS = frozenset({"grad", "_grad"})
#: What reads attributes by texts that it is given, or calls them.
_BY_TEXT = frozenset({"getattr", "attrgetter", "methodcaller", "__getattribute__"})
#: Torch's own optimizers: code that names one makes one.
_KINDS = frozenset(
    name
    for name, kind in vars(torch.optim).items()
    if is_a(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
)
#: Names by which code has the class of an object.
_CLASS_OF = frozenset({"type", "__class__"})
_MISSING = object()


def uses_gradients(
    reached: Account,
    own: Collection[Optimizer],
    stepped: Iterable[Any] = (),
    counts: Callable[[CodeType], bool] = lambda code: not is_trusted_code(code),
    names: Callable[[CodeType], bool] | None = None,
    makes: bool = True,
) -> bool:
    """Whether code that an account has may look at gradients or step an optimizer.

    Args:
        reached: all that the code reaches, but for the optimizers of torch's schedulers.
        own: the job's optimizers, which may be read and given other hyperparameters.
        stepped: the job's schedulers, whose ``step`` is called.
        counts: whether a code is looked at.
        names: whether a code has a name of gradients.
        makes: whether an optimizer that it may make counts, too.
    """
    held = (value.gi_code for value in reached.instances(GeneratorType))
    codes = [code for code in (*reached.codes, *held) if counts(code)]
    if any(map(names or names_gradients, codes)):
        return True
    executed = [each for each in _executed(reached) if counts(each.code)]
    return (
        _reads_by_text(reached, executed)
        or (makes and _makes_optimizers(executed))
        or _steps(reached, executed, own, stepped)
    )


def function_of(generator: Any) -> FunctionType | None:
    """What stands for a generator's code, with its variables, in an account; None of all else."""
    if type(generator) is not GeneratorType or generator.gi_frame is None:
        return None
    code, frame = generator.gi_code, generator.gi_frame
    held = frame.f_locals
    closure = tuple(CellType(held.get(name)) for name in code.co_freevars)
    return FunctionType(code, frame.f_globals, code.co_name, None, closure)


def names_gradients(code: CodeType) -> bool:
    """Whether code has a name of gradients, or a text that is one."""
    names = (name for name in code.co_names if "grad" in name and not _HARMLESS.fullmatch(name))
    if any("grad" in _OTHER_WORDS.sub("", name) for name in names):
        return True
    return not _GRADIENTS.isdisjoint(_texts(code.co_consts))


def names_gradients_as_words(code: CodeType) -> bool:
    """The same of code of which much is about other gradients, those of a picture, say: functions
    that it calls are looked at by themselves."""
    names = (name for name in code.co_names if not _HARMLESS.fullmatch(name))
    if any(not {"grad", "grads"}.isdisjoint(name.split("_")) for name in names):
        return True
    return not _GRADIENTS.isdisjoint(_texts(code.co_consts))


def _texts(values: Iterable[Any]) -> Iterator[str]:
    """The texts among constants, and in tuples and sets of them."""
    for value in values:
        if type(value) is str:
            yield value
        elif type(value) in (tuple, frozenset):
            yield from _texts(value)


class _Code(NamedTuple):
    """Code that may run; `variable`: the value of one of its variables from outside, if known."""

    code: CodeType
    variable: Callable[[str], Any]


def _executed(reached: Account) -> Iterator[_Code]:
    for value in reached.own_objects:
        if type(value) is FunctionType:
            yield _Code(value.__code__, functools.partial(_variable, value))
        elif type(value) is GeneratorType and value.gi_frame is not None:
            held = value.gi_frame.f_locals
            yield _Code(value.gi_code, functools.partial(_in_mapping, held))


def made_before(reached: Account) -> list[type]:
    """The classes of objects that are there, and of which code makes no other: what made these has
    run already, and runs no more."""
    functions = [
        value
        for value in reached.own_objects
        if type(value) is FunctionType and not is_trusted_code(value.__code__)
    ]
    parts = [part for one in functions for part in nested_codes(one.__code__)]
    if any(not _CLASS_OF.isdisjoint(part.co_names) for part in parts):
        return []
    named = {name for part in parts for name in (*part.co_names, *part.co_freevars)}
    # Methods that say `super()` have their class, whether or not they name it.
    implied = {id(_variable(one, "__class__")) for one in functions}
    kinds = [value for value in reached.own_objects if is_a(value, type)]
    held = [kind for kind in kinds if id(kind) not in implied or kind.__name__ in named]
    made = {id(base) for kind in held for base in kind.__mro__}
    return [k for k in reached.own_classes if not (is_trusted_class(k) or id(k) in made)]


def _variable(function: FunctionType, name: str) -> Any:
    """A variable of the functions around it, or a global."""
    code = function.__code__
    if name in code.co_freevars:
        found = gc.get_referents((function.__closure__ or ())[code.co_freevars.index(name)])
        return found[0] if found else _MISSING
    return function.__globals__.get(name, _MISSING)


def _in_mapping(held: dict[str, Any], name: str) -> Any:
    return held.get(name, _MISSING)


# Texts


def _reads_by_text(reached: Account, executed: Sequence[_Code]) -> bool:
    """Whether something that reads attributes by texts is given that of gradients."""
    if not _GRADIENTS.isdisjoint(_texts_of_readers(reached)):
        return True
    parts = (part for each in executed for part in nested_codes(each.code))
    if all(_BY_TEXT.isdisjoint(part.co_names) for part in parts):
        return False
    return any(type(text) is str and text in _GRADIENTS for text in _values(reached, executed))


def _texts_of_readers(reached: Account) -> Iterator[str]:
    """The texts by which objects of the library's read attributes or call methods."""
    readers = (*reached.instances(operator.attrgetter), *reached.instances(operator.methodcaller))
    for reader in readers:
        for text in _texts(reader.__reduce__()[1]):
            yield from text.split(".")


def _values(reached: Account, executed: Iterable[_Code]) -> Iterator[Any]:
    """What variables, defaults, attributes and items are, as far as an account has met them."""
    for each in executed:
        yield from (each.variable(name) for name in code_names(each.code).global_names)
    for value in reached.own_objects:
        if type(value) is FunctionType:
            yield from value.__defaults__ or ()
        elif not is_a(value, (type, ModuleType)):
            yield from gc.get_referents(value)
            yield from (_C.instance_dict(value) or {}).values()
    for kind in reached.own_classes:
        if not is_trusted_class(kind):
            yield from vars(kind).values()


# Steps


def _called(executed: Sequence[_Code], stepped: Iterable[Any]) -> Iterable[_Code]:
    """The code without methods ``step`` that nobody calls: a trainer's, which is the job's step."""
    known = {id(f.__code__) for one in stepped for f in _functions_of(type(one))}
    others = [each for each in executed if each.code.co_name != "step" or id(each.code) in known]
    parts = [part for each in others for part in nested_codes(each.code)]
    return executed if any(r.called for part in parts for r in _receivers(part)) else others


def _steps(
    reached: Account,
    executed: Sequence[_Code],
    own: Collection[Optimizer],
    stepped: Iterable[Any],
) -> bool:
    """Whether code may step an optimizer: one that is not the job's, or the job's."""
    met = reached.instances(Optimizer)
    if not all(_is_one_of(optimizer, own) for optimizer in met):
        return True
    if any(_is_step_of_one(value, met) for value in reached.own_objects):
        return True
    if met and "step" in _texts_of_readers(reached):
        return True
    attributes = _Attributes(reached)
    ours = {id(f.__code__) for kind in map(type, met) for f in _functions_of(kind)}
    for each in _called(executed, stepped):
        for part in nested_codes(each.code):
            for receiver in _receivers(part):
                if receiver.kind == "self" and id(part) not in ours:
                    continue  # a method of its own, which is looked at by itself
                suspects = bool(met) and receiver.called
                if _may_be_optimizer(_known(receiver, each, part, attributes), suspects):
                    return True
    return False


def _makes_optimizers(executed: Iterable[_Code]) -> bool:
    """Whether code has a class of optimizers: by its name in torch, or in a variable."""
    for each in executed:
        variables = (*code_names(each.code).global_names, *each.code.co_freevars)
        held = map(each.variable, variables)
        if any(is_a(kind, type) and _is_optimizers(kind) for kind in held):
            return True
        if any(not _KINDS.isdisjoint(part.co_names) for part in nested_codes(each.code)):
            return True
    return False


def _is_one_of(value: Any, others: Iterable[Any]) -> bool:
    return any(value is other for other in others)


def _is_optimizers(kind: type) -> bool:
    return issubclass(kind, Optimizer) and kind is not Optimizer


def _is_step_of_one(value: Any, optimizers: Iterable[Optimizer]) -> bool:
    """Whether it is an optimizer's bound ``step``, but for what a scheduler puts in its place."""
    if type(value) is not MethodType or value.__name__ != "step":
        return False
    owner = value.__self__
    own = _C.instance_dict(owner) or {}
    return _is_one_of(owner, optimizers) and not _is_one_of(value, own.values())


def _functions_of(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        yield from (part for part in vars(base).values() if type(part) is FunctionType)


class _Receiver(NamedTuple):
    """What ``step`` is got of: a variable, an attribute, "self", or something else; `called`:
    whether in order to call it there, and not to read it, as callbacks do of a step's result."""

    kind: str
    name: str = ""
    called: bool = True


@functools.lru_cache(maxsize=1 << 12)
def _receivers(code: CodeType) -> tuple[_Receiver, ...]:
    """What code gets ``step`` of."""
    found: list[_Receiver] = []
    if not _BY_TEXT.isdisjoint(code.co_names) and "step" in _texts(code.co_consts):
        found.append(_Receiver("unknown"))
    if "step" not in code.co_names:
        return tuple(found)
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for index, each in enumerate(instructions):
        if each.argval != "step" or each.opname not in ("LOAD_METHOD", "LOAD_ATTR"):
            continue
        if not _is_super(instructions, index):
            called = _is_called(instructions, index)
            found.append(_receiver(instructions[index - 1], code)._replace(called=called))
    return tuple(found)


def _is_called(found: list[dis.Instruction], index: int) -> bool:
    each = found[index]
    if each.opname == "LOAD_METHOD":
        return True
    if "LOAD_METHOD" not in dis.opmap and (each.arg or 0) & 1:  # as the lowest bit says
        return True
    if index + 1 < len(found) and found[index + 1].opname == "PUSH_NULL":
        return True
    start = index - 1  # or that comes before what is called
    while start > 0 and found[start].opname == "LOAD_ATTR":
        start -= 1
    return start > 0 and found[start - 1].opname == "PUSH_NULL"


def _is_super(found: list[dis.Instruction], index: int) -> bool:
    """Whether it is the method of a class that another's is derived from."""
    before = found[max(0, index - 3) : index]
    called = bool(before) and before[-1].opname == "CALL" and before[-1].arg == 0
    return called and any(each.argval == "super" for each in before)


def _receiver(loaded: dis.Instruction, code: CodeType) -> _Receiver:
    name = str(loaded.argval)
    if loaded.opname == "LOAD_ATTR":
        return _Receiver("attribute", name)
    if loaded.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return _Receiver("variable", name)
    if loaded.opname == "LOAD_DEREF" and name in code.co_freevars:
        return _Receiver("variable", name)
    return _Receiver("self" if name == "self" else "unknown")


def _known(receiver: _Receiver, outer: _Code, part: CodeType, attributes: _Attributes) -> list[Any]:
    if receiver.kind == "attribute":
        return attributes.named(receiver.name)
    if receiver.kind != "variable":
        return [_MISSING]
    is_inner = receiver.name in part.co_freevars and receiver.name not in outer.code.co_freevars
    return [_MISSING if is_inner else outer.variable(receiver.name)]


class _Attributes:
    """What attributes of a name are, of whatever objects an account has."""

    def __init__(self, reached: Account) -> None:
        self._reached = reached

    @functools.cached_property
    def _found(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for value in self._reached.own_objects:
            if not is_a(value, (type, ModuleType)):
                held = [*(_C.instance_dict(value) or {}).items(), *in_slots(value)]
                for name, inner in held:
                    found.setdefault(name, []).append(inner)
        return found

    def named(self, name: str) -> list[Any]:
        """The values of all attributes of a name; "missing" where nobody has one."""
        return self._found.get(name) or [_MISSING]


def _may_be_optimizer(values: Iterable[Any], suspects: bool) -> bool:
    """Whether what ``step`` is got of is an optimizer; for who suspects that, also whether it may
    be one, or steps one that it is given."""
    for value in values:
        if is_a(value, Optimizer):
            return True
        scales = is_a(value, torch.amp.GradScaler)
        has_own = inspect.getattr_static(type(value), "step", None) is not None
        if suspects and (scales or not has_own):
            return True
    return False
