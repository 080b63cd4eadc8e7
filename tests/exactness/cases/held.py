"""Cases: what callbacks evaluate, and what the user holds while the job trains and afterwards."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
import weakref

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

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


def normed():
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    )


def ragged():
    """A shuffling loader whose last batch is smaller."""
    return DataLoader(TensorDataset(*batches(1, 43)[0]), 8, shuffle=True)


# -- evaluation


def evaluated(name, evaluate, *expected, **options):
    """Enters a case whose callback evaluates, also just before the first smaller batch."""

    def make(live):
        model, kept = normed(), []

        def change(step):
            if step % 6 in (2, 5):
                kept.append(evaluate(model))

        made = job(model, data=ragged(), epochs=3, on_step=every(True, change))
        return Subject(made, lambda: kept)

    make.__name__ = name
    case(*(expected or KEPT), matters=False, **options)(make)


def _loss_of(model):
    return sum(cross_entropy(model, batch).item() for batch in batches(3, 12))


def _in_eval_mode(model):
    model.eval()
    with torch.no_grad():
        found = _loss_of(model)
    model.train()
    return found


def _slowly(model):
    """Long enough for whatever is prepared meanwhile to see the model in the wrong mode."""
    model.eval()
    time.sleep(0.05)
    with torch.no_grad():
        found = _loss_of(model)
    model.train()
    return found


def _in_train_mode(model):
    """The statistics of the norm move, and dropout draws."""
    with torch.no_grad():
        return _loss_of(model)


def _in_inference_mode(model):
    model.eval()
    with torch.inference_mode():
        found = _loss_of(model)
    model.train()
    return found


def _on_a_copy(model):
    return _in_eval_mode(copy.deepcopy(model))


def _with_gradients(model):
    """Saliency: a backward pass in the callback, which leaves gradients behind."""
    model.eval()
    x = batches(1)[0][0].requires_grad_()
    model(x).sum().backward()
    model.train()
    return x.grad


def _with_features(model):
    """Features by a hook that is there only while they are wanted."""
    kept = []
    handle = model[0].register_forward_hook(lambda module, inputs, out: kept.append(out))
    _in_eval_mode(model)
    handle.remove()
    return kept


def _in_bfloat16(model):
    with torch.autocast("cpu", torch.bfloat16):
        return _in_eval_mode(model)


def _by_another_thread(model):
    found = []
    thread = threading.Thread(target=lambda: found.append(_in_eval_mode(model)))
    thread.start()
    thread.join()
    return found


evaluated("evaluated", _in_eval_mode)
evaluated("evaluated_slowly", _slowly)
evaluated("evaluated_in_train_mode", _in_train_mode)
evaluated("evaluated_in_inference_mode", _in_inference_mode)
evaluated("evaluated_on_a_copy", _on_a_copy)
evaluated("evaluated_with_gradients", _with_gradients, "captured", "recaptured", "opaque")
evaluated("evaluated_with_features", _with_features)
evaluated("evaluated_under_autocast", _in_bfloat16)
evaluated("evaluated_by_another_thread", _by_another_thread)


@case(*KEPT)
def evaluated_and_left_so(live):
    """A callback that forgets to go back to training: dropout is off from then on."""
    model = normed()

    def change(step):
        if step == 3:
            model.eval()
            with torch.no_grad():
                _loss_of(model)

    return job(model, data=ragged(), epochs=3, on_step=every(live, change))


@case(*KEPT)
def stopped_early(live):
    """Evaluates, keeps the best weights, and takes them back when it has become worse."""
    model, best = normed(), {}

    def change(step):
        if step % 2:
            return
        found = _in_eval_mode(model)
        if found < best.get("loss", float("inf")):
            best.update(loss=found, weights=copy.deepcopy(model.state_dict()))
        elif live:
            model.load_state_dict(best["weights"])

    made = job(
        model,
        data=ragged(),
        epochs=4,
        optimizer=sgd(model, lr=0.5),
        on_step=every(True, change),
    )
    return Subject(made, lambda: best)


# -- what is kept


@case(*KEPT, matters=False)
def views_kept_by_the_callback(live):
    """Views of a weight follow it in the loop, and stay readable when the run is over."""
    model, views = mlp(), []
    made = job(model, on_step=every(True, lambda s: views.append(model[0].weight.detach()[0])))
    return Subject(made, lambda: views)


@case(*KEPT, matters=False)
def arrays_kept_by_the_callback(live):
    model, views = mlp(), []
    made = job(model, on_step=every(True, lambda s: views.append(model[0].weight.detach().numpy())))

    def extra():
        gc.collect()
        return views

    return Subject(made, extra)


@case(*KEPT, matters=False)
def array_taken_before(live):
    model = mlp()
    view = model[0].weight.detach().numpy()
    return Subject(job(model), lambda: view)


@case(*KEPT, matters=False)
def weight_made_of_an_array(live):
    model = mlp()
    array = np.full((32, 16), 0.01, dtype=np.float32)
    model[0].weight = nn.Parameter(torch.from_numpy(array))
    return Subject(job(model), lambda: array)


@case(*KEPT)
def weight_written_through_an_array(live):
    model = mlp()
    view = model[0].weight.detach().numpy()

    def change(step):
        view[0] = step

    return Subject(job(model, on_step=every(live, change)), lambda: view)


@case(*KEPT, matters=False)
def memory_shared_by_dlpack(live):
    model = mlp()
    other = torch.from_dlpack(model[0].weight.detach())
    return Subject(job(model), lambda: other)


@case(*KEPT, matters=False)
def view_of_a_weight_taken_before(live):
    model = mlp()
    row = model[0].weight.detach()[3]
    return Subject(job(model), lambda: row)


@case(*KEPT)
def weights_in_one_flat_tensor(live):
    """All weights are views of one tensor outside the job, which the callback changes."""
    model = mlp()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    start = 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    return Subject(job(model, on_step=every(live, lambda step: flat.mul_(0.9))), lambda: flat)


@case(*KEPT, matters=False)
def memory_shared_between_processes(live):
    return job(mlp().share_memory())


@case(*KEPT, matters=False)
def snapshots_of_all_weights(live):
    model, kept = mlp(), []

    def change(step):
        kept.append({name: value.clone() for name, value in model.state_dict().items()})

    return Subject(job(model, on_step=every(True, change)), lambda: kept)


@case(*KEPT, matters=False)
def state_dict_kept_without_copies(live):
    model, kept = mlp(), []
    made = job(model, on_step=every(True, lambda step: kept.append(model.state_dict())))
    return Subject(made, lambda: kept)


@case(*KEPT, matters=False)
def saved_to_a_file(live):
    model, kept = mlp(0.2), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def change(step):
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "state": optimizer.state_dict()}, file)
        file.seek(0)
        kept.append(torch.load(file))

    return Subject(job(model, optimizer=optimizer, on_step=every(True, change)), lambda: kept)


@case(*KEPT, matters=False)
def optimizer_state_kept(live):
    model, kept = mlp(), []
    optimizer = sgd(model)

    def change(step):
        kept.append(optimizer.state[model[0].weight]["momentum_buffer"])

    return Subject(job(model, optimizer=optimizer, on_step=every(True, change)), lambda: kept)


@case(*KEPT, matters=False)
def weak_references_stay(live):
    """The objects that the user knows are the ones that train."""
    model = mlp()
    known = weakref.ref(model[0].weight)
    same = []
    made = job(model, on_step=every(True, lambda step: same.append(known() is model[0].weight)))
    return Subject(made, lambda: same)


@case(*KEPT, matters=False)
def addresses_seen_by_the_callback(live):
    """A weight is where it was in the step before, as far as the callback can see."""
    model, same = mlp(), []
    view = model[0].weight.detach()

    def change(step):
        same.append(view.data_ptr() == model[0].weight.data_ptr())

    return Subject(job(model, on_step=every(True, change)), lambda: same)


@case(*KEPT, matters=False)
def another_thread_reads(live):
    """A thread that reads the model all the time finds real tensors, and no errors."""
    model, errors, done = mlp(), [], threading.Event()
    weakref.finalize(model, done.set)  # of a job that nobody runs, too
    known = weakref.ref(model)

    def read():
        while not done.wait(0.001):
            try:
                kinds = {type(v) for v in known().state_dict().values()}
                copies = [v.clone() for v in known().state_dict().values()]
                if kinds != {torch.Tensor} or not all(v.isfinite().all() for v in copies):
                    errors.append(str(kinds))
            except Exception as error:
                errors.append(repr(error))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def extra():
        done.set()
        reader.join()
        return errors

    return Subject(job(model, data=batches(40), epochs=3), extra)


# -- gradients of what the job does not train


def asks_for_gradient_of(weight):
    def loss(model, batch):
        return cross_entropy(model, batch) * (1.0 if weight.grad is None else 2.0)

    return loss


@case("opaque")
def gradient_made_by_the_callback(live):
    weight = nn.Parameter(torch.ones(1))
    change = lambda: (weight * 2).sum().backward()  # noqa: E731
    return job(mlp(), asks_for_gradient_of(weight), on_step=at(4, live, change))


@case("opaque")
def gradient_made_by_the_data(live):
    weight = nn.Parameter(torch.ones(1))

    class Rows(Dataset):
        seen = 0

        def __len__(self):
            return 80

        def __getitem__(self, place):
            self.seen += 1
            if live and self.seen == 33:
                (weight * 2).sum().backward()
            rows, labels = batches(10)[place // 8]
            return rows[place % 8], labels[place % 8]

    return job(mlp(), asks_for_gradient_of(weight), data=DataLoader(Rows(), 8))
