"""Cases: optimizers of torch's and of the user's own, and hooks on them."""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
import types

import torch
from torch import nn, optim

from tests.exactness.case import EAGER, Subject, at, case, cross_entropy, job, mlp, sgd

# -- optimizers of torch, each in the loop as it is


def optimized(name, kind, *expected, **options):
    """Enters a case of one of torch's optimizers; those that are not live use plain SGD."""

    def make(live):
        model = mlp()
        made = kind(model.parameters()) if live else optim.SGD(model.parameters(), lr=1e-3)
        return job(model, optimizer=made)

    make.__name__ = name
    case(*expected, **options)(make)


optimized("adamw", functools.partial(optim.AdamW, lr=0.01), "captured")
optimized("adam_amsgrad", functools.partial(optim.Adam, lr=0.01, amsgrad=True), "captured")
optimized("radam", functools.partial(optim.RAdam, lr=0.01), *EAGER)
optimized("asgd", functools.partial(optim.ASGD, lr=0.05), *EAGER)
optimized("rprop", functools.partial(optim.Rprop, lr=0.01), *EAGER)
optimized("adafactor", functools.partial(optim.Adafactor, lr=0.01), *EAGER)
optimized("adam_with_a_tensor_rate", lambda p: optim.Adam(p, lr=torch.tensor(0.01)), "captured")
optimized("lbfgs", functools.partial(optim.LBFGS, lr=0.1, max_iter=3), "opaque", "opaque optimizer")
optimized(
    "lbfgs_searching",
    functools.partial(optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe"),
    *("opaque", "opaque optimizer"),
)


# -- optimizers of the user's own


class Lion(optim.Optimizer):
    def __init__(self, params, lr=0.003):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_(mean.lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


optimized("optimizer_of_ones_own", Lion, *EAGER)


@case("opaque", *EAGER)
def accumulation_by_an_overridden_zero_grad(live):
    class Accumulating(optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none=True):
            if not live or self.calls % 4 == 0:
                super().zero_grad(set_to_none)

        def step(self, closure=None):
            self.calls += 1
            return super().step() if self.calls % 4 == 0 else None

    model = mlp()
    return job(model, optimizer=Accumulating(model.parameters(), lr=0.1))


@case("opaque", *EAGER)
def zero_grad_that_keeps_a_share(live):
    class Heavy(optim.SGD):
        def zero_grad(self, set_to_none=True):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5 if live else 0.0)

    model = mlp()
    return job(model, optimizer=Heavy(model.parameters(), lr=0.1))


@case(*EAGER)
def optimizer_that_counts_in_its_class(live):
    class Decaying(optim.SGD):
        calls = 0

        def step(self, closure=None):
            Decaying.calls += 1
            self.param_groups[0]["lr"] = 0.1 / (Decaying.calls if live else 1)
            return super().step()

    model = mlp()
    made = job(model, optimizer=Decaying(model.parameters(), lr=0.1))
    return Subject(made, lambda: Decaying.calls)


@case(*EAGER)
def optimizer_that_adds_noise(live):
    class Langevin(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1)
                if live and p.grad.norm() < 1e9:
                    p.add_(torch.randn_like(p), alpha=0.01)

    model = mlp(0.2)
    return job(model, optimizer=Langevin(model.parameters()))


@case(*EAGER)
def optimizer_that_branches_on_gradients(live):
    class Careful(optim.SGD):
        skipped = 0

        def step(self, closure=None):
            norm = sum(p.grad.square().sum() for p in self.param_groups[0]["params"]).sqrt()
            if live and norm > 0.5:
                self.skipped += 1
                return None
            return super().step()

    model = mlp()
    optimizer = Careful(model.parameters(), lr=0.3)
    return Subject(job(model, optimizer=optimizer), lambda: optimizer.skipped)


@case(*EAGER)
def look_ahead(live):
    """Slow weights kept beside the fast ones, by an optimizer around another one."""

    class LookAhead(optim.SGD):
        calls = 0

        @torch.no_grad()
        def step(self, closure=None):
            params = self.param_groups[0]["params"]
            if self.calls == 0:
                self.slow = [p.detach().clone() for p in params]
            super().step()
            self.calls += 1
            if live and self.calls % 3 == 0:
                for slow, p in zip(self.slow, params, strict=True):
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)

    model = mlp()
    return job(model, optimizer=LookAhead(model.parameters(), lr=0.1))


# -- numbers that an optimizer of the user's own looks at, at a value that matters later


def looking(name, way):
    """Enters a case of an optimizer that makes another number of one of its own."""

    class Looking(optim.Optimizer):
        def __init__(self, params, share):
            super().__init__(params, {"lr": 0.1, "share": share})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                factor = float(way(group["share"]))
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"] * (1.0 + factor))

    def make(live):
        model = mlp()
        return job(model, optimizer=Looking(model.parameters(), 0.5 if live else 0.25))

    make.__name__ = f"share_{name}"
    case(*EAGER, "captured", "opaque")(make)


