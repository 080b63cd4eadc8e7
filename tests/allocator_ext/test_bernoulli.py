"""Masks that a tape draws itself: the bits of torch, and the state of its generator."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.graphs import step_of
from waterflow.executor.run.tape import compile_step
from waterflow.steps.same_bits import same_bits

pytestmark = pytest.mark.cpu

#: An engine has 624 words, of which each element takes two.
SIZES = [1, 2, 3, 311, 312, 313, 623, 624, 625, 1248, 6720, 10_001]
PROBABILITIES = [0.0, 1.0, 0.5, 0.8, 1 / 3, 1e-12, 1 - 2**-53, 2**-53, 5e-324]


def draws(probability, **layout):
    """A step that draws masks like its batch, of two sizes."""

    def step(batch):
        mask = torch.empty_like(batch, **layout).bernoulli_(probability)
        few = torch.empty(3).bernoulli_(0.5)
        return batch.sum(), mask, few

    return step


def compiled_for(step, batch):
    return compile_step(step_of(step, batch))


def results(compiled, generator, batch):
    compiled.tape.set_generators(generator, None)
    compiled.tape.set_batch([batch])
    compiled.tape.run(0, len(compiled.tape))
    return [compiled.tape.slot(slot) for slot in compiled.outputs.values()]


def expected_of(step, generator, batch):
    """The same of the eager step, with the default generator in that state."""
    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        return step(batch)[1:], torch.get_rng_state()
    finally:
        torch.set_rng_state(before)


def check(step, batch, runs=4, skip=0):
    """The first run dispatches and compares, the others need not."""
    generator = torch.Generator().manual_seed(7)
    torch.empty(skip).uniform_(generator=generator)
    compiled = compiled_for(step, batch)
    for _ in range(runs):
        expected, state = expected_of(step, generator, batch)
        for found, wanted in zip(results(compiled, generator, batch), expected, strict=True):
            assert found.stride() == wanted.stride()
            assert same_bits(found, wanted)
        assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("skip", [0, 1, 623])
def test_every_size_has_the_bits_of_the_dispatched_operator(size, skip):
    check(draws(0.8), torch.zeros(size), skip=skip)


@pytest.mark.parametrize("probability", PROBABILITIES)
def test_every_probability_has(probability):
    check(draws(probability), torch.zeros(40, 50))


def test_a_normal_number_that_is_kept_stays():
    """Two are made at a time, and the second one is kept by the generator."""
    generator = torch.Generator().manual_seed(3)
    torch.empty(1).normal_(generator=generator)
    twin = generator.clone_state()
    compiled = compiled_for(draws(0.5), torch.zeros(9))
    for _ in range(3):
        results(compiled, generator, torch.zeros(9))
    for _ in range(3):
        torch.empty(9).bernoulli_(0.5, generator=twin)
        torch.empty(3).bernoulli_(0.5, generator=twin)
    found, expected = (torch.empty(1).normal_(generator=one) for one in (generator, twin))
    assert same_bits(found, expected)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(6, 4).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(8, dtype=torch.bfloat16),
        torch.zeros(0, 3),
    ],
    ids=["transposed", "channels last", "double", "bfloat16", "empty"],
)
def test_other_tensors_are_dispatched_or_have_the_same_bits(batch):
    check(draws(0.7), batch)


def test_the_dispatcher_is_asked_once():
    def names():
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            results(compiled, generator, torch.zeros(5))
        return {event.name for event in recorded.events()}

    generator = torch.Generator().manual_seed(1)
    compiled = compiled_for(draws(0.5), torch.zeros(5))
    assert "aten::bernoulli_" in names()
    assert "aten::bernoulli_" not in names()
