"""What a captured step may differ by from the eager one: only what its kernels do themselves."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import waterflow as wf
from waterflow.partitioner.graph import variation
from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.graph.variation import Varying
from waterflow.steps import audit, check_schedule
from waterflow.steps.leeway import Leeway

pytestmark = pytest.mark.cpu

WEIGHT, BIAS = Input("parameter", "weight"), Input("parameter", "bias")
NOISE = 1e-4


def made(loss=1.0, **tensors):
    """A result of a step: its weight, its bias, the state of its optimizer."""
    torch.manual_seed(0)
    told = {"weight": torch.randn(1000), "bias": torch.randn(10), "state": torch.randn(1000)}
    told.update(tensors)
    inputs = {WEIGHT: told["weight"], BIAS: told["bias"]}
    return SimpleNamespace(loss=loss, tensors=inputs, made={(0, "state"): told["state"]})


def noisy(seed, scale=NOISE):
    weight = made().tensors[WEIGHT]
    return weight + scale * torch.randn(1000, generator=torch.Generator().manual_seed(seed))


def leeway(varying, one, other):
    return Leeway.between(varying, one, other)


ONLY_WEIGHT = Varying(frozenset({WEIGHT}))


def test_what_varies_may_differ_by_as_much_again():
    found = leeway(ONLY_WEIGHT, made(weight=noisy(1)), made(weight=noisy(2)))
    assert found.allows_input(WEIGHT, noisy(3), noisy(1))
    assert not found.allows_input(WEIGHT, noisy(3, 1000 * NOISE), noisy(1))
    assert not found.allows_input(WEIGHT, torch.full((1000,), torch.nan), noisy(1))
    assert not found.allows_input(WEIGHT, noisy(3).double(), noisy(1))
    assert not found.allows_input(WEIGHT, noisy(3)[:10], noisy(1))


def test_what_does_not_vary_has_to_be_the_same():
    found = leeway(ONLY_WEIGHT, made(weight=noisy(1)), made(weight=noisy(2)))
    bias = made().tensors[BIAS]
    assert found.allows_input(BIAS, bias, bias.clone())
    assert not found.allows_input(BIAS, torch.nextafter(bias, bias + 1), bias)
    assert not found.allows_output((0, "state"), bias, bias + 1e-7)
    assert not found.allows_number(1.0, 1.0000001)


def test_kernels_that_repeated_themselves_may_have_rounded_by_chance():
    found = leeway(ONLY_WEIGHT, made(), made())
    weight = made().tensors[WEIGHT]
    assert found.allows_input(WEIGHT, torch.nextafter(weight, weight + 1), weight)
    assert not found.allows_input(WEIGHT, weight + 1e-4, weight)


def test_what_exceeds_it_is_told_from_what_has_none():
    found = leeway(ONLY_WEIGHT, made(weight=noisy(1)), made(weight=noisy(2)))
    bias = made().tensors[BIAS]
    assert not found.allows_input(BIAS, bias + 1, bias)
    assert not found.is_exceeded
    assert not found.allows_input(WEIGHT, noisy(3, 1.0), noisy(1))
    assert found.is_exceeded


def test_rounding_is_allowed_where_two_results_were_the_same_by_chance():
    varying = Varying(frozenset({WEIGHT, BIAS}))
    found = leeway(varying, made(weight=noisy(1)), made(weight=noisy(2)))
    bias = made().tensors[BIAS]
    one_rounded = bias.clone()
    one_rounded[3] = torch.nextafter(bias[3], bias[3] + 1)
    assert found.allows_input(BIAS, one_rounded, bias)
    assert not found.allows_input(BIAS, bias + 1e-4, bias)


def test_a_tensor_of_few_elements_may_differ_as_much_as_others_for_its_size():
    """It may have come out the same twice by chance."""
    varying = Varying(frozenset({WEIGHT, BIAS}))
    scale = torch.tensor([2.0])
    results = [made(weight=noisy(seed), bias=scale) for seed in (1, 2)]
    found = leeway(varying, *results)
    assert found.allows_input(BIAS, scale * (1 + NOISE), scale)
    assert not found.allows_input(BIAS, scale * 1.1, scale)


def test_whole_numbers_have_none():
    varying = Varying(frozenset({WEIGHT}))
    counts = [torch.tensor([1, 2]), torch.tensor([1, 3])]
    found = leeway(varying, made(weight=counts[0]), made(weight=counts[1]))
    assert not found.allows_input(WEIGHT, torch.tensor([1, 4]), counts[0])


def test_a_loss_that_varies():
    found = leeway(Varying(loss=True), made(1.0), made(1.001))
    assert found.allows_number(1.01, 1.0)
    assert not found.allows_number(1.1, 1.0)
    assert not found.allows_number(float("nan"), 1.0)
    assert found.allows_number(float("nan"), float("nan"))


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 1)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def run(**options):
    torch.manual_seed(0)
    model = Looked()
    job = wf.Job(
        "looked",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        loss=lambda model, tokens: model(tokens).square().mean(),
        data=[torch.randint(5, (8,)) for _ in range(6)],
        **options,
    )
    return wf.run([job], "64MiB", progress=False)["looked"]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The embedding's gradient varies, as far as graphs say. Returns what sets the kernel's noise:
    of the captured step's results, for tensors of these names."""

    def embeds(node):
        return "embedding_dense_backward" in str(node.target)

    def set_noise(*names):
        def predict(steps, *rest):
            found = predicted(steps, *rest)
            for meaning, tensor in found.tensors.items():
                if meaning.key in names:
                    tensor.add_(torch.randn(tensor.shape, generator=dice), alpha=1e-6)
            return found

        monkeypatch.setattr(audit, "predict", predict)

    predicted, dice = audit.predict, torch.Generator().manual_seed(0)
    monkeypatch.setattr(variation, "is_unordered", embeds)
    return set_noise


