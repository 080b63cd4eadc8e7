"""Cases: random numbers, drawn in the step, beside it, by the data and by other generators."""

from __future__ import annotations

import random
from random import gauss
from random import random as uniform

import numpy as np
import torch
import torch.nn.functional as F
from case_exactness import Net, Subject, at, batches, case, cross_entropy, every, job, mlp, sgd
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

KEPT = ("captured", "recaptured")


def rows(count=80):
    x, y = zip(*batches(count // 8), strict=True)
    return TensorDataset(torch.cat(x), torch.cat(y))


# -- generators that are not torch's, drawn from by the step


def drawing(name, make_draw):
    """Enters a case whose loss is weighted by numbers from outside torch."""

    def make(live):
        draw = make_draw()
        if not live:
            first = draw()
            draw = lambda: first  # noqa: E731
        return job(mlp(), lambda m, b: cross_entropy(m, b) * draw())

    make.__name__ = name
    case("opaque")(make)


drawing("random_module", lambda: lambda: random.random())
drawing("random_function_imported", lambda: lambda: uniform())
drawing("gauss_imported", lambda: lambda: gauss(1.0, 0.1))
drawing("random_object", lambda: random.Random(0).random)
drawing("random_object_in_a_closure", lambda: (lambda r: lambda: r.uniform(0, 1))(random.Random(1)))
drawing("random_choice", lambda: lambda: random.choice([0.5, 1.0, 2.0]))
drawing("numpy_module", lambda: lambda: np.random.rand())
drawing("numpy_generator", lambda: np.random.default_rng(0).random)
drawing("numpy_state", lambda: np.random.RandomState(0).random_sample)
drawing("torch_number", lambda: lambda: torch.rand(1).item())
drawing("torch_integer", lambda: lambda: float(torch.randint(1, 5, ())))


# -- torch's own, in the step: part of the graph


def step_draws(name, draw, *expected):
    """Enters a case whose hidden layer goes through something random."""

    def make(live):
        class Model(Net):
            def forward(self, x):
                hidden = torch.tanh(self.one(x))
                return self.two(draw(hidden) if live else hidden)

        return job(Model())

    make.__name__ = name
    case(*(expected or ("captured",)))(make)


step_draws("draws_dropout", lambda h: F.dropout(h, 0.3))
step_draws("draws_alpha_dropout", lambda h: F.alpha_dropout(h, 0.3, training=True))
step_draws("draws_noise", lambda h: h + 0.1 * torch.randn_like(h))
step_draws("draws_uniform", lambda h: h * torch.rand(8, 32))
step_draws("draws_bernoulli", lambda h: h * torch.bernoulli(torch.full((8, 32), 0.7)))
step_draws("draws_in_place", lambda h: h + torch.empty(8, 32).normal_(0, 0.1))
step_draws("draws_integers", lambda h: h + 0.1 * torch.randint(0, 3, (8, 1)))
step_draws("draws_a_permutation", lambda h: 0.7 * h + 0.3 * h[torch.randperm(8)])
step_draws("draws_rrelu", lambda h: F.rrelu(h, training=True))
step_draws("draws_gumbel", lambda h: h + F.gumbel_softmax(h, 0.7))
step_draws("draws_multinomial", lambda h: h + torch.multinomial(h.softmax(1).detach(), 1))
step_draws(
    "draws_from_a_distribution",
    lambda h: torch.distributions.Normal(h, 0.1).rsample(),
    *("captured", "opaque"),
)
step_draws("draws_exponential", lambda h: h * torch.empty_like(h).exponential_())
step_draws(
    "draws_under_fork",
    lambda h: h + _forked(h),
    *("captured", "opaque"),
)


def _forked(hidden):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return 0.1 * torch.randn_like(hidden)


@case("captured", "opaque")
def generator_of_the_model(live):
    class Model(Net):
        def factor(self, x):
            return 1 + 0.3 * torch.rand(8, 1, generator=self.generator)

    model = Model()
    model.generator = torch.Generator().manual_seed(0)
    if not live:
        model.factor = lambda x: 1.0
    return Subject(job(model), lambda: model.generator.get_state())


@case("captured", "opaque")
def generator_of_the_loss(live):
    generator = torch.Generator().manual_seed(0)

    def loss(model, batch):
        noise = torch.randn(8, 16, generator=generator) if live else 0.0
        return F.cross_entropy(model(batch[0] + 0.1 * noise), batch[1])

    return Subject(job(mlp(), loss), generator.get_state)


@case("captured", "opaque")
def draws_in_a_custom_backward(live):
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient + (0.01 * torch.randn_like(gradient) if live else 0.0)

    class Model(Net):
        def forward(self, x):
            return self.two(Noisy.apply(self.one(x)))

    return job(Model())


@case("captured", "opaque")
def mixes_pairs_of_a_batch(live):
    """Mixup: a permutation, a share from numpy, both drawn by the loss."""

    def loss(model, batch):
        order = torch.randperm(8) if live else torch.arange(8)
        share = torch.distributions.Beta(0.4, 0.4).sample()
        return F.cross_entropy(model(share * batch[0] + (1 - share) * batch[0][order]), batch[1])

    return job(mlp(), loss)


@case("captured", matters=False)
def recurrent_dropout(live):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 8, num_layers=2, dropout=0.3, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.lstm(x.view(8, 4, 4))[0][:, -1])

    return job(Model())


@case("captured", matters=False)
def attention_dropout(live):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            x = x.view(8, 2, 8)
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    return job(Model())


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
