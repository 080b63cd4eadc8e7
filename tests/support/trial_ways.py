"""Ways in which two trials may differ: those that make another step, and those that do not."""

import collections
import dataclasses
import enum
import functools
import struct
import threading
import types
import weakref

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

import waterflow as wf


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator), y


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


@dataclasses.dataclass
class Config:
    power: float = 1.5


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain):
        self.gain = gain


def made_class(name="Kind", bases=(), **attributes):
    return type(name, bases, {"__qualname__": "Kind", **attributes})


class First:
    pass


class Second(First):
    pass


def made_function(code=(lambda self: self).__code__, module="here", **names):
    """One that nobody calls."""
    return types.FunctionType(code, {"__name__": module, **names})


def described(doc):
    return made_class(rate=property(lambda self: 0.5, doc=doc))


def with_metadata(mark):
    return np.dtype("f4", metadata={"mark": mark})


def within(offset):
    """Numbers at some bytes of memory."""
    return np.zeros(24, "u1")[offset : offset + 16].view("f8")


def whole(rows):
    return memoryview(b"123456").cast("B", (rows, 6 // rows))


def lock(times):
    made = threading.RLock()
    for _ in range(times):
        made.acquire()
    return made


def called_back(function=None):
    kept = First()
    return kept, weakref.ref(kept, function)


def payload(bits):
    """What is no number, with bits of its own."""
    return struct.unpack(">d", struct.pack(">Q", 0x7FF8000000000000 + bits))[0]


class Odds:
    """What few read of objects, all read."""

    def __init__(self):
        self.named, self.based = made_class(), made_class("Based", (Second, First))
        self.function, self.described = made_function(), described("short")
        self.method = types.MethodType(made_function(), made_class())
        self.partial = functools.partial(made_function())
        self.marked = staticmethod(made_function())
        self.dtype, self.array = with_metadata(1), np.zeros(3, with_metadata(1))
        self.own, self.aligned = np.zeros(3), within(0)
        self.memory, self.lock, self.reference = whole(2), lock(0), called_back()
        self.tensor, self.nan = torch.ones(3), payload(1)
        self.complex = complex(0.5, self.nan)

    def read(self):
        read = [len(self.named.__name__), len(self.based.__bases__)]
        read += [len(self.function.__module__), len(self.described.rate.__doc__)]
        read += [len(self.method.__module__), len(self.partial.func.__module__)]
        read.append(getattr(self.marked, "mark", 1))
        read += [self.dtype.metadata["mark"], self.array.dtype.metadata["mark"]]
        read += [self.own.base is None, self.own.flags.owndata, self.aligned.flags.aligned]
        read += [self.memory.shape[0], "count=1" in repr(self.lock)]
        read += [self.reference[1].__callback__ is None, self.tensor._base is None]
        read += [struct.pack(">d", self.nan)[-1], struct.pack(">d", self.complex.imag)[-1]]
        return sum((1 + place) * number for place, number in enumerate(read)) / 512


class Block(nn.Module):
    """Reads state of many kinds."""

    rate = 0.25

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.25)
        self.again = nn.Linear(6, 6)
        self.more = nn.Linear(6, 6)
        self.steps = nn.ModuleList([nn.Tanh(), nn.Softplus()])
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.alpha, self.count, self.name, self.flag, self.extra = 0.5, 1, "relu", True, None
        self.table = {"a": 0.5, "b": 2.0}
        self.gains, self.pair, self.words = [0.5, 2.0], (1.0, 0.5), {"x"}
        self.one, self.other = [0.5], [0.5]
        self.mode, self.config, self.slotted = Mode.SUM, Config(), Slotted(0.5)
        self.array, self.counts = np.ones(3), collections.deque([1.0], maxlen=2)
        self.odds = Odds()
        self.trial = "first"  # nobody reads it

    def forward(self, x):
        x = self.drop(self.norm(self.first(x))) * self.alpha * self.scale
        for _ in range(self.count):
            x = F.relu(self.again(x)) if self.name == "relu" else torch.tanh(self.again(x))
        x = self.more(x) if self.flag else self.again(x)
        x = x if self.extra is None else x + self.extra
        for value in self.table.values():
            x = x * value + 0.125
        x = x * self.gains[0] * self.pair[1] + len(self.words) * self.rate
        x = x * (0.5 if self.one is self.other else 0.75)
        x = x * (1.5 if self.mode is Mode.SUM else 0.5) * self.config.power * self.slotted.gain
        x = x * float(self.array[0]) + self.counts[0] + self.odds.read()
        for step in self.steps:
            x = step(x)
        return self.last(x)


class Overriding(Block):
    def forward(self, x):
        return super().forward(x) * 0.5


class Named(Block):
    rate = 0.75


@dataclasses.dataclass
class Parts:
    """What a trial is made of."""

    model: nn.Module
    loss: object = None
    optimizer: object = None
    data: object = None
    options: dict = dataclasses.field(default_factory=dict)


def plain_loss(temperature=1.0, weight=None, **options):
    def loss(model, batch):
        x, y, *others = batch
        by = 1 + struct.pack(">d", *others)[-1] if others else 1
        return F.cross_entropy(model(x) / temperature, y, weight=weight, **options) * by

    return loss


def momentum(parameters, **options):
    return optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def trial(name, change=None, steps=3):
    torch.manual_seed(3)
    parts = Parts(Block(), plain_loss(), momentum, [rows(8, n) for n in range(2)])
    if change is not None:
        change(parts)
    optimizer = parts.optimizer(parts.model.parameters())
    options = {"steps": steps, "seed": 1, "capture": "auto", **parts.options}
    return wf.Job(name, parts.model, optimizer, parts.loss, parts.data, **options)


def setting(path, value):
    """A change of one attribute, the owner found along a path."""

    def change(parts):
        *owners, attribute = path.split(".")
        setattr(functools.reduce(getattr, owners, parts.model), attribute, value())

    return change


def on_model(act):
    return lambda parts: act(parts.model)


def with_loss(**options):
    return lambda parts: setattr(parts, "loss", plain_loss(**options))


def with_optimizer(make=momentum, **options):
    return lambda parts: setattr(parts, "optimizer", functools.partial(make, **options))


def with_parts(**fields):
    return lambda parts: [setattr(parts, name, value()) for name, value in fields.items()]


def another_model(make):
    def change(parts):
        torch.manual_seed(3)
        parts.model = make()

    return change


def tie(model):
    model.more.weight = model.again.weight


def same_module_twice(model):
    model.more = model.again


def transpose(model):
    model.again.weight = nn.Parameter(model.again.weight.detach().t().contiguous().t())


def one_list(model):
    model.one = model.other


def own_forward(model):
    model.drop.forward = lambda x: x * 0.5


def two_groups(parameters):
    first, *others = parameters
    return optim.SGD([{"params": [first]}, {"params": others}], lr=0.1, momentum=0.9)


def backwards(parameters):
    return momentum(list(parameters)[::-1])


class OwnSGD(optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


def scaled(model, batch, *, by):
    return plain_loss()(model, batch) * by


class Criterion:
    def __init__(self, by):
        self.by = by

    def __call__(self, model, batch):
        return plain_loss()(model, batch) * self.by

    def method(self, model, batch):
        return self(model, batch)


def by_default(by):
    def loss(model, batch, by=by):
        return plain_loss()(model, batch) * by

    return loss


def by_keyword(by):
    def loss(model, batch, *, by=by):
        return plain_loss()(model, batch) * by

    return loss


def by_global(by):
    code = by_keyword(by).__code__
    namespace = {"plain_loss": plain_loss, "BY": by, "__builtins__": __builtins__}
    source = "def loss(model, batch):\n    return plain_loss()(model, batch) * BY\n"
    exec(compile(source, __file__, "exec"), namespace)
    assert code is not None
    return namespace["loss"]


def by_name(function):
    def loss(model, batch):
        return plain_loss()(model, batch) * function.__globals__["by"]

    return loss


def by_function(activate):
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(activate(model(x)), y)

    return loss


def cast(model, batch):
    x, y = batch
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(x), y)


def doubled():
    return [(x.double(), y) for x, y in (rows(8, n) for n in range(2))]


def numbered(number):
    return [(*rows(8, n), number) for n in range(2)]


def strided():
    return [(x.t().contiguous().t(), y) for x, y in (rows(8, n) for n in range(2))]


def local_class(rate):
    class Local(Block):
        pass

    Local.rate = rate
    return Local()


def hooked(kind, act):
    return on_model(lambda model: getattr(model.again, kind)(act))


#: Ways in which a trial differs so that its step is another one.
OTHERS = {
    "float": setting("alpha", lambda: 0.75),
    "minus zero": setting("alpha", lambda: -0.5),
    "whole number for a float": setting("pair", lambda: (1.0, 2)),
    "count": setting("count", lambda: 2),
    "text": setting("name", lambda: "tanh"),
    "flag": setting("flag", lambda: False),
    "not none": setting("extra", lambda: 0.5),
    "tensor for none": setting("extra", lambda: torch.ones(6)),
    "dictionary's value": setting("table", lambda: {"a": 0.5, "b": 3.0}),
    "dictionary's order": setting("table", lambda: {"b": 2.0, "a": 0.5}),
    "list's item": setting("gains", lambda: [0.75, 2.0]),
    "tuple's item": setting("pair", lambda: (1.0, 0.75)),
    "set": setting("words", lambda: {"x", "y"}),
    "one object or two": on_model(one_list),
    "enumeration": setting("mode", lambda: Mode.MEAN),
    "data class": setting("config", lambda: Config(2.5)),
    "slot": setting("slotted", lambda: Slotted(0.75)),
    "array": setting("array", lambda: np.full(3, 2.0)),
    "deque": setting("counts", lambda: collections.deque([2.0], maxlen=2)),
    "class's name": setting("odds.named", lambda: made_class("Other")),
    "class's bases": setting("odds.based", lambda: made_class("Based", (Second,))),
    "function's module": setting("odds.function", lambda: made_function(module="there")),
    "method's module": setting(
        "odds.method", lambda: types.MethodType(made_function(module="there"), made_class())
    ),
    "partial's module": setting(
        "odds.partial", lambda: functools.partial(made_function(module="there"))
    ),
    "property's text": setting("odds.described", lambda: described("longer")),
    "static method's attribute": setting("odds.marked.mark", lambda: 2),
    "metadata of a dtype": setting("odds.dtype", lambda: with_metadata(2)),
    "metadata of an array": setting("odds.array", lambda: np.zeros(3, with_metadata(2))),
    "array that is a view": setting("odds.own", lambda: np.zeros(3)[:]),
    "array that is skewed": setting("odds.aligned", lambda: within(1)),
    "shape of memory": setting("odds.memory", lambda: whole(3)),
    "lock that is held": setting("odds.lock", lambda: lock(1)),
    "reference that calls back": setting("odds.reference", lambda: called_back(print)),
    "tensor that is a view": setting("odds.tensor", lambda: torch.ones(3)[:]),
    "bits of no number": setting("odds.nan", lambda: payload(2)),
    "bits of a complex number": setting("odds.complex", lambda: complex(0.5, payload(2))),
    "order of modules": setting("steps", lambda: nn.ModuleList([nn.Softplus(), nn.Tanh()])),
    "dropout's p": setting("drop.p", lambda: 0.5),
    "eps": setting("norm.eps", lambda: 1e-3),
    "statistics' momentum": setting("norm.momentum", lambda: 0.2),
    "dropout in eval mode": on_model(lambda model: model.drop.eval()),
    "norm in eval mode": on_model(lambda model: model.norm.eval()),
    "frozen parameter": on_model(lambda model: model.again.weight.requires_grad_(False)),
    "no bias": on_model(lambda model: model.again.register_parameter("bias", None)),
    "buffer's shape": setting("scale", lambda: torch.full((6,), 0.5)),
    "buffer's dtype": setting("scale", lambda: torch.full((1,), 0.5, dtype=torch.float16)),
    "buffer that is a view": setting("scale", lambda: torch.full((2,), 0.5)[1:]),
    "tied weights": on_model(tie),
    "module that is there twice": on_model(same_module_twice),
    "strides": on_model(transpose),
    "width": another_model(lambda: setattr(m := Block(), "more", nn.Linear(6, 6, False)) or m),
    "dtype": lambda parts: (parts.model.double(), setattr(parts, "data", doubled())),
    "subclass": another_model(Overriding),
    "class attribute": another_model(Named),
    "class made in a function": another_model(lambda: local_class(0.5)),
    "method of an instance": on_model(own_forward),
    "forward hook": hooked("register_forward_hook", lambda module, args, out: out * 0.5),
    "other forward hook": hooked("register_forward_hook", lambda module, args, out: out * 0.25),
    "forward hook before": hooked("register_forward_pre_hook", lambda module, args: args),
    "backward hook": hooked(
        "register_full_backward_hook", lambda module, inputs, outputs: (inputs[0] * 0.5,)
    ),
    "hook of a parameter": on_model(
        lambda model: model.again.weight.register_hook(lambda gradient: gradient * 0.5)
    ),
    "closure": with_loss(temperature=2.0),
    "label smoothing": with_loss(label_smoothing=0.1),
    "reduction": with_loss(reduction="sum"),
    "weights of classes": with_loss(weight=torch.tensor([1.0, 2.0, 3.0])),
    "partial": with_parts(loss=lambda: functools.partial(scaled, by=0.5)),
    "other partial": with_parts(loss=lambda: functools.partial(scaled, by=0.25)),
    "callable object": with_parts(loss=lambda: Criterion(0.5)),
    "other callable object": with_parts(loss=lambda: Criterion(0.25)),
    "bound method": with_parts(loss=lambda: Criterion(0.5).method),
    "other bound method": with_parts(loss=lambda: Criterion(0.25).method),
    "default": with_parts(loss=lambda: by_default(0.5)),
    "other default": with_parts(loss=lambda: by_default(0.25)),
    "keyword's default": with_parts(loss=lambda: by_keyword(0.5)),
    "other keyword's default": with_parts(loss=lambda: by_keyword(0.25)),
    "global": with_parts(loss=lambda: by_global(0.5)),
    "other global": with_parts(loss=lambda: by_global(0.25)),
    "function in a closure": with_parts(loss=lambda: by_function(torch.tanh)),
    "other function in a closure": with_parts(loss=lambda: by_function(torch.sigmoid)),
    "autocast": with_parts(loss=lambda: cast),
    "batch's strides": with_parts(data=strided),
    "batch's container": with_parts(data=lambda: [list(rows(8, n)) for n in range(2)]),
    "batch's number": with_parts(data=lambda: numbered(0.1)),
    "batch's bits of no number": with_parts(data=lambda: numbered(payload(1))),
    "batch's other bits": with_parts(data=lambda: numbered(payload(2))),
    "batch's size": with_parts(data=lambda: [rows(6, n) for n in range(2)]),
    "no momentum": with_optimizer(momentum=0.0),
    "nesterov": with_optimizer(nesterov=True),
    "maximize": with_optimizer(maximize=True),
    "weight decay": with_optimizer(weight_decay=0.1),
    "foreach": with_optimizer(foreach=True),
    "fused": with_optimizer(fused=True),
    "groups": with_optimizer(lambda parameters: two_groups(parameters)),
    "order of parameters": with_optimizer(lambda parameters: backwards(parameters)),
    "optimizer's class": with_optimizer(lambda p: OwnSGD(p, lr=0.1, momentum=0.9)),
    "other optimizer": with_optimizer(lambda parameters: optim.Adam(parameters)),
    "clipping": lambda parts: parts.options.update(clip_grad_norm=0.5),
    "scheduler": lambda parts: scheduled(parts),
    "other clipping": lambda parts: parts.options.update(clip_grad_norm=0.25),
}


def other_weights(model):
    for tensor in (*model.parameters(), model.scale, model.norm.running_mean):
        tensor.detach().mul_(0.75)


def scheduled(parts):
    def make(parameters):
        optimizer = momentum(parameters)
        parts.options["scheduler"] = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return optimizer

    parts.optimizer = make


#: Ways in which a trial differs and still takes the same step.
ALIKE = {
    "nothing": None,
    "learning rate": with_optimizer(lr=0.025),
    "momentum's number": with_optimizer(momentum=0.5),
    "weights": on_model(other_weights),
    "data": with_parts(data=lambda: [rows(8, n) for n in range(5, 8)]),
    "attribute that nobody reads": setting("trial", lambda: "second"),
    "seed": lambda parts: parts.options.update(seed=7),
    "callback": lambda parts: parts.options.update(on_step=lambda result: None),
    "equal loss": with_loss(),
}
