"""What code may change, by its bytecode."""

from __future__ import annotations

import argparse
import asyncio.base_events
import dataclasses
import dis
import tarfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch

from waterflow.account import stores
from waterflow.account.origins import Origin
from waterflow.account.stores import Stores, stores_of

NOTES: dict[str, Any] = {}
COUNT = 0


def kinds(function: Callable[..., Any]) -> set[tuple[str, str, str]]:
    """How what is changed, and where that comes from, by a function and those inside it."""
    found: set[tuple[str, str, str]] = set()
    for each in stores_within(function.__code__):
        for change in each.changes:
            origins = change.origins or {Origin("", "")}
            found |= {(change.how, change.name, said(origin)) for origin in origins}
    return found


def stores_within(code: CodeType) -> Iterator[Stores]:
    yield stores_of(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from stores_within(constant)


def said(origin: Origin) -> str:
    return f"{origin.kind} {origin.name}".strip()


def makes_all_that_it_changes(model: Any, batch: Any) -> Any:
    found: dict[str, Any] = {}
    found["loss"] = model(batch[0])
    total = 0.0
    for part in batch:
        total += float(part.sum())
    rows = [row * 1 for row in batch]
    rows.append(total)
    rows.sort()
    copied = dict(NOTES)
    copied["more"] = 1
    return {**found, "rows": rows, "total": sum(rows)}


def parameter_that_is_made_anew(batch: Any) -> Any:
    batch = {**batch}
    batch["more"] = 1
    return batch


class Holder:
    count = 0

    def attribute(self, x: Any) -> None:
        self.last = x

    def of_class(self) -> None:
        type(self).count += 1

    def item(self, x: Any) -> None:
        self.cache[x] = 1

    def nested(self, x: Any) -> None:
        self.tables["a"].setdefault("b", []).append(x)

    def alias(self, x: Any) -> None:
        held = self.rows
        held.append(x)

    def loop(self) -> None:
        for row in self.rows:
            row["seen"] = True

    def either(self, x: Any) -> None:
        chosen = self.one if x else self.two
        chosen.append(x)

    def slice(self, x: Any) -> None:
        self.buffer[: len(x)] = x

    def method_in_hand(self, rows: list[Any]) -> None:
        list(map(self.rows.append, rows))

    def in_place(self, x: Any) -> None:
        self.center.mul_(0.9).add_(x)

    def operator(self, x: Any) -> None:
        self.buffer += x

    def by_name(self, name: str, x: Any) -> None:
        setattr(self, name, x)

    def dictionary(self, x: Any) -> None:
        self.__dict__.update(x=x)

    def output(self, x: Any) -> None:
        torch.add(x, 1, out=self.buffer)

    def generator(self) -> Any:
        return torch.rand(2, generator=self.source)

    def iterator(self) -> Any:
        return next(self.stream)

    def delegates(self) -> Iterator[Any]:
        yield from self.stream

    def changes_what_was_yielded(self) -> Iterator[Any]:
        last = yield from self.stream
        last.append(1)

    def deletes(self) -> None:
        del self.cache["a"]
        del self.last


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attribute", ("attribute", "last", "parameter self")),
        ("of_class", ("attribute", "count", "class")),
        ("item", ("item", "", "held cache")),
        ("nested", ("method", "append", "below tables")),
        ("alias", ("method", "append", "held rows")),
        ("loop", ("item", "", "below rows")),
        ("either", ("method", "append", "held two")),
        ("either", ("method", "append", "held one")),
        ("slice", ("item", "", "held buffer")),
        ("method_in_hand", ("method", "append", "held rows")),
        ("in_place", ("method", "mul_", "held center")),
        ("in_place", ("method", "add_", "below center")),
        ("operator", ("operator", "+=", "held buffer")),
        ("by_name", ("attribute", "*", "parameter self")),
        ("dictionary", ("attribute", "*", "parameter self")),
        ("output", ("method", "out", "held buffer")),
        ("generator", ("method", "generator", "held source")),
        ("iterator", ("method", "__next__", "held stream")),
        ("delegates", ("method", "__next__", "held stream")),
        ("changes_what_was_yielded", ("method", "append", "unknown")),
        ("deletes", ("item", "", "held cache")),
        ("deletes", ("attribute", "last", "parameter self")),
    ],
)
def test_a_method_changes_what_its_object_holds(name: str, change: tuple[str, str, str]) -> None:
    assert change in kinds(getattr(Holder, name))


@pytest.mark.parametrize("function", [makes_all_that_it_changes, parameter_that_is_made_anew])
def test_what_code_makes_for_itself_is_changed_by_nobody(function: Callable[..., Any]) -> None:
    iterated = {change for change in kinds(function) if change[1] == "__next__"}
    assert kinds(function) == iterated


