"""Cases: where the batches come from, and what they depend on."""

from __future__ import annotations

import collections

import numpy as np
import torch
import torch.nn.functional as F

from tests.exactness.case import (
    KEPT,
    Net,
    Subject,
    at,
    batches,
    case,
    every,
    job,
    made_by,
    mlp,
    sgd,
)

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
