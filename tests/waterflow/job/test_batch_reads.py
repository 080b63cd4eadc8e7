"""What a loss can read of its batch: too much may be said, too little never."""

from __future__ import annotations

import collections
import functools
import sys

import numpy as np
import pytest
import torch

from waterflow.job.batch import UnknownLeafError, flatten, moved
from waterflow.job.batch_reads import reads_of

pytestmark = pytest.mark.virtual

KEYS = {"image": 1, "label": 2, "path": 3}
ALL = frozenset()
read_locals = locals
table = np.ones(3)


def use(*values):
    return values


def by_keys(model, batch):
    return use(model, batch["image"], batch["label"])


def by_keys_again(model, batch):
    for _ in range(2):
        image = batch["image"]
        if image:
            use(model, batch["label"], lambda: model)
    del batch


def in_a_condition(model, batch):
    return (KEYS if model else batch)["image"]


def in_a_condition_before_a_jump(model, batch):
    return (batch if model else KEYS)["image"]


def by_other_name(model, batch):
    same = batch
    return same["image"]


def handed_on(model, batch):
    return use(model, batch["image"], batch)


def by_method(model, batch):
    return batch.get("image")


def iterated(model, batch):
    return [batch["image"] for _ in batch]


def in_a_text(model, batch):
    return f"{batch}", batch["image"]


def compared(model, batch):
    return batch == KEYS


def contained(model, batch):
    return "path" in batch


def spread(model, batch):
    return use(**batch)


def merged(model, batch):
    return {**batch}["image"]


def enclosed(model, batch):
    return lambda: batch["image"]


def by_variable_key(model, batch):
    return [batch["image"], *(batch[key] for key in KEYS)]


def by_a_key_of_the_model(model, batch):
    return batch[model]


def written(model, batch):
    batch["image"] += 1


def by_local_names(model, batch):
    return use(batch["image"], locals())


def by_local_names_of_another_name(model, batch):
    return use(batch["image"], read_locals())


def by_evaluation(model, batch):
    return use(batch["image"], eval("batch"))


def by_frames(model, batch):
    try:
        return batch["image"] / 0
    except TypeError as error:
        return error.__traceback__.tb_frame.f_locals


def generated(model, batch):
    yield batch["image"]


def anything(model, *batch):
    return batch


def by_slice(model, batch):
    return batch[0:1]


def after_another(model, batch):
    batch = {**KEYS}
    return batch["label"]


class Task:
    def loss(self, model, batch):
        return use(self, batch["image"], batch["label"])

    def __call__(self, model, batch):
        return batch["image"]


DICTS = [
    (by_keys, {"path"}),
    (by_keys_again, {"path"}),
    (Task().loss, {"path"}),
    (lambda model, batch: batch["path"], {"image", "label"}),
    (lambda m, b: None, {"image", "label", "path"}),
    (in_a_condition, {"label", "path"}),
    # There the compiler goes on apart for both, from Python 3.12 on.
    (in_a_condition_before_a_jump, {"label", "path"} if sys.version_info >= (3, 12) else ALL),
    (after_another, {"image", "path"}),
    *(
        (loss, ALL)
        for loss in (
            by_other_name,
            handed_on,
            by_method,
            iterated,
            in_a_text,
            compared,
            contained,
            spread,
            merged,
            enclosed,
            by_variable_key,
            by_a_key_of_the_model,
            written,
            by_local_names,
            by_local_names_of_another_name,
            by_evaluation,
            by_frames,
            generated,
            anything,
            by_slice,
            Task(),
            functools.partial(by_keys),
            functools.wraps(by_keys)(lambda *given: by_keys(*given)),
            use,
        )
    ),
]


def unread(loss, batch):
    reads = reads_of(loss)
    return ALL if reads is None else reads.unread(batch)


@pytest.mark.parametrize(("loss", "expected"), DICTS)
def test_keys(loss, expected):
    assert unread(loss, dict(KEYS)) == expected


def unpacked(model, batch):
    image, _label, path = batch
    return use(model, image, path)


def unpacked_into_a_cell(model, batch):
    image, _label, path = batch
    return lambda: path, use(image)


def unpacked_deeply(model, batch):
    (image, _), label, _path = batch
    return use(image, label)


def unpacked_with_a_rest(model, batch):
    image, *_rest = batch
    return image


def unpacked_elsewhere(model, batch):
    use.image, _label, _path = batch


def unpacked_twice(model, batch):
    image, _, _ = batch
    _, label, _ = batch
    return use(image, label)


SEQUENCES = [
    (lambda m, b: m(b[0]) + b[1], {2}),
    (lambda m, b: m(b[0]) + b[-2], {2}),
    (lambda m, b: b[5], {0, 1, 2}),
    (unpacked, {1}),
    (unpacked_twice, {2}),
    (unpacked_into_a_cell, ALL),
    (unpacked_deeply, ALL),
    (unpacked_with_a_rest, ALL),
    (unpacked_elsewhere, ALL),
    (by_slice, ALL),
]


@pytest.mark.parametrize(("loss", "expected"), SEQUENCES)
@pytest.mark.parametrize("kind", [list, tuple])
def test_positions(kind, loss, expected):
    assert unread(loss, kind([1, 2, 3])) == expected


def test_what_is_unpacked_otherwise_is_the_steps_own_error():
    assert unread(unpacked, [1, 2]) == ALL


def test_only_plain_containers_with_plain_keys():
    class OwnDict(dict):
        pass

    pair = collections.namedtuple("Pair", "image path")(1, 2)
    for batch in (OwnDict(KEYS), collections.UserDict(KEYS), pair, torch.ones(2), "image"):
        assert unread(by_keys, batch) == ALL
        assert unread(lambda m, b: b[0], batch) == ALL
    assert unread(by_keys, {**KEYS, None: 1}) == ALL
    assert unread(unpacked, dict(KEYS)) == ALL, "it unpacks keys"
    assert unread(lambda m, b: b[1], {1: 5, 2: 6}) == {2}
    assert unread(lambda m, b: b[True], {1: 5, 2: 6}) == ALL


def test_globals_of_any_kind_are_looked_at():
    assert unread(lambda m, b: use(table, b["image"]), dict(KEYS)) == {"label", "path"}


def test_flat_batches_leave_out_what_is_unread():
    one = {"image": torch.ones(2), "label": torch.zeros(2), "path": ["a"], "raw": np.ones(2)}
    other = {**one, "path": "b", "raw": object()}
    reads = reads_of(by_keys)
    flat = flatten(one, reads)
    assert flat.signature == flatten(other, reads).signature
    assert len(flat.tensors) == 2
    again = flat.rebuild([torch.ones(3), torch.ones(4)])
    assert list(again) == list(one)
    assert again["raw"] is one["raw"]
    assert again["label"].shape == (4,)
    without = {key: value for key, value in other.items() if key != "raw"}
    assert flat.signature != flatten(without, reads).signature
    assert flatten([torch.ones(2), 1], reads_of(unpacked)).signature != flat.signature
    with pytest.raises(UnknownLeafError):
        flatten(one)
    assert flatten(("a", 1), reads_of(lambda m, b: b[1])).rebuild([]) == ("a", 1)
    assert moved(one, torch.device("meta"), reads)["image"].device.type == "meta"
    assert moved(one, torch.device("meta"))["image"].device.type == "cpu"
