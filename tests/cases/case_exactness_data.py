"""Cases: what the batches are, where they come from, and what they depend on."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from case_exactness import Net, Subject, at, batches, case, cross_entropy, every, job, mlp, sgd
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

KEPT = ("captured", "recaptured")


def made_by(make_batches):
    """Data whose batches are made anew in every epoch."""

    class Data:
        def __iter__(self):
            return make_batches()

    return Data()


# -- data that depend on how training goes


@case("captured")
def curriculum_moved_by_the_callback(live):
    class Data:
        scale = 1.0

        def __iter__(self):
            return ((x * self.scale, y) for x, y in batches())

    data = Data()
    return job(mlp(), data=data, on_step=every(live, lambda step: setattr(data, "scale", step)))


@case("captured")
def labels_from_the_model(live):
    model = mlp()

    def pseudo():
        for x, y in batches():
            yield x, model(x).detach().argmin(1) if live else y

    return job(model, data=made_by(pseudo))


@case("captured")
def labels_from_the_model_in_a_generator(live):
    model = mlp()
    data = ((x, model(x).detach().argmin(1) if live else y) for x, y in batches())
    return job(model, data=data)


@case("captured")
def hard_negatives(live):
    """Rows of the pool with the largest loss, found before each batch is made."""
    model, pool = mlp(), batches(1, 64)[0]

    def hardest():
        for step in range(10):
            with torch.no_grad():
                losses = F.cross_entropy(model(pool[0]), pool[1], reduction="none")
            rows = losses.topk(8).indices if live else torch.arange(8) + 4 * step
            yield pool[0][rows], pool[1][rows]

    return job(model, data=made_by(hardest))


@case("captured")
def rollouts_of_the_policy(live):
    """Reinforcement learning: the batch is what the model did just now."""
    policy = mlp()

    def rollouts():
        for x, _ in batches():
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=policy(x)).sample()
            yield x, action, x[:, 0] - action

    def loss(model, batch):
        log = model(batch[0]).log_softmax(1).gather(1, batch[1][:, None])
        return -(log[:, 0] * batch[2]).mean()

    return Subject(job(policy, loss, data=made_by(rollouts) if live else list(rollouts())))


@case("captured")
def replay_filled_by_the_callback(live):
    kept = collections.deque([batches(1)[0]], maxlen=4)
    more = batches(20)
    change = every(live, lambda step: kept.append(more[step]))
    data = made_by(lambda: (kept[-1] for _ in range(10)))
    return job(mlp(), data=data, on_step=change)


@case("captured")
def list_that_grows_while_it_is_read(live):
    data = batches(10)
    more = batches(14)[10:]
    return job(
        mlp(), data=data, on_step=every(live, lambda step: data.extend(more[step - 1 : step]))
    )


@case("captured")
def data_ended_by_the_callback(live):
    state = {"last": 10**6 if not live else 12}

    def some():
        for step, batch in enumerate(batches(16)):
            if step >= state["last"]:
                return
            yield batch

    return job(mlp(), data=made_by(some), on_step=at(8, live, lambda: state.update(last=11)))


@case("captured")
def batch_size_moved_by_the_callback(live):
    x, y = batches(1, 400)[0]
    state = {"size": 8}

    def growing():
        start = 0
        for _ in range(12):
            rows = slice(start, start + state["size"])
            start += state["size"]
            yield x[rows], y[rows]

    return job(mlp(), data=made_by(growing), on_step=at(4, live, lambda: state.update(size=12)))


@case("captured")
def batch_changed_by_the_callback(live):
    data = batches(5)
    change = every(live, lambda step: data[step % 5][0].mul_(0.5))
    return job(mlp(), data=data, epochs=3, on_step=change)


@case(*KEPT)
def data_that_set_the_mode(live):
    """Each epoch begins with the model set to evaluate: a habit of some loaders."""
    model = mlp(0.3)

    def some():
        model.train(not live)
        yield from batches(5)
        model.train()

    return job(model, data=made_by(some), epochs=3)


@case(*KEPT)
def data_that_set_the_learning_rate(live):
    model = mlp()
    optimizer = sgd(model)

    def some():
        for step, batch in enumerate(batches()):
            if live:
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            yield batch

    return job(model, optimizer=optimizer, data=made_by(some))


# -- memory that is used again


@case("captured")
def buffer_refilled(live):
    def some():
        buffer = torch.empty(8, 16)
        for x, y in batches():
            buffer = buffer.copy_(x) if live else buffer.fill_(1.0)
            yield buffer, y

    return job(mlp(), data=made_by(some))


@case("captured")
def array_refilled(live):
    def some():
        array = np.empty((8, 16), dtype=np.float32)
        shared = torch.from_numpy(array)
        for x, y in batches():
            array[:] = x.numpy() if live else 1.0
            yield shared, y

    return job(mlp(), data=made_by(some))


@case("captured")
def windows_of_one_tensor(live):
    """Batches that overlap, and whose memory the callback moves on."""
    series = torch.sin(torch.arange(440.0))
    windows = series.as_strided((40, 8, 16), (8, 16, 1))
    data = [(windows[n], torch.arange(8) % 4) for n in range(12)]
    return job(mlp(), data=data, on_step=every(live, lambda step: series.add_(0.01)))


@case("captured")
def batch_that_is_a_weight(live):
    """The data hand out the model's own memory."""
    model = Net()
    fixed = model.one.weight.detach()[:8].clone()

    def some():
        for _, y in batches():
            yield (model.one.weight.detach()[:8] if live else fixed), y

    return job(model, data=made_by(some))


