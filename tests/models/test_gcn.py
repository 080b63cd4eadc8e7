"""The GCN is D^-1/2 (A + I) D^-1/2 X W with a dense matrix, layer by layer."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from waterflow.models.gcn import GCN, GCN_SMALL, IGNORED, Gcn, citation_graph

pytestmark = pytest.mark.cpu


def dense(edges, nodes):
    """D^-1/2 (A + I) D^-1/2, entry by entry."""
    matrix = torch.eye(nodes, dtype=torch.float64)
    for source, target in edges.t().tolist():
        matrix[target, source] += 1
    degrees = matrix.sum(1)
    for row in range(nodes):
        for column in range(nodes):
            matrix[row, column] /= (degrees[row] * degrees[column]).sqrt()
    return matrix


def links(*pairs):
    """Both directions of each link."""
    return torch.tensor([*pairs, *(pair[::-1] for pair in pairs)]).t()


@pytest.mark.parametrize(
    ("edges", "nodes"),
    [
        (links((0, 1), (1, 2), (1, 3), (3, 4)), 5),
        (links((0, 1), (0, 1), (2, 1)), 4),  # one twice, and a node without any
        (torch.empty(2, 0, dtype=torch.int64), 3),
        (citation_graph(30, 6, 3)[1], 30),
    ],
    ids=["tree", "twice", "none", "random"],
)
def test_logits_and_gradients(edges, nodes):
    torch.manual_seed(0)
    model = Gcn(6, 5, 3).double().eval()
    x = torch.randn(nodes, 6, dtype=torch.float64)
    first, second = (layer.weight for layer in (model.first, model.second))
    matrix = dense(edges, nodes)
    wanted = matrix @ (matrix @ x @ first).relu() @ second
    found = model(x, edges)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    mine = torch.autograd.grad(found.square().sum(), [first, second])
    theirs = torch.autograd.grad(wanted.square().sum(), [first, second])
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_dropout_draws_in_training():
    model = Gcn(6, 5, 3)
    x, edges, _ = citation_graph(20, 6, 3)
    x = x + 1
    assert not torch.equal(model(x, edges), model(x, edges))
    model.eval()
    assert torch.equal(model(x, edges), model(x, edges))


def test_a_graph():
    torch.manual_seed(0)
    x, edges, labels = citation_graph(2_000, 1_433, 7)
    half = edges.shape[1] // 2
    assert edges.shape == (2, 8_000)
    assert torch.equal(edges[:, :half], edges[:, half:].flip(0))
    assert 0 <= edges.min() <= edges.max() < 2_000
    assert (edges[0] != edges[1]).all()
    assert edges[0].bincount().max() > 40  # ten times the mean: some are cited often
    torch.testing.assert_close(x.sum(1), torch.ones(2_000))
    assert 0.012 < (x > 0).float().mean() < 0.0135
    assert ((labels == IGNORED) | (labels < 7)).all()
    assert (labels != IGNORED).sum() == 106


def test_a_graph_without_links():
    with pytest.raises(ValueError, match="at least 2 nodes to have links, got 1"):
        GCN.batch(1)


def test_only_the_first_layer_decays():
    model = GCN_SMALL.model()
    groups = GCN_SMALL.optimizer(model.parameters()).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {id(model.first.weight): 5e-4, id(model.second.weight): 0}


def test_shapes_at_full_size():
    with FakeTensorMode():
        model, batch = GCN.model(), GCN.batch(2_708)
        assert [tensor.shape for tensor in batch] == [(2_708, 1_433), (2, 10_832), (2_708,)]
        assert model(*batch[:2]).shape == (2_708, 7)
        assert GCN.loss(model, batch).shape == ()