def test_variables_of_modules_and_functions() -> None:
    def counts() -> Callable[[], None]:
        steps = 0

        def count() -> None:
            global COUNT
            nonlocal steps
            COUNT += 1
            steps += 1
            NOTES["steps"] = steps

        return count

    found = kinds(counts)
    assert {("variable", "COUNT", ""), ("cell", "steps", "")} <= found
    assert ("item", "", "held NOTES") in found


def test_defaults_and_parameters_may_be_anybodys() -> None:
    def keeps(x: Any, seen: list[Any] = []) -> None:  # noqa: B006
        seen.append(x)

    assert ("method", "append", "parameter seen") in kinds(keeps)


def test_branches_loops_and_handlers_are_all_gone_through() -> None:
    def tries(self: Any, x: Any) -> None:
        held = None
        while x:
            if held is not None:
                held.append(x)
            held = self.rows
            try:
                x = x.next
            except AttributeError:
                self.failed.append(x)
            finally:
                self.seen.add(x)
        with self.lock:
            self.inside.append(x)

    found = kinds(tries)
    for name in ("rows", "failed", "inside"):
        assert ("method", "append", f"held {name}") in found
    assert ("method", "add", "held seen") in found


def test_what_is_handed_on_may_be_found_again() -> None:
    def hands(self: Any) -> Any:
        print(len(self.known))
        helper(self.given)
        self.other = self.stored
        return self.returned

    (stores,) = stores_within(hands.__code__)
    escaped = {origin.name for origin in stores.escapes if origin.kind == "held"}
    assert {"given", "returned", "stored"} <= escaped
    assert "known" not in escaped
    assert {origin.name for origin in stores.aliases["other"]} == {"stored"}


def test_what_is_yielded_from_another_is_handed_on_and_not_that_itself() -> None:
    def delegates(self: Any) -> Iterator[Any]:
        yield from self.rows

    (found,) = stores_within(delegates.__code__)
    assert {(one.kind, one.name) for one in found.escapes} >= {("below", "rows")}
    assert ("held", "rows") not in {(one.kind, one.name) for one in found.escapes}


def test_methods_that_are_called_are_not_read() -> None:
    def notes(self: Any, rows: Any) -> Any:
        self.losses.append(rows.mean())
        return self.last, rows.size(0)

    (found,) = stores_within(notes.__code__)
    assert found.reads == {"last"}


def helper(found: Any) -> None:
    """Somebody's."""


def test_calls_of_all_kinds_are_understood() -> None:
    def calls(self: Any, *given: Any, **more: Any) -> None:
        np.copyto(self.buffer, given[0])
        list.append(self.rows, 1)
        object.__setattr__(self, "n", 1)
        self.update(*given, **more)
        helper(*self.args)

    found = kinds(calls)
    assert ("item", "", "held buffer") in found
    assert ("method", "append", "held rows") in found
    assert ("attribute", "n", "parameter self") in found
    assert ("method", "update", "parameter self") in found


def test_the_stack_is_as_deep_as_the_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each instruction of thousands of functions, so no value is taken for another."""
    wrong: set[tuple[str, int, int]] = set()

    def held_to(name: str, does: Any) -> Any:
        def operate(reading: Any, each: dis.Instruction) -> None:
            before = len(reading._stack)
            does(reading, each)
            moved = len(reading._stack) - before
            effect = dis.stack_effect(each.opcode, each.arg, jump=False)
            if each.opname == "CALL" and "PRECALL" in dis.opmap:
                effect -= each.arg or 0  # done by the instruction before it
            enough = before >= (each.arg or 0) + 3  # unknown parts of the stack are not held
            if moved != effect and enough and each.opname not in ENDS:
                wrong.add((name, effect, moved))

        return operate

    held = {name: held_to(name, does) for name, does in stores._OPERATIONS.items()}
    monkeypatch.setattr(stores, "_OPERATIONS", held)
    modules = (torch.nn.functional, torch.nn.modules.module, torch.utils.data.dataloader)
    found = 0
    for module in (*modules, argparse, dataclasses, typing, asyncio.base_events, tarfile):
        source = Path(str(module.__file__)).read_text()
        found += count_changes(compile(source, str(module.__file__), "exec"))
    assert not wrong
    assert found > 1000


#: What ends a function, or is an instruction of which another does the work.
ENDS = ("RETURN_VALUE", "RERAISE", "RAISE_VARARGS", "PRECALL")


def count_changes(code: CodeType) -> int:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return len(stores._Reading(code).read().changes) + sum(map(count_changes, inner))