@case("captured", "opaque", matters=False)
def input_that_needs_a_gradient(live):
    data = [(x.clone().requires_grad_(), y) for x, y in batches()]
    made = job(mlp(), data=data)
    return Subject(made, lambda: [x.grad for x, _ in data])


# -- kinds of batches


@case("captured")
def conjugated(live):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, z):
            return (z @ self.weight).imag

    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(3, 4, dtype=torch.complex64, generator=generator) for _ in range(10)]
    data = [z.conj() if live and n % 2 else z for n, z in enumerate(data)]
    return job(Model(), lambda m, b: (m(b) - 1).square().mean(), data=data)


@case("captured")
def negated(live):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(8, 16, dtype=torch.complex64, generator=generator) for _ in range(10)]
    data = [(z.conj().imag if live and n % 2 else z.imag) for n, z in enumerate(made)]
    labels = torch.arange(8) % 4
    return job(mlp(), lambda m, b: F.cross_entropy(m(b), labels), data=data)


@case("captured")
def ragged_last_batch(live):
    x, y = batches(1, 43)[0]
    data = DataLoader(TensorDataset(x, y), 8, drop_last=not live)
    return job(mlp(0.3), data=data, epochs=3)


@case("captured", matters=False)
def strides_of_many_kinds(live):
    kinds = (
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, ::2],
        lambda x: x[:1].expand(8, 16),
        lambda x: x.flip(0),
    )
    data = [(kinds[n % 5](x), y) for n, (x, y) in enumerate(batches())]
    return job(mlp(), data=data)


@case("captured", "opaque")
def many_shapes(live):
    """More shapes than anybody wants graphs of."""
    generator = torch.Generator().manual_seed(0)
    sizes = range(2, 72) if live else [8] * 70
    data = [(torch.randn(n, 16, generator=generator), torch.arange(n) % 4) for n in sizes]
    return job(nn.Linear(16, 4), data=data)


@case("captured")
def numbers_in_a_batch(live):
    data = [(*batch, 1 / (1 + (n if live else 0))) for n, batch in enumerate(batches())]
    return job(mlp(), lambda m, b: cross_entropy(m, b) * b[2], data=data)


@case("captured")
def texts_in_a_batch(live):
    data = [(*batch, ["hard", "easy"][n % 2 if live else 1]) for n, batch in enumerate(batches())]
    weights = {"hard": 2.0, "easy": 1.0}
    return job(mlp(), lambda m, b: cross_entropy(m, b) * weights[b[2]], data=data)


@case("captured", "opaque", matters=False)
def names_in_a_batch(live):
    """Every batch has other texts, which the loss never looks at."""
    data = [(*batch, [f"row {n}.{i}" for i in range(8)]) for n, batch in enumerate(batches(14))]
    return job(mlp(), data=data)


@case("captured")
def identifiers_in_a_batch(live):
    """The loss looks up a weight by the number of each row."""
    table = torch.linspace(0.1, 2.0, 80)
    data = [(*batch, list(range(8 * n, 8 * n + 8))) for n, batch in enumerate(batches())]

    def loss(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * table[batch[2] if live else list(range(8))]).mean()

    return job(mlp(), loss, data=data)


@case("captured")
def structures_that_alternate(live):
    data = [
        {"x": x, "y": y} if n % 2 and live else {"x": x, "y": y, "weight": torch.tensor(2.0)}
        for n, (x, y) in enumerate(batches())
    ]

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"]) * batch.get("weight", 1.0)

    return job(mlp(), loss, data=data)


