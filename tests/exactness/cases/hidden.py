"""Cases: what the step reads lies behind names and calls that are hard to look through."""

from __future__ import annotations

import abc
import array
import asyncio
import collections
import collections.abc
import contextlib
import ctypes
import functools
import inspect
import itertools
import logging
import operator
import os
import pickle
import random
import statistics
import subprocess
import sys
import threading
import types
import weakref
import zlib

import numpy as np
import torch

from tests.exactness.case import Net, at, batches, case, cross_entropy, every, job, mlp

ANY = ("captured", "recaptured", "opaque")

#: Read by name only, or through other modules' eyes.
HIDDEN = 1.0


def read_between(name, make_reader, *expected, **options):
    """Enters a case whose weight is read in a roundabout way, and changed after step 4.

    `make_reader` returns how to read it, and how to change it to three.
    """

    def make(live):
        read, change = make_reader()
        loss = lambda m, b: cross_entropy(m, b) * read()  # noqa: E731
        return job(mlp(), loss, on_step=at(4, live, change))

    make.__name__ = name
    case(*(expected or ANY), **options)(make)


def moved_inside(name, make_reader, *expected):
    """Enters a case whose weight is moved on by every read; frozen where it is not live."""

    def make(live):
        read = make_reader()
        ask = read if live else functools.partial(float, read())
        return job(mlp(), lambda m, b: cross_entropy(m, b) * ask())

    make.__name__ = name
    case(*(expected or ("opaque",)))(make)


def _holder():
    return types.SimpleNamespace(weight=1.0)


def _global_by_name():
    globals()["HIDDEN"] = 1.0
    return lambda: globals()["HIDDEN"], lambda: globals().update(HIDDEN=3.0)


def _module_by_name():
    globals()["HIDDEN"] = 1.0
    return lambda: sys.modules[__name__].HIDDEN, lambda: globals().update(HIDDEN=3.0)


def _evaluated():
    globals()["HIDDEN"] = 1.0
    return lambda: eval("HIDDEN"), lambda: globals().update(HIDDEN=3.0)


def _attribute_by_name():
    holder, name = _holder(), "".join(["wei", "ght"])
    return lambda: getattr(holder, name), lambda: setattr(holder, name, 3.0)


def _attribute_by_reduce():
    holder = types.SimpleNamespace(inner=_holder())
    path = ["inner", "weight"]
    return lambda: functools.reduce(getattr, path, holder), lambda: setattr(
        holder.inner, "weight", 3.0
    )


def _attribute_by_another_name():
    holder, read, names = _holder(), functools.partial(getattr), ["weight"]
    return lambda: read(holder, names[0]), lambda: setattr(holder, "weight", 3.0)


def _attribute_by_format():
    holder, form = _holder(), "{0.weight}"
    return lambda: float(form.format(holder)), lambda: setattr(holder, "weight", 3.0)


def _flag_of_threads():
    flag = threading.Event()
    return lambda: 3.0 if flag.is_set() else 1.0, flag.set


def _order():
    made = collections.OrderedDict(a=1.0, b=3.0)
    return lambda: next(iter(made.values())), lambda: made.move_to_end("a")


def _another_module_of_the_name():
    name = "a_module_of_these_cases"
    for weight in (3.0, 1.0):
        made = types.ModuleType(name)
        made.WEIGHT = weight
        if weight == 3.0:
            other = made
    sys.modules[name] = made

    def read():
        import a_module_of_these_cases as found

        return found.WEIGHT

    return read, lambda: sys.modules.update({name: other})


def _attribute_getter():
    holder = _holder()
    return functools.partial(operator.attrgetter("weight"), holder), lambda: setattr(
        holder, "weight", 3.0
    )


def _method_caller():
    table = {"weight": 1.0}
    call = operator.methodcaller("get", "weight")
    return lambda: call(table), lambda: table.update(weight=3.0)


