"""Trainings with more than a loss and an optimizer, each as a job and as a plain loop of its own.

The loops are written out, and share nothing with the package: they are what users have today.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

SEED = 3
Told = tuple[list[float], dict[str, list[float]]]


@dataclass
class Training:
    """One training, made anew for each run.

    Attributes:
        job: keywords of its `wf.Job`.
        plain: the same as a plain loop; returns losses and metrics.
        parts: the modules whose tensors are compared.
        captured: whether its steps can be captured; None: where distributions do not look at their
            arguments' values, as is so once torch's compiler was loaded.
        extra: what else has to be equal in the end.
    """

    job: dict[str, Any]
    plain: Callable[[], Told]
    parts: Mapping[str, nn.Module]
    captured: bool | None = False
    extra: Callable[[], Any] = field(default=lambda: None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors of its parts."""
        return {
            f"{name}.{key}": tensor.detach().clone()
            for name, part in self.parts.items()
            for key, tensor in part.state_dict().items()
        }


def batches(count: int = 7, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of 16 numbers with labels of four classes."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 16, generator=generator),
            torch.randint(0, 4, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def mlp(inputs: int = 16, outputs: int = 4, dropout: float = 0.1) -> nn.Sequential:
    """A network that draws random numbers."""
    return nn.Sequential(
        nn.Linear(inputs, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, outputs)
    )


def gan() -> Training:
    """Two networks against each other, each with its own optimizer."""
    torch.manual_seed(0)
    generator, critic = mlp(8, 16), mlp(16, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3)
    data = batches()

    def step(batch):
        real = batch[0]
        fake = generator(torch.randn(len(real), 8))
        of_critic.zero_grad()
        critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        critic_loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = F.softplus(-critic(fake)).mean()
        loss.backward()
        of_generator.step()
        return loss, {"critic": critic_loss}

    def plain():
        losses, critics = [], []
        torch.manual_seed(SEED)
        for _ in range(2):
            for real, _labels in data:
                fake = generator(torch.randn(len(real), 8))
                of_critic.zero_grad()
                on_real, on_fake = critic(real), critic(fake.detach())
                critic_loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
                critic_loss.backward()
                of_critic.step()
                of_generator.zero_grad()
                loss = F.softplus(-critic(fake)).mean()
                loss.backward()
                of_generator.step()
                losses.append(loss.item())
                critics.append(critic_loss.item())
        return losses, {"critic": critics}

    parts = {"generator": generator, "critic": critic}
    optimizers = [of_generator, of_critic]
    job = {"model": parts, "optimizers": optimizers, "step": step, "data": data, "epochs": 2}
    return Training(job, plain, parts, captured=True)


def sac() -> Training:
    """An actor, a critic with a slow copy, a temperature outside all modules: three optimizers."""
    torch.manual_seed(0)
    actor, critic, temperature = (
        mlp(16, 4, 0.0),
        mlp(18, 1, 0.0),
        torch.zeros((), requires_grad=True),
    )
    slow = copy.deepcopy(critic).requires_grad_(False)
    of_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    of_critic = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    of_temperature = torch.optim.SGD([temperature], lr=1e-2, momentum=0.9)
    optimizers = [of_actor, of_critic, of_temperature]
    data = batches()

    def act(state):
        mean, scale = actor(state).chunk(2, dim=1)
        normal = torch.distributions.Normal(mean, F.softplus(scale) + 1e-3)
        action = normal.rsample()
        return action, normal.log_prob(action).sum(1, keepdim=True)

    def step(batch):
        state, label = batch
        with torch.no_grad():
            action, chance = act(state)
            reward = label[:, None].float()
            value = slow(torch.cat([state, action], 1)) - temperature.exp() * chance
            target = reward + 0.9 * value
        critic_loss = F.mse_loss(critic(torch.cat([state, action], 1)), target)
        of_critic.zero_grad()
        critic_loss.backward()
        of_critic.step()
        action, chance = act(state)
        value = critic(torch.cat([state, action], 1))
        actor_loss = (temperature.exp().detach() * chance - value).mean()
        of_actor.zero_grad()
        actor_loss.backward()
        of_actor.step()
        temperature_loss = -(temperature * (chance.detach() - 2)).mean()
        of_temperature.zero_grad()
        temperature_loss.backward()
        of_temperature.step()
        with torch.no_grad():
            for own, other in zip(slow.parameters(), critic.parameters(), strict=True):
                own.mul_(0.99).add_(other, alpha=0.01)
        return actor_loss, {"critic": critic_loss, "alpha": temperature.exp()}

    def plain():
        losses, critics, alphas = [], [], []
        torch.manual_seed(SEED)
        for _ in range(2):
            for batch in data:
                loss, told = step(batch)
                losses.append(loss.item())
                critics.append(told["critic"].item())
                alphas.append(told["alpha"].item())
        return losses, {"critic": critics, "alpha": alphas}

    parts = {"actor": actor, "critic": critic, "slow": slow}
    job = {
        "model": [actor, critic],
        "modules": slow,
        "optimizers": optimizers,
        "step": step,
        "data": data,
        "epochs": 2,
    }
    return Training(job, plain, parts, captured=None, extra=temperature.item)


def ppo() -> Training:
    """Batches that are drawn by the model as it is, and several updates on each."""
    torch.manual_seed(0)
    policy = mlp(16, 4, 0.0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    states = [state for state, _ in batches(3)]

    class Rollouts:
        def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
            for state in states:
                with torch.no_grad():
                    chosen = torch.distributions.Categorical(logits=policy(state))
                    action = chosen.sample()
                    chance = chosen.log_prob(action)
                yield state, action, chance, torch.randn(len(state))

    def update(batch):
        state, action, before, advantage = batch
        now = torch.distributions.Categorical(logits=policy(state))
        ratio = (now.log_prob(action) - before).exp()
        bounded = ratio.clamp(0.8, 1.2)
        loss = -torch.min(ratio * advantage, bounded * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        return loss, now.entropy().mean()

    def step(batch):
        for _ in range(3):
            loss, entropy = update(batch)
        return loss.item(), {"entropy": entropy.item()}

    def plain():
        losses, entropies = [], []
        torch.manual_seed(SEED)
        for _ in range(4):
            for state in states:
                with torch.no_grad():
                    chosen = torch.distributions.Categorical(logits=policy(state))
                    action = chosen.sample()
                    before, advantage = chosen.log_prob(action), torch.randn(len(state))
                for _ in range(3):
                    loss, entropy = update((state, action, before, advantage))
                losses.append(loss.item())
                entropies.append(entropy.item())
        return losses, {"entropy": entropies}

    job = {"model": policy, "optimizers": [optimizer], "step": step, "data": Rollouts()}
    return Training({**job, "epochs": 4}, plain, {"policy": policy})


def _distillation(own_step: bool) -> Training:
    torch.manual_seed(0)
    teacher, student = mlp(), mlp()
    teacher.eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    data = batches()

    def loss(model, batch):
        with torch.no_grad():
            target = teacher(batch[0]).softmax(1)
        made = model(batch[0])
        return F.kl_div(made.log_softmax(1), target, reduction="batchmean")

    def step(batch):
        optimizer.zero_grad()
        value = loss(student, batch)
        value.backward()
        optimizer.step()
        return value

    def plain():
        losses = []
        torch.manual_seed(SEED)
        for _ in range(2):
            for batch in data:
                optimizer.zero_grad()
                value = loss(student, batch)
                value.backward()
                optimizer.step()
                losses.append(value.item())
        return losses, {}

    how = {"step": step} if own_step else {"loss": loss}
    job = {"model": student, "optimizer": optimizer, "data": data, "epochs": 2, **how}
    return Training(job, plain, {"student": student, "teacher": teacher}, captured=True)


def distillation() -> Training:
    """A teacher under ``no_grad``, beside the loss."""
    return _distillation(own_step=False)


def distillation_by_step() -> Training:
    """The same in a step of its own."""
    return _distillation(own_step=True)


class _Weighted(nn.Module):
    """Two losses, weighed by what is learnt with the model; its own norm keeps count."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, made: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        made = self.norm(made)
        parts = torch.stack([F.cross_entropy(made, label), made.square().mean()])
        return ((-self.weights).exp() * parts + self.weights).sum()


def learnt_loss() -> Training:
    """A loss with parameters of its own."""
    torch.manual_seed(0)
    model, criterion = mlp(), _Weighted()
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=0.01)
    data = batches()

    def loss(model, batch):
        return criterion(model(batch[0]), batch[1])

    def plain():
        losses = []
        torch.manual_seed(SEED)
        for _ in range(2):
            for rows, labels in data:
                optimizer.zero_grad()
                value = criterion(model(rows), labels)
                value.backward()
                optimizer.step()
                losses.append(value.item())
        return losses, {}

    job = {"model": model, "modules": [criterion], "optimizer": optimizer, "loss": loss}
    parts = {"model": model, "criterion": criterion}
    return Training({**job, "data": data, "epochs": 2}, plain, parts, captured=True)


def lbfgs() -> Training:
    """An optimizer that evaluates the loss by itself."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    data = batches(3)

    def step(batch):
        def closure():
            optimizer.zero_grad()
            value = F.cross_entropy(model(batch[0]), batch[1])
            value.backward()
            return value

        return optimizer.step(closure)

    def plain():
        losses = []
        torch.manual_seed(SEED)
        for _ in range(4):
            for batch in data:
                losses.append(step(batch).item())
        return losses, {}

    job = {"model": model, "optimizers": [optimizer], "step": step, "data": data, "epochs": 4}
    return Training(job, plain, {"model": model})


def plateau() -> Training:
    """Two schedulers: one follows a metric, and lowers the rate as often as it can."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateaus = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = batches()

    def loss(model, batch):
        made = model(batch[0])
        right = (made.argmax(1) == batch[1]).float().mean()
        return F.cross_entropy(made, batch[1]), {"accuracy": right}

    def plain():
        losses, accuracies = [], []
        torch.manual_seed(SEED)
        for _ in range(2):
            for rows, labels in data:
                optimizer.zero_grad()
                made = model(rows)
                value = F.cross_entropy(made, labels)
                value.backward()
                optimizer.step()
                losses.append(value.item())
                accuracies.append((made.argmax(1) == labels).float().mean().item())
                plateaus.step(accuracies[-1])
                decay.step()
        return losses, {"accuracy": accuracies}

    job = {
        "model": model,
        "optimizer": optimizer,
        "loss": loss,
        "data": data,
        "epochs": 2,
        "schedulers": [plateaus, decay],
        "scheduler_metric": "accuracy",
    }
    rates = {"model": model}
    return Training(job, plain, rates, True, lambda: optimizer.param_groups[0]["lr"])


def scaled() -> Training:
    """A gradient scaler, on the host, under autocast."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    data = batches()

    def step(batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = F.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return value

    def plain():
        losses = []
        torch.manual_seed(SEED)
        for _ in range(2):
            for batch in data:
                losses.append(step(batch).item())
        return losses, {}

    job = {"model": model, "optimizer": optimizer, "step": step, "data": data, "epochs": 2}
    return Training(job, plain, {"model": model}, extra=scaler.get_scale)


def averaged() -> Training:
    """Averaged weights, and gradients that outlive a step."""
    torch.manual_seed(0)
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches()
    model.made = 0

    def step(batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        value.backward()
        model.made += 1
        if model.made % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        return value

    def plain():
        losses = []
        torch.manual_seed(SEED)
        for number in range(14):
            rows, labels = data[number % 7]
            value = F.cross_entropy(model(rows), labels)
            value.backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
            losses.append(value.item())
        return losses, {}

    job = {"model": model, "modules": average, "optimizer": optimizer, "step": step, "data": data}
    return Training({**job, "epochs": 2}, plain, {"model": model, "average": average})


def accumulated() -> Training:
    """Three batches a step, one left over, clipped twice, under autocast, with metrics."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = batches()

    def loss(model, batch):
        made = model(batch[0])
        right = (made.argmax(1) == batch[1]).float().mean()
        return F.cross_entropy(made, batch[1]), {"accuracy": right, "rows": 8}

    def plain():
        losses, accuracies = [], []
        torch.manual_seed(SEED)
        for _ in range(4):
            for first in range(0, 7, 3):
                optimizer.zero_grad()
                total, right = None, []
                for rows, labels in data[first : first + 3]:
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        made = model(rows)
                        value = F.cross_entropy(made, labels)
                    value = value / 3
                    value.backward()
                    total = value.detach() if total is None else total + value.detach()
                    right.append((made.argmax(1) == labels).float().mean().item())
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
                optimizer.step()
                losses.append(total.item())
                accuracies.append(sum(right[1:], right[0]) / len(right))
        return losses, {"accuracy": accuracies, "rows": [8.0] * 12}

    rules = {"accumulate": 3, "autocast": torch.bfloat16}
    clipping = {"clip_grad_norm": 0.5, "clip_grad_value": 0.1}
    job = {"model": model, "optimizer": optimizer, "loss": loss, "data": data, "epochs": 4}
    return Training({**job, **rules, **clipping}, plain, {"model": model}, captured=True)


TRAININGS: dict[str, Callable[[], Training]] = {
    make.__name__: make
    for make in (
        *(gan, sac, ppo, distillation, distillation_by_step, learnt_loss, lbfgs),
        *(plateau, scaled, averaged, accumulated),
    )
}
