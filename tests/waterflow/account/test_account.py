"""Every place that a step can read: the account sees it change, names it and puts it back."""

import builtins
import functools
import gc
import logging
import random
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import state
from waterflow.account import account, purity
from waterflow.account.account import Account
from waterflow.account.code_names import names_in
from waterflow.account.walk import Limits

pytestmark = pytest.mark.cpu


class World:
    """A model that has been trained for a step, and what that step has executed."""

    def __init__(self):
        self.model = state.Net().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(8, 4)
        self.step()
        seen = purity.observer()
        with purity.undisturbed(seen):
            self.step()
        self.codes = seen.codes()
        self.names = names_in(self.codes, seen.calls())

    def step(self):
        self.optimizer.zero_grad()
        state.loss(self.model, self.batch).backward()
        self.optimizer.step()

    def roots(self):
        return {"model": self.model, "loss": state.loss, "optimizer": self.optimizer}

    def account(self, precise=True, **options):
        names, codes = (self.names, self.codes) if precise else (None, None)
        return Account.take(self.roots(), names, codes, **options)


@pytest.fixture(scope="module")
def shared_world():
    return World()


@pytest.fixture
def world(shared_world):
    """One world for all: each test leaves it as it was, or builds its own."""
    return shared_world


def model_of(text):
    """A mutation of the model that is written as a statement on `m`."""
    return lambda world: exec(text, {"m": world.model, "torch": torch, "np": np, "nn": nn})


def state_of(text):
    """A mutation of the module `state`, written as a statement on `s`."""
    return lambda world: exec(text, {"s": state, "types": types})


def optimizer_of(text):
    return lambda world: exec(text, {"o": world.optimizer})