def _delegated():
    class Proxy:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    proxy = Proxy(_holder())
    return lambda: proxy.weight, lambda: setattr(proxy.inner, "weight", 3.0)


def _weak_proxy():
    class Holder:
        weight = 1.0

    holder = Holder()
    proxy = weakref.proxy(holder)
    return lambda: proxy.weight, lambda: setattr(holder, "weight", 3.0)


def _mapping_proxy():
    inner = {"weight": 1.0}
    view = types.MappingProxyType(inner)
    return lambda: view["weight"], lambda: inner.update(weight=3.0)


def _array():
    values = array.array("d", [1.0])
    return lambda: values[0], lambda: values.__setitem__(0, 3.0)


def _c_value():
    value = ctypes.c_double(1.0)
    return lambda: value.value, lambda: setattr(value, "value", 3.0)


def _memory():
    values = bytearray([1])
    view = memoryview(values)
    return lambda: float(view[0]), lambda: values.__setitem__(0, 3)


def _deep_chain():
    """A closure in a dictionary in an object in a list, three calls down."""
    inner = _holder()

    class Registry:
        def __init__(self):
            self.functions = {"weight": lambda: inner.weight}

        def __call__(self, name):
            return self.functions[name]()

    chain = [Registry()]

    def first(name):
        return chain[0](name)

    def second():
        return first("weight")

    return second, lambda: setattr(inner, "weight", 3.0)


def _decorated():
    holder = _holder()

    def doubling(function):
        @functools.wraps(function)
        def wrapper(*args):
            return holder.weight * function(*args)

        return wrapper

    return doubling(lambda: 1.0), lambda: setattr(holder, "weight", 3.0)


def _single_dispatch():
    @functools.singledispatch
    def weight(value):
        return 1.0

    return lambda: weight(2), lambda: weight.register(int, lambda value: 3.0)


def _partial_method():
    class Loss:
        weight = 1.0

        def times(self, factor):
            return self.weight * factor

        double = functools.partialmethod(times, 2.0)

    loss = Loss()
    return loss.double, lambda: setattr(loss, "weight", 3.0)


def _instance_of_a_replaced_class():
    class One:
        def weight(self):
            return 1.0

    class Three:
        def weight(self):
            return 3.0

    thing = One()
    return lambda: thing.weight(), lambda: setattr(thing, "__class__", Three)


def _executed():
    space = {"weight": 1.0}
    exec("def read():\n    return weight\n", space)
    return space["read"], lambda: space.update(weight=3.0)


def _tensor_number():
    """A tensor outside of everything, read with item()."""
    value = torch.ones(())
    return value.item, lambda: value.fill_(3.0)


def _structured_array():
    values = np.zeros(1, dtype=[("weight", "f8")])
    values["weight"] = 1.0
    return lambda: float(values["weight"][0]), lambda: values["weight"].fill(3.0)


def _function_named():
    def one():
        pass

    return lambda: float(len(one.__name__) - 2), lambda: setattr(one, "__name__", "three")


def _function_described():
    def one():
        """1.0"""

    return lambda: float(one.__doc__), lambda: setattr(one, "__doc__", "3.0")


def _partial_set_anew():
    read = functools.partial(float, 1.0)
    return lambda: read(), lambda: read.__setstate__((float, (3.0,), {}, {}))


def _method_dispatched():
    class Loss:
        @functools.singledispatchmethod
        def weight(self, kind):
            return 1.0

    loss = Loss()
    change = lambda: vars(Loss)["weight"].register(int, lambda self, kind: 3.0)  # noqa: E731
    return lambda: loss.weight(1), change


def _pattern_by_position():
    class Pair:
        __match_args__ = ("one", "three")
        one, three = 1.0, 3.0

    pair = Pair()

    def read():
        match pair:
            case Pair(weight, _):
                return weight

    return read, lambda: setattr(Pair, "__match_args__", ("three", "one"))


