"""Cases: optimizers, schedulers, and what is done to them while they are at work."""

from __future__ import annotations

import copy
import functools
import itertools

import torch
from case_exactness import Subject, at, batches, case, cross_entropy, every, job, mlp, sgd
from torch import nn, optim
from torch.optim import lr_scheduler, swa_utils

KEPT = ("captured", "recaptured")
EAGER = ("captured", "recaptured", "opaque optimizer")


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
optimized("lbfgs", functools.partial(optim.LBFGS, lr=0.1, max_iter=3), "opaque")
optimized(
    "lbfgs_searching",
    functools.partial(optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe"),
    "opaque",
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


@case(*EAGER)
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


@case(*EAGER)
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


# -- hooks


@case(*EAGER)
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


# -- changed in a callback


def changed(name, change, kind=None, *expected):
    """Enters a case whose callback changes the optimizer, or the weights through it, at step 4."""

    def make(live):
        model = mlp()
        optimizer = (kind or sgd)(model)
        act = at(4, live, lambda: change(optimizer))
        return job(model, optimizer=optimizer, on_step=act)

    make.__name__ = name
    case(*(expected or KEPT))(make)


def _adam(model):
    return optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)


def _set(**values):
    return lambda optimizer: optimizer.param_groups[0].update(values)


def _states(optimizer):
    return [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]


changed("rate_changed", _set(lr=0.01))
changed("momentum_changed", _set(momentum=0.5))
changed("momentum_switched_off", _set(momentum=0.0))
changed("dampening_changed", _set(dampening=0.3))
changed("nesterov_switched_on", _set(nesterov=True))
changed("weight_decay_switched_on", _set(weight_decay=0.1))
changed("direction_turned", _set(maximize=True))
changed("betas_changed", _set(betas=(0.5, 0.9)), _adam)
changed("epsilon_changed", _set(eps=1e-3), _adam)
changed("decay_decoupled", _set(decoupled_weight_decay=True), _adam)
changed("second_moments_scaled", lambda o: _states(o)[0]["exp_avg_sq"].mul_(9), _adam)
changed("state_cleared", lambda o: o.state.clear())
changed("state_of_one_parameter_removed", lambda o: o.state.pop(o.param_groups[0]["params"][0]))
changed("state_scaled_in_place", lambda o: [s["momentum_buffer"].mul_(0.1) for s in _states(o)])
changed(
    "state_tensor_replaced",
    lambda o: _states(o)[0].update(momentum_buffer=torch.zeros(32, 16)),
)
changed("step_count_reset", lambda o: [s["step"].zero_() for s in _states(o)], _adam)
changed(
    "weights_clamped", lambda o: [p.data.clamp_(-0.1, 0.1) for p in o.param_groups[0]["params"]]
)
changed("method_of_the_optimizer_patched", lambda o: setattr(o, "step", lambda: None), None, *EAGER)


@case(*KEPT)
def optimizer_state_loaded_back(live):
    model, kept = mlp(), []
    optimizer = _adam(model)

    def change(step):
        if step == 3:
            kept.append(copy.deepcopy(optimizer.state_dict()))
        if step == 6:
            optimizer.load_state_dict(kept[0])

    return job(model, optimizer=optimizer, on_step=every(live, change))


@case(*KEPT)
def everything_loaded_back(live):
    """Back to the best weights so far, as early stopping and roll-backs do."""
    model, kept = mlp(), {}
    optimizer = _adam(model)

    def change(step):
        if step == 3:
            kept.update(model=copy.deepcopy(model.state_dict()), state=optimizer.state_dict())
        if step == 6:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["state"])

    return job(model, optimizer=optimizer, on_step=every(live, change))


@case(*KEPT)
def group_added(live):
    model = mlp()
    optimizer = optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    group = {"params": list(model[0].parameters()), "lr": 0.02}
    return job(
        model, optimizer=optimizer, on_step=at(4, live, lambda: optimizer.add_param_group(group))
    )


@case(*KEPT)
def group_removed(live):
    model = mlp()
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]
    optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
    return job(
        model, optimizer=optimizer, on_step=at(4, live, lambda: optimizer.param_groups.pop())
    )


@case(*KEPT)
def second_optimizer_stepped_by_the_callback(live):
    model = mlp()
    first, second = (optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))

    def change(step):
        second.step()
        second.zero_grad()

    return job(model, optimizer=first, on_step=every(live, change))


@case(*KEPT, matters=False)
def gradients_looked_at(live):
    model, norms = mlp(), []
    change = every(True, lambda step: norms.append([p.grad.norm() for p in model.parameters()]))
    return Subject(job(model, on_step=change), lambda: norms)


