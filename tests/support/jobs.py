# ruff: noqa: C408  (a table of keyword arguments reads best as calls)
"""The table of jobs whose numbers must be those of the plain loop, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import waterflow as wf
from tests.support.data import (
    cross_entropy,
    dict_loss,
    dicts,
    loader,
    named,
    pairs,
    penalty_loss,
    record_loss,
    records,
    transposed_loss,
)
from tests.support.models import (
    Attention,
    Autocast,
    Bagged,
    Clamped,
    Cnn,
    Custom,
    Ema,
    EncoderLayer,
    InPlace,
    Mlp,
    Noisy,
    Normed,
    Partly,
    Plain,
    Recurrent,
    Routed,
    Tied,
    Transposed,
)

Build = Callable[[], wf.Job]


def sgd(parameters):
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return optim.Adam(parameters, lr=0.01)


def adamw(parameters):
    return optim.AdamW(parameters, lr=0.02)


def build(
    name: str,
    model: Callable[[], nn.Module],
    optimizer: Callable[[Any], optim.Optimizer] = sgd,
    data: Callable[[], Any] = pairs,
    loss: Any = cross_entropy,
    scheduler: Callable[[Any], Any] | None = None,
    prepare: Callable[[nn.Module, optim.Optimizer], None] | None = None,
    **options: Any,
) -> wf.Job:
    """A new job; equal weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        net = model()
    chosen = optimizer(net.parameters() if not getattr(optimizer, "whole", False) else net)
    if prepare is not None:
        prepare(net, chosen)
    if scheduler is not None:
        options["scheduler"] = scheduler(chosen)
    options.setdefault("epochs", 2)
    return wf.Job(name, model=net, optimizer=chosen, loss=loss, data=data(), seed=5, **options)


def table(**entries: dict[str, Any]) -> dict[str, Build]:
    return {name: partial(build, name, **options) for name, options in entries.items()}


tokens = partial(pairs, "tokens")
images = partial(pairs, "images")

MODELS = table(
    cnn=dict(model=Cnn, data=images),
    cnn_shuffled=dict(model=Cnn, data=partial(loader, "images"), optimizer=adamw),
    encoder=dict(model=EncoderLayer, data=partial(loader, "tokens"), optimizer=adamw),
    attention_causal=dict(model=Attention, data=tokens, optimizer=adamw),
    attention_masked=dict(model=partial(Attention, mask=True), data=tokens),
    attention_plain=dict(model=partial(Attention, dropout=0.0), data=tokens),
    lstm=dict(model=Recurrent, data=tokens),
    lstm_deep=dict(
        model=partial(Recurrent, num_layers=2, bidirectional=True, dropout=0.2), data=tokens
    ),
    gru=dict(model=partial(Recurrent, nn.GRU), data=tokens, optimizer=adamw),
    rnn=dict(model=partial(Recurrent, nn.RNN), data=tokens),
    tied=dict(model=Tied, data=tokens, optimizer=adamw),
    partly=dict(model=Partly),
    in_place=dict(model=InPlace),
    autocast=dict(model=Autocast, data=images, optimizer=adamw),
    custom=dict(model=Custom),
    noisy=dict(model=Noisy),
    noisy_shuffled=dict(model=Noisy, data=loader),
    ema=dict(model=Ema),
    normed=dict(model=Normed),
    routed=dict(model=Routed, optimizer=adamw),
    bagged=dict(model=Bagged, data=tokens),
    plain=dict(model=Plain),
    clamped=dict(model=Clamped),
    transposed=dict(model=Transposed, loss=transposed_loss),
    penalty=dict(model=Mlp, loss=penalty_loss),
)


def frozen_too(net: nn.Module, optimizer: optim.Optimizer) -> None:
    """Freezes after the optimizer was made: the optimizer still holds the layer."""
    net.one.requires_grad_(False)


def clip_hook(net: nn.Module, optimizer: optim.Optimizer) -> None:
    """Clips as a hook of the optimizer, through the model."""

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)


def clip_hook_list(net: nn.Module, optimizer: optim.Optimizer) -> None:
    """The same, through a list of its own."""
    parameters = list(net.parameters())

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.1)

    optimizer.register_step_pre_hook(clip)


