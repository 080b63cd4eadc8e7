"""One loader for many jobs: the batches of the plain loop over it, made once."""

from __future__ import annotations

import collections
import gc
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import waterflow as wf

pytestmark = pytest.mark.cpu


class Numbers(Dataset):
    """Numbers with noise of all three random modules; counts how often each is fetched."""

    def __init__(self, count=24, noise=True, fails_at=None):
        self.count = count
        self.noise = noise
        self.fails_at = fails_at
        self.fetched = collections.Counter()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.fetched[index] += 1
        if index == self.fails_at:
            raise LookupError(f"no number {index}")
        if not self.noise:
            return torch.full((2,), float(index))
        return index + torch.rand(2) + random.random() + np.random.rand()


def loader(numbers=None, **options):
    return DataLoader(numbers or Numbers(), batch_size=4, shuffle=True, **options)


def listed(iterator):
    return [batch.tolist() for batch in iterator]


def plain(data, epochs, seed=3):
    """The batches of the loop in the docstring, and leaves the process's streams as they were."""
    with torch.random.fork_rng():
        states = random.getstate(), np.random.get_state()
        torch.manual_seed(seed)
        found = [listed(data) for _ in range(epochs)]
        random.setstate(states[0])
        np.random.set_state(states[1])
    return found


def job(name, data, *, epochs=2, dropout=0.5, loss=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(dropout), nn.Linear(8, 1))
    return wf.Job(
        name,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss=loss or squares,
        data=data,
        epochs=epochs,
        seed=1,
        **options,
    )


def squares(model, batch):
    return F.mse_loss(model(batch).squeeze(1), batch.sum(1))


def test_every_epoch_is_that_of_the_plain_loop():
    data = wf.shared(loader(), seed=3)
    expected = plain(loader(), 3)
    assert [listed(data.epoch(number)) for number in range(3)] == expected
    assert [listed(data) for _ in range(3)] == expected, "by hand one epoch follows the other"
    assert len(data) == 6


def test_any_epoch_may_be_asked_for_at_any_time():
    expected = plain(loader(), 4)
    data = wf.shared(loader(), seed=3)
    for number in (3, 0, 2, 0, 1, 3):
        assert listed(data.epoch(number)) == expected[number]


def test_a_generator_of_the_loaders_begins_where_it_was():
    def make():
        return loader(generator=torch.Generator().manual_seed(7))

    data = wf.shared(made := make(), seed=3)
    before = made.generator.get_state()
    expected = plain(make(), 3)
    for number in (1, 0, 2):
        assert listed(data.epoch(number)) == expected[number]
    assert torch.equal(made.generator.get_state(), before)


def test_the_process_draws_what_it_would():
    data = wf.shared(loader(), seed=3)
    torch.manual_seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    listed(data)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_without_a_seed_the_process_draws_one():
    def order():
        torch.manual_seed(11)
        return listed(wf.shared(loader(Numbers(noise=False))))

    assert order() == order()
    assert order() != listed(wf.shared(loader(Numbers(noise=False))))


def test_jobs_train_as_in_the_plain_loop_and_batches_are_made_once():
    numbers = Numbers()
    data = wf.shared(loader(numbers), seed=3)
    report = wf.run([job(name, data) for name in "abc"], memory="10MiB")
    assert report.ok, [entry.error for entry in report]
    assert set(numbers.fetched.values()) == {2}, "once per epoch"
    expected = wf.run_eager(job("d", data), threads=1).losses
    assert all(entry.losses == expected for entry in report)
    assert len(expected) == 12


def test_losses_are_those_of_a_list_of_the_same_batches():
    data = wf.shared(loader(), seed=3)
    batches = [torch.tensor(batch) for batch in plain(loader(), 1)[0]]
    expected = wf.run_eager(job("a", batches, epochs=1)).losses
    assert wf.run_eager(job("b", data, epochs=1)).losses == expected


def test_who_is_far_behind_has_the_batches_made_again():
    numbers = Numbers()
    data = wf.shared(loader(numbers), seed=3, window=2)
    (expected,) = plain(loader(), 1)
    slow, slower = data.epoch(0), data.epoch(0)
    found = [next(slow).tolist()], [next(slower).tolist()]
    assert listed(data.epoch(0)) == expected
    found[0].extend(listed(slow))
    found[1].extend(listed(slower))
    assert found == (expected, expected)


def test_who_comes_late_begins_at_the_beginning():
    data = wf.shared(loader(), seed=3)
    expected = plain(loader(), 2)
    first = data.epoch(0)
    next(first), next(first)
    late = data.epoch(0)
    assert listed(late) == expected[0]
    assert listed(first) == expected[0][2:]
    with wf.Engine(memory="10MiB") as engine:
        early = engine.submit(job("early", data))
        early.result(300)
        assert engine.submit(job("late", data)).result(300).losses == early.losses


def test_memory_is_kept_for_those_who_read_and_a_window_more():
    data = wf.shared([torch.ones(2) * n for n in range(40)], window=4)
    for number in range(10):
        collections.deque(data.epoch(number), maxlen=0)
    assert sum(len(one.kept) for one in data._passes) <= 2 * 4