def test_a_step_that_does_not_repeat_itself_is_captured(as_on_a_gpu):
    as_on_a_gpu("embed.weight")
    assert run().captured == "captured"


def test_the_rest_of_it_still_has_to_be_the_same(as_on_a_gpu):
    as_on_a_gpu("embed.weight", "head.weight")
    with pytest.warns(wf.OpaqueStepWarning, match=r"other numbers.*head\.weight"):
        assert run().captured == "opaque step"


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
@pytest.mark.parametrize(
    ("name", "state"), [("embed.weight", "finished"), ("head.weight", "failed")]
)
def test_a_later_check_ends_only_who_is_sure_to_be_wrong(as_on_a_gpu, monkeypatch, name, state):
    """Where numbers vary it may be a rare chance: the job goes on as eager Python."""
    as_on_a_gpu("embed.weight")
    monkeypatch.setattr(check_schedule, "_SHARE", 1e9)  # due checks wait for nothing
    checks = []
    predict = audit.predict

    def wrong_later(steps, *rest):
        found = predict(steps, *rest)
        checks.append(found)
        if len(checks) > 4:  # each asks twice, and both graphs are checked at their first use
            for meaning, tensor in found.tensors.items():
                if meaning.key == name:
                    tensor.add_(len(checks) % 2)
        return found

    monkeypatch.setattr(audit, "predict", wrong_later)
    report = run(epochs=200)
    assert report.state == state
    assert report.error is None or "gives another number than the eager step" in report.error


def test_without_such_kernels_all_has_to_be_the_same(as_on_a_gpu, monkeypatch):
    as_on_a_gpu("embed.weight")
    monkeypatch.setattr(variation, "is_unordered", lambda node: False)
    with pytest.warns(wf.OpaqueStepWarning, match=r"other numbers.*embed\.weight"):
        assert run().captured == "opaque step"