@case("captured")
def order_of_keys(live):
    turn = lambda x, y: {"x": x, "y": y}  # noqa: E731
    back = lambda x, y: {"y": y, "x": x}  # noqa: E731
    data = [(back if n % 2 and live else turn)(*batch) for n, batch in enumerate(batches())]

    def loss(model, batch):
        scale = 2.0 if next(iter(batch)) == "y" else 1.0
        return F.cross_entropy(model(batch["x"]), batch["y"]) * scale

    return job(mlp(), loss, data=data)


@case("captured")
def nothing_in_a_batch(live):
    mask = torch.arange(8) % 2
    data = [(*batch, mask if n % 3 and live else None) for n, batch in enumerate(batches())]

    def loss(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses.mean() if batch[2] is None else (losses * batch[2]).mean()

    return job(mlp(), loss, data=data)


@case("captured")
def types_that_alternate(live):
    data = [(x.double() if n % 2 and live else x, y) for n, (x, y) in enumerate(batches())]

    def loss(model, batch):
        scale = 2.0 if batch[0].dtype == torch.float64 else 1.0
        return F.cross_entropy(model(batch[0].float()), batch[1]) * scale

    return job(mlp(), loss, data=data)


@case("captured", "opaque", matters=False)
def arrays_in_a_batch(live):
    data = [(x.numpy(), y.numpy()) for x, y in batches()]

    def loss(model, batch):
        return F.cross_entropy(model(torch.from_numpy(batch[0])), torch.from_numpy(batch[1]))

    return job(mlp(), loss, data=data)


@case("captured", "opaque", matters=False)
def batch_of_a_class(live):
    class Batch:
        def __init__(self, x, y):
            self.x, self.y = x, y

    data = [Batch(*batch) for batch in batches()]
    return job(mlp(), lambda m, b: F.cross_entropy(m(b.x), b.y), data=data)


@case("captured")
def batch_of_a_dataclass(live):
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        y: torch.Tensor
        weight: float

    data = [Batch(*batch, 1.0 + (n if live else 0)) for n, batch in enumerate(batches())]
    return job(mlp(), lambda m, b: F.cross_entropy(m(b.x), b.y) * b.weight / 5, data=data)


@case("captured", "opaque", matters=False)
def tensors_of_a_subclass(live):
    class Image(torch.Tensor):
        pass

    data = [(x.as_subclass(Image), y) for x, y in batches()]
    return job(mlp(), data=data)


@case("captured", "opaque", matters=False)
def sparse_batches(live):
    data = [((x * (x > 0)).to_sparse(), y) for x, y in batches()]

    class Model(Net):
        def forward(self, x):
            return self.two(torch.tanh(torch.sparse.mm(x, self.one.weight.t())))

    return job(Model(), data=data)


@case("captured", "opaque", matters=False)
def sparse_rows_in_batches(live):
    data = [((x * (x > 0)).to_sparse_csr(), y) for x, y in batches()]
    return job(mlp(), lambda m, b: F.cross_entropy(m(b[0].to_dense()), b[1]), data=data)


@case("captured", "opaque", matters=False)
def nested_batches(live):
    parts = [[x[:3], x[3:]] for x, _ in batches()]
    data = [torch.nested.nested_tensor(part, layout=torch.jagged) for part in parts]
    return job(mlp(), lambda m, b: m(b).values().square().mean(), data=data)


@case("captured", "opaque", matters=False)
def half_precision_batches(live):
    return job(mlp().bfloat16(), data=[(x.bfloat16(), y) for x, y in batches()])


@case("captured", matters=False)
def streamed_batches(live):
    class Stream(IterableDataset):
        def __iter__(self):
            for x, y in batches():
                yield from zip(x, y, strict=True)

    return job(mlp(0.3), data=DataLoader(Stream(), 7))


@case("captured", matters=False)
def two_loaders_side_by_side(live):
    labelled = DataLoader(TensorDataset(*batches(1, 80)[0]), 8, shuffle=True)
    unlabelled = DataLoader(TensorDataset(batches(1, 96)[0][0]), 8, shuffle=True)
    data = made_by(lambda: zip(labelled, unlabelled, strict=False))

    def loss(model, batch):
        spread = model(batch[1][0]).softmax(1).var(0).sum()
        return cross_entropy(model, batch[0]) + 0.1 * spread

    return job(mlp(0.3), loss, data=data)
