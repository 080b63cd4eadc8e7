"""The LSTM is nn.LSTM, spelled out."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from waterflow.models.lstm import LSTM_LM, LSTM_LM_SMALL, LstmModel, language_model

pytestmark = pytest.mark.cpu


def fused(model):
    """nn.LSTM with the model's weights."""
    layers = len(model.cells)
    lstm = nn.LSTM(model.width, model.width, layers, batch_first=True)
    for index, cell in enumerate(model.cells):
        for side, part in (("ih", cell.gates_of_input), ("hh", cell.gates_of_hidden)):
            getattr(lstm, f"weight_{side}_l{index}").data = part.weight.data
            getattr(lstm, f"bias_{side}_l{index}").data = part.bias.data
    return lstm


@pytest.mark.parametrize("layers", [1, 3])
def test_logits_and_gradients(layers):
    torch.manual_seed(0)
    model = LstmModel(vocabulary=11, width=6, layers=layers)
    ids = torch.randint(11, (4, 9))
    reference = fused(model)
    wanted = model.decoder(reference(model.embedding(ids))[0])
    found = model(ids)
    torch.testing.assert_close(found, wanted)
    weight = model.cells[0].gates_of_hidden.weight
    (mine,) = torch.autograd.grad(found.square().sum(), weight, retain_graph=True)
    (theirs,) = torch.autograd.grad(wanted.square().sum(), reference.weight_hh_l0)
    torch.testing.assert_close(mine, theirs)


def test_a_step_is_thousands_of_operators():
    from torch.profiler import profile

    model = LstmModel(vocabulary=16, width=4, layers=2)
    ids = torch.randint(16, (2, 64))
    with profile() as recorded:
        model(ids).sum().backward()
    launched = ("aten::addmm", "aten::mm", "aten::mul", "aten::add", "aten::sigmoid", "aten::tanh")
    counts = {event.key: event.count for event in recorded.key_averages()}
    assert sum(counts.get(name, 0) for name in launched) > 2_000


def test_dropout_is_drawn_in_training_for_all_but_the_recurrent_connections():
    torch.manual_seed(0)
    model = LstmModel(vocabulary=11, width=6, layers=2, dropout=0.5)
    ids = torch.randint(11, (4, 9))
    assert not torch.equal(model(ids), model(ids))
    shapes = []
    model.dropout.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    model(ids)
    assert shapes == [(4, 6)] * 9 * 2 + [(4, 9, 6)]
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_the_language_model_starts_with_small_weights():
    for parameter in language_model(50, 8, 2).parameters():
        assert parameter.abs().max() <= 0.05
        assert parameter.std() > 0.02


def test_a_batch_is_a_text_and_what_follows():
    ids, following = LSTM_LM_SMALL.batch(3)
    assert torch.equal(ids[:, 1:], following[:, :-1])
    assert ids.is_contiguous()
    assert following.is_contiguous()


def test_shapes_at_full_size():
    with FakeTensorMode():
        model, batch = LSTM_LM.model(), LSTM_LM.batch(2)
        assert [tensor.shape for tensor in batch] == [(2, 35), (2, 35)]
        assert model(batch[0]).shape == (2, 35, 10_000)
        assert LSTM_LM.loss(model, batch).shape == ()