MUTATIONS = {
    # attributes, of objects of every kind
    "model.cfg.t": model_of("m.cfg.t = 2.0"),
    "model.cfg.t#int": model_of("m.cfg.t = 1"),
    "model.cfg.t#zero": model_of("m.cfg.t = -0.0"),
    "model.cfg.t#gone": model_of("del m.cfg.t"),
    "model.cfg.inner.x": model_of("m.cfg.inner.x += 1"),
    "model.cfg.inner.deep.y[1]": model_of("m.cfg.inner.deep.y[1] = 5"),
    "model.cfg.inner.deep.y": model_of("m.cfg.inner.deep.y.append(5)"),
    "model.cfg.inherited": model_of("m.cfg.inherited = 6"),
    "model.shadow": model_of("m.shadow = 1"),
    "model.scale": model_of("m.scale = 3.0"),
    "model.number": model_of("m.number += 1"),
    "model.nothing": model_of("m.nothing = 0"),
    "model.training": model_of("m.training = False"),
    "model.layers.2.p": model_of("m.layers[2].p = 0.5"),
    "model.layers.1.momentum": model_of("m.layers[1].momentum = 0.5"),
    "model.options.rate": model_of("m.options.rate = 0.25"),
    "model.options.betas[0]": model_of("m.options.betas[0] = 0.0"),
    "model.slotted.value": model_of("m.slotted.value = 7"),
    "model.slotted._Slotted__private": model_of("m.slotted._Slotted__private = 7"),
    "model.kind": model_of("m.kind = type(m.kind).OTHER"),
    "model.cfg.__class__": model_of("m.cfg.__class__ = type('Other', (type(m.cfg),), {})"),
    "model.__class__": model_of("m.__class__ = type('Other', (type(m),), {})"),
    "model.scalar": model_of("m.scalar = np.float64(2.5)"),
    "model.weak|model.target.mark": model_of("m.weak().mark = 2"),
    # containers, nested
    "model.items[0]": model_of("m.items[0] = 9"),
    "model.items[1][1]": model_of("m.items[1][1] = 9"),
    "model.items[2]['x'][1][0]": model_of("m.items[2]['x'][1][0] = 9"),
    "model.items": model_of("m.items.pop()"),
    "model.items#replaced": model_of("m.items = list(m.items)"),
    "model.table['a']": model_of("m.table['a'] = 2"),
    "model.table['b']['c'][0]": model_of("m.table['b']['c'][0] = 2"),
    "model.table['new']": model_of("m.table['new'] = 2"),
    "model.table['a']#gone": model_of("del m.table['a']"),
    "model.table": model_of("m.table[(1, 2)] = 4"),
    "model.table#order": model_of("m.table['a'] = m.table.pop('a')"),
    "model.names": model_of("m.names.add('c')"),
    "model.names#gone": model_of("m.names.discard('a')"),
    "model.frozen": model_of("m.frozen = frozenset({3})"),
    "model.fixed[0][0]": model_of("m.fixed[0][0] = 2"),
    "model.window": model_of("m.window.append(3)"),
    "model.window[0]": model_of("m.window.rotate()"),
    "model.ordered": model_of("m.ordered.move_to_end('a')"),
    "model.ordered['b']": model_of("m.ordered['b'] = 3"),
    "model.defaults['a']": model_of("m.defaults['a'].append(2)"),
    "model.defaults['z']": model_of("m.defaults['z']"),
    "model.counts['a']": model_of("m.counts['a'] += 1"),
    "model.chain.maps[0]['a']": model_of("m.chain['a'] = 2"),
    "model.chain.maps[1]['b'][0]": model_of("m.chain['b'][0] = 3"),
    "model.proxy['a']|model.proxy_of['a']": model_of("m.proxy_of['a'] = 2"),
    "model.user_dict.data['a']": model_of("m.user_dict['a'] = 2"),
    "model.user_list.data": model_of("m.user_list.append(2)"),
    "model.pair[0]": model_of("m.pair.left.append(2)"),
    "model.pair": model_of("m.pair = m.pair._replace(right=3)"),
    # arrays and memory
    "model.array": model_of("m.array[1] += 1"),
    "model.strided": model_of("m.strided[1] += 1"),
    "model.objects": model_of("m.objects[0] = 7"),
    "model.objects[0]": model_of("m.objects[1][0] = 7"),
    "model.raw": model_of("m.raw[0] = 0"),
    "model.typed": model_of("m.typed[0] = 0.5"),
    # random generators and iterators
    "model.rng": model_of("m.rng.random()"),
    "model.np_rng": model_of("m.np_rng.normal()"),
    "model.old_rng": model_of("m.old_rng.rand()"),
    "model.torch_rng": model_of("torch.rand(1, generator=m.torch_rng)"),
    "model.context": model_of("m.context.set(5)"),
    # functions
    "closure variable 'n' of closure.<locals>.count": model_of("m.add()"),
    "closure variable 'box' of closure.<locals>.count|model.box[0]": model_of("m.box[0] += 1"),
    "model.partial.keywords['factor']": model_of("m.partial.keywords['factor'] = 2.0"),
    "model.partial.func.__defaults__": state_of("s.scaled.__defaults__ = (2.0,)"),
    "model.partial.func.__kwdefaults__": state_of("s.scaled.__kwdefaults__ = dict(offset=1.0)"),
    "model.partial.func.__code__": state_of("s.scaled.__code__ = (lambda x, factor=1: x).__code__"),
    "model.partial.func.calls": state_of("s.scaled.calls += 1"),
    "the defaults of scaled": state_of("s.scaled.__kwdefaults__['offset'] = 2.0"),
    "the defaults of scaled#deep": state_of("s.scaled.__kwdefaults__['table']['k'] = 2"),
    "model.method": model_of("m.method = m.cfg.made"),
    "model.forward": model_of("m.forward = lambda x: x"),
    "model.layers.0.forward": model_of("m.layers[0].forward = lambda x: x"),
    # classes
    "Net.scale": state_of("s.Net.scale = 3.0"),
    "Net.forward": state_of("s.Net.forward = lambda self, x: x"),
    "Net.__call__": state_of("s.Net.__call__ = lambda self, x: x"),
    "Base.inherited": state_of("s.Base.inherited = 6"),
    "Config.inherited": state_of("s.Config.inherited = 6"),
    "Config.shared['a']": state_of("s.Config.shared['a'] = 2"),
    "Config.double": state_of("s.Config.double = property(lambda self: 1)"),
    "Config.computed.power": state_of("vars(s.Config)['computed'].power = 3"),
    "Config.fixed": state_of("s.Config.fixed = staticmethod(lambda: 2)"),
    "Config.made.__defaults__": state_of("s.Config.made.__func__.__defaults__ = (3,)"),
    "WithMeta.width": state_of("s.WithMeta.width = 4"),
    "Meta.level": state_of("s.Meta.level = 4"),
    "Square.seen": state_of("s.Square.seen += 1"),
    "Linear.forward": model_of("nn.Linear.forward = lambda self, x: x"),
    # globals
    "global 'beta' of": state_of("s.beta = 2.0"),
    "global 'beta' of#gone": state_of("del s.beta"),
    "global 'schedule' of loss": state_of("s.schedule = {}"),
    "['warm'][2]['deep']": state_of("s.schedule['warm'][2]['deep'] = 4"),
    ").gain": state_of("s.helpers.gain = 2.0"),
    "global 'sum' of loss": state_of("s.sum = max"),
    "built-in 'sum'": lambda world: setattr(builtins, "sum", max),
    "global 'memo'": state_of("s.memo = lambda n: n"),
    "_global_forward_pre_hooks": lambda world: nn.modules.module.register_module_forward_pre_hook(
        lambda m, x: None
    ),
    # modules, tensors, the optimizer
    "model.plain": model_of("m.plain = m.plain.clone()"),
    "model.plain.shape": model_of("m.plain.resize_(2, 2)"),
    "model.plain.requires_grad": model_of("m.plain.requires_grad_()"),
    "model.plain.tag": None,
    "model.steps": model_of("m.steps = torch.zeros(1)"),
    "model.layers.0.weight": model_of("m.layers[0].weight = nn.Parameter(torch.ones(4, 4))"),
    "model.layers.0.weight.data": model_of("m.layers[0].weight.data = torch.ones(4, 4)"),
    "model.layers.0.weight.requires_grad": model_of("m.layers[0].weight.requires_grad_(False)"),
    "model.layers.0.weight._backward_hooks": model_of(
        "m.layers[0].weight.register_hook(lambda g: g)"
    ),
    "model.layers.0.weight._post_accumulate_grad_hooks": model_of(
        "m.layers[0].weight.register_post_accumulate_grad_hook(lambda p: None)"
    ),
    "model.layers.0": model_of("m.layers[0] = nn.Linear(4, 4)"),
    "model.layers.3": model_of("m.layers.append(nn.ReLU())"),
    "model.extra": model_of("m.extra = nn.ReLU()"),
    "model.layers.0._forward_hooks": model_of("m.layers[0].register_forward_hook(print)"),
    "model.layers.0._backward_hooks": model_of("m.layers[0].register_full_backward_hook(print)"),
    "model._forward_pre_hooks": model_of("m.register_forward_pre_hook(lambda m, x: None)"),
    "optimizer.param_groups[0]['lr']": optimizer_of("o.param_groups[0]['lr'] = 0.5"),
    "optimizer.param_groups[0]['params']": optimizer_of("o.param_groups[0]['params'].pop()"),
    "optimizer.state": optimizer_of("o.state = dict(o.state)"),
    "optimizer.zero_grad": optimizer_of("o.zero_grad = lambda: None"),
}
del MUTATIONS["model.plain.tag"]


