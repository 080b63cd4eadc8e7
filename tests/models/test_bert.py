"""BERT is transformers' BertForMaskedLM: the same parameters, the same logits, the same gradients.

transformers' names for the parts are mapped here: models import torch alone.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from waterflow.models.bert import (
    BERT_BASE,
    IGNORED,
    MASK,
    Bert,
    BertConfig,
    bert_base,
    bert_tiny,
    masked_language_loss,
    masked_text,
)

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

NAMES = {
    r"bert\.embeddings\.word_embeddings": "embeddings.words",
    r"bert\.embeddings\.position_embeddings": "embeddings.positions",
    r"bert\.embeddings\.token_type_embeddings": "embeddings.segments",
    r"bert\.embeddings\.LayerNorm": "embeddings.norm",
    r"bert\.encoder\.layer\.(\d+)\.attention\.self\.": r"layers.\1.attention.",
    r"bert\.encoder\.layer\.(\d+)\.attention\.output\.dense": r"layers.\1.attention.out",
    r"bert\.encoder\.layer\.(\d+)\.attention\.output\.LayerNorm": r"layers.\1.attention_norm",
    r"bert\.encoder\.layer\.(\d+)\.intermediate\.dense": r"layers.\1.expand",
    r"bert\.encoder\.layer\.(\d+)\.output\.dense": r"layers.\1.contract",
    r"bert\.encoder\.layer\.(\d+)\.output\.LayerNorm": r"layers.\1.inner_norm",
    r"cls\.predictions\.transform\.dense": "head.dense",
    r"cls\.predictions\.transform\.LayerNorm": "head.norm",
    r"cls\.predictions\.bias": "head.decoder.bias",
    r"cls\.predictions\.decoder": "head.decoder",
}


def ours(name):
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def theirs(config):
    options = transformers.BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.inner,
        max_position_embeddings=config.positions,
        attn_implementation="sdpa",
    )
    return transformers.BertForMaskedLM(options)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    config = BertConfig(vocabulary=50, width=32, layers=2, heads=4, inner=48, positions=16)
    reference = theirs(config)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases and norms, too, must matter
    state = {ours(name): value for name, value in reference.state_dict().items()}
    model = Bert(config)
    result = model.load_state_dict(state, strict=False)
    assert not result.missing_keys
    assert set(result.unexpected_keys) <= {"bert.embeddings.position_ids"}
    return model, reference


def batch():
    ids = torch.randint(1, 50, (3, 11))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    segments = torch.randint(2, ids.shape)
    return ids, mask, segments


@pytest.mark.parametrize("masked", [False, True])
def test_logits(pair, masked):
    model, reference = (model.eval() for model in pair)
    ids, mask, segments = batch()
    with torch.no_grad():
        if masked:
            found = model(ids, mask, segments)
            wanted = reference(ids, attention_mask=mask, token_type_ids=segments).logits
        else:
            found, wanted = model(ids), reference(ids).logits
    torch.testing.assert_close(found, wanted)


def test_gradients(pair):
    model, reference = (model.eval() for model in pair)
    ids, _, _ = batch()
    labels = torch.randint(50, ids.shape)
    F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    reference(ids, labels=labels).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[ours(name)], parameter.grad, msg=name)


def test_dropout_draws_in_training(pair):
    model = pair[0].train()
    ids, _, _ = batch()
    assert not torch.equal(model(ids), model(ids))


def test_base_has_as_many_parameters_as_transformers():
    with torch.device("meta"):
        model, reference = bert_base(), theirs(BertConfig())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(parameter.numel() for parameter in reference.parameters())
    assert count == 109_514_298


def test_the_padding_embedding_starts_at_zero():
    words = bert_tiny().embeddings.words.weight
    assert not words[0].any()
    assert words[1].any()


def test_masked_language_loss(pair):
    model, reference = (model.eval() for model in pair)
    ids = torch.randint(1, 50, (3, 11))
    labels = torch.where(torch.rand(ids.shape) < 0.3, ids, IGNORED)
    labels[0, 0] = ids[0, 0]
    with torch.no_grad():
        found = masked_language_loss(model, (ids, labels))
        wanted = reference(ids, labels=labels).loss
    torch.testing.assert_close(found, wanted)


def test_masked_text():
    torch.manual_seed(0)
    ids, labels = masked_text(200, 128, 30_522)
    guessed = labels != IGNORED
    assert guessed[:, 0].all()
    assert 0.14 < guessed[:, 1:].float().mean() < 0.16
    assert labels[guessed].min() >= 1
    masked, same = ids[guessed] == MASK, ids[guessed] == labels[guessed]
    assert 0.78 < masked.float().mean() < 0.82
    assert 0.08 < same.float().mean() < 0.12
    assert 0.08 < (~masked & ~same).float().mean() < 0.12
    assert (ids[~guessed] != MASK).float().mean() > 0.999
    assert 1 <= ids.min() <= ids.max() < 30_522


def test_shapes_at_full_size():
    with FakeTensorMode():
        model, batch = BERT_BASE.model(), BERT_BASE.batch(2)
        assert [tensor.shape for tensor in batch] == [(2, 128), (2, 128)]
        assert model(batch[0]).shape == (2, 128, 30_522)
        assert BERT_BASE.loss(model, batch).shape == ()
