"""Cases: what the batches are."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import waterflow as wf
from tests.exactness.case import Net, at, batches, case, cross_entropy, job, made_by, mlp

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


@case("captured", matters=False)
def things_in_a_batch_that_the_step_cannot_read(live):
    """Arrays, objects and texts, others in every batch."""
    kinds = (lambda n: np.full(3, n), lambda n: object(), lambda n: f"row {n}", lambda n: None)
    data = [
        {"x": x, "y": y, "raw": kinds[n % 4](n), "path": f"{n}.png"}
        for n, (x, y) in enumerate(batches(14))
    ]
    return job(mlp(0.3), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), data=data)


@case("captured", "recaptured", "opaque")
def a_loss_that_begins_to_read_what_none_had_read(live):
    data = [(*batch, float(n)) for n, batch in enumerate(batches())]

    def plain(model, batch):
        x, y, _weight = batch
        return F.cross_entropy(model(x), y)

    def weighted(model, batch):
        x, y, weight = batch
        return F.cross_entropy(model(x), y) * weight

    made = job(mlp(), plain, data=data)

    def swap():
        made.loss = weighted

    made.on_step = at(4, live, swap)
    return made


@case("captured", "recaptured", "opaque")
def a_batch_read_by_way_of_a_frame(live):
    """The loss names two of three values, what it calls looks at its variables."""
    data = [(*batch, 1.0 + (n if live else 0)) for n, batch in enumerate(batches())]

    def weight():
        try:
            raise LookupError
        except LookupError as error:
            return error.__traceback__.tb_frame.f_back.f_locals["batch"][2]

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) * weight()

    return job(mlp(), loss, data=data)


@case("captured", "opaque")
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


# -- what a batch has beside its items


def other_in_each(live, make, factor, held=lambda batch: batch):
    """Batches of which each second one has another number where only its class knows of it."""
    data = [make(batch, 3.0 if live and n % 2 else 1.0) for n, batch in enumerate(batches())]
    return job(mlp(), lambda m, b: cross_entropy(m, held(b)) * factor(b), data=data)


def marked(value, number):
    value.number = number
    return value


class Rows(tuple):
    pass


class RowList(list):
    pass


class RowDict(dict):
    pass


class RowUserDict(UserDict):
    pass


@dataclasses.dataclass
class Row:
    images: torch.Tensor
    labels: torch.Tensor
    ignored: int = dataclasses.field(default=0, compare=False)


class Word(str):
    """A text that does not tell upper from lower case."""

    def __eq__(self, other):
        return isinstance(other, str) and self.lower() == other.lower()

    def __hash__(self):
        return hash(self.lower())


class Always(float):
    """A number that says that it is every other."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __repr__(self):
        return "a number"


def in_order(batch):
    return batch["x"], batch["y"]


@case("captured")
def attributes_of_a_tuple(live):
    return other_in_each(live, lambda b, n: marked(Rows(b), n), lambda b: b.number)


@case("captured")
def attributes_of_a_list(live):
    return other_in_each(live, lambda b, n: marked(RowList(b), n), lambda b: b.number)


@case("captured")
def attributes_of_a_dictionary(live):
    make = lambda b, n: marked(RowDict(x=b[0], y=b[1]), n)  # noqa: E731
    return other_in_each(live, make, lambda b: b.number, in_order)


@case("captured")
def attributes_of_an_ordered_dictionary(live):
    make = lambda b, n: marked(OrderedDict(x=b[0], y=b[1]), n)  # noqa: E731
    return other_in_each(live, make, lambda b: b.number, in_order)


@case("captured", "opaque")
def attributes_of_a_mapping(live):
    make = lambda b, n: marked(RowUserDict(x=b[0], y=b[1]), n)  # noqa: E731
    return other_in_each(live, make, lambda b: b.number, in_order)


@case("captured")
def attributes_of_a_dataclass_that_are_no_fields(live):
    rows = lambda b: (b.images, b.labels)  # noqa: E731
    return other_in_each(live, lambda b, n: marked(Row(*b), n), lambda b: b.number, rows)


