"""Small models of the kinds that people train, with something awkward in each."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.one, self.two = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Cnn(nn.Module):
    """BatchNorm with its counter, dropout, pooling, an in-place activation."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6, momentum=0.3),
            nn.SiLU(),
            nn.Dropout2d(0.2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        return self.net(x)


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        padding = tokens == 0
        return self.head(self.layer(self.embed(tokens), src_key_padding_mask=padding).mean(1))


class Attention(nn.Module):
    """Attention by hand, causal, with dropout inside the fused operator."""

    def __init__(self, dropout=0.1, mask=False):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)
        self.dropout = dropout
        self.register_buffer("mask", torch.ones(5, 5).tril().bool() if mask else None)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q, k, v, self.mask, self.dropout if self.training else 0.0, self.mask is None
        )
        return self.out(y.transpose(1, 2).flatten(2)).mean(1)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.rnn = kind(5, 6, batch_first=True, **options)
        self.head = nn.Linear(12 if options else 6, 3)

    def forward(self, tokens):
        out, _ = self.rnn(self.embed(tokens))
        return self.head(out[:, -1])


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens)))).mean(1)[:, :3]


class Partly(nn.Module):
    """A frozen layer below, and layers that the forward never uses."""

    def __init__(self):
        super().__init__()
        self.frozen, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.unused, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(5)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.head(self.frozen(x).relu())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.bias = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(4, 6)

    def forward(self, x):
        y = self.one(x).relu_() * 2
        y.add_(self.bias(x), alpha=0.5).mul_(1.5)
        z = torch.zeros(len(x), 6)
        z[:, 1:4] = y[:, :3]
        z[:, 0] = 1.0
        z += y.sigmoid_()
        return self.two(z.clamp_(-3, 3))


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(F.gelu(self.norm(self.conv(x))).mean((2, 3))).float()


class Cubed(torch.autograd.Function):
    """A derivative by hand, deliberately not the true one."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2.5 * ctx.scale * x * x, None


class Custom(Mlp):
    def forward(self, x):
        return self.two(Cubed.apply(self.one(x), 0.7))


class Noisy(Mlp):
    """Random numbers of several kinds in the forward pass."""

    def forward(self, x):
        x = x + 0.1 * torch.randn(x.shape) + 0.1 * torch.rand_like(x)
        keep = torch.bernoulli(torch.full_like(x, 0.9))
        order = torch.randperm(4)
        picked = torch.randint(0, 3, (len(x), 1))
        y = self.one((x * keep)[:, order])
        noise = torch.empty_like(y).uniform_(-0.1, 0.1) + torch.normal(0.0, 0.1, y.shape)
        return self.two(torch.tanh(y + noise + torch.zeros_like(y).exponential_())) + 0.1 * picked


class Transposed(nn.Module):
    """Gradients of transposed tensors, which some kernels do not lay out as torch describes it."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix = nn.Conv1d(1, 6, 3, padding=1), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(4, 3)

    def forward(self, x):
        y = self.mix(self.conv(x[:, None]).mT)
        y = F.hardswish(self.norm(y)).mT + F.logsigmoid(self.conv(x[:, None]))
        return F.log_softmax(F.relu6(F.softplus(self.head(y))).mT, -1).mean(2)


class Ema(Mlp):
    """Buffers that are given a new tensor in every step, and one that counts in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(6), persistent=False)

    def forward(self, x):
        y = torch.tanh(self.one(x))
        self.steps += 1
        self.ema = 0.9 * self.ema + 0.1 * y.detach().mean(0)
        self.scratch.copy_(y.detach().amax(0))
        return self.two(y - self.ema / (1 - 0.9**self.steps) + 0.01 * self.scratch)


class Normed(nn.Module):
    """Parametrizations: one of two parameters, one whose buffers change in the forward pass."""

    def __init__(self):
        super().__init__()
        parametrize = nn.utils.parametrizations
        self.one = parametrize.weight_norm(nn.Linear(4, 6))
        self.two = parametrize.spectral_norm(nn.Linear(6, 6))
        self.three = parametrize.orthogonal(nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.three(self.two(torch.tanh(self.one(x))))))


class Routed(nn.Module):
    """Indices that depend on data, without control flow: a soft and a hard choice of experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.Parameter(torch.randn(3, 4, 3) / 2)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        best, index = scores.max(-1)
        chosen = self.experts[index]
        return torch.einsum("bi,bio->bo", x, chosen) * best[:, None] + scores @ self.experts.sum(1)


class Bagged(nn.Module):
    """An embedding bag, group and layer norm, cumulative sums, a sorted result."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 6, mode="mean")
        self.norm, self.groups = nn.LayerNorm(6), nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.groups(self.norm(self.bag(tokens)))
        return self.head(x.cumsum(-1).sort(-1).values / math.sqrt(6))


class Plain(Mlp):
    """Tensors that are plain attributes: changed in place, and made on the spot."""

    def __init__(self):
        super().__init__()
        self.count, self.history = torch.zeros(()), torch.zeros(3)
        self.both = [self.one.weight, self.two.weight]

    def _apply(self, function, *arguments):
        """Moves them with the rest, which `Module.to` does for buffers only."""
        self.count, self.history = function(self.count), function(self.history)
        return super()._apply(function, *arguments)

    def forward(self, x):
        self.count += 1
        self.history[1] = self.count * 2
        penalty = sum(weight.square().mean() for weight in self.both)
        scale = torch.tensor([1.0, 2.0, 3.0], device=x.device) / torch.tensor(2.0).item()
        return super().forward(x) * scale / self.count + self.history * penalty


class Clamped(Mlp):
    """Keeps its weights in bounds, in place, in the forward pass."""

    def forward(self, x):
        with torch.no_grad():
            self.one.weight.clamp_(-0.3, 0.3)
        self.two.weight.data.mul_(0.99)
        return super().forward(x)


class Deciding(Mlp):
    """No graph can follow it: what it does depends on its input's values."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x
