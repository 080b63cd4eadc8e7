"""GPT-2 is transformers' GPT2LMHeadModel: the same parameters, logits, loss and gradients.

transformers' names for the parts are mapped here: models import torch alone.
"""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from waterflow.models.gpt2 import GPT2, GPT2_SMALL, Gpt2, Gpt2Config, gpt2_tiny
from waterflow.models.text import next_token_loss

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

NAMES = {
    r"transformer\.wte": "words",
    r"transformer\.wpe": "positions",
    r"transformer\.h\.(\d+)\.ln_1": r"blocks.\1.attention_norm",
    r"transformer\.h\.(\d+)\.ln_2": r"blocks.\1.inner_norm",
    r"transformer\.h\.(\d+)\.attn\.c_attn": r"blocks.\1.attention.query_key_value",
    r"transformer\.h\.(\d+)\.attn\.c_proj": r"blocks.\1.attention.out",
    r"transformer\.h\.(\d+)\.mlp\.c_fc": r"blocks.\1.expand",
    r"transformer\.h\.(\d+)\.mlp\.c_proj": r"blocks.\1.contract",
    r"transformer\.ln_f": "norm",
}


def ours(name, value):
    """Name and value of a parameter in our model; their linear layers are transposed."""
    if re.search(r"\.c_\w+\.weight", name):
        value = value.t()
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name, value


def theirs(config):
    options = transformers.GPT2Config(
        vocab_size=config.vocabulary,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        n_positions=config.positions,
        attn_implementation="sdpa",
    )
    return transformers.GPT2LMHeadModel(options)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    config = Gpt2Config(vocabulary=50, width=32, layers=2, heads=4, positions=16)
    reference = theirs(config)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases and norms, too, must matter
    model = Gpt2(config)
    model.load_state_dict(dict(ours(*item) for item in reference.named_parameters()))
    return model.eval(), reference.eval()


def test_logits(pair):
    model, reference = pair
    ids = torch.randint(50, (3, 11))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits)


def test_loss_and_gradients(pair):
    model, reference = pair
    text = torch.randint(50, (3, 12))
    found = next_token_loss(model, (text[:, :-1], text[:, 1:]))
    wanted = reference(text, labels=text).loss  # it shifts the labels itself
    torch.testing.assert_close(found, wanted)
    found.backward()
    wanted.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        own_name, gradient = ours(name, parameter.grad)
        torch.testing.assert_close(gradients[own_name], gradient, msg=name)


def test_dropout_draws_in_training(pair):
    model = pair[0].train()
    ids = torch.randint(50, (3, 11))
    assert not torch.equal(model(ids), model(ids))


def test_a_sequence_longer_than_the_positions():
    model = gpt2_tiny()
    with pytest.raises(ValueError, match="33 tokens is longer than the 32 positions"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_the_shortcuts_start_smaller():
    torch.manual_seed(0)
    block = Gpt2(Gpt2Config(vocabulary=50, width=128, layers=8, heads=2)).blocks[3]
    for linear, std in ((block.contract, 0.005), (block.expand, 0.02)):
        assert linear.weight.std().item() == pytest.approx(std, rel=0.05)
        assert not linear.bias.any()


def test_a_batch_is_a_text_and_what_follows():
    ids, following = GPT2_SMALL.batch(3)
    assert torch.equal(ids[:, 1:], following[:, :-1])
    assert ids.is_contiguous()
    assert following.is_contiguous()


def test_shapes_at_full_size():
    with FakeTensorMode():
        model, batch = GPT2.model(), GPT2.batch(2)
        assert [tensor.shape for tensor in batch] == [(2, 1_024), (2, 1_024)]
        assert model(batch[0]).shape == (2, 1_024, 50_257)
        assert GPT2.loss(model, batch).shape == ()