def library_function(name, function, change, make_loss):
    """Enters a case in which somebody changes a function of a library in place, for four steps."""
    places = ("__code__", "__defaults__")

    @contextlib.contextmanager
    def around():
        kept = [getattr(function, place) for place in places]
        try:
            yield
        finally:
            for place, value in zip(places, kept, strict=True):
                setattr(function, place, value)

    def make(live):
        kept = [getattr(function, place) for place in places]

        def on_step(step):
            if step.step == 4:
                change(function)
            if step.step == 8:
                for place, value in zip(places, kept, strict=True):
                    setattr(function, place, value)

        return job(mlp(), make_loss, on_step=on_step if live else None)

    make.__name__ = name
    case(*ANY, around=around, alone=True)(make)


def _mean_of_three(data):
    return 3.0


def _forward_of_half(self, input):
    return input * 0.5


def _set_code(code):
    return lambda function: setattr(function, "__code__", code)


def _smoothed(function):
    function.__defaults__ = (*function.__defaults__[:-1], 0.3)


library_function(
    "default_of_a_function_of_torchs",
    *(torch.nn.functional.cross_entropy, _smoothed),
    lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
)
library_function(
    "code_of_a_function_of_pythons",
    *(statistics.mean, _set_code(_mean_of_three.__code__)),
    lambda m, b: cross_entropy(m, b) * statistics.mean((0.5, 1.5)),
)
library_function(
    "code_of_a_method_of_torchs",
    *(torch.nn.Tanh.forward, _set_code(_forward_of_half.__code__)),
    lambda m, b: cross_entropy(m, b) + torch.nn.Tanh()(b[0]).sum() * m(b[0]).sum() * 1e-3,
)

read_between("name_of_a_function", _function_named)
read_between("text_of_a_function", _function_described)
read_between("partial_set_anew", _partial_set_anew)
read_between("dispatch_of_a_method_changed", _method_dispatched)
read_between("pattern_by_position_changed", _pattern_by_position)
read_between("global_read_by_name", _global_by_name)
read_between("global_read_from_the_module", _module_by_name)
read_between("global_read_by_evaluation", _evaluated)
read_between("attribute_read_by_name", _attribute_by_name)
read_between("attribute_read_by_reduce", _attribute_by_reduce)
read_between("attribute_read_by_a_function_held", _attribute_by_another_name)
read_between("attribute_read_by_a_format", _attribute_by_format)
read_between("flag_of_threads", _flag_of_threads)
read_between("order_of_a_dictionary", _order)
read_between("module_of_the_same_name", _another_module_of_the_name)
read_between("attribute_read_by_a_getter", _attribute_getter)
read_between("value_read_by_a_method_caller", _method_caller)
read_between("attribute_read_by_delegation", _delegated)
read_between("attribute_read_by_a_weak_proxy", _weak_proxy)
read_between("value_behind_a_mapping_proxy", _mapping_proxy)
read_between("value_in_an_array", _array)
read_between("value_of_c", _c_value)
read_between("value_in_a_memory_view", _memory)
read_between("value_down_a_chain", _deep_chain)
read_between("value_in_a_decorator", _decorated)
read_between("dispatch_by_type_changed", _single_dispatch)
read_between("value_of_a_partial_method", _partial_method)
read_between("class_of_an_object_replaced", _instance_of_a_replaced_class)
read_between("value_of_an_executed_function", _executed)
read_between("value_of_a_tensor_outside", _tensor_number)
read_between("value_in_a_structured_array", _structured_array)


def _coroutine():
    calls = itertools.count(1)

    async def weight():
        await asyncio.sleep(0)
        return 1 / next(calls)

    return lambda: asyncio.run(weight())


def _process():
    calls = itertools.count(1)
    words = ["/bin/sh", "-c", "echo $1", "sh"]

    def read():
        said = subprocess.run([*words, str(next(calls))], capture_output=True, check=True)
        return 1 / int(said.stdout)

    return read


