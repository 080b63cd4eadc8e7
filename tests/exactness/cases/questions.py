"""Cases: what a step asks of its batch. The way that a graph has was taken for other values."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tests.exactness.case import STEPS, at, case, every, job, made_by, mlp

LIMIT = torch.tensor(40)


def masked(count=STEPS):
    """Rows, labels, and a mask of whole numbers: of ones alone, or with zeros at its end."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for number in range(count):
        rows = torch.randn(8, 16, generator=generator)
        labels = torch.randint(0, 4, (8,), generator=generator)
        mask = torch.ones(8, 6, dtype=torch.long)
        mask[: number % 3, 6 - number % 3 :] = 0
        found.append((rows, labels, mask))
    return found


def weighted(live, ask, first, data=None, **options):
    """A job whose loss is weighted by what is asked of a mask; not live, always as at first."""
    frozen = float(ask(first))

    def loss(model, batch):
        rows, labels, mask = batch
        weight = ask(mask) if live else frozen
        return F.cross_entropy(model(rows), labels) * (1 + weight)

    return job(mlp(0.2), loss, data=masked() if data is None else data, **options)


def asks(name, ask, expected="captured", matters=True):
    def make(live):
        return weighted(live, ask, masked()[0][2])

    make.__name__ = name
    case(expected, matters=matters)(make)


def _branch(mask):
    return 1.0 if mask.all() else 2.0


def _asks_again(mask):
    if mask.all():
        return 1.0
    return 2.0 if mask[0].sum() > 4 else 3.0


def _rounds(mask):
    weight = 0.0
    for _ in range(int(mask[:, -1].sum())):
        weight = weight + 0.25
    return weight


def _through_a_view(mask):
    """Its memory is written to by another name."""
    copy = mask.clone()
    copy.view(-1).mul_(2)
    return float(copy.sum() > 90)


def _packed(mask):
    jumps = (torch.diff(mask.cumsum(-1), dim=-1) != 1).cumsum(-1)
    return 1.0 if (jumps[:, -1] == 0).all() else 2.0


def _by_positions(mask):
    places = torch.arange(6, device=mask.device)
    return float((mask * places).sum() > 115)


def _gathered(mask):
    """It raises for a mask of other numbers than places."""
    return 1.0 if mask.gather(1, mask).sum() > 40 else 0.0


def _suppressed(mask):
    try:
        return float(mask.sum().item())
    except RuntimeError:
        return 0.0


asks("asks_whether_a_mask_is_of_ones", _branch)
asks("asks_for_equality", lambda mask: float(torch.equal(mask, torch.ones_like(mask))))
asks("asks_for_a_number", lambda mask: 1.0 / int(mask.sum()))
asks("asks_for_numbers", lambda mask: float(sum(mask[:, -1].tolist())))
asks("asks_for_a_text_of_a_number", lambda mask: float(f"{mask.sum().item()}".endswith("8")))
asks("asks_by_the_answer_before", _asks_again)
asks("asks_how_many_rounds", _rounds)
asks("asks_for_a_length", lambda mask: float(mask[:, : mask.sum(1).min()].shape[1]))
asks("asks_for_jumps", _packed)
asks("asks_by_positions", _by_positions)
asks("asks_what_is_always_so", lambda mask: 1.0 if mask.max() < 2 else 2.0, matters=False)
# What follows is not known from whole numbers of the batch alone.
asks("asks_for_a_mean", lambda mask: float(mask.float().mean()), "opaque")
asks("asks_beside_a_global_tensor", lambda mask: float(mask.sum() + LIMIT > 87), "opaque")
asks("asks_what_was_written_through_a_view", _through_a_view, "opaque")
asks("asks_where_it_catches", _suppressed, "opaque")
asks("asks_for_places", lambda mask: float(len(mask.nonzero())), "opaque")
asks("asks_what_is_unique", lambda mask: float(len(mask.sum(1).unique())), "opaque")


@case("opaque")
def asks_beside_random_numbers(live):
    """Whole numbers, too, but drawn."""

    def loss(model, batch):
        drawn = torch.randint(0, 2, (4,)).sum() > 1 if live else True
        return F.cross_entropy(model(batch[0]), batch[1]) * (2.0 if drawn else 1.0)

    return job(mlp(), loss)


@case("opaque")
def asks_beside_a_buffer(live):
    model = mlp()
    model.register_buffer("seen", torch.tensor(0))

    def loss(model, batch):
        rows, labels, mask = batch
        much = (model.seen + mask.sum() > 47) if live else True
        return F.cross_entropy(model(rows), labels) * (2.0 if much else 1.0)

    return job(model, loss, data=masked(), on_step=every(live, lambda n: model.seen.fill_(n % 2)))


@case("captured")
def asked_mask_that_a_callback_changes(live):
    """Of a batch that may be there already."""
    data = masked()

    def change(step):
        for _, _, mask in data[step : step + 2]:
            mask[0, 0] = step % 2

    return weighted(True, _branch, data[0][2], data, on_step=every(live, change))


@case("captured")
def asked_mask_that_changes_through_an_array(live):
    """Without a new version of the tensor."""
    data = masked()
    arrays = [mask.numpy() for _, _, mask in data]

    def change(step):
        if step < STEPS:
            arrays[step][:] = np.eye(8, 6) if step % 2 else 1

    return weighted(True, _branch, data[0][2], data, on_step=every(live, change))


@case("captured")
def asked_mask_in_memory_that_is_filled_again(live):
    def batches():
        rows, labels, mask = (part.clone() for part in masked()[0])
        for batch in masked():
            rows.copy_(batch[0])
            labels.copy_(batch[1])
            if live:
                mask.copy_(batch[2])
            yield rows, labels, mask

    return weighted(True, _branch, masked()[0][2], made_by(batches))


@case("recaptured")
def asks_something_else_from_then_on(live):
    """What is asked is Python's, which a callback changes."""
    asked = {"least": 4}

    def ask(mask):
        return 1.0 if mask[1].sum() > asked["least"] else 2.0

    return weighted(True, ask, masked()[0][2], on_step=at(5, live, lambda: asked.update(least=1)))


@case("opaque")
def asks_for_what_hardly_repeats(live):
    generator = torch.Generator().manual_seed(5)
    data = [
        (rows, labels, torch.randint(0, 1000, (8, 6), generator=generator))
        for rows, labels, _ in masked(30)
    ]
    return weighted(live, lambda numbers: 1.0 / int(numbers.sum()), data[0][2], data)


@case("captured", "recaptured")
def own_step_asks(live):
    model = mlp(0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch):
        rows, labels, mask = batch
        loss = F.cross_entropy(model(rows), labels)
        if live and not mask.all():
            loss = loss * 3
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return job(model, None, step=step, optimizer=None, optimizers=[optimizer], data=masked())


@case("fails")
def asks_what_raises_for_some_values(live):
    data = masked()
    data[6][2][0, 0] = 9
    return weighted(live, _gathered, data[0][2], data)


@case("captured", "recaptured", "opaque")
def no_longer_asks_what_would_raise(live):
    data = masked()
    data[6][2][0, 0] = 9
    asked = {"on": live}

    def ask(mask):
        return _gathered(mask) if asked["on"] else 2.0

    on_step = at(4, live, lambda: asked.update(on=False))
    return weighted(True, ask, data[0][2], data, on_step=on_step)


@case("fails")
def asks_whether_to_raise(live):
    data = masked()
    data[6][2][0, 0] = 7

    def ask(mask):
        if mask.max() > 1:
            raise ValueError("a mask of what is no truth")
        return 0.0

    return weighted(live, ask, data[0][2], data)
