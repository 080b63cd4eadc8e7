"""Ways in which the losses of two jobs have one count in common: each returns what counts, made
anew for each job."""

from __future__ import annotations

import collections
import configparser
import functools
import itertools
import mmap
import os
import queue
import random
import struct
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import networkx
import numpy as np
import torch
from scipy import sparse
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Tick = Callable[[], int]


class Count:
    def __init__(self) -> None:
        self.n = 0

    def tick(self) -> int:
        self.n += 1
        return self.n


def same_attributes() -> Callable[[], Tick]:
    state: dict[str, Any] = {}

    class Borg:
        n: int

        def __init__(self) -> None:
            self.__dict__ = state

        def tick(self) -> int:
            self.n = state.get("n", 0) + 1
            return self.n

    return lambda: Borg().tick


def same_attributes_of_a_class() -> Callable[[], Tick]:
    class Borg:
        state: dict[str, Any] = {}  # noqa: RUF012

        def __init__(self) -> None:
            self.__dict__ = self.state
            self.state.setdefault("n", 0)

        def tick(self) -> int:
            self.n = self.n + 1
            return self.n

    return lambda: Borg().tick


def remembered_object() -> Callable[[], Tick]:
    @functools.cache
    def counter() -> Count:
        return Count()

    return lambda: lambda: counter().tick()


def computed_once() -> Callable[[], Tick]:
    class Holder:
        @functools.cached_property
        def count(self) -> Count:
            return Count()

    holder = Holder()
    return lambda: lambda: holder.count.tick()


def by_default() -> Callable[[], Tick]:
    counts: collections.defaultdict[str, Count] = collections.defaultdict(Count)
    return lambda: lambda: counts["a"].tick()


def of_the_environment() -> Callable[[], Tick]:
    os.environ["WATERFLOW_TEST_COUNT"] = "0"

    def tick() -> int:
        n = int(os.environ["WATERFLOW_TEST_COUNT"]) + 1
        os.environ["WATERFLOW_TEST_COUNT"] = str(n)
        return n

    return lambda: tick


def method_of_a_class() -> Callable[[], Tick]:
    class Counter:
        n = 0

        @classmethod
        def tick(owner) -> int:
            owner.n += 1
            return owner.n

    return lambda: Counter.tick


def only_object() -> Callable[[], Tick]:
    class Single:
        made: Any = None
        n: int

        def __new__(cls) -> Any:
            if cls.made is None:
                cls.made = super().__new__(cls)
                cls.made.n = 0
            return cls.made

        def tick(self) -> int:
            self.n += 1
            return self.n

    return lambda: lambda: Single().tick()


def attribute_made_late() -> Callable[[], Tick]:
    class Late:
        n: int

        def tick(self) -> int:
            self.n = getattr(self, "n", 0) + 1
            return self.n

    late = Late()
    return lambda: late.tick


def turning_queue() -> Callable[[], Tick]:
    numbers: queue.Queue[int] = queue.Queue()
    for number in range(7):
        numbers.put(number)

    def tick() -> int:
        found = numbers.get()
        numbers.put(found)
        return found

    return lambda: tick


def bound_argument() -> Callable[[], Tick]:
    state = [0]

    def tick(held: list[int]) -> int:
        held[0] += 1
        return held[0]

    return lambda: functools.partial(tick, state)


def bound_object() -> Callable[[], Tick]:
    state = types.SimpleNamespace(n=0)

    def tick(self: Any) -> int:
        self.n += 1
        return int(self.n)

    return lambda: types.MethodType(tick, state)


def field_of_a_tuple() -> Callable[[], Tick]:
    class Pair(collections.namedtuple("Pair", "numbers")):
        pass

    pair = Pair([0])

    def tick() -> int:
        pair.numbers[0] += 1
        return int(pair.numbers[0])

    return lambda: tick


def taken_from_a_queue() -> Callable[[], Tick]:
    found: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(5_000):
        found.put(number)
    return lambda: lambda: found.get()