def _bound_random():
    """The method of a generator, found by name and kept."""
    return getattr(random.Random(3), "".join(["ran", "dom"]))


def _nested_iterators():
    return functools.partial(next, map(lambda n: 1 / n, filter(bool, itertools.count())))  # noqa: C417


def _c_counter():
    value = ctypes.c_int(0)

    def read():
        value.value += 1
        return 1 / value.value

    return read


def _bytes_counter():
    value = bytearray(1)

    def read():
        value[0] += 1
        return 1 / value[0]

    return read


def _descending():
    """A heap of numbers that each step takes the least of."""
    values = [0.1 * n for n in range(1, 15)]
    return functools.partial(values.pop, 0)


moved_inside("coroutine_that_counts", _coroutine)
moved_inside("process_that_is_asked", _process)
moved_inside("random_method_kept", _bound_random)
moved_inside("iterators_nested", _nested_iterators)
moved_inside("counter_of_c", _c_counter)
moved_inside("counter_in_bytes", _bytes_counter)
moved_inside("list_popped_from_the_front", _descending)


# -- what built-in objects have beside attributes and items


def _new(name):
    return type(name, (), {})


def _registered(abstract, told):
    def make_reader():
        base, own = abstract(), told()
        value = own()
        return lambda: 3.0 if isinstance(value, base) else 1.0, lambda: base.register(own)

    return make_reader


def _of_an_abstract_subclass():
    Above = abc.ABCMeta("Above", (), {})

    Below, Told = abc.ABCMeta("Below", (Above,), {}), _new("Told")

    return lambda: 3.0 if issubclass(Told, Above) else 1.0, lambda: Below.register(Told)


def _dispatched_by_an_abstract_class():
    Abstract, Told = abc.ABCMeta("Abstract", (), {}), _new("Told")

    @functools.singledispatch
    def weight(value):
        return 1.0

    weight.register(Abstract, lambda value: 3.0)
    value = Told()
    return lambda: weight(value), lambda: Abstract.register(Told)


def _set_of_a_class(name, before, after):
    def make_reader():
        kind = _new("Kind")
        setattr(kind, name, before)
        return lambda: 3.0 if getattr(kind, name) == after else 1.0, functools.partial(
            setattr, kind, name, after
        )

    return make_reader


def _name_of_a_class():
    kind = _new("Kind")
    return lambda: 3.0 if kind.__name__ == "Other" else 1.0, lambda: setattr(
        kind, "__name__", "Other"
    )


def _documentation_of_a_class():
    kind = type("Kind", (), {"__doc__": "1.0"})
    return lambda: float(kind.__doc__), lambda: setattr(kind, "__doc__", "3.0")


def _annotation_of_a_class():
    kind = type("Kind", (), {"__annotations__": {"x": 1.0}})
    return lambda: kind.__annotations__["x"], lambda: kind.__annotations__.update(x=3.0)


def _annotation_of_a_function():
    def told(x: 1.0) -> None: ...

    read = lambda: float(told.__annotations__["x"])  # noqa: E731
    return read, lambda: told.__annotations__.update(x=3.0)


def _annotation_by_its_signature():
    def told(x: 1.0) -> None: ...

    read = lambda: float(inspect.signature(told).parameters["x"].annotation)  # noqa: E731
    return read, lambda: told.__annotations__.update(x=3.0)


def _arguments_of_an_exception():
    error = ValueError(1.0)
    return lambda: error.args[0], lambda: setattr(error, "args", (3.0,))


def _cause_of_an_exception():
    error = ValueError()
    read = lambda: 3.0 if error.__cause__ else 1.0  # noqa: E731
    return read, lambda: setattr(error, "__cause__", KeyError())


def _writability(array):
    read = lambda: 1.0 if array.flags.writeable else 3.0  # noqa: E731
    return read, lambda: setattr(array.flags, "writeable", False)


