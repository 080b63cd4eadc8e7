"""What code may change, by its bytecode: the attributes, variables and contents of which objects.

Code is gone through instruction by instruction, with a stack that holds in place of values where
these come from: what is held by a name (an attribute, a global, a variable of a function around
it), what that contains, a parameter, anything. What code makes for itself comes from nowhere, and
may be changed freely. Where branches meet, a value comes from wherever either has it; loops are
gone through until nothing is added.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import NamedTuple

from waterflow.account.changing_names import (
    ADDING,
    ANYTHING,
    CHANGED_KEYWORDS,
    CHANGES_FIRST,
    COMPREHENSIONS,
    CONSUMING,
    CONTENTS,
    HARMLESS,
    INPUTS,
    NEW,
    PLAIN_RESULTS,
    RETURNS_PART,
    TAKING,
    TENSORS_VIEWS,
    TYPES,
    VIEWS,
    changes_all,
    is_changing,
    is_in_place,
)
from waterflow.account.origins import (
    ANY,
    CLASS,
    MADE,
    NOTHING,
    NULL,
    UNKNOWN,
    Origin,
    Value,
    below,
    container,
    either,
)

_Locals = dict[str, Value]
_NUMPY = {Origin("held", "np"), Origin("held", "numpy")}


class Change(NamedTuple):
    """Something that code may change.

    Attributes:
        how: "attribute", "variable" (of a module), "cell" (a variable of functions around it),
            "item", "method", "operator".
        name: of the attribute, variable, method or operator; "*": any.
        origins: where the object comes from that is changed.
        code: the code that does it.
        line: where.
    """

    how: str
    name: str
    origins: frozenset[Origin]
    code: CodeType
    line: int


class Stores(NamedTuple):
    """What one function's code does.

    Attributes:
        changes: what it may change, but for what it makes for itself.
        escapes: what it hands to other code, by calls, results and containers: whoever has a value
            that comes from nowhere known may have one of these.
        aliases: what it stores by a name, where it can be found again.
        contents: what it puts into what is held by a name.
        reads: the names by which it gets something for more than to add to it; "*": any.
        calls: the objects that it calls, or whose methods it calls, as changes by a "call": what
            such a call does, the code that is called tells.
    """

    changes: tuple[Change, ...]
    escapes: frozenset[Origin]
    aliases: dict[str, frozenset[Origin]]
    contents: dict[str, frozenset[Origin]]
    reads: frozenset[str]
    calls: tuple[Change, ...]


@functools.lru_cache(maxsize=8192)
def stores_of(code: CodeType) -> Stores:
    """What code may change, without the functions inside it."""
    return _Reading(code).read()


class _Reading:
    """One code object, gone through."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
        self._parameters = frozenset(code.co_varnames[:count])
        self._instructions = list(dis.get_instructions(code))
        self._locals: _Locals = {}
        self._ever: _Locals = {}  # all that was ever in them
        self._back: dict[int, _Locals] = {}  # what jumps back bring along
        self._stack: list[Value] = []
        self._changes: dict[Change, None] = {}
        self._calls: dict[Change, None] = {}
        self._escapes: set[Origin] = set()
        self._aliases: dict[str, frozenset[Origin]] = {}
        self._contents: dict[str, frozenset[Origin]] = {}
        self._reads: set[str] = set()
        self._keywords: Sequence[str] = ()
        self._line = code.co_firstlineno

    def read(self) -> Stores:
        given = {name: self._parameter(name) for name in self._parameters}
        for name in self._parameters.intersection(self._code.co_cellvars):
            self._add(self._aliases, name, given[name])
        self._ever = {name: Value(origins, origins) for name, origins in given.items()}
        start, before = dict(self._ever), None
        while before != self._back:
            before, self._locals = dict(self._back), dict(start)
            self._run()
        self._note_reads()
        return Stores(
            tuple(self._changes),
            frozenset(self._escapes),
            self._aliases,
            self._contents,
            frozenset(self._reads),
            tuple(self._calls),
        )

    def _note_reads(self) -> None:
        for each, then in itertools.pairwise(self._instructions):
            if each.opname in _GETS and not _is_called(each) and then.argval not in ADDING:
                self._reads.add(each.argval)

    def _run(self) -> None:
        reached, left = True, dict[int, tuple[list[Value], _Locals]]()
        self._stack = []
        for each in self._instructions:
            if (found := left.pop(each.offset, None)) is not None:
                stack, variables = found
                self._stack = _merged(self._stack, stack) if reached else stack
                self._locals = _both(self._locals, variables) if reached else variables
            elif not reached:  # the handler of an exception
                self._stack, self._locals = [], dict(self._ever)
            if each.offset in self._back:
                self._locals = _both(self._locals, self._back[each.offset])
            self._line = _line(each) or self._line
            if "JUMP" in each.opname or each.opname in ("FOR_ITER", "SEND"):
                self._jump(each, left)
            _OPERATIONS.get(each.opname, _Reading._other)(self, each)
            reached = each.opname not in _LEAVES

    def _jump(self, each: dis.Instruction, left: dict[int, tuple[list[Value], _Locals]]) -> None:
        """Where it may go on has what there is now."""
        target, variables = each.argval, dict(self._locals)
        if target <= each.offset:
            self._back[target] = _both(self._back.get(target, variables), variables)
        elif target in left:
            left[target] = left[target][0], _both(left[target][1], variables)
        else:
            left[target] = self._jumped(each), variables

    def _jumped(self, each: dis.Instruction) -> list[Value]:
        effect = dis.stack_effect(each.opcode, each.arg, jump=True)
        stack = self._stack[:effect] if effect < 0 else [*self._stack, *[ANY] * effect]
        if each.opname == "FOR_ITER" and effect < 0:
            return self._stack[:-1]
        if each.opname == "SEND":  # what the iterator returns is in place of what was sent
            return [*self._stack[: effect - 1], ANY]
        return list(stack)

    # The stack

    def _push(self, value: Value) -> None:
        self._stack.append(value)

    def _pop(self) -> Value:
        return self._stack.pop() if self._stack else ANY

    def _pops(self, count: int) -> list[Value]:
        return [self._pop() for _ in range(count)][::-1]

    # What is found

    def _parameter(self, name: str) -> frozenset[Origin]:
        return frozenset({Origin("parameter", name, self._code)})

    def _change(self, how: str, name: str, origins: frozenset[Origin]) -> None:
        if origins or how in ("variable", "cell"):
            self._changes[Change(how, name, origins, self._code, self._line)] = None

    def _add(self, to: dict[str, frozenset[Origin]], name: str, origins: frozenset[Origin]) -> None:
        to[name] = to.get(name, NOTHING) | origins

    def _store(self, name: str, value: Value) -> None:
        """A value is held by a name from now on."""
        self._escape(value)
        self._add(self._aliases, name, value.origins)
        self._add(self._contents, name, value.inner)

    def _escape(self, value: Value) -> None:
        self._escapes |= value.all()

    def _put(self, holder: Value, value: Value) -> None:
        """A value is put into a container, where it can be found again."""
        self._escape(value)
        for origin in holder.origins:
            if origin.kind in ("held", "below"):
                self._add(self._contents, origin.name, value.all())

    # Operations

    def _nothing(self, each: dis.Instruction) -> None:
        """Moves nothing on the stack, or was seen to."""

    def _other(self, each: dis.Instruction) -> None:
        """What has no method: whatever it leaves may come from anywhere."""
        effect = dis.stack_effect(each.opcode, each.arg, jump=False)
        taken = self._pops(max(1, 1 - effect)) if self._stack else []
        for value in taken:
            self._escape(value)
        for _ in range(len(taken) + effect):
            self._push(ANY)

    def _pop_top(self, each: dis.Instruction) -> None:
        self._pop()

    def _end_loop(self, each: dis.Instruction) -> None:
        self._pops(-dis.stack_effect(each.opcode, each.arg))

    def _load_made(self, each: dis.Instruction) -> None:
        constant = each.argval
        called = constant.co_name if isinstance(constant, CodeType) else ""
        text = constant if type(constant) is str else None
        keywords = constant if type(constant) is tuple else ()
        self._push(Value(called=called, constant=text, keywords=keywords))

    def _load_null(self, each: dis.Instruction) -> None:
        self._push(NULL)

    def _local(self, name: str) -> Value:
        if name.startswith("."):  # what a comprehension goes through
            return ANY
        return self._locals.get(name, MADE)

    def _set_local(self, name: str, value: Value) -> None:
        self._locals[name] = value._replace(method="", called="", constant=None, keywords=())
        self._ever[name] = either(self._ever.get(name, MADE), self._locals[name])

    def _load_local(self, each: dis.Instruction) -> None:
        for name in _names(each):
            self._push(self._local(name))

    def _store_local(self, each: dis.Instruction) -> None:
        for name in _names(each):
            self._set_local(name, self._pop())

    def _store_and_load(self, each: dis.Instruction) -> None:
        stored, loaded = each.argval
        self._set_local(stored, self._pop())
        self._push(self._local(loaded))

    def _load_held(self, each: dis.Instruction) -> None:
        is_global = each.opname == "LOAD_GLOBAL"
        if is_global and (each.arg or 0) & 1:
            self._push(NULL)
        if is_global and each.argval in ANYTHING:
            self._change("variable", "*", UNKNOWN)
        held = frozenset({Origin("held", each.argval)})
        self._push(Value(held, called=each.argval if is_global else ""))

    def _store_variable(self, each: dis.Instruction) -> None:
        self._store(each.argval, self._pop())
        self._change_variable(each)

    def _change_variable(self, each: dis.Instruction) -> None:
        if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            self._change("variable", each.argval, NOTHING)
        elif each.argval in self._code.co_freevars:
            self._change("cell", each.argval, NOTHING)

    def _load_attribute(self, each: dis.Instruction) -> None:
        value, name = self._pop(), each.argval
        if _is_called(each):
            self._push(value._replace(method=name, called="", constant=None))
            self._push(value)
        else:
            self._push(self._attribute(value, name))

    def _attribute(self, value: Value, name: str) -> Value:
        if name == "__class__":
            return Value(CLASS)
        if name == "__dict__":
            self._reads.add("*")
            self._change("attribute", "*", value.origins)
            return value
        if is_changing(name):  # a bound method, which somebody will call
            self._change("method", name, value.origins)
        held = frozenset({Origin("held", name)})
        if name == "args" and value.origins <= UNKNOWN:  # of an exception, which holds them unseen
            held |= UNKNOWN
        if name in VIEWS:
            held |= below(value.origins)
        elif name in TENSORS_VIEWS:  # of tensors that come from nowhere known nobody asks
            held |= frozenset(o for o in below(value.origins) if o.kind == "below")
        return Value(held)

    def _load_super(self, each: dis.Instruction) -> None:
        value = self._pops(3)[-1]
        if "NULL|self" in each.argrepr or (each.arg or 0) & 1:
            self._push(value._replace(method=each.argval))
            self._push(value)
        else:
            self._push(self._attribute(value, each.argval))

    def _store_attribute(self, each: dis.Instruction) -> None:
        value, holder = self._pops(2)
        self._change("attribute", each.argval, holder.origins)
        self._store(each.argval, value)

    def _delete_attribute(self, each: dis.Instruction) -> None:
        self._change("attribute", each.argval, self._pop().origins)

    def _subscript(self, each: dis.Instruction) -> None:
        self._push(self._pops(3 if each.opname == "BINARY_SLICE" else 2)[0].part())

    def _store_subscript(self, each: dis.Instruction) -> None:
        value, holder, *_ = self._pops(4 if each.opname == "STORE_SLICE" else 3)
        self._change("item", "", holder.origins)
        self._put(holder, value)

    def _delete_subscript(self, each: dis.Instruction) -> None:
        self._change("item", "", self._pops(2)[0].origins)

    def _operator(self, each: dis.Instruction) -> None:
        one, two = self._pops(2)
        if each.argrepr == "[]":  # a subscript, in newer versions
            self._push(one.part())
            return
        inner = one.part().all() | two.part().all()
        if each.argrepr.endswith("="):
            self._change("operator", each.argrepr, one.origins)
            self._put(one, two.part())
            self._push(Value(one.origins, inner))
        else:
            self._push(Value(inner=inner))

    def _compare(self, each: dis.Instruction) -> None:
        self._pops(2)
        self._push(MADE)

    def _unary(self, each: dis.Instruction) -> None:
        self._pop()
        self._push(MADE)

    def _build(self, each: dis.Instruction) -> None:
        count = each.arg or 0
        count = 2 * count if each.opname == "BUILD_MAP" else count
        count += each.opname == "BUILD_CONST_KEY_MAP"
        self._push(container(self._pops(count)))

    def _add_to(self, each: dis.Instruction) -> None:
        """Adds to what a display or a comprehension makes."""
        values = self._pops(2 if each.opname == "MAP_ADD" else 1)
        if each.opname.endswith(("EXTEND", "UPDATE", "MERGE")):
            self._consume(*values)
            values = [value.part() for value in values]
        place = each.arg or 1
        if place <= len(self._stack):
            made = self._stack[-place]
            self._stack[-place] = made._replace(inner=made.inner | container(values).inner)

    def _unpack(self, each: dis.Instruction) -> None:
        count = each.arg or 0
        if each.opname == "UNPACK_EX":
            count = (count & 0xFF) + 1 + (count >> 8)
        value = self._pop()
        self._consume(value)
        self._stack += [value.part()] * count

    def _consume(self, *values: Value) -> None:
        """These are gone through: an iterator is moved by that, and so is what is behind one (of
        `zip`, say)."""
        for value in values:
            self._change("method", "__next__", value.all())

    def _iterate(self, each: dis.Instruction) -> None:
        if self._stack:
            self._consume(self._stack[-1])
            self._push(self._stack[-1].part())
        else:
            self._push(ANY)

    def _send(self, each: dis.Instruction) -> None:
        """Something is sent to what is below it, which is gone through."""
        self._escape(self._pop())
        self._iterate(each)

    def _end_send(self, each: dis.Instruction) -> None:
        _, returned = self._pops(2)
        self._push(returned)

    def _copy(self, each: dis.Instruction) -> None:
        place = each.arg or 1
        self._push(self._stack[-place] if place <= len(self._stack) else ANY)

    def _swap(self, each: dis.Instruction) -> None:
        place = each.arg or 1
        while len(self._stack) < place:
            self._stack.insert(0, ANY)
        stack = self._stack
        stack[-place], stack[-1] = stack[-1], stack[-place]

    def _leave(self, each: dis.Instruction) -> None:
        if each.opname != "RETURN_CONST":
            self._escape(self._pop())

    def _yield(self, each: dis.Instruction) -> None:
        self._escape(self._pop())
        self._push(ANY)

    def _import(self, each: dis.Instruction) -> None:
        self._pops(2)
        self._push(Value(frozenset({Origin("held", each.argval.split(".")[0])})))

    def _import_from(self, each: dis.Instruction) -> None:
        self._push(Value(frozenset({Origin("held", each.argval)}), called=each.argval))

    def _make_function(self, each: dis.Instruction) -> None:
        *given, code = self._pops(1 + bin(each.arg or 0).count("1"))
        for value in given:
            self._escape(value)
        self._push(Value(called=code.called))

    def _enter(self, each: dis.Instruction) -> None:
        manager = self._pop()
        self._escape(manager)
        self._push(ANY)
        self._push(Value(manager.origins | UNKNOWN, manager.inner | UNKNOWN))

    # Calls

    def _name_keywords(self, each: dis.Instruction) -> None:
        self._keywords = self._code.co_consts[each.arg or 0]

    def _call(self, each: dis.Instruction) -> None:
        if each.opname == "CALL_KW":
            self._keywords = self._pop().keywords
        given = self._pops(each.arg or 0)
        one, two = self._pops(2)
        called = one if one.method or two is NULL else two
        if not (one.method or one is NULL or two is NULL):  # a decorator's call
            given, called = [two, *given], one
        keywords, self._keywords = self._keywords, ()
        self._push(self._result(called, given, keywords))

    def _call_with_all(self, each: dis.Instruction) -> None:
        keywords = self._pop() if (each.arg or 0) & 1 else MADE
        given = self._pop()
        called, under = self._pop(), self._stack[-1:]
        if under == [NULL]:
            self._pop()
        elif called is NULL or (under and under[0].method):
            called = self._pop()
        self._push(self._result(called, [given.part(), given, keywords.part()], ("", "", "out")))

    def _result(self, called: Value, given: list[Value], keywords: Sequence[str]) -> Value:
        held = (origin.name for origin in called.origins if origin.kind == "held")
        name = called.method or called.called or next(held, "")
        objects = called.origins
        if called.method:  # or an object that is held by that name
            objects |= {Origin("held", name)}
            self._call_method(name, called, given)
        if objects:
            self._calls[Change("call", name, objects, self._code, self._line)] = None
        self._call_function(name, called, given)
        is_numpys = not (called.method and _NUMPY.isdisjoint(objects))  # as far as can be told
        if name in INPUTS and is_numpys:  # what is given after the inputs
            for value in given[INPUTS[name] : len(given) - len(keywords)]:
                self._change("method", "out", value.origins)
        for keyword, value in zip(keywords, given[-len(keywords) :], strict=False):
            if keyword in CHANGED_KEYWORDS:
                self._change("method", keyword, value.origins)
        if called.called in HARMLESS and not called.method:
            return self._built_in(name, given)
        for value in given:
            self._escape(value)
        if not called.method:
            return Value(inner=UNKNOWN) if name in COMPREHENSIONS else ANY
        if name in NEW:
            return Value(inner=called.part().all())
        if name in CONTENTS:
            return either(called.part(), container(given).part())
        return Value(UNKNOWN | below(called.origins), UNKNOWN | called.part().all())

    def _call_method(self, name: str, called: Value, given: list[Value]) -> None:
        """What a method does to its object."""
        if is_changing(name):
            self._change("method", name, called.origins)
            for value in given:
                self._put(called, value)
        elif name in TAKING:
            self._change("method", name, called.origins)
        elif name in ("__setattr__", "__delattr__"):
            known = next((value.constant for value in given[-2:] if value.constant), None)
            first = given[0].origins if given else NOTHING
            self._change("attribute", known or "*", first | called.origins)

    def _call_function(self, name: str, called: Value, given: list[Value]) -> None:
        """What a function does to what it is given first."""
        first = given[0] if given else MADE
        if changes_all(name):
            for value in given:
                self._changes_memory(value)
        if any(value.called in ("setattr", "delattr") for value in given):  # whoever calls that
            for value in given:
                self._change("attribute", "*", value.origins)
        if name == "next":
            self._consume(first)
        elif name in CHANGES_FIRST:
            self._change("item", "", first.origins)
            for value in given[1:]:
                self._put(first, value)
        elif is_in_place(name) or _is_of_type(called):
            self._change("method", name, first.origins)

    def _changes_memory(self, value: Value) -> None:
        """Tensors, arrays, bytes or a module, or those in a list, are written to."""
        origins = value.all() | value.part().all()
        self._change("method", "out", origins)
        self._change("method", "load_state_dict", origins)

    def _built_in(self, name: str, given: list[Value]) -> Value:
        first = given[0] if given else MADE
        if name in ("setattr", "delattr"):
            known = given[1].constant if len(given) > 1 else None
            self._change("attribute", known or "*", first.origins)
            for value in given[2:]:
                self._store(known or "*", value)
        elif name == "vars":
            self._reads.add("*")
            self._change("attribute", "*", first.origins)
        elif name == "type":
            return Value(CLASS)
        elif name == "getattr":
            known = given[1].constant if len(given) > 1 else None
            self._reads.add(known or "*")
            if not known:  # perhaps a method that changes it
                self._change("method", "*", first.origins)
            found = self._attribute(first, known) if known else ANY
            return either(found, container(given[2:]).part())
        elif name in ("map", "filter", "sorted", "min", "max"):  # may call what they are given
            for value in given:
                self._escape(value)
        if name in CONSUMING:
            self._consume(*given)
        inner = container(value.part() for value in given)
        if name in PLAIN_RESULTS:
            return MADE
        if name in RETURNS_PART:
            origins = inner.inner.union(*(value.all() for value in given))
            return Value(origins, origins)
        return Value(inner=inner.inner.union(*(value.origins for value in given)))


