"""A model, a loss function and their surroundings with state in every kind of place.

What the step computes is of no matter; it reads every place by its name.
"""

import array
import contextvars
import enum
import functools
import itertools
import random
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

beta = 1.0
schedule = {"warm": [1, 2, {"deep": 3}]}
helpers = types.ModuleType("state_helpers")
helpers.gain = 1.0
unread = 0


class Kind(enum.Enum):
    PLAIN = 1
    OTHER = 2


class Pair(NamedTuple):
    left: list
    right: int


@dataclass
class Options:
    rate: float = 0.5
    betas: list = field(default_factory=lambda: [1.0, 2.0])


class Slotted:
    __slots__ = ("__private", "value")

    def __init__(self):
        self.value = 1
        self.__private = 2

    def read(self):
        return self.value + self.__private


class Meta(type):
    level = 1


class WithMeta(metaclass=Meta):
    width = 3


class Descriptor:
    def __init__(self):
        self.power = 2

    def __get__(self, owner, kind=None):
        return self.power


class Base:
    inherited = 5


class Config(Base):
    shared = {"a": 1}  # noqa: RUF012
    computed = Descriptor()

    def __init__(self):
        self.t = 1.0
        self.inner = types.SimpleNamespace(x=1, deep=types.SimpleNamespace(y=[1, 2]))

    @property
    def double(self):
        return self.t * 2

    @staticmethod
    def fixed(x=1):
        return x

    @classmethod
    def made(cls, y=2):
        return y


class Handle:
    def __init__(self):
        self.mark = 1


def scaled(x, factor=1.0, *, offset=0.0, table={"k": 1}):  # noqa: B006
    scaled.calls  # noqa: B018
    return x * factor + offset + table["k"] * 0


scaled.calls = 0


@functools.lru_cache
def memo(n):
    return n * beta


def numbers():
    n = 0
    while True:
        n += 1
        yield n


def closure():
    n = 0
    box = [0]

    def count(x):
        return x + n * 0 + box[0] * 0

    def add():
        nonlocal n
        n += 1

    return count, add, box


class Square(torch.autograd.Function):
    seen = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad + Square.seen * 0


class Net(nn.Module):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.cfg = Config()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.register_buffer("steps", torch.zeros(1))
        self.plain = torch.ones(4)
        self.items = [1, [2, 3], {"x": (4, [5])}]
        self.table = {"a": 1, "b": {"c": [1]}, (1, 2): 3}
        self.names = {"a", "b"}
        self.frozen = frozenset({1, 2})
        self.fixed = ([1], 2)
        self.window = deque([1, 2], maxlen=4)
        self.ordered = OrderedDict(a=1, b=2)
        self.defaults = defaultdict(list, a=[1])
        self.counts = Counter("aab")
        self.chain = ChainMap({"a": 1}, {"b": [2]})
        self.proxy_of = {"a": 1}
        self.proxy = types.MappingProxyType(self.proxy_of)
        self.user_dict = UserDict(a=1)
        self.user_list = UserList([1])
        self.options = Options()
        self.pair = Pair([1], 2)
        self.slotted = Slotted()
        self.kind = Kind.PLAIN
        self.partial = functools.partial(scaled, factor=1.0)
        self.method = self.cfg.fixed
        self.count, self.add, self.box = closure()
        self.array = np.arange(4.0)
        self.strided = np.arange(8.0)[::2]
        self.objects = np.array([1, [2]], dtype=object)
        self.scalar = np.float64(1.5)
        self.raw = bytearray(b"abc")
        self.typed = array.array("d", [1.0, 2.0])
        self.rng = random.Random(1)
        self.np_rng = np.random.default_rng(1)
        self.old_rng = np.random.RandomState(1)
        self.torch_rng = torch.Generator().manual_seed(1)
        self.counter = itertools.count()
        self.cycle = itertools.cycle([1, 2])
        self.iterator = iter([1, 2, 3])
        self.generator = numbers()
        next(self.generator)
        self.context = contextvars.ContextVar("context", default=1)
        self.target = Handle()
        self.weak = weakref.ref(self.target)
        self.unnamed = 0
        self.number = 10**30
        self.nothing = None

    def forward(self, x):
        self.read()
        x = Square.apply(self.layers(x)) * self.scale * self.cfg.t
        return self.partial(self.count(x)) + self.plain + self.method()

    def read(self):
        cfg = self.cfg
        cfg.shared, cfg.computed, cfg.double, cfg.inner.x, cfg.inner.deep.y, cfg.inherited  # noqa: B018
        cfg.fixed(), cfg.made(), WithMeta.width, WithMeta.level
        self.items, self.table, self.names, self.frozen, self.fixed, self.window  # noqa: B018
        self.ordered, self.defaults, self.counts, self.chain["a"], self.proxy["a"]
        self.user_dict["a"], self.user_list[0], self.options.rate, self.options.betas
        self.pair.left, self.slotted.read(), self.kind.value, self.number, self.nothing
        self.array, self.strided, self.objects, self.scalar, self.raw, self.typed  # noqa: B018
        self.rng, self.np_rng, self.old_rng, self.torch_rng, self.counter, self.cycle  # noqa: B018
        self.iterator, self.generator, self.context, self.weak().mark, self.steps
        getattr(self, "shadow", None)
        memo(1)


def loss(model, batch):
    """Reads globals, of this module and of others."""
    deep = schedule["warm"][2]["deep"]
    return (model(batch) ** 2).mean() * beta * helpers.gain + deep * 0 + sum(range(2))