def _disabled_levels():
    logger = logging.getLogger("tests.exactness.hidden")
    logger.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    read = lambda: 1.0 if logger.isEnabledFor(logging.INFO) else 3.0  # noqa: E731
    return read, lambda: logging.disable(logging.INFO)


def _nested_rows():
    rows = torch.nested.nested_tensor([torch.ones(2)])
    return lambda: rows.unbind()[0][0].item(), lambda: rows.unbind()[0].fill_(3.0)


@contextlib.contextmanager
def _put_back():
    before = logging.root.manager.disable
    yield
    logging.disable(before)


read_between("class_told_of", _registered(lambda: abc.ABCMeta("Own", (), {}), lambda: _new("Told")))
read_between(  # one that no other test comes across, for as long as the class is there
    "class_that_a_librarys_is_told_of",
    _registered(lambda: collections.abc.AsyncGenerator, lambda: _new("Told")),
)
read_between("class_that_an_abstract_subclass_is_told_of", _of_an_abstract_subclass)
read_between("dispatched_by_an_abstract_class", _dispatched_by_an_abstract_class)
read_between("name_of_a_class", _name_of_a_class)
read_between("qualified_name_of_a_class", _set_of_a_class("__qualname__", "Kind", "Other"))
read_between("module_of_a_class", _set_of_a_class("__module__", "here", "there"))
read_between("documentation_of_a_class", _documentation_of_a_class)
read_between("annotation_of_a_class", _annotation_of_a_class)
read_between("annotation_of_a_function", _annotation_of_a_function)
read_between("annotation_by_its_signature", _annotation_by_its_signature)
read_between("arguments_of_an_exception", _arguments_of_an_exception)
read_between("cause_of_an_exception", _cause_of_an_exception)
read_between("writability_of_an_array", lambda: _writability(np.ones(3)))
read_between("writability_of_every_other_element", lambda: _writability(np.ones(6)[::2]))
read_between("writability_of_an_array_of_objects", lambda: _writability(np.array([1, "2"], object)))
read_between("disabled_levels_of_loggers", _disabled_levels, around=_put_back, alone=True)
read_between("nested_rows", _nested_rows)


def _moving_array(change, read):
    """An array whose flags or shape each step moves."""

    def make_reader():
        array = np.ones((2, 3))

        def moved():
            found = read(array)
            change(array)
            return found

        return moved

    return make_reader


moved_inside(
    "writability_moved_by_the_step",
    _moving_array(
        lambda array: setattr(array.flags, "writeable", not array.flags.writeable),
        lambda array: 1.0 if array.flags.writeable else 3.0,
    ),
)
moved_inside(
    "shape_moved_by_the_step",
    _moving_array(
        lambda array: setattr(array, "shape", array.shape[::-1]),
        lambda array: float(array.shape[0]),
    ),
)


# -- what a step writes and never reads, but its data do: a trace writes it, too, and puts it back


def written_for_the_data(name, make, write, read):
    """Enters a case whose batches are scaled by what the loss moves on in each step."""

    def make_job(live):
        held = make()

        class Data:
            def __iter__(self):
                for x, y in batches():
                    yield x * read(held), y

        def loss(model, batch):
            if live:
                write(held)
            return cross_entropy(model, batch)

        return job(mlp(), loss, data=Data())

    make_job.__name__ = name
    case("opaque")(make_job)


def _scale_field(array):
    array["weight"] *= 1.5


def _scale_last(array):
    array[-1] *= 1.5


def _scale_arguments(error):
    error.args = (error.args[0] * 1.5,)


def _scale_arguments_of_a_partial(partial):
    partial.__setstate__((float, (partial.args[0] * 1.5,), {}, None))