def _is_of_type(called: Value) -> bool:
    """Whether it is a changing method of a class, as in `list.append(found, 1)`."""
    names = {origin.name for origin in called.origins if origin.kind == "held"}
    return is_changing(called.method) and not names.isdisjoint(TYPES)


def _merged(one: list[Value], two: list[Value]) -> list[Value]:
    """Aligned at the top, where they differ in length: that of an unusual jump."""
    length = min(len(one), len(two))
    longer = one if len(one) > len(two) else two
    rest = longer[: len(longer) - length]
    pairs = zip(one[len(one) - length :], two[len(two) - length :], strict=True)
    return [*rest, *(either(*pair) for pair in pairs)]


def _both(one: _Locals, two: _Locals) -> _Locals:
    found = {**one, **two}
    return {name: either(one.get(name, value), value) for name, value in found.items()}


def _names(each: dis.Instruction) -> tuple[str, ...]:
    return each.argval if isinstance(each.argval, tuple) else (each.argval,)


def _is_called(each: dis.Instruction) -> bool:
    """Whether an attribute is asked for as a method, to be called at once."""
    return each.opname == "LOAD_METHOD" or "NULL|self" in each.argrepr


def _line(each: dis.Instruction) -> int | None:
    positions = each.positions
    return None if positions is None else positions.lineno