def decay_hook(net: nn.Module, optimizer: optim.Optimizer) -> None:
    """Changes parameters after each step, through the optimizer's group."""
    (group,) = optimizer.param_groups

    def decay(*_: Any) -> None:
        with torch.no_grad():
            for parameter in group["params"]:
                parameter.mul_(0.9).add_(parameter.sign(), alpha=0.01)

    optimizer.register_step_post_hook(decay)


def gradient_hook(net: nn.Module, optimizer: optim.Optimizer) -> None:
    net.one.weight.register_hook(lambda gradient: gradient * 0.5)


def trained_before(net: nn.Module, optimizer: optim.Optimizer) -> None:
    """Has made steps before waterflow sees it."""
    for batch in pairs():
        optimizer.zero_grad()
        cross_entropy(net, batch).backward()
        optimizer.step()


def groups(parameters):
    one, *rest = parameters
    return optim.AdamW(
        [{"params": [one], "lr": 0.1, "weight_decay": 0.0}, {"params": rest, "betas": (0.8, 0.9)}],
        lr=0.01,
    )


def groups_sgd(parameters):
    one, two, *rest = parameters
    return optim.SGD(
        [{"params": [one, two], "momentum": 0.0}, {"params": rest, "lr": 0.3}],
        lr=0.1,
        momentum=0.9,
        weight_decay=0.1,
    )


TRAINING = table(
    frozen_later=dict(model=Mlp, prepare=frozen_too, optimizer=adamw),
    clip=dict(model=Mlp, clip_grad_norm=0.1),
    clip_foreach=dict(
        model=Mlp, clip_grad_norm=0.1, optimizer=lambda p: optim.AdamW(p, lr=0.02, foreach=True)
    ),
    clip_hook=dict(model=Mlp, prepare=clip_hook),
    clip_hook_list=dict(model=Mlp, prepare=clip_hook_list, optimizer=adamw),
    decay_hook=dict(model=Mlp, prepare=decay_hook),
    gradient_hook=dict(model=Mlp, prepare=gradient_hook),
    trained_before=dict(model=Mlp, prepare=trained_before, optimizer=adamw),
    trained_before_momentum=dict(model=Mlp, prepare=trained_before),
    groups=dict(model=Mlp, optimizer=groups),
    groups_sgd=dict(model=Mlp, optimizer=groups_sgd, clip_grad_norm=1.0),
    dict_batch=dict(model=Mlp, data=dicts, loss=dict_loss),
    named_batch=dict(model=Mlp, data=named),
    record_batch=dict(model=Mlp, data=records, loss=record_loss),
    last_batch=dict(model=Mlp, data=partial(pairs, sizes=(3, 3, 2)), optimizer=adamw),
    shuffled=dict(model=Mlp, data=loader),
    one_step=dict(model=Mlp, steps=1, epochs=None, optimizer=adamw),
    eager=dict(model=Cnn, data=images, capture=False),
)


