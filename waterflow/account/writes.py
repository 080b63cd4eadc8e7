"""Whether some code may change what other code reads, by what both reach and by its bytecode.

Containers, tensors and objects can be changed in many ways, so whoever reaches one may change it.
What belongs to everybody (variables of modules, attributes of classes and functions, variables of
closures) is reached by nearly all code, and changed by instructions that have its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from types import CodeType

from waterflow.account import places
from waterflow.account.account import Account
from waterflow.account.bytecode import variables_set_by
from waterflow.account.code_names import IMPORTERS, code_names
from waterflow.account.probes import Memo
from waterflow.account.trust import is_trusted_class, is_trusted_code

#: Names of what changes attributes or variables by names given to it.
_WRITERS = frozenset(
    {
        *("setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "__globals__", "vars"),
        *("globals", "locals", "exec", "eval", "cell_contents", "f_globals", "modules"),
        *IMPORTERS,
    }
)
_VARIABLES = frozenset({"environ", "environb", "putenv", "unsetenv"})
#: Names of what sets torch's switches, which belong to the process, and its hooks of all modules.
_SWITCHES = re.compile(
    r"backends|use_deterministic_algorithms|sdpa_kernel|register_(module_|kl)\w*|_?set_(default_|"
    r"deterministic_|float32_matmul_precision|num_\w*threads|flush_denormal|autocast_|grad_enabled|"
    r"detect_anomaly|anomaly_|sharing_strategy|swap_module|overwrite_module)\w*|detect_anomaly|"
    r"check_sparse_tensor_invariants|__future__"
)
_OF_FUNCTIONS = frozenset({"__defaults__", "__kwdefaults__", "__code__"})
#: By the kind of what is read, names of what sets it without a way to it.
_SETTERS: dict[type[places.Place], frozenset[str]] = {
    places.Settings: frozenset(
        {"getcontext", "setcontext", "seterr", "seterrcall", "setbufsize", "set_printoptions"}
    ),
    places.Registered: frozenset({"register"}),
}


def may_change(writer: Account, read: Account) -> bool:
    """Whether the code of one account may change something that is in another one.

    Args:
        writer: whose code may write.
        read: what is not to change.
    """
    if writer.reaches(read):
        return True
    codes = [code for code in writer.codes if writer.executes(code) and not is_trusted_code(code)]
    named = frozenset[str]().union(*(code_names(code).names for code in codes))
    if not named.isdisjoint(_WRITERS | _VARIABLES) or any(map(_SWITCHES.fullmatch, named)):
        return True
    kinds = set(map(type, read.places))
    if any(kind in kinds and not named.isdisjoint(names) for kind, names in _SETTERS.items()):
        return True
    stored = _stored(codes)
    shared = {_identity(place) for place in writer.places} - {None}
    return any(_identity(place) in shared and _is_met(place, stored, read) for place in read.places)


class _Stored(frozenset[str]):
    """The names that code stores to.

    Attributes:
        in_cells: whether it stores to variables of functions around it.
    """

    in_cells: bool


def _stored(codes: Collection[CodeType]) -> _Stored:
    found = _Stored(frozenset[str]().union(*(code_names(code).stored for code in codes)))
    found.in_cells = any(map(variables_set_by, codes))
    return found


def _identity(place: places.Place) -> int | None:
    """Of what belongs to everybody; None for other places."""
    if isinstance(place, places.Names):
        return id(place.namespace)
    if isinstance(place, places.ClassAttributes):
        return id(place.kind)
    if isinstance(place, places.Function):
        return id(place.function)
    if isinstance(place, places.Probed):  # a call fills it
        return id(place.holder) if type(place.holder) is Memo else None
    return id(place.cell) if isinstance(place, places.Cell) else None


def _is_met(place: places.Place, stored: _Stored, read: Account) -> bool:
    """Whether a shared place is one that is stored to."""
    if isinstance(place, places.Cell):
        return stored.in_cells
    if isinstance(place, places.Names):
        return not stored.isdisjoint(place.trails)
    if isinstance(place, places.Probed):
        return read.names is None or "cache_info" in read.names
    if isinstance(place, places.ClassAttributes) and is_trusted_class(place.kind):
        return not stored.isdisjoint(place.before)
    return bool(stored) and (
        read.names is None or not stored.isdisjoint(read.names | _OF_FUNCTIONS)
    )
