"""Cases: schedulers of every kind."""

from __future__ import annotations

import itertools

from torch import optim
from torch.optim import lr_scheduler

from tests.exactness.case import KEPT, adam, batches, case, cross_entropy, job, mlp, sgd

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
scheduled("one_cycle_with_betas", lambda o: S.OneCycleLR(o, 0.03, 15), *KEPT, optimizer=adam)
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


# -- with code of the user's that looks at gradients, or steps an optimizer


@case("opaque")
def lambda_of_a_gradient(live):
    model = mlp()
    optimizer = sgd(model)

    def rate(epoch):
        gradient = model[0].weight.grad
        return 1.0 if gradient is None or not live else 1 / (1 + gradient.norm().item())

    return job(model, optimizer=optimizer, scheduler=S.LambdaLR(optimizer, rate))


@case("opaque")
def own_scheduler_of_a_gradient(live):
    model = mlp()
    optimizer = sgd(model)

    class ByNorm(S.LRScheduler):
        def get_lr(self):
            gradient = self.optimizer.param_groups[0]["params"][0].grad
            return [0.1 if gradient is None or not live else 0.1 / (1 + gradient.norm().item())]

    return job(model, optimizer=optimizer, scheduler=ByNorm(optimizer))


@case("opaque")
def own_scheduler_that_steps_its_optimizer(live):
    model = mlp()
    optimizer = sgd(model)

    class Again(S.ExponentialLR):
        def step(self, epoch=None):
            super().step(epoch)
            if live and self.last_epoch > 2:
                self.optimizer.step()

    return job(model, optimizer=optimizer, scheduler=Again(optimizer, 0.9))


@case("opaque")
def own_scheduler_that_steps_another_optimizer(live):
    model = mlp()
    optimizer, other = sgd(model[2]), sgd(model[0], lr=0.01)

    class Both(S.ExponentialLR):
        def step(self, epoch=None):
            super().step(epoch)
            if live:
                other.step()
            other.zero_grad()

    return job(model, optimizer=optimizer, scheduler=Both(optimizer, 0.9))
