"""Torch's own tables of operators, modules and optimizers train as the eager loop trains them.

Each case is trained both ways and compared by bits. What runs as eager Python is listed, so that
nothing stops being captured unnoticed. `make soak` takes all of the tables.
"""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="torch's tables need it")

from benchmarks.coverage.__main__ import chosen
from benchmarks.coverage.suites import load
from benchmarks.coverage.trial import Kind, outcome_of

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

SHARDS = 4  # tests that share a table, so that several processes may share them
ALL = 10**6
LAZY = {f"nn.LazyConv{kind}{n}d" for kind in ("", "Transpose") for n in (1, 2, 3)}
#: What runs as eager Python; of some only a few samples do.
OPAQUE = {
    "op_db": {
        # The shapes of their results depend on values.
        *("__getitem__", "combinations", "index_fill", "index_put", "masked_select"),
        *("nn_functional_ctc_loss", "repeat_interleave"),
        # What they do depends on values, for some of them in the backward pass.
        *("corrcoef", "cov", "narrow", "nn_functional_gaussian_nll_loss", "tensor_split"),
        *("prod", "masked_prod", "masked_fill", "median", "masked_median", "nanmedian"),
        *("cumprod", "masked_cumprod", "linalg_vander", "linalg_det", "quantile", "nanquantile"),
        *("max_reduction_no_dim", "min_reduction_no_dim", "nn_functional_binary_cross_entropy"),
        # Whether they have succeeded is asked of values, by an operator without a result.
        *("linalg_cholesky", "linalg_eig", "linalg_eigvals", "linalg_inv", "linalg_lu_factor"),
        *("linalg_matrix_power", "linalg_solve", "linalg_tensorinv", "linalg_tensorsolve"),
        # Their results or arguments are sparse.
        *("sparse_mm_reduce", "sparse_sampled_addmm", "to_sparse"),
        # Torch keeps what they are told in classes that no code of the user's leads to.
        "nn_functional_linear_cross_entropy_chunked",
        "nn_functional_linear_cross_entropy_chunked_none",
    },
    "module_db": {
        # What they do depends on values.
        *("nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d", "nn.CTCLoss"),
        *("nn.GaussianNLLLoss", "nn.LinearCrossEntropyLoss"),
        *("nn.Transformer", "nn.TransformerEncoder"),
        *LAZY,  # parameters that are made in the first step
    },
    "optim_db": {"ASGD", "Adafactor", "LBFGS", "RAdam", "Rprop", "SparseAdam"},
}
#: Equal inputs give them other numbers each time, in plain loops as well: torch's default driver on
#: the CPU (gelsy) takes pivots from memory that it has not set.
UNSTEADY = {"linalg_lstsq", "linalg_lstsq_grad_oriented"}


def check(suite, names, **options):
    """None is refused or different, and those that are not captured are known."""
    table = load(suite, **options)
    steady = [name for name in names(table.names()) if name not in UNSTEADY]
    found = {name: outcome_of(table.trials(name), audit="log") for name in steady}
    wrong = {name: str(one) for name, one in found.items() if one.kind > Kind.OPAQUE}
    assert not wrong
    opaque = {name: one.reason for name, one in found.items() if one.kind is Kind.OPAQUE}
    assert not {
        name: why for name, why in opaque.items() if name.split("[")[0] not in OPAQUE[suite]
    }
    assert Kind.CAPTURED in {one.kind for one in found.values()}


@pytest.mark.parametrize("shard", range(2))
def test_some_operators(shard):
    check("op_db", lambda names: chosen(names, 0.06)[shard::2], samples=1)


@pytest.mark.parametrize("shard", range(2))
def test_some_modules(shard):
    check("module_db", lambda names: chosen(names, 0.45)[shard::2], samples=1)


@pytest.mark.parametrize("shard", range(2))
def test_some_optimizers(shard):
    check("optim_db", lambda names: chosen(names, 0.5)[shard::2])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_optimizers():
    check("optim_db", lambda names: names)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_all_modules(shard):
    check("module_db", lambda names: names[shard::SHARDS], samples=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_all_operators(shard):
    check("op_db", lambda names: names[shard::SHARDS], samples=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(16))
@pytest.mark.parametrize("suite", ["op_db", "module_db"])
def test_all_samples(suite, shard):
    check(suite, lambda names: names[shard::16], samples=ALL)
