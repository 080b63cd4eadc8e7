"""What the library's code leads to is walked once, and never taken for what it no longer is."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from waterflow.account import library
from waterflow.account.account import Account
from waterflow.account.code_names import code_names
from waterflow.account.structure import Structure

pytestmark = pytest.mark.cpu


EPS = [1e-3]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.ReLU())

    def forward(self, x):
        return torch.relu(self.inner(x))


def loss(model, batch):
    made = functional.dropout(model(batch[0]), 0.0)
    return functional.cross_entropy(made, batch[1])


def roots():
    model = Net()
    return {"model": model, "loss": loss, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def found(account):
    """All that an account holds, but for its order."""
    places = sorted(
        (type(place).__name__, *map(id, holders(place)), *named(place)) for place in account.places
    )
    return places, account.codes, sorted(account.unwalkable), account.objects


def holders(place):
    if hasattr(place, "holders"):
        return place.holders
    names = ("holder", "kind", "namespace", "cell", "function", "tensor")
    return [getattr(place, name) for name in names if hasattr(place, name)][:1]


def named(place):
    return sorted(getattr(place, "trails", ()))


def walked_anew(taken):
    library._parts.clear()
    return Account.take(taken)


@pytest.fixture(autouse=True)
def _nothing_known():
    library._parts.clear()
    yield
    library._parts.clear()


def others(*_arguments, **_options):
    return 0


@contextlib.contextmanager
def set_in(owner, name, value):
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def hooked():
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, made: None)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def in_cell():
    """In place of what a function of the library's wraps."""
    (cell,) = vars(torch.optim.SGD)["step"].__closure__
    before, cell.cell_contents = cell.cell_contents, others
    try:
        yield
    finally:
        cell.cell_contents = before


@contextlib.contextmanager
def of_other_code():
    before, functional.cross_entropy.__code__ = functional.cross_entropy.__code__, others.__code__
    try:
        yield
    finally:
        functional.cross_entropy.__code__ = before


@contextlib.contextmanager
def of_other_defaults():
    before = functional.cross_entropy.__defaults__
    functional.cross_entropy.__defaults__ = (*before[:-1], 0.5)
    try:
        yield
    finally:
        functional.cross_entropy.__defaults__ = before


#: A built-in function that dropout's module would find among its own variables first.
BUILT_IN = min(code_names(functional.dropout.__code__).global_names - vars(functional).keys())

CHANGES = {
    "a hook of all modules": hooked,
    "a function of a module": lambda: set_in(functional, "cross_entropy", others),
    "a function that one of the library's calls": lambda: set_in(
        functional, "has_torch_function_variadic", others
    ),
    "a variable that was not there": lambda: set_in(functional, BUILT_IN, others),
    "a method": lambda: set_in(nn.Linear, "forward", others),
    "a method that is overridden": lambda: set_in(nn.Linear, "__call__", others),
    "a method of a base": lambda: set_in(torch.optim.Optimizer, "zero_grad", others),
    "a function's code": of_other_code,
    "a function's defaults": of_other_defaults,
    "what a function wraps": in_cell,
    "an object of the user's in a class": lambda: set_in(nn.ReLU, "forward", Net()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_the_library_are_seen(change):
    taken = roots()
    before = Account.take(taken)
    assert before.library is not None
    with CHANGES[change]():
        now = Account.take(taken)
        assert now.holds()
        assert found(now) == found(walked_anew(taken))
        assert not before.holds() or found(now) != found(before)
    again = Account.take(taken)
    assert again.holds()
    assert again.library is not None  # another structure, if there were none any more
    assert found(again) == found(before)
    assert before.holds()


def test_a_hook_of_all_modules_leads_on_as_the_users_own_code_does():
    def noted(module, given, made):
        return functional.normalize(made, eps=EPS[0])

    taken = roots()
    assert Account.take(taken).library is not None
    handle = nn.modules.module.register_module_forward_hook(noted)
    try:
        account = Account.take(taken)
        assert id(EPS) in account.objects
        assert noted.__code__ in account.codes
        EPS[0] = 2e-3
        assert "EPS" in account.difference()
    finally:
        handle.remove()
        EPS[0] = 1e-3


def test_the_library_is_walked_once_for_jobs_of_a_kind():
    one, other = Account.take(roots()), Account.take(roots())
    assert one.library is other.library
    assert len(one.library.places) > len(one.own_places)


def test_a_part_that_is_walked_again_has_the_same_structure():
    taken = roots()
    one, other = Account.take(taken), walked_anew(taken)
    assert one.library is not other.library
    first, second = (Structure(each, taken.values(), portable=True) for each in (one, other))
    assert first.digest == second.digest
    assert first.portable is not None
    assert first.portable == second.portable


def test_who_holds_an_object_of_the_librarys_is_told_from_who_holds_one_like_it():
    hooks = nn.modules.module._global_forward_hooks
    kinds = []
    for held in (hooks, nn.modules.module._global_backward_hooks, type(hooks)()):
        taken = roots() | {"held": [held]}
        account = Account.take(taken)
        assert account.library is not None
        kinds.append(Structure(account, taken.values(), portable=True))
    assert len({kind.digest for kind in kinds}) == 3
    assert len({kind.portable for kind in kinds}) == 3


def test_differences_in_the_library_are_named_and_put_back():
    account = Account.take(roots())
    before = vars(nn.Linear)["forward"]
    try:
        nn.Linear.forward = others
        assert account.difference() == "Linear.forward"
        assert account.differences() == ["Linear.forward"]
        assert account.restore() == []
        assert vars(nn.Linear)["forward"] is before
    finally:
        nn.Linear.forward = before


@pytest.mark.parametrize("change", [of_other_code, of_other_defaults])
def test_a_function_that_was_changed_in_place_is_none_of_the_librarys(change):
    taken = roots()
    account = Account.take(taken)
    before = Structure(account, taken.values(), portable=True)
    with change():
        assert account.difference() == "the function cross_entropy"
        changed = Structure(Account.take(taken), taken.values(), portable=True)
        assert changed.digest != before.digest
        assert changed.portable != before.portable
        assert account.restore() == []
        assert functional.cross_entropy(torch.eye(3), torch.arange(3)) > 0
    again = Structure(Account.take(taken), taken.values(), portable=True)
    assert again.digest == before.digest
    assert again.portable == before.portable


def test_few_parts_are_kept(monkeypatch):
    monkeypatch.setattr(library, "_MOST_PARTS", 2)
    for name in ("one", "two", "three"):
        Account.take(roots(), names={name, "forward"})
    assert len(library._parts) == 2


KINDS = {
    "convolutions": lambda: nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.MaxPool2d(2)),
    "recurrent": lambda: nn.LSTM(3, 3),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, batch_first=True),
    "sparse": lambda: nn.EmbeddingBag(5, 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_common_models_lead_to_is_shared(kind):
    one, other = (Account.take({"model": KINDS[kind](), "loss": loss}) for _ in range(2))
    assert one.library is not None
    assert one.library is other.library


def test_what_leads_to_a_generator_of_everybodys_is_not_shared():
    def noisy(model, batch):
        return model(batch[0]).sum() * np.random.random()

    for _ in range(2):
        account = Account.take({"loss": noisy})
        assert account.library is None
        assert account.unwalkable
