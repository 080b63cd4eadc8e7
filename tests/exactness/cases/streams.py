"""Cases: the step draws random numbers, from torch and from elsewhere."""

from __future__ import annotations

import random
from random import gauss
from random import random as uniform

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness.case import Net, Subject, case, cross_entropy, job, mlp

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