def zipped_iterator() -> Callable[[], Tick]:
    """Moved by whoever goes through `zip`."""
    numbers = itertools.count(1)
    return lambda: lambda: next(iter([number for number, _ in zip(numbers, "a", strict=False)]))


def iterator_handed_to_a_library() -> Callable[[], Tick]:
    numbers = itertools.count(1)
    return lambda: lambda: next(itertools.islice(numbers, 1))


def iterator_unpacked() -> Callable[[], Tick]:
    numbers = iter(list(range(2_000)))

    def tick() -> int:
        first, second = itertools.islice(numbers, 2)
        return int(first + second)

    return lambda: tick


def iterator_delegated_to() -> Callable[[], Tick]:
    numbers = itertools.count(1)

    def delegated() -> Iterator[int]:
        yield from numbers

    return lambda: lambda: next(delegated())


def method_bound_early() -> Callable[[], Tick]:
    take = list(range(5_000)).pop
    return lambda: lambda: take(0)


def method_by_a_name_put_together() -> Callable[[], Tick]:
    numbers, name = list(range(5_000)), "po"
    return lambda: lambda: int(getattr(numbers, name + "p")(0))


def default_of_another_function() -> Callable[[], Tick]:
    held = lambda found=[0]: found  # noqa: E731

    def tick() -> int:
        held()[0] += 1
        return held()[0]

    return lambda: tick


def argument_of_an_exception() -> Callable[[], Tick]:
    found = [0]

    def tick() -> int:
        try:
            raise KeyError(found)
        except KeyError as error:
            error.args[0][0] += 1
        return found[0]

    return lambda: tick


def array_changed_by_a_function() -> Callable[[], Tick]:
    found = np.zeros(1, np.int64)

    def tick() -> int:
        np.add.at(found, [0], 1)
        return int(found[0])

    return lambda: tick


_KEPT: list[Count] = []


def weak_reference() -> Callable[[], Tick]:
    count = Count()
    _KEPT.append(count)
    found = weakref.ref(count)

    def tick() -> int:
        held = found()
        assert held is not None
        held.n += 1
        return held.n

    return lambda: tick


def within(holder: Any) -> Callable[[], Tick]:
    """A list in a container of a library's or of the user's."""

    def tick() -> int:
        holder["a"][0] += 1
        return int(holder["a"][0])

    return lambda: tick


class Items:
    def __init__(self) -> None:
        self._held = {"a": [0]}

    def __getitem__(self, key: str) -> list[int]:
        return self._held[key]


def in_a_read_only_view() -> Callable[[], Tick]:
    return within(types.MappingProxyType({"a": [0]}))


def in_a_dictionary_of_python() -> Callable[[], Tick]:
    return within(collections.UserDict(a=[0]))


def in_a_chain() -> Callable[[], Tick]:
    return within(collections.ChainMap({}, {"a": [0]}))


def in_a_container_of_ones_own() -> Callable[[], Tick]:
    return within(Items())


def memory_read_by_bytes() -> Callable[[], Tick]:
    memory = mmap.mmap(-1, 1 << 12)
    memory[:] = bytes(range(256)) * 16
    return lambda: memory.read_byte


def field_set_by_an_array() -> Callable[[], Tick]:
    array = np.zeros(1)

    def tick() -> int:
        array.setfield(array[0] + 1, np.float64)
        return int(array[0])

    return lambda: tick


def array_that_grows() -> Callable[[], Tick]:
    array = np.zeros(1)

    def tick() -> int:
        array.resize(len(array) + 1, refcheck=False)
        return len(array)

    return lambda: tick


def sparse_matrix() -> Callable[[], Tick]:
    matrix = sparse.lil_matrix((3, 3))

    def tick() -> int:
        matrix[0, 0] = matrix[0, 0] + 1
        return int(matrix.sum())

    return lambda: tick