def gan(*, drops: bool = True, scheduled: bool = False, **options: Any) -> wf.Job:
    """Two networks against each other in a step of their own.

    `drops`: whether the gradients of the step before go; else they add up.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        data = [batch[0] for batch in pairs()]
        size = data[0][0].numel()
        maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, size))
        critic = nn.Sequential(nn.Linear(size, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    of_maker, of_critic = adam(maker.parameters()), sgd(critic.parameters())

    def step(real: torch.Tensor) -> Any:
        real = real.flatten(1).float()
        made = maker(torch.randn(len(real), 4))
        if drops:
            of_critic.zero_grad()
        critic_loss = (critic(made.detach()) - critic(real)).mean().exp()
        critic_loss.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        of_critic.step()
        if drops:
            of_maker.zero_grad()
        loss = -critic(made).mean()
        loss.backward()
        of_maker.step()
        return loss, {"critic": critic_loss}

    if scheduled:
        options["schedulers"] = [
            lr_scheduler.StepLR(of_maker, 2, 0.3),
            lr_scheduler.ExponentialLR(of_critic, 0.9),
        ]
    options.setdefault("epochs", 2)
    return wf.Job(
        "gan_scheduled" if scheduled else "gan" if drops else "gan_summed",
        model={"maker": maker, "critic": critic},
        optimizers=[of_maker, of_critic],
        step=step,
        data=data,
        seed=5,
        **options,
    )


OWN_STEPS: dict[str, Build] = {
    "gan": gan,
    "gan_summed": partial(gan, drops=False),
    "gan_scheduled": partial(gan, scheduled=True),
}

SCHEDULERS = table(
    step_lr=dict(model=Mlp, scheduler=lambda o: lr_scheduler.StepLR(o, 2, 0.3)),
    cosine=dict(
        model=Mlp, optimizer=adamw, scheduler=lambda o: lr_scheduler.CosineAnnealingLR(o, 5)
    ),
    cosine_to_zero=dict(model=Mlp, scheduler=lambda o: lr_scheduler.CosineAnnealingLR(o, 2)),
    one_cycle=dict(
        model=Mlp, scheduler=lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8), epochs=3
    ),
    one_cycle_adam=dict(
        model=Mlp,
        scheduler=lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8),
        optimizer=lambda p: optim.Adam(p, lr=0.02, fused=True),
    ),
    warm_up_from_zero=dict(
        model=Mlp, optimizer=adamw, scheduler=lambda o: lr_scheduler.LambdaLR(o, lambda s: s / 3)
    ),
    epoch_lambda=dict(
        model=Mlp,
        scheduler=lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5**e),
        scheduler_every="epoch",
        epochs=3,
    ),
    tensor_lr_scheduled=dict(
        model=Mlp,
        optimizer=lambda p: optim.Adam(p, lr=torch.tensor(0.1), foreach=False, capturable=False),
        scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    ),
    tensor_lr_fused=dict(
        model=Mlp,
        optimizer=lambda p: optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, fused=True),
        scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    ),
)


def variants(name: str, kind: Any, *, fused: bool = False, **options: Any) -> dict[str, Any]:
    """The forms of one optimizer: plain, foreach and, where there is one, fused."""
    forms: dict[str, dict[str, bool]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}}
    if fused:
        forms["fused"] = {"fused": True}
    return {
        f"{name}_{form}": dict(model=Mlp, optimizer=partial(kind, **options, **flags), epochs=2)
        for form, flags in forms.items()
    }


OPTIMIZERS = table(
    **variants("sgd", optim.SGD, fused=True, lr=0.1),
    **variants("momentum", optim.SGD, fused=True, lr=0.1, momentum=0.9, dampening=0.1),
    **variants("nesterov", optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    **variants("adam", optim.Adam, fused=True, lr=0.02, weight_decay=0.01),
    **variants("amsgrad", optim.Adam, fused=True, lr=0.02, amsgrad=True),
    **variants("adamw", optim.AdamW, fused=True, lr=0.02),
    **variants("maximize", optim.AdamW, lr=0.02, maximize=True, weight_decay=0.1),
    **variants("rmsprop", optim.RMSprop, lr=0.01),
    **variants("rmsprop_all", optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    **variants("adagrad", optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    **variants("nadam", optim.NAdam, lr=0.02),
    **variants(
        "nadam_decoupled", optim.NAdam, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True
    ),
    **variants("adamax", optim.Adamax, lr=0.02, weight_decay=0.1),
    **variants("adadelta", optim.Adadelta, lr=1.0, weight_decay=0.1),
    **variants("radam", optim.RAdam, lr=0.02),
    **variants("asgd", optim.ASGD, lr=0.02),
    **variants("rprop", optim.Rprop, lr=0.02),
    adagrad_fused=dict(model=Mlp, optimizer=partial(optim.Adagrad, lr=0.1, fused=True)),
    adafactor=dict(model=Mlp, optimizer=partial(optim.Adafactor, lr=0.02)),
    tensor_lr_adam=dict(model=Mlp, optimizer=lambda p: optim.Adam(p, lr=torch.tensor(0.02))),
    tensor_lr_sgd=dict(model=Mlp, optimizer=lambda p: optim.SGD(p, lr=torch.tensor(0.1))),
)
