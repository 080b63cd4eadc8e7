"""What functions and methods do to objects, by the names that bytecode has for them."""

from __future__ import annotations

import random

import numpy as np

#: Methods that change what they are called on: of containers, arrays, iterators, files, memory,
#: modules, generators of random numbers, estimators, images.
CHANGING = frozenset(
    {
        *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update"),
        *("popitem", "setdefault", "add", "discard", "appendleft", "extendleft", "popleft"),
        *("rotate", "difference_update", "intersection_update", "symmetric_difference_update"),
        *("move_to_end", "subtract", "fill", "put", "itemset", "partition", "byteswap", "setflags"),
        *("frombytes", "fromlist", "send", "throw", "close", "__next__", "__setitem__"),
        *("__delitem__", "__iadd__", "__ior__", "seek", "read", "readline", "readlines"),
        *("readinto", "read1", "write", "writelines", "truncate", "set_", "resize"),
        *("setfield", "read_byte", "write_byte", "fit", "partial_fit", "fit_transform"),
        *("fit_predict", "set_params", "putpixel", "putdata", "putalpha", "paste", "thumbnail"),
        *("execute", "commit", "load_state_dict", "zero_grad", "manual_seed", "set_state"),
        *("register_buffer", "register_module", "register_parameter", "register_forward_hook"),
        *("register_forward_pre_hook", "register_full_backward_hook", "register_hook"),
        *("reset_parameters", "reset_running_stats", "update_parameters", "set"),
        *("add_section", "remove_section", "remove_option", "read_dict", "read_string"),
        *(name for name in dir(random.Random) if not name.startswith("_")),
        *(name for name in dir(np.random.Generator) if not name.startswith("_")),
        *(name for name in dir(np.random.RandomState) if not name.startswith("_")),
    }
)
#: Those of them that only add to a list, which tells nothing to whoever does no more.
ADDING = frozenset({"append", "extend"})
#: Methods by which something is taken from a queue; a dictionary is only looked into by them.
TAKING = frozenset({"get", "get_nowait"})
#: Functions that change what they are given first.
CHANGES_FIRST = frozenset(
    {
        *("next", "heappush", "heappop", "heapify", "heapreplace", "heappushpop", "insort"),
        *("insort_left", "insort_right", "shuffle", "copyto", "put", "place", "putmask"),
        *("fill_diagonal", "put_along_axis", "setitem", "delitem", "iconcat", "iadd", "ior"),
        *("isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ixor"),
        *("ilshift", "irshift", "memmove", "memset", "at"),  # the last of numpy's functions
    }
)
#: Functions that change any of what they are given: memory, modules' weights.
_CHANGES_ALL = frozenset(
    {
        *("update_bn", "vector_to_parameters", "swap_tensors", "pack_into"),
        *("l1_unstructured", "random_unstructured", "ln_structured", "random_structured"),
        *("global_unstructured", "custom_from_mask"),
    }
)
#: Torch's functions on lists of tensors, which change these where they end as others do.
_OF_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
#: How many arguments numpy's functions read; one more they write to.
INPUTS = {name: found.nin for name, found in vars(np).items() if isinstance(found, np.ufunc)}
#: Built-in functions that keep nothing of what they are given, and change none of it.
HARMLESS = frozenset(
    {
        *("len", "enumerate", "zip", "range", "sorted", "isinstance", "issubclass", "sum", "min"),
        *("max", "any", "all", "iter", "list", "dict", "set", "tuple", "frozenset", "print", "str"),
        *("repr", "float", "int", "bool", "abs", "round", "id", "hash", "reversed", "hasattr"),
        *("getattr", "type", "callable", "next", "super", "format", "divmod", "pow", "slice"),
        *("setattr", "delattr", "vars", "dir", "map", "filter"),
    }
)
#: Those of them that go through what they are given.
CONSUMING = frozenset(
    {
        *("list", "dict", "set", "tuple", "frozenset", "sorted", "sum", "min", "max", "any", "all"),
    }
)
#: Those of them whose results are numbers, texts, or nothing.
PLAIN_RESULTS = frozenset(
    {
        *("len", "isinstance", "issubclass", "any", "all", "print", "str", "repr", "float", "int"),
        *("bool", "id", "hash", "hasattr", "callable", "format", "range"),
    }
)
#: Those of them that return one of what they are given, or of what that contains.
RETURNS_PART = frozenset({"min", "max", "next", "sum", "iter", "getattr"})
#: Methods whose results are new; what these contain may not be.
NEW = frozenset(
    {
        *("copy", "clone", "__copy__", "split", "join", "format", "strip", "lower", "upper"),
        *("replace", "tolist", "item", "keys", "count", "index", "startswith", "endswith"),
    }
)
#: Methods of compiled objects that only look something up: in data bases, tables, vocabularies,
#: texts.
READING = NEW | {
    *("get", "items", "values", "encode", "decode", "slice", "to_numpy", "to_pylist", "as_py"),
    *("match", "fullmatch", "search", "findall", "finditer", "sub", "subn"),
}
#: Methods whose results are what an object contains, and methods that do no more than that.
CONTENTS = frozenset({"get", "pop", "popitem", "popleft", "setdefault", "items", "values"})
#: Arguments that a function writes to, or draws from.
CHANGED_KEYWORDS = frozenset({"out", "generator"})
#: Functions that the compiler makes of what is written in brackets.
COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
#: Attributes of tensors and arrays that are views of them; those of tensors alone.
VIEWS = frozenset({"T", "real", "imag", "flat"})
TENSORS_VIEWS = frozenset({"data", "mT", "H", "mH", "grad"})
#: Classes whose methods may be called with the object to change given first.
TYPES = frozenset(
    {
        *("list", "dict", "set", "deque", "bytearray", "object", "super", "Counter", "Tensor"),
        *("OrderedDict", "defaultdict", "ndarray", "Random", "Generator", "Module"),
    }
)
#: Functions that run text, or give variables by names.
ANYTHING = frozenset({"exec", "eval", "globals"})


def is_in_place(name: str) -> bool:
    """Whether a function or method is called as torch's are that change what they are given."""
    return name.endswith("_") and not name.startswith("_")


def changes_all(name: str) -> bool:
    """Whether a function changes any of what it is given."""
    return name in _CHANGES_ALL or (name.startswith(_OF_LISTS) and name.endswith("_"))


def is_changing(name: str) -> bool:
    """Whether a method of that name changes what it is called on."""
    return name in CHANGING or is_in_place(name)