def estimator_fitted_further() -> Callable[[], Tick]:
    scaler = StandardScaler()

    def tick() -> int:
        scaler.partial_fit([[1.0]])
        return int(scaler.n_samples_seen_)

    return lambda: tick


def graph_that_grows() -> Callable[[], Tick]:
    graph = networkx.Graph()

    def tick() -> int:
        graph.add_node(len(graph))
        return len(graph)

    return lambda: tick


def generator_of_numpys_bound_early() -> Callable[[], Tick]:
    draw = np.random.default_rng(0).integers
    return lambda: lambda: int(draw(1000))


def old_generator_of_numpys_bound_early() -> Callable[[], Tick]:
    draw = np.random.RandomState(0).randint
    return lambda: lambda: int(draw(1000))


def generator_of_pythons_bound_early() -> Callable[[], Tick]:
    draw = random.Random(0).randrange
    return lambda: lambda: draw(1000)


def generator_bound_to_a_function() -> Callable[[], Tick]:
    source = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, 1000, (), generator=source)
    return lambda: lambda: int(draw())


def generator_among_keywords() -> Callable[[], Tick]:
    given = {"generator": torch.Generator().manual_seed(0)}
    return lambda: lambda: int(torch.randint(1000, (), **given))


def generator_of_a_loader() -> Callable[[], Tick]:
    data = TensorDataset(torch.arange(1000))
    loader = DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(0))
    return lambda: lambda: int(next(iter(loader))[0])


def running_statistics() -> Callable[[], Tick]:
    """Of a module that nobody trains, in training mode."""
    norm = nn.BatchNorm1d(2).requires_grad_(False)

    def tick() -> int:
        norm(torch.ones(2, 2))
        assert norm.num_batches_tracked is not None
        return int(norm.num_batches_tracked)

    return lambda: tick


def spectral_norm() -> Callable[[], Tick]:
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)).requires_grad_(False)
    return lambda: lambda: int(norm(torch.ones(64)).abs().sum() * 1e4)


def tensors_in_a_list() -> Callable[[], Tick]:
    held = torch.zeros(1)

    def tick() -> int:
        torch._foreach_add_([held], 1)
        return int(held)

    return lambda: tick


def weights_taken_from_a_vector() -> Callable[[], Tick]:
    held = nn.Linear(2, 2).requires_grad_(False)
    nn.init.zeros_(held.weight)
    nn.init.zeros_(held.bias)

    def tick() -> int:
        found = nn.utils.parameters_to_vector(held.parameters()) + 1
        nn.utils.vector_to_parameters(found, held.parameters())
        return int(held.bias[0])

    return lambda: tick


def weights_drawn_anew() -> Callable[[], Tick]:
    held = nn.Linear(2, 2).requires_grad_(False)
    held.weight.zero_()

    def tick() -> int:
        found = int(held.weight.sum().abs() * 1e4)
        held.reset_parameters()
        return found

    return lambda: tick


def average_of_weights() -> Callable[[], Tick]:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)).requires_grad_(False)

    def tick() -> int:
        average.update_parameters(nn.Linear(1, 1))
        return int(average.n_averaged)

    return lambda: tick


def output_bound_to_a_function() -> Callable[[], Tick]:
    held = torch.zeros(1)
    add = functools.partial(torch.add, held, 1, out=held)
    return lambda: lambda: int(add())


def output_given_by_its_place() -> Callable[[], Tick]:
    held = np.zeros(1)

    def tick() -> int:
        np.add(held, 1, held)
        return int(held[0])

    return lambda: tick


def bytes_packed_into() -> Callable[[], Tick]:
    held = bytearray(8)

    def tick() -> int:
        struct.pack_into("q", held, 0, struct.unpack_from("q", held)[0] + 1)
        return int(held[0])

    return lambda: tick


def attribute_set_by_a_bound_function() -> Callable[[], Tick]:
    held = types.SimpleNamespace(n=0)
    put = functools.partial(setattr, held, "n")

    def tick() -> int:
        put(held.n + 1)
        return int(held.n)

    return lambda: tick


