"""Cases: callbacks, schedulers and data draw random numbers beside the step."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from tests.exactness.case import (
    KEPT,
    Subject,
    at,
    batches,
    case,
    cross_entropy,
    every,
    job,
    mlp,
    sgd,
)


def rows(count=80):
    x, y = zip(*batches(count // 8), strict=True)
    return TensorDataset(torch.cat(x), torch.cat(y))


# -- callbacks and schedulers that draw


def callback_draws(name, draw, **options):
    """Enters a case with dropout, whose masks move when a callback draws from the same stream."""

    def make(live):
        return job(mlp(0.3), on_step=every(live, lambda step: draw()))

    make.__name__ = name
    case(*KEPT, **options)(make)


callback_draws("callback_draws", lambda: torch.randn(3))
callback_draws("callback_makes_a_layer", lambda: nn.Linear(3, 3))
callback_draws("callback_iterates_a_loader", lambda: list(DataLoader(rows(), 40)))
callback_draws("callback_shuffles", lambda: list(DataLoader(rows(), 40, shuffle=True)))
callback_draws("callback_seeds_torch", lambda: torch.manual_seed(3))


@case(*KEPT, matters=False)
def callback_draws_and_puts_back(live):
    def change(step):
        before = torch.get_rng_state()
        torch.randn(7)
        torch.set_rng_state(before)

    return job(mlp(0.3), on_step=every(True, change))


@case(*KEPT)
def callback_rewinds_the_stream(live):
    kept = []

    def change(step):
        if step == 3:
            kept.append(torch.get_rng_state())
        if step == 6:
            torch.set_rng_state(kept[0])

    return job(mlp(0.3), on_step=every(live, change))


@case(*KEPT, matters=False)
def callback_tells_what_it_drew(live):
    drawn = []
    made = job(mlp(0.3), on_step=every(True, lambda step: drawn.append(torch.rand(2))))
    return Subject(made, lambda: drawn)


@case(*KEPT, matters=False)
def seed_seen_by_the_callback(live):
    seen = []
    made = job(mlp(0.3), on_step=every(True, lambda step: seen.append(torch.initial_seed())))
    return Subject(made, lambda: seen)


@case(*KEPT)
def noise_added_to_the_weights(live):
    model = mlp(0.3)
    change = every(live, lambda step: model[0].weight.data.add_(0.01 * torch.randn(32, 16)))
    return job(model, on_step=change)


@case(*KEPT)
def layer_drawn_anew(live):
    model = mlp(0.3)
    return job(model, on_step=at(4, live, lambda: model[0].reset_parameters()))


@case(*KEPT)
def scheduler_that_draws(live):
    model = mlp(0.3)
    optimizer = sgd(model)

    class Scheduler:
        def step(self):
            if live:
                optimizer.param_groups[0]["lr"] = 0.1 * torch.rand(1).item()

    return job(model, optimizer=optimizer, scheduler=Scheduler())


@case(*KEPT, matters=False)
def evaluation_with_dropout_on(live):
    """Monte-Carlo dropout in the callback: the model itself draws from the stream."""
    model, means = mlp(0.3), []
    x = torch.ones(4, 16)

    def change(step):
        with torch.no_grad():
            means.append(torch.stack([model(x) for _ in range(3)]).std().item())

    return Subject(job(model, on_step=every(True, change)), lambda: means)


# -- data that draw


class Seeded(Dataset):
    """Draws each row from a seed of its own, as many augmentations do."""

    def __init__(self, live):
        self.live = live

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if self.live:
            torch.manual_seed(index)
        return torch.randn(16), index % 4


@case("captured")
def dataset_that_seeds_torch(live):
    return job(mlp(0.3), data=DataLoader(Seeded(live), 8))


@case("captured")
def dataset_that_seeds_under_fork(live):
    class Forked(Seeded):
        def __getitem__(self, index):
            with torch.random.fork_rng(devices=[], enabled=self.live):
                return super().__getitem__(index)

    return job(mlp(0.3), data=DataLoader(Forked(live), 8))


@case("captured")
def dataset_that_draws(live):
    class Noisy(Dataset):
        def __len__(self):
            return 80

        def __getitem__(self, index):
            return torch.full((16,), index / 80) + (torch.randn(16) if live else 0), index % 4

    return job(mlp(0.3), data=DataLoader(Noisy(), 8, shuffle=True))


@case("captured", matters=False)
def dataset_that_reads_the_stream(live):
    class Reading(Dataset):
        def __len__(self):
            return 80

        def __getitem__(self, index):
            state = torch.get_rng_state()[:16].float() / 255
            return state + torch.initial_seed() % 7, index % 4

    return job(mlp(0.3), data=DataLoader(Reading(), 8))


@case("captured")
def numpy_augmentation(live):
    class Augmented(Dataset):
        def __len__(self):
            return 80

        def __getitem__(self, index):
            noise = np.random.randn(16) + random.random() if live else np.ones(16)
            return torch.from_numpy(noise).float(), index % 4

    return job(mlp(0.3), data=DataLoader(Augmented(), 8, shuffle=True))


@case("captured")
def loader_with_its_own_generator(live):
    generator = torch.Generator().manual_seed(4) if live else None
    data = DataLoader(rows(), 8, shuffle=True, generator=generator)
    return Subject(job(mlp(0.3), data=data), lambda: generator and generator.get_state())


@case("captured")
def generator_shared_with_the_callback(live):
    """The callback seeds the generator that the loader shuffles with, once an epoch."""
    generator = torch.Generator().manual_seed(4)
    data = DataLoader(rows(40), 8, shuffle=True, generator=generator)
    change = every(live, lambda step: generator.manual_seed(7))
    return job(mlp(0.3), data=data, epochs=3, on_step=change)


@case("captured")
def sampler_weighted_by_the_losses(live):
    data = rows()
    sampler = WeightedRandomSampler(torch.ones(len(data)), 40)

    def on_step(result):
        if live:
            sampler.weights[result.step :: 7] = result.loss

    return job(mlp(0.3), data=DataLoader(data, 8, sampler=sampler), epochs=3, on_step=on_step)


@case("captured", matters=False)
def workers(live):
    data = DataLoader(rows(40), 8, shuffle=True, num_workers=1)
    return job(mlp(0.3), data=data, epochs=2)


@case("captured", matters=False)
def validation_beside_a_shuffled_loader(live):
    """What nearly every script does: shuffle, train, and validate now and then."""
    data, held_out = rows(84), DataLoader(rows(40), 16)
    model, kept = mlp(0.3), []

    def validate():
        model.eval()
        with torch.no_grad():
            kept.append(sum(cross_entropy(model, batch).item() for batch in held_out))
        model.train()

    made = job(
        model,
        data=DataLoader(data, 8, shuffle=True),
        epochs=2,
        on_step=every(True, lambda step: validate() if step % 5 == 0 else None),
    )
    return Subject(made, lambda: kept)
