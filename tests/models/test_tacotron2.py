"""Tacotron 2: where it looks, what it may know of the frames, and its loss."""

import dataclasses

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from waterflow.models.tacotron2 import (
    TACOTRON2_SMALL,
    TINY,
    Attention,
    Spectrogram,
    Tacotron2,
    spectrogram_loss,
    tacotron2_task,
)

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def certain():
    """A model without dropout, and a batch."""
    torch.manual_seed(0)
    model = Tacotron2(dataclasses.replace(TINY, dropout=0.0, cell_dropout=0.0))
    for parameter in model.decoder.attention.parameters():
        nn.init.normal_(parameter)  # attends to places here and there, not to all alike
    return model, TACOTRON2_SMALL.batch(2)


def test_alignments_sum_to_one(certain):
    model, (characters, mels, _) = certain
    alignments = model(characters, mels).alignments
    assert alignments.shape == (2, 3, 7)
    assert (alignments >= 0).all()
    torch.testing.assert_close(alignments.sum(2), torch.ones(2, 3))
    assert alignments.std() > 0.01


def test_attention_by_loops():
    torch.manual_seed(0)
    attention = Attention(TINY).double()
    query, keys, last, total = (
        torch.rand(shape, dtype=torch.float64) for shape in ((1, 16), (1, 7, 8), (1, 7), (1, 7))
    )
    scores = []
    for place in range(7):
        seen = torch.zeros(4, dtype=torch.float64)
        for offset in range(-2, 3):
            if 0 <= place + offset < 7:
                weights = attention.filters.weight[:, :, offset + 2]
                seen += weights[:, 0] * last[0, place + offset]
                seen += weights[:, 1] * total[0, place + offset]
        compared = attention.query.weight @ query[0] + keys[0, place]
        compared = torch.tanh(compared + attention.place.weight @ seen)
        scores.append((attention.score.weight @ compared).exp())
    wanted = torch.cat(scores) / torch.cat(scores).sum()
    torch.testing.assert_close(attention(query, keys, last, total)[0], wanted)


@pytest.mark.parametrize("frame", [0, 1, 2])
def test_a_frame_is_known_to_later_ones_alone(certain, frame):
    model, (characters, mels, _) = certain
    changed = mels.clone()
    changed[:, :, frame] += 1
    one, other = model(characters, mels), model(characters, changed)
    for found, again in ((one.before, other.before), (one.gates, other.gates)):
        assert torch.equal(found[..., : frame + 1], again[..., : frame + 1])
        for later in range(frame + 1, 3):
            assert not torch.equal(found[..., later], again[..., later])


def test_the_prenet_drops_out_in_evaluation_too():
    model, (characters, mels, _) = TACOTRON2_SMALL.model().eval(), TACOTRON2_SMALL.batch(2)
    assert not torch.equal(model(characters, mels).before, model(characters, mels).before)


def test_loss():
    mels, gates = torch.randn(2, 8, 3), torch.tensor([[0.0, 0.0, 1.0]] * 2)
    predicted = Spectrogram(mels + 1, mels - 2, torch.zeros(2, 3), torch.empty(0))
    loss = spectrogram_loss(lambda characters, mels: predicted, (None, mels, gates))
    torch.testing.assert_close(loss, 1 + 4 + torch.tensor(2.0).log())


def test_the_last_frame_has_the_gate():
    _, _, gates = TACOTRON2_SMALL.batch(2)
    assert gates.tolist() == [[0, 0, 1]] * 2


def test_a_number_of_frames():
    assert tacotron2_task(frames=3).batch(2)[1].shape == (2, 80, 3)
    with pytest.raises(ValueError, match="frames must be a whole number of 1 or more, got 0"):
        tacotron2_task(frames=0)


def test_shapes_at_full_size():
    task = tacotron2_task(frames=3)
    with FakeTensorMode():
        model, batch = task.model(), task.batch(2)
        assert [tensor.shape for tensor in batch] == [(2, 100), (2, 80, 3), (2, 3)]
        shapes = [tensor.shape for tensor in model(*batch[:2])]
        assert shapes == [(2, 80, 3), (2, 80, 3), (2, 3), (2, 3, 100)]
        assert task.loss(model, batch).shape == ()