def settings_read_from_a_file() -> Callable[[], Tick]:
    held = configparser.ConfigParser()
    held["a"] = {"n": "0"}

    def tick() -> int:
        held.set("a", "n", str(held.getint("a", "n") + 1))
        return held.getint("a", "n")

    return lambda: tick


WAYS = {
    made.__name__.replace("_", " "): made
    for made in (
        same_attributes,
        same_attributes_of_a_class,
        remembered_object,
        computed_once,
        by_default,
        of_the_environment,
        method_of_a_class,
        only_object,
        attribute_made_late,
        turning_queue,
        bound_argument,
        bound_object,
        field_of_a_tuple,
        taken_from_a_queue,
        zipped_iterator,
        iterator_handed_to_a_library,
        iterator_unpacked,
        iterator_delegated_to,
        method_bound_early,
        method_by_a_name_put_together,
        default_of_another_function,
        argument_of_an_exception,
        array_changed_by_a_function,
        weak_reference,
        in_a_read_only_view,
        in_a_dictionary_of_python,
        in_a_chain,
        in_a_container_of_ones_own,
        memory_read_by_bytes,
        field_set_by_an_array,
        array_that_grows,
        sparse_matrix,
        estimator_fitted_further,
        graph_that_grows,
        generator_of_numpys_bound_early,
        old_generator_of_numpys_bound_early,
        generator_of_pythons_bound_early,
        generator_bound_to_a_function,
        generator_among_keywords,
        generator_of_a_loader,
        running_statistics,
        spectral_norm,
        tensors_in_a_list,
        weights_taken_from_a_vector,
        weights_drawn_anew,
        average_of_weights,
        output_bound_to_a_function,
        output_given_by_its_place,
        bytes_packed_into,
        attribute_set_by_a_bound_function,
        settings_read_from_a_file,
    )
}


def apart() -> Iterator[tuple[str, Callable[[], Tick]]]:
    """What looks like one of these, and tells no job of another."""

    @functools.cache
    def table(length: int) -> list[float]:
        return [1.0] * length

    notes: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    plain = os.environ

    def noting() -> int:
        notes["a"].append(1)
        return 1

    def reading() -> int:
        return len(plain.get("HOME", "")) + 1

    yield "a table that is read", lambda: lambda: len(table(3))
    yield "notes", lambda: noting
    yield "the environment read", lambda: reading
    numbers, held = [1, 2, 3], {"a": [1]}

    def going_through() -> int:
        first, *_ = numbers
        return first + sum(numbers) + len(list(zip(numbers, numbers, strict=True)))

    def by_name() -> int:
        return len(str(getattr(held, "ke" + "ys")))

    scaler = StandardScaler().fit([[1.0], [2.0]])
    yield "a fitted estimator", lambda: lambda: int(scaler.transform([[3.0]])[0, 0])
    yield "a list that is gone through", lambda: going_through
    norm = nn.BatchNorm1d(2).eval()
    used = np.add

    def summing() -> int:
        return int(used(1, 2) + np.add(numbers, 1)[0])

    yield "running statistics that are read", lambda: lambda: int(norm(torch.ones(2, 2))[0, 0])
    yield "own statistics", lambda: functools.partial(counted, nn.BatchNorm1d(2))
    yield "own generators", lambda: functools.partial(random.Random(0).randrange, 1000)
    yield "everybody's generator", lambda: functools.partial(random.randrange, 1000)
    yield "results of numpy's", lambda: summing
    yield "own iterators", lambda: functools.partial(next, itertools.count(1))
    yield "own objects", lambda: Count().tick
    yield "own arguments", lambda: functools.partial(Count.tick, Count())


def counted(norm: nn.BatchNorm1d) -> int:
    norm(torch.ones(2, 2))
    assert norm.num_batches_tracked is not None
    return int(norm.num_batches_tracked)