def names_of(name):
    """What the place may be called; a number sign begins what tells two mutations of it apart."""
    return name.partition("#")[0].split("|")


#: What stays as it is: storages are not kept, iterators only go on.
NOT_PUT_BACK = {
    "model.layers.0.weight.data",
    "model.plain.shape",
    "model.counter",
    "model.cycle",
    "model.iterator",
    "model.generator",
    "model.objects",
    "model.context",
}

MOVES = {
    "model.counter": model_of("next(m.counter)"),
    "model.cycle": model_of("next(m.cycle)"),
    "model.iterator": model_of("next(m.iterator)"),
    "model.generator": model_of("next(m.generator)"),
}


@pytest.mark.parametrize("precise", [True, False], ids=["precise", "all"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_seen_named_and_undone(world, name, precise):
    if name in NOT_PUT_BACK or (name == "model.scalar" and not precise):
        world = World()
    account = world.account(precise)
    assert account.difference() is None
    assert account.holds()
    MUTATIONS[name](world)
    seen = account.holds(), account.difference(), account.differences()
    rest = account.restore()
    assert not seen[0]
    assert any(each in text for text in seen[2] for each in names_of(name)), seen[2]
    if name not in NOT_PUT_BACK:
        assert rest == []
        assert account.holds()


@pytest.mark.parametrize("name", MOVES)
def test_what_goes_on_is_seen_and_reported(name):
    world = World()
    account = world.account()
    MOVES[name](world)
    assert not account.holds()
    assert account.difference().startswith(name)
    assert any(text.startswith(name) for text in account.restore())


HARMLESS = {
    "contents of parameters": model_of("m.layers[0].weight.data.mul_(2)"),
    "contents of buffers": model_of("m.steps.add_(1)"),
    "contents of plain tensors": model_of("m.plain.add_(1)"),
    "an attribute nobody reads": model_of("m.unnamed += 1"),
    "a new attribute nobody reads": model_of("m.brand_new = [1]"),
    "a global nobody reads": state_of("s.unread += 1"),
    "a class attribute nobody reads": state_of("s.Net.brand_new = 1"),
    "an equal number": model_of("m.number = int(str(m.number))"),
    "an equal text in a list": model_of("m.table['b']['c'][0] = int('1')"),
    "an equal tuple": model_of("m.pair = m.pair"),
    "an equal scalar": model_of("m.scalar = np.float64(1.5)"),
    "gradients": model_of("m.layers[0].weight.grad = None"),
    "a step": lambda world: world.step(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_step_does_not_read_does_not_count(name):
    world = World()
    account = world.account()
    HARMLESS[name](world)
    assert account.differences() == []
    assert account.holds()


def test_the_whole_world_can_be_walked(world):
    assert world.account().unwalkable == []


def test_all_executed_code_has_been_met(world):
    met = world.account().codes
    user = [code for code in world.codes if code.co_filename == state.__file__]
    assert len(user) > 10
    assert [code.co_qualname for code in user if code not in met] == []


class Sealed(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (open(__file__), "_io.TextIOWrapper"),  # noqa: SIM115
        (np.zeros((16 << 20) + 1, np.uint8), "an array above 16 MiB"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
        (sys._getframe(), "frame"),
        (gc, None),
        (Sealed("x"), None),
    ],
    ids=["file", "large array", "lazy parameter", "frame", "library module", "constant"],
)
def test_what_cannot_be_walked_is_said(value, what):
    account = Account.take({"model": {"thing": value}})
    found = [text for path, text in account.unwalkable if path.startswith("model['thing']")]
    assert (what is None and not found) or what in found[0]


def test_compiled_functions_that_draw_are_said():
    def loss(model, batch):
        return np.random.default_rng().normal()

    unwalkable = Account.take({"loss": loss}).unwalkable
    assert any("default_rng" in path and what == "a compiled function" for path, what in unwalkable)


def test_code_that_reads_any_attribute_may_be_left_for_later():
    class Reads(nn.Module):
        def forward(self, x):
            return getattr(self, x)

    account = Account.take({"model": Reads()}, unless_any=True)
    assert account.unwalkable == [("the code", "reads attributes by names not known")]
    assert not Account.take({"model": nn.Linear(1, 1)}, unless_any=True).unwalkable


def test_objects_are_not_asked_for_their_class():
    class Shy:
        @property
        def __class__(self):
            raise PermissionError("look away")

    account = Account.take({"shy": [Shy(), nn.Linear(1, 1)]})
    assert len(account.instances(nn.Module)) == 1


@pytest.mark.parametrize("first", range(8))
def test_sets_are_put_back_in_their_order(first):
    """Integers that are equal modulo the size of the table take each other's place."""
    names = set()
    for number in (first, first + 8, first + 16):
        names.add(number)
    account, before = Account.take({"names": names}), list(names)
    names.clear()
    names.update({first + 16, first + 8, 99})
    account.restore()
    assert list(names) == before
    assert account.holds()


def test_only_so_many_objects():
    things = [[number] for number in range(100)]
    assert Account.take({"things": things}).is_whole
    account = Account.take({"things": things}, limits=Limits(objects=50))
    assert not account.is_whole
    assert account.unwalkable


def test_module_generators_are_state():
    def loss(model, batch):
        return random.random() + np.random.rand()

    account = Account.take({"loss": loss})
    state = random.getstate()
    random.random()
    assert account.difference() is not None
    assert account.restore() == []
    assert random.getstate() == state
    np.random.rand()
    assert not account.holds()


def test_skipped_places_do_not_count(world):
    group = world.optimizer.param_groups[0]
    skip = {id(group): {"lr"}, id(world.optimizer.state): None, id(world.model): {"unnamed"}}
    account = world.account(precise=False, skip=skip)
    group["lr"] *= 2
    world.model.unnamed += 1
    world.optimizer.state["x"] = 1
    assert account.differences() == []
    group["weight_decay"] = 0.5
    del world.optimizer.state["x"]
    assert account.difference() == "optimizer.param_groups[0]['weight_decay']"
    assert account.restore() == []
    group["lr"] /= 2


def test_accounts_that_share_an_object_reach_each_other():
    box = [1]
    loader = types.SimpleNamespace(b=(1, box))
    first = Account.take({"model": {"a": box}})
    second = Account.take({"loader": loader}, everything=True)
    third = Account.take({"loader": {"b": [1], "f": state.loss, "n": nn}})
    assert first.reaches(second)
    assert first.shared(second) == ["model['a']"]
    assert not first.reaches(third)
    assert not first.reaches(Account.take({"loader": loader}))  # no code names the attribute
    weight = nn.Parameter(torch.ones(2))
    views = Account.take({"w": weight}), Account.take({"v": weight.detach()})
    assert views[0].reaches(views[1])


def test_no_code_of_the_users_runs_while_walking():
    class Touchy:
        def __getattribute__(self, name):
            raise AssertionError(name)

        def __eq__(self, other):
            raise AssertionError

        def __hash__(self):
            return 1

        def __repr__(self):
            raise AssertionError

        def __iter__(self):
            raise AssertionError

    class TouchyList(list):
        def __iter__(self):
            raise AssertionError

        def __len__(self):
            raise AssertionError

    touchy = Touchy()
    held = {touchy: TouchyList([touchy])}
    account = Account.take({"model": held})
    assert account.holds()
    list.append(held[touchy], 1)
    assert account.difference() is not None
    assert account.restore() == []


plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
nested = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


def containers_in(value):
    if isinstance(value, (list, dict)):
        yield value
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, (list, tuple, dict)):
        for each in inner:
            yield from containers_in(each)


@settings(max_examples=150, deadline=None)
@given(nested, st.data())
def test_any_container_anywhere(value, data):
    holder = {"root": value}
    account = Account.take({"model": holder})
    assert account.holds()
    chosen = data.draw(st.sampled_from(list(map(id, containers_in(holder)))))
    place = next(each for each in containers_in(holder) if id(each) == chosen)
    marker = object()
    if isinstance(place, list):
        place.insert(data.draw(st.integers(0, len(place))), marker)
    else:
        place["marker"] = marker
    assert not account.holds()
    assert account.restore() == []
    assert account.holds()


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy:DeprecationWarning")
@pytest.mark.parametrize("name", ["tests.levels.below", "tests.levels"])
def test_what_a_logger_lets_through_is_seen(name):
    logger, changed = logging.getLogger("tests.levels.below"), logging.getLogger(name)
    taken = Account.take({"loss": lambda: logger.isEnabledFor(logging.DEBUG)})
    logger.warning("%s", "kept")  # fills a cache of its own
    assert taken.holds()
    changed.setLevel(logging.ERROR)
    assert "level" in taken.difference()
    changed.setLevel(logging.NOTSET)
    assert taken.holds()
    changed.count = 1
    assert "count" in taken.difference()
    del changed.count
    assert taken.holds()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pytest would keep each
def test_accounts_are_freed(world):
    roots = {"model": world.model.cfg, "items": world.model.items}
    world.account()
    Account.take(roots, world.names)
    gc.collect()
    watched = [world.model, world.model.cfg, world.model.items, state.loss, state.Net]
    before = [sys.getrefcount(each) for each in watched], len(gc.get_objects())
    for _ in range(30):
        world.account()
    for _ in range(1000):
        Account.take(roots, world.names)
    gc.collect()
    assert [sys.getrefcount(each) for each in watched] == before[0]
    assert len(gc.get_objects()) < before[1] + 100


def test_cycles_through_an_account_are_collected():
    class Keeper:
        pass

    keeper = Keeper()
    keeper.account = Account.take({"model": keeper})
    gone = []
    finalizer = functools.partial(gone.append, 1)
    import weakref

    weakref.finalize(keeper, finalizer)
    del keeper
    gc.collect()
    assert gone == [1]


class Reader:
    """Reads what it is told to; `other` is read by nobody."""

    def __init__(self, helper):
        self.helper, self.factor, self.other = helper, 2.0, [1]

    def __call__(self):
        return self.helper() * self.factor


class Helper:
    def __init__(self):
        self.offset, self.other = 3.0, [1]

    def __call__(self):
        return self.offset


class Curious(Helper):
    def __call__(self):
        return self.offset + len(self.other)


@pytest.fixture
def walks(monkeypatch):
    """The names along which walks went, from here on; nothing is remembered of earlier ones."""
    found = []
    run = account.Walk.run

    def counted(self, roots, late):
        found.append(self.names)
        run(self, roots, late)

    monkeypatch.setattr(account.Walk, "run", counted)
    monkeypatch.setattr(account, "_KNOWN_NAMES", {})
    return found


def test_names_are_looked_for_once_for_all_of_a_kind(walks):
    first = Account.take({"call": Reader(Helper())})
    assert len(walks) > 1
    walks.clear()
    second = Account.take({"call": Reader(Helper())})
    assert walks == [first.names]
    assert second.names == first.names
    assert list(map(str, (place.trail for place in second.places))) == list(
        map(str, (place.trail for place in first.places))
    )


@pytest.mark.parametrize("kinds", [(Helper, Curious), (Curious, Helper)])
def test_what_others_of_a_kind_read_does_not_count(walks, kinds):
    alone = []
    for kind in kinds:
        account._KNOWN_NAMES.clear()
        alone.append(Account.take({"call": Reader(kind())}).names)
    account._KNOWN_NAMES.clear()
    assert [Account.take({"call": Reader(kind())}).names for kind in kinds] == alone
    assert alone[0] != alone[1]


def test_a_change_is_seen_along_remembered_names(walks):
    Account.take({"call": Reader(Helper())})
    reader = Reader(Helper())
    found = Account.take({"call": reader})
    assert found.holds()
    reader.helper.offset = 4.0
    assert found.difference() == "call.helper.offset"
