"""What kernels on the host take besides their results, rule by rule.

That the rules are those of the kernels is shown by test_fake.py, which compares whole steps.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.graphs import step_of
from waterflow.executor.profile.cpu_workspaces import host_script

pytestmark = pytest.mark.cpu

X = torch.ones(8, 16)


def script_of(name, function, *tensors, results=1, threads=2):
    """The script of the one operator of this name in a function."""
    (node,) = [
        node
        for node in step_of(function, *tensors).nodes
        if getattr(node.target, "_schema", None) and node.target._schema.name == f"aten::{name}"
    ]
    return host_script(node, results, threads)


def test_a_kernel_without_a_rule_takes_its_results_only():
    assert script_of("exp", lambda x: (x.exp().sum(),), X) == [("result", 0)]


def test_a_number_beside_a_tensor_is_cast_to_its_type():
    script = script_of("mul", lambda x: ((x * 2.0).sum(),), X.to(torch.bfloat16))
    assert script == [("take", 2), ("result", 0), ("give", 0)]


def test_the_tape_itself_casts_numbers_to_float32():
    assert script_of("mul", lambda x: ((x * 2.0).sum(),), X) == [("result", 0)]


def test_a_number_that_an_operator_takes_as_such_becomes_a_tensor_first():
    def scaled(x):
        return (torch.ops.aten.mul.Scalar(x, 2.0).sum(),)

    takes = [("take", 8), ("take", 4)]
    assert script_of("mul", scaled, X) == [*takes, ("result", 0), ("give", 1), ("give", 0)]
    compared = script_of("gt", lambda x: ((x > 2.0).sum(),), X)
    assert compared == [*takes, ("result", 0), ("give", 0), ("give", 1)]


def test_operands_of_another_type_are_cast_whole():
    double = torch.ones(8, 16, dtype=torch.float64)
    script = script_of("add", lambda x, y: ((x + y).sum(),), X, double)
    assert script == [("take", 8 * 8 * 16), ("result", 0), ("give", 0)]


def test_equal_types_need_no_cast():
    assert script_of("add", lambda x, y: ((x + y).sum(),), X, X) == [("result", 0)]


def test_a_mean_divides_by_a_number():
    script = script_of("mean", lambda x: (x.mean(),), X)
    assert script == [("result", 0), ("take", 8), ("take", 4), ("give", 1), ("give", 0)]


def test_threads_have_sums_of_their_own():
    def function(x, weight, bias):
        weight, bias, x = (t.detach().requires_grad_() for t in (weight, bias, x))
        loss = F.layer_norm(x, (16,), weight, bias).sum()
        return loss, *torch.autograd.grad(loss, (x, weight, bias))

    arguments = (function, X, torch.ones(16), torch.zeros(16))
    takes = [
        dict(script_of("native_layer_norm_backward", *arguments, results=3, threads=threads))[
            "take"
        ]
        for threads in (1, 4)
    ]
    assert takes == [2 * 64, 8 * 64]


def test_lists_are_worked_off_one_tensor_at_a_time():
    def function(x):
        return (sum(t.sum() for t in torch._foreach_mul([x, x.clone()], [2.0, 3.0])),)

    script = script_of("_foreach_mul", function, X, results=2)
    kinds = [kind for kind, _ in script]
    assert kinds.index("give") < len(kinds) - 1 - kinds[::-1].index("result")
    assert kinds.count("take") == kinds.count("give")