_GETS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_ATTR"})
_LEAVES = frozenset(
    {
        *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD"),
        *("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"),
    }
)

_Operation = Callable[[_Reading, dis.Instruction], None]
_METHODS: dict[_Operation, str] = {
    _Reading._nothing: "RESUME NOP PRECALL CACHE EXTENDED_ARG MAKE_CELL COPY_FREE_VARS NOT_TAKEN "
    "JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT DELETE_FAST SETUP_ANNOTATIONS "
    "GET_ITER GET_YIELD_FROM_ITER GET_AITER TO_BOOL",
    _Reading._pop_top: "POP_TOP POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE "
    "POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_FALSE "
    "POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE "
    "POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE "
    "JUMP_IF_TRUE_OR_POP JUMP_IF_FALSE_OR_POP POP_ITER",
    _Reading._end_loop: "END_FOR",
    _Reading._load_made: "LOAD_CONST LOAD_SMALL_INT LOAD_ASSERTION_ERROR",
    _Reading._load_null: "PUSH_NULL",
    _Reading._load_local: "LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_AND_CLEAR LOAD_FAST_BORROW "
    "LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW_LOAD_FAST_BORROW",
    _Reading._store_local: "STORE_FAST STORE_FAST_STORE_FAST STORE_FAST_MAYBE_NULL",
    _Reading._store_and_load: "STORE_FAST_LOAD_FAST",
    _Reading._load_held: "LOAD_GLOBAL LOAD_NAME LOAD_DEREF LOAD_CLASSDEREF LOAD_CLOSURE",
    _Reading._store_variable: "STORE_GLOBAL STORE_DEREF STORE_NAME",
    _Reading._change_variable: "DELETE_GLOBAL DELETE_DEREF",
    _Reading._load_attribute: "LOAD_ATTR LOAD_METHOD",
    _Reading._load_super: "LOAD_SUPER_ATTR",
    _Reading._store_attribute: "STORE_ATTR",
    _Reading._delete_attribute: "DELETE_ATTR",
    _Reading._subscript: "BINARY_SUBSCR BINARY_SLICE",
    _Reading._store_subscript: "STORE_SUBSCR STORE_SLICE",
    _Reading._delete_subscript: "DELETE_SUBSCR",
    _Reading._operator: "BINARY_OP",
    _Reading._compare: "COMPARE_OP IS_OP CONTAINS_OP",
    _Reading._unary: "UNARY_NOT UNARY_NEGATIVE UNARY_INVERT UNARY_POSITIVE",
    _Reading._build: "BUILD_LIST BUILD_TUPLE BUILD_SET BUILD_MAP BUILD_CONST_KEY_MAP BUILD_STRING "
    "BUILD_SLICE",
    _Reading._add_to: "LIST_APPEND SET_ADD MAP_ADD LIST_EXTEND SET_UPDATE DICT_UPDATE DICT_MERGE",
    _Reading._unpack: "UNPACK_SEQUENCE UNPACK_EX",
    _Reading._iterate: "FOR_ITER",
    _Reading._send: "SEND",
    _Reading._end_send: "END_SEND",
    _Reading._copy: "COPY",
    _Reading._swap: "SWAP",
    _Reading._leave: "RETURN_VALUE RETURN_CONST RERAISE",
    _Reading._yield: "YIELD_VALUE",
    _Reading._import: "IMPORT_NAME",
    _Reading._import_from: "IMPORT_FROM",
    _Reading._make_function: "MAKE_FUNCTION",
    _Reading._enter: "BEFORE_WITH BEFORE_ASYNC_WITH",
    _Reading._name_keywords: "KW_NAMES",
    _Reading._call: "CALL CALL_KW",
    _Reading._call_with_all: "CALL_FUNCTION_EX",
}
_OPERATIONS: dict[str, _Operation] = {
    name: method for method, names in _METHODS.items() for name in names.split()
}