def test_a_job_that_ends_early_leaves_the_others_alone():
    data = wf.shared(loader(), seed=3)
    jobs = [
        job("stops", data, on_step=lambda step: wf.STOP if step.step == 2 else None),
        job("fails", data, loss=lambda model, batch: 1 / 0),
        job("goes on", data, epochs=3),
        job("is short", data, steps=1),
    ]
    report = wf.run(jobs, memory="10MiB")
    assert [entry.state for entry in report] == ["stopped", "failed", "finished", "finished"]
    assert report["goes on"].losses == wf.run_eager(job("x", data, epochs=3), threads=1).losses


def test_every_job_has_the_errors_of_the_data():
    data = wf.shared(loader(Numbers(fails_at=9)), seed=3)
    report = wf.run([job("a", data), job("b", data)], memory="10MiB")
    for entry in report:
        assert entry.state == "failed"
        assert "LookupError" in str(entry.error) or "no number 9" in str(entry.error)
    assert report["a"].steps == report["b"].steps
    with pytest.raises(LookupError, match="no number 9"):
        wf.run_eager(job("c", data))


def test_what_a_job_writes_to_its_batch_no_other_sees():
    def spoils(model, batch):
        found = squares(model, batch.clone())
        batch.fill_(float("nan"))
        return found

    data = wf.shared(loader(), seed=3)
    jobs = [job("spoils", data, loss=spoils), job("a", data), job("b", data)]
    report = wf.run(jobs, memory="10MiB")
    expected = wf.run_eager(job("c", data), threads=1).losses
    assert all(entry.losses == expected for entry in report), [entry.error for entry in report]


def test_a_batch_that_cannot_be_copied_is_an_error_with_a_remedy():
    class Own(torch.Tensor):
        pass

    data = wf.shared([torch.ones(2).as_subclass(Own)])
    with pytest.raises(
        wf.JobError, match=r"a batch of shared data.*a loader of its own.*new_empty"
    ):
        next(data.epoch(0))


def test_many_threads_see_the_same():
    data = wf.shared(loader(), seed=3, window=2)
    expected = plain(loader(), 3)
    found = {}

    def read(name):
        found[name] = [listed(data.epoch(number)) for number in range(3)]

    threads = [threading.Thread(target=read, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [found[name] for name in range(6)] == [expected] * 6


def test_ctrl_c_in_the_data_ends_that_pass_alone():
    class Interrupted(Numbers):
        def __getitem__(self, index):
            if self.fetched.total() == 6:
                self.fetched[-1] += 1
                raise KeyboardInterrupt
            return super().__getitem__(index)

    data = wf.shared(loader(Interrupted()), seed=3)
    with pytest.raises(KeyboardInterrupt):
        listed(data.epoch(0))
    assert listed(data.epoch(0)) == plain(loader(), 1)[0]


def test_worker_processes():
    make = lambda: loader(num_workers=2)  # noqa: E731
    (expected,) = plain(make(), 1)
    data = wf.shared(make(), seed=3)
    assert listed(data.epoch(0)) == expected
    report = wf.run([job(name, data, epochs=1) for name in "ab"], memory="10MiB")
    assert report["a"].losses == report["b"].losses
    assert report["a"].losses == wf.run_eager(job("c", data, epochs=1), threads=1).losses


def test_batches_are_made_in_the_context_of_who_shared():
    class Typed(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.ones(2) @ torch.ones(2, 2)

    data = wf.shared(DataLoader(Typed(), batch_size=2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {batch.dtype for batch in data} == {torch.float32}


def test_plans_take_no_epoch_away():
    data = wf.shared(loader(), seed=3)
    report = wf.plan([job("a", data)], memory="10MiB")
    assert report.fits
    assert listed(data) == plain(loader(), 1)[0]


def test_in_a_loader_of_tensors_numbers_are_the_plain_ones():
    tensors = TensorDataset(torch.randn(23, 2))
    data = wf.shared(DataLoader(tensors, batch_size=4, shuffle=True), seed=3)
    torch.manual_seed(3)
    expected = [batch[0].tolist() for batch in DataLoader(tensors, batch_size=4, shuffle=True)]
    assert [batch[0].tolist() for batch in data] == expected


def test_a_reader_that_is_gone_is_forgotten():
    data = wf.shared(loader(), seed=3)
    reader = data.epoch(0)
    next(reader)
    assert len(data._passes[0].readers) == 1
    del reader
    gc.collect()
    assert not data._passes[0].readers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wf.shared(5), "can be iterated once per epoch.*got int"),
        (lambda: wf.shared(iter([1])), "can be iterated once per epoch.*got list_iterator"),
        (lambda: wf.shared(wf.shared([1])), "shared already"),
        (lambda: wf.shared([1], window=0), "window must be a positive whole number.*got 0"),
        (lambda: wf.shared([1], seed=1.5), "seed must be a whole number or None, got 1.5"),
        (
            lambda: wf.shared(loader(num_workers=1, persistent_workers=True)),
            "persistent_workers=True",
        ),
    ],
)
def test_what_cannot_be_shared(make, message):
    with pytest.raises(wf.JobError, match=message):
        make()