written_for_the_data(
    "field_of_an_array_for_the_data",
    lambda: np.ones(2, dtype=[("weight", "f4"), ("kind", "i4")]),
    _scale_field,
    lambda array: float(array["weight"][0]),
)
written_for_the_data(
    "objects_of_an_array_for_the_data",
    lambda: np.array(["", 1.0], dtype=object),
    _scale_last,
    lambda array: array[-1],
)
written_for_the_data(
    "every_other_element_for_the_data",
    lambda: np.ones(6)[::2],
    _scale_last,
    lambda array: float(array[-1]),
)
written_for_the_data(
    "arguments_of_an_exception_for_the_data",
    lambda: ValueError(1.0),
    _scale_arguments,
    lambda error: error.args[0],
)
written_for_the_data(
    "arguments_of_a_partial_for_the_data",
    lambda: functools.partial(float, 1.0),
    _scale_arguments_of_a_partial,
    lambda partial: partial(),
)


@case("opaque", "captured")
def operator_written_in_python(live):
    """An operator of the user's own, whose implementation counts its calls."""
    calls = itertools.count(1)

    class Count(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy() / (next(calls) if live else 1))

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Model(Net):
        def forward(self, x):
            return self.two(Count.apply(self.one(x)))

    return job(Model())


@case(*ANY)
def attribute_that_is_computed(live):
    """A module's __getattr__ answers for what the callback has put elsewhere."""
    outside = {"scale": 1.0}

    class Model(Net):
        def __getattr__(self, name):
            return outside["scale"] if name == "scale" else super().__getattr__(name)

        def factor(self, x):
            return self.scale

    return job(Model(), on_step=every(live, lambda step: outside.update(scale=1 / step)))


# -- state that is read by another way than by calling, or by an attribute


def _default_of_a_function():
    def other(numbers=[1.0]):  # noqa: B006
        """Nobody calls it."""

    numbers = inspect.signature(other).parameters["numbers"].default
    return (
        lambda: inspect.signature(other).parameters["numbers"].default[0],
        lambda: numbers.__setitem__(0, 3.0),
    )


def _variable_of_a_function():
    numbers = [1.0]

    def other():
        return numbers

    return (
        lambda: inspect.getclosurevars(other).nonlocals["numbers"][0],
        lambda: numbers.__setitem__(0, 3.0),
    )


def _global_of_a_function():
    namespace = {"numbers": [1.0]}
    exec("def other():\n    return numbers\n", namespace)
    other = namespace["other"]
    return (
        lambda: other.__globals__["numbers"][0],
        lambda: namespace["numbers"].__setitem__(0, 3.0),
    )


def _factory_of_a_dictionary():
    numbers = collections.defaultdict(lambda: 1.0)
    return lambda: numbers.default_factory(), lambda: setattr(
        numbers, "default_factory", lambda: 3.0
    )


def _variables_of_the_environment():
    os.environ.pop("WF_CASE", None)
    return (
        lambda: 3.0 if any(name == "WF_CASE" for name in os.environ) else 1.0,
        lambda: os.environ.update(WF_CASE="1"),
    )


def _form_of_a_variable():
    form, holder = "{one.number}", types.SimpleNamespace(number=1.0)
    forms = {"form": form}
    return (
        lambda: float(forms["form"].format(one=holder)),
        lambda: setattr(holder, "number", 3.0),
    )


def _pickled():
    holder = types.SimpleNamespace(number=1.0)
    return (
        lambda: 1.0 + zlib.crc32(pickle.dumps(holder)) % 7,
        lambda: setattr(holder, "number", 3.0),
    )


read_between("default_of_a_function", _default_of_a_function, *ANY)
read_between("variable_of_a_function", _variable_of_a_function, *ANY)
read_between("global_of_a_function", _global_of_a_function, *ANY)
read_between("factory_of_a_dictionary", _factory_of_a_dictionary, *ANY)
read_between("variables_of_the_environment", _variables_of_the_environment, *ANY)
read_between("form_of_a_variable", _form_of_a_variable, *ANY)
read_between("pickled_object", _pickled, *ANY)