@case("captured")
def field_of_a_dataclass_that_is_not_compared(live):
    rows = lambda b: (b.images, b.labels)  # noqa: E731
    return other_in_each(live, lambda b, n: Row(*b, int(n)), lambda b: b.ignored, rows)


@case("captured")
def attributes_of_a_text(live):
    return other_in_each(live, lambda b, n: (*b, marked(Word("x"), n)), lambda b: b[2].number)


@case("captured")
def text_that_is_equal_to_another(live):
    make = lambda b, n: (*b, Word("A" if n > 1 else "a"))  # noqa: E731
    return other_in_each(live, make, lambda b: 3.0 if b[2].isupper() else 1.0)


@case("captured")
def number_that_is_equal_to_every_other(live):
    return other_in_each(live, lambda b, n: (*b, Always(n)), lambda b: float(b[2]))


@case("captured")
def key_that_is_equal_to_another(live):
    make = lambda b, n: {"x": b[0], "y": b[1], (1 if n > 1 else True): 0}  # noqa: E731
    return other_in_each(live, make, lambda b: 1.0 if True is list(b)[2] else 3.0, in_order)


@case("captured", "opaque")
def attributes_of_tensors(live):
    make = lambda b, n: [marked(b[0], n), b[1]]  # noqa: E731
    return other_in_each(live, make, lambda b: b[0].number)


@case("captured", "opaque")
def attributes_that_some_tensors_have(live):
    make = lambda b, n: [marked(b[0], n) if n > 1 else b[0], b[1]]  # noqa: E731
    return other_in_each(live, make, lambda b: getattr(b[0], "number", 1.0))


@case("captured", "recaptured")
def attribute_of_the_class_of_a_batch(live):
    class Kind:
        number = 1.0

    @dataclasses.dataclass
    class Mine(Kind):
        x: torch.Tensor
        y: torch.Tensor

    data = [Mine(*batch) for batch in batches()]
    change = at(4, live, lambda: setattr(Kind, "number", 3.0))
    loss = lambda m, b: cross_entropy(m, (b.x, b.y)) * b.number  # noqa: E731
    return job(mlp(), loss, data=data, on_step=change)


# -- batches that the step changes, and that the data yield again


def epochs_of(live, make, loss, **options):
    """Three epochs of the same batches; or of others like them, as a loader makes them anew."""
    batches_now = [make(batch) for batch in batches(4)]
    kept = batches_now if live else made_by(lambda: [make(batch) for batch in batches(4)])
    return job(mlp(), loss, data=kept, epochs=3, **options)


@case("opaque")
def batch_that_a_number_is_taken_from(live):
    def loss(model, batch):
        factor = batch.pop() if len(batch) > 2 else 3.0
        return cross_entropy(model, batch) * factor

    return epochs_of(live, lambda b: [*b, 1.0], loss)


@case("opaque")
def tensor_that_the_step_marks(live):
    def loss(model, batch):
        factor = 2.0 if hasattr(batch[0], "seen") else 1.0
        batch[0].seen = True
        return cross_entropy(model, batch) * factor

    return epochs_of(live, lambda b: [b[0].clone(), b[1]], loss)


@case("opaque")
def tensor_that_the_step_asks_a_gradient_of(live):
    """From the second epoch on it has one, and what it finds there is added to."""

    def loss(model, batch):
        rows = batch[0].requires_grad_()
        cross_entropy(model, batch).backward()
        model.zero_grad()
        return F.cross_entropy(model((rows + rows.grad).detach()), batch[1])

    return epochs_of(live, lambda b: [b[0].clone(), b[1]], loss)


@case("opaque")
def tensor_that_the_step_hangs_a_hook_on(live):
    def loss(model, batch):
        rows = batch[0].requires_grad_()
        rows.register_hook(lambda gradient: gradient * 2)
        (slope,) = torch.autograd.grad(cross_entropy(model, batch), rows)
        return F.cross_entropy(model(rows.detach() + slope), batch[1])

    return epochs_of(live, lambda b: [b[0].clone(), b[1]], loss)


