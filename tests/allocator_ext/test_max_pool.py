"""Max pooling that a tape does by itself: PyTorch's values and places, whatever the window."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.graphs import step_of
from waterflow.executor.run.tape import compile_step
from waterflow.steps.same_bits import same_bits

pytestmark = pytest.mark.cpu

OPERATOR = torch.ops.aten.max_pool2d_with_indices
#: Equal values, values without order, and values that no window is larger than.
SPECIAL = [0.0, -0.0, 1.0, 1.0, float("nan"), float("inf"), -float("inf"), 1e-41]
WINDOWS = [
    # size, stride, padding, dilation, whether incomplete windows at the end count
    (2, [], 0, 1, False),
    (2, 2, 0, 1, True),
    (3, 2, 1, 1, False),
    (3, 2, 1, 1, True),
    (3, 1, 1, 1, False),
    ([3, 2], [1, 3], [1, 0], 1, True),
    ([1, 5], [4, 5], [0, 2], [1, 1], True),
    (5, 3, 2, 1, True),
    (2, 2, 0, 2, False),  # with gaps
    ([2, 3], [2, 1], 0, [1, 2], False),
]


def images(*shape: int) -> torch.Tensor:
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)]
    return torch.where(torch.rand(shape) < 0.4, special, torch.randn(shape))


def pool(window):
    """A step that pools its batch."""

    def step(batch):
        return batch.sum(), *OPERATOR(batch, *window)

    return step


def results(compiled, batch):
    compiled.tape.set_batch([batch])
    compiled.tape.run(0, len(compiled.tape))
    return [compiled.tape.slot(slot) for slot in compiled.outputs.values()]


def check(window, batches):
    """The first run dispatches and compares, the others need not."""
    step = pool(window)
    compiled = compile_step(step_of(step, batches[0]))
    for batch in batches:
        for found, expected in zip(results(compiled, batch), step(batch)[1:], strict=True):
            assert found.stride() == expected.stride()
            assert same_bits(found, expected), f"{window} of {tuple(batch.shape)}"
    return compiled


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (1, 1, 5, 5), (4, 12, 16), (3, 2, 6, 31)])
def test_every_window_has_the_bits_of_the_dispatched_operator(window, shape):
    torch.manual_seed(0)
    check(window, [images(*shape) for _ in range(3)])


def test_windows_of_one_value_and_of_everything():
    torch.manual_seed(1)
    sizes = range(1, 6)
    for height, width in itertools.product(sizes, sizes):
        check(([height, width], 1, 0, 1, False), [images(2, 2, 5, 5) for _ in range(2)])


def test_nothing_is_larger_than_what_a_window_begins_with():
    lowest, none = torch.full((1, 2, 6, 6), -float("inf")), torch.full((1, 2, 6, 6), float("nan"))
    check((3, 2, 1, 1, True), [lowest, none, lowest])


def test_large_images_are_pooled_by_several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check((3, 2, 1, 1, False), [images(4, 16, 65, 67) for _ in range(2)])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.double(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.transpose(2, 3),
        lambda x: x[:, :, 1:],
        lambda x: x.long(),
    ],
    ids=["channels last", "double", "bfloat16", "transposed", "a part", "whole numbers"],
)
def test_other_tensors_are_dispatched_or_have_the_same_bits(other):
    torch.manual_seed(2)
    check((3, 2, 1, 1, False), [other(torch.randn(2, 3, 8, 8)) for _ in range(3)])


def test_a_layout_that_changes_is_dispatched():
    torch.manual_seed(3)
    batches = [images(2, 3, 8, 8), images(2, 3, 8, 8).transpose(2, 3), images(2, 3, 8, 8)]
    check((2, 2, 0, 1, False), batches)


def test_the_dispatcher_is_asked_once():
    def names(batch):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            results(compiled, batch)
        return {event.name for event in recorded.events()}

    compiled = compile_step(step_of(pool(WINDOWS[0]), images(2, 3, 8, 8)))
    assert "aten::max_pool2d_with_indices" in names(images(2, 3, 8, 8))
    assert "aten::max_pool2d_with_indices" not in names(images(2, 3, 8, 8))