@case(*KEPT, matters=False)
def gradients_asked_for(live):
    model = mlp()
    gradients = []

    def look(parameters):
        gradients.append([p.grad.clone() for p in parameters])

    made = job(model, keep_grads=True, on_step=every(True, lambda s: look(model.parameters())))
    return Subject(made, lambda: gradients)


@case(*KEPT, matters=False)
def gradients_left_at_the_end(live):
    model = mlp()
    return Subject(job(model, keep_grads=True), lambda: [p.grad for p in model.parameters()])


# -- averages of the weights


@case(*KEPT, matters=False)
def stochastic_weight_averaging(live):
    model = mlp()
    optimizer = sgd(model)
    average = swa_utils.AveragedModel(model)
    slow = swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)

    def change(step):
        if step > 4:
            average.update_parameters(model)
            slow.step()

    return Subject(job(model, optimizer=optimizer, on_step=every(True, change)), average.state_dict)


@case(*KEPT)
def moving_average_swapped_in(live):
    model = mlp()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7))

    def change(step):
        average.update_parameters(model)
        if step == 6:
            model.load_state_dict(average.module.state_dict())

    return Subject(job(model, on_step=every(live, change)), average.state_dict)


@case(*KEPT, matters=False)
def copies_of_the_model(live):
    model, kept = mlp(0.2), []
    made = job(model, on_step=every(True, lambda step: kept.append(copy.deepcopy(model))))
    return Subject(made, lambda: [copied.state_dict() for copied in kept])


# -- schedulers


def scheduled(name, kind, *expected, optimizer=sgd, **options):
    """Enters a case of a scheduler; one that is not live does without."""

    def make(live):
        model = mlp()
        chosen = optimizer(model)
        return job(
            model,
            optimizer=chosen,
            scheduler=kind(chosen) if live else None,
            data=batches(5),
            epochs=3,
            **options,
        )

    make.__name__ = name
    case(*(expected or ("captured",)))(make)


S = lr_scheduler
scheduled("exponential", lambda o: S.ExponentialLR(o, 0.8))
scheduled("cosine_with_restarts", lambda o: S.CosineAnnealingWarmRestarts(o, 4))
scheduled("one_cycle", lambda o: S.OneCycleLR(o, 0.3, total_steps=15), *KEPT)
scheduled("one_cycle_with_betas", lambda o: S.OneCycleLR(o, 0.03, 15), *KEPT, optimizer=_adam)
scheduled("cyclic_with_momentum", lambda o: S.CyclicLR(o, 0.01, 0.2, 3), *KEPT)
scheduled("multiplicative", lambda o: S.MultiplicativeLR(o, lambda step: 0.9))
scheduled("chained", lambda o: S.ChainedScheduler([S.ExponentialLR(o, 0.9), S.StepLR(o, 3)]))
scheduled(
    "sequential",
    lambda o: S.SequentialLR(o, [S.ConstantLR(o, 0.1), S.ExponentialLR(o, 0.9)], [5]),
)
scheduled("every_epoch", lambda o: S.StepLR(o, 1, 0.3), scheduler_every="epoch")
scheduled("on_a_plateau", lambda o: S.ReduceLROnPlateau(o, patience=0, threshold=0.3))
scheduled(
    "on_a_plateau_of_epochs",
    lambda o: S.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    scheduler_every="epoch",
)


@case("captured")
def lambda_with_state(live):
    model, calls = mlp(), itertools.count(1)
    optimizer = sgd(model)
    scheduler = S.LambdaLR(optimizer, lambda step: 1 / (next(calls) if live else 1))
    return job(model, optimizer=optimizer, scheduler=scheduler)


@case(*KEPT)
def scheduler_of_the_weight_decay(live):
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)

    class Decay:
        calls = 0

        def step(self):
            self.calls += 1
            optimizer.param_groups[0]["weight_decay"] = 0.1 * self.calls if live else 0.01

    return job(model, optimizer=optimizer, scheduler=Decay())


@case(*KEPT, matters=False)
def scheduler_that_looks_at_the_weights(live):
    model = mlp()
    optimizer = sgd(model)

    class Trust:
        def step(self):
            norm = model[0].weight.norm().item()
            optimizer.param_groups[0]["lr"] = 0.02 * norm

    return job(model, optimizer=optimizer, scheduler=Trust())


@case(*KEPT)
def plateau_stepped_by_the_callback(live):
    model = mlp()
    optimizer = sgd(model)
    plateau = S.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)

    def on_step(result):
        if live:
            plateau.step(result.loss)

    return job(model, optimizer=optimizer, on_step=on_step)


@case(*KEPT, "opaque")
def rate_set_by_the_loss_function(live):
    model = mlp()
    optimizer = sgd(model)

    def loss(model, batch):
        value = cross_entropy(model, batch)
        if live:
            optimizer.param_groups[0]["lr"] *= 0.8
        return value

    return job(model, loss, optimizer=optimizer)


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