@case("opaque")
def batch_that_counts_its_steps(live):
    def loss(model, batch):
        batch["steps"] = batch.get("steps", 0) + 1
        return cross_entropy(model, in_order(batch)) * batch["steps"]

    return epochs_of(live, lambda b: {"x": b[0], "y": b[1]}, loss)


@case("opaque")
def batch_that_is_given_another_tensor(live):
    def loss(model, batch):
        images, batch["x"] = batch["x"], batch["x"] * 2
        return cross_entropy(model, (images, batch["y"]))

    return epochs_of(live, lambda b: {"x": b[0], "y": b[1]}, loss)


@case("opaque")
def field_of_a_batch_that_the_step_sets(live):
    def loss(model, batch):
        batch.ignored += 1
        return cross_entropy(model, (batch.images, batch.labels)) * batch.ignored

    return epochs_of(live, lambda b: Row(*b), loss)


@case("opaque")
def list_in_a_batch_that_grows(live):
    def loss(model, batch):
        batch[2].append(1)
        return cross_entropy(model, batch) * len(batch[2])

    return epochs_of(live, lambda b: (*b, []), loss)


@case("opaque")
def batch_that_a_step_of_ones_own_changes(live):
    made = job(mlp())
    model, optimizer = made.model, made.optimizer

    def step(batch):
        factor = batch.pop() if len(batch) > 2 else 3.0
        optimizer.zero_grad()
        loss = cross_entropy(model, batch) * factor
        loss.backward()
        optimizer.step()
        return loss

    make = lambda b: [*b, 1.0]  # noqa: E731
    data = [make(b) for b in batches(4)]
    data = data if live else made_by(lambda: [make(b) for b in batches(4)])
    return wf.Job("case", model=model, optimizer=optimizer, step=step, data=data, epochs=3, seed=5)


@case("captured", matters=False)
def batch_that_a_loader_makes_anew(live):
    """Whatever the step does to its containers, nobody sees."""

    def loss(model, batch):
        labels = batch.pop("y")
        return F.cross_entropy(model(batch["x"]), labels)

    x, y = batches(1, 32)[0]
    rows = [{"x": x[n], "y": y[n]} for n in range(32)]
    return job(mlp(), loss, data=DataLoader(rows, 8), epochs=3)


@case("opaque")
def batch_that_a_loader_of_ones_own_yields_again(live):
    class Loader(DataLoader):
        def __iter__(self):
            return iter(self.dataset if live else [dict(row) for row in self.dataset])

    def loss(model, batch):
        batch["steps"] = batch.get("steps", 0) + 1
        return cross_entropy(model, in_order(batch)) * batch["steps"]

    rows = [{"x": x, "y": y} for x, y in batches(4)]
    return job(mlp(), loss, data=Loader(rows, 2), epochs=3)


@case("captured", "opaque")
def gradients_that_some_batches_have(live):
    data = [tuple(batch) for batch in batches()]
    for n, (x, _) in enumerate(data):
        x.grad = torch.ones_like(x) if live and n % 2 else None
    loss = lambda m, b: cross_entropy(m, b) * (1.0 if b[0].grad is None else 3.0)  # noqa: E731
    return job(mlp(), loss, data=data)


@case("captured", "opaque")
def parameters_among_batches(live):
    data = [
        (nn.Parameter(x, requires_grad=False) if live and n % 2 else x, y)
        for n, (x, y) in enumerate(batches())
    ]
    factor = lambda x: 3.0 if isinstance(x, nn.Parameter) else 1.0  # noqa: E731
    return job(mlp(), lambda m, b: cross_entropy(m, b) * factor(b[0]), data=data)


@case("captured", "opaque")
def batches_made_in_inference_mode(live):
    data = batches()
    with torch.inference_mode():
        data = [(x.clone() if live and n % 2 else x, y) for n, (x, y) in enumerate(data)]
    factor = lambda x: 3.0 if x.is_inference() else 1.0  # noqa: E731
    return job(mlp(), lambda m, b: cross_entropy(m, (b[0].clone(), b[1])) * factor(b[0]), data=data)


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