def _or_one(share):
    try:
        return {0.5: 2.0}[share]
    except (KeyError, TypeError):
        return 1.0


looking("rounded_of_a_plain_one", lambda share: int(float(share) * 10))
looking("rounded_without_its_sign", lambda share: int(abs(share) * 10))
looking("rounded_in_its_real_part", lambda share: int(share.real * 10))
looking("as_text", lambda share: str(share)[:3])
looking("as_a_formatted_text", lambda share: "%.1f" % share)  # noqa: UP031
looking("as_a_fraction", lambda share: share.as_integer_ratio()[1].bit_length())
looking("as_json", lambda share: json.dumps(share)[:3])
looking("as_bytes", lambda share: struct.pack("d", share)[6])
looking("taken_apart", lambda share: math.frexp(share)[1])
looking("that_is_close", lambda share: 2.0 if math.isclose(share, 0.5, rel_tol=1e-3) else 1.0)
looking("looked_up", lambda share: {0.5: 2.0}.get(share, 1.0))
looking("looked_up_with_an_excuse", _or_one)
looking("in_a_set", lambda share: 2.0 if share in {0.5} else 1.0)
looking("of_a_type", lambda share: share if type(share) is float else 2.0)
looking("rounded_by_a_tensor", lambda share: torch.tensor(10 * share, dtype=torch.int64))


# -- hooks


@case("opaque", *EAGER)
def hook_that_clips_more_and_more(live):
    model, calls = mlp(), itertools.count(1)
    optimizer = sgd(model)

    def clip(*_):
        nn.utils.clip_grad_norm_(model.parameters(), 1 / (next(calls) if live else 1) ** 2)

    optimizer.register_step_pre_hook(clip)
    return job(model, optimizer=optimizer)


@case(*EAGER)
def hook_that_adds_noise_to_gradients(live):
    model = mlp(0.2)
    optimizer = sgd(model)

    def disturb(*_):
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=0.05 if live else 0.0)

    optimizer.register_step_pre_hook(disturb)
    return job(model, optimizer=optimizer)


@case(*EAGER)
def hook_added_to_the_optimizer(live):
    model = mlp()
    optimizer = sgd(model)

    def shrink(*_):
        model[0].weight.data.mul_(0.9)

    change = at(4, live, lambda: optimizer.register_step_post_hook(shrink))
    return job(model, optimizer=optimizer, on_step=change)


@case("captured", "opaque", matters=False)
def optimizer_in_the_backward_pass(live):
    """Each parameter has an optimizer, stepped by a hook as soon as its gradient is there."""
    model = mlp()
    each = {p: optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p):
        each[p].step()
        each[p].zero_grad()

    for p in list(model.parameters())[:-1]:
        p.register_post_accumulate_grad_hook(update)
    return job(model, optimizer=optim.SGD([model[-1].bias], lr=0.1))


# -- sparse gradients


def _embedding(live, kind):
    model = nn.EmbeddingBag(20, 4, sparse=live)
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randint(0, 20, (8, 3), generator=generator), torch.arange(8) % 4) for _ in range(10)
    ]
    return job(model, optimizer=kind(model.parameters()), data=data)


@case("opaque", "captured", matters=False)
def sparse_gradients(live):
    return _embedding(live, functools.partial(optim.SGD, lr=0.1))


@case("opaque", "captured", "opaque optimizer", matters=False)
def sparse_adam(live):
    return _embedding(True, functools.partial(optim.SparseAdam, lr=0.1))


# -- a step of the object's own


def _shrinking(model, step, live):
    """A step that is the one that was there, and more from the sixth on."""
    made = itertools.count(1)

    def stepping(*given):
        step(*given)
        if live and next(made) > 5:
            with torch.no_grad():
                model[0].weight.mul_(0.9)

    return stepping


@case("opaque", "opaque optimizer")
def step_replaced_on_the_object(live):
    model = mlp()
    optimizer = sgd(model)
    optimizer.step = _shrinking(model, optimizer.step, live)
    return job(model, optimizer=optimizer)


@case("opaque", "opaque optimizer")
def step_replaced_within_a_schedulers_wrapper(live):
    model = mlp()
    optimizer = sgd(model)
    step = _shrinking(model, type(optimizer).step, live)
    optimizer.step = types.MethodType(lambda self, closure=None: step(self), optimizer)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return job(model, optimizer=optimizer, scheduler=scheduler)


# -- gradients of what it does not train, which nothing drops


@case("opaque")
def clipping_of_more_than_is_trained(live):
    model = mlp()
    optimizer = sgd(model[2])
    more = model if live else model[2]

    def clip(*_):
        nn.utils.clip_grad_norm_(more.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)
    return job(model, optimizer=optimizer)


@case("opaque")
def loss_of_gradients_that_add_up(live):
    model = mlp()
    made = itertools.count(1)

    def loss(model, batch):
        found = cross_entropy(model, batch)
        if live and next(made) > 5:
            found = found * (1 + model[0].weight.grad.norm())
        return found

    return job(model, loss, optimizer=sgd(model[2]))
