"""A job's streams: whatever draws gets the loop's numbers, and nobody else sees it."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from waterflow.executor.run import rng as rng_module
from waterflow.executor.run.rng import JobRng

pytestmark = pytest.mark.cpu

SEED = 11


@pytest.fixture(autouse=True)
def installed():
    """As within an engine; afterwards everything is in its place again."""
    before = {**vars(random)}, {**vars(np.random)}, torch.random.default_generator
    rng_module.install()
    yield
    rng_module.uninstall()
    assert ({**vars(random)}, {**vars(np.random)}, torch.random.default_generator) == before


def elsewhere(function):
    """What another thread sees."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def everybody():
    """The streams that the threads of the process share."""
    python, numpy = random.getstate(), np.random.get_state()
    return torch.get_rng_state().tolist(), python, [part.tolist() for part in numpy[1:2]], numpy[2:]


def flat(value):
    """The tensors of a result, as bytes: NaN is equal to itself."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            return [*flat(value._indices()), *flat(value._values())]
        return [value.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in flat(part)]
    return [torch.tensor(value)] if isinstance(value, (int, float)) else []


def in_the_loop(function):
    """The result on streams of its own, and where the host's stands then."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return function(), torch.get_rng_state()


def assert_as_in_the_loop(function):
    """Equal bits in a scope, equal progress, and nothing for other threads to see. Returns whether
    something was drawn."""
    expected, end = in_the_loop(function)
    rng, before = JobRng(SEED), everybody()
    with rng.scope():
        found = function()
        assert elsewhere(everybody) == before
    assert everybody() == before
    assert torch.equal(rng.host.get_state(), end)
    pairs = zip(flat(expected), flat(found), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    return not torch.equal(end, JobRng(SEED).host.get_state())


# Operators


def x(*shape, dtype=torch.float32):
    """The same positive numbers each time."""
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(*shape, generator=generator) * 0.5 + 0.2).to(dtype)


def overloads():
    """All operators that draw: those with a generator, and those that say so."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space != "aten":
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        takes = any("Generator" in str(a.type) for a in op._schema.arguments)
        if takes or torch.Tag.nondeterministic_seeded in op.tags:
            found[name] = op
    return found


OVERLOADS = overloads()
KEYS = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
KEYS += ("CompositeExplicitAutogradNonFunctional",)
#: Not for the host, whatever is registered; nested tensors' helper draws nothing.
ELSEWHERE = ("_cudnn", "miopen", "mps", "flash_attention", "efficient", "overrideable", "triton")
ELSEWHERE += ("_fill_mem_eff", "_nested_tensor", "_fused_dropout")


def on_host(name):
    """Whether the operator has a kernel for the host."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return not any(word in name for word in ELSEWHERE) and any(has(name, key) for key in KEYS)


def weights(gates):
    """Of two recurrent layers, so that dropout between them draws."""
    return [x(*size) for size in 2 * [(gates * 3, 3), (gates * 3, 3), (gates * 3,), (gates * 3,)]]


def arguments(packet):
    """Something to pass for an argument of an operator, by the argument's name."""
    tensors = {"hx": [x(2, 4, 3)] * 2 if packet == "lstm" else x(2, 4, 3), "high": torch.tensor(40)}
    tensors |= {"input": x(2, 4, 3), "data": x(8, 3), "batch_sizes": torch.tensor([4, 4])}
    tensors |= {name: x(2, 5, 4) for name in ("query", "key", "value")}
    tensors |= {"count": torch.full((6, 4), 9.0), "out1": torch.empty(0, dtype=torch.bool)}
    whole = {"low": 2, "high": 40, "from": 2, "to": 40, "n": 20, "num_samples": 3, "num_layers": 2}
    other = {"p": 0.4, "mean": 0.4, "std": 0.4, "dropout": 0.4, "generator": None}
    other |= {"names": None}
    other |= {
        "size": [3, 4],
        "params": weights({"lstm": 4, "gru": 3}.get(packet, 1)),
        "hx": tensors["hx"],
    }
    return tensors, whole | other


#: What makes an operator draw that draws nothing by default.
SETTINGS = {
    "rrelu": {"training": True},
    "attention": {"dropout_p": 0.4},
    "_fused_sdp": {"dropout_p": 0.4},
}


def call_of(name):
    """A call of the operator on fresh arguments; returns them, too, as it may write to them."""
    op = OVERLOADS[name]
    packet = name.partition("::")[2].partition(".")[0]
    required = [a for a in op._schema.arguments if not a.has_default_value()]
    settings = [extra for word, extra in SETTINGS.items() if word in name]

    def result():
        integers = packet.startswith(("randint", "randperm", "multinomial"))
        sized = any(a.name in ("size", "n", "num_samples", "input") for a in required)
        dtype = torch.int64 if integers else torch.float32
        return torch.empty(0, dtype=dtype) if sized else torch.zeros(6, 4, dtype=dtype)

    def value(of):
        tensors, others = arguments(packet)
        if str(of.type) == "Tensor":
            there = -x(6, 4) if "rrelu" in name else x(6, 4)  # only what is negative draws
            return tensors.get(of.name, result() if of.kwarg_only else there)
        flags = "train", "has_biases"  # the others off
        return others.get(of.name, of.name in flags)

    def call():
        positional = [value(a) for a in required if not a.kwarg_only]
        keywords = {a.name: value(a) for a in required if a.kwarg_only}
        for extra in settings:
            keywords |= extra
        return op(*positional, **keywords), positional, list(keywords.values())

    return call


@pytest.mark.parametrize("name", sorted(filter(on_host, OVERLOADS)))
def test_every_random_operator(name):
    draws = assert_as_in_the_loop(call_of(name))
    assert draws == (name != "aten::_fused_sdp_choice")  # it only looks


def transposed(dtype):
    return x(7, 40, dtype=dtype).t()


def gapped(dtype):
    return x(9, 30, dtype=dtype)[::2, 1::3]


def channels_last(dtype):
    return x(2, 3, 5, 4, dtype=dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", [transposed, gapped, channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_types_and_layouts(layout, dtype):
    def function():
        value = layout(dtype)
        drawn = [torch.rand_like(value), torch.randn_like(value), torch.bernoulli(value)]
        drawn += [F.dropout(value), F.alpha_dropout(value), F.feature_alpha_dropout(value, 0.4)]
        written = [getattr(layout(dtype), name)() for name in ("uniform_", "normal_", "bernoulli_")]
        return *drawn, *written, layout(dtype).exponential_(), layout(dtype).cauchy_()

    assert assert_as_in_the_loop(function)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.bool])
def test_whole_numbers(dtype):
    assert assert_as_in_the_loop(lambda: (torch.zeros(40, dtype=dtype).random_(0, 2),))


def initialisers():
    weights = [getattr(nn.init, f"{name}_")(x(6, 5)) for name in INITIALISERS]
    return (
        *weights,
        nn.init.sparse_(x(6, 5), 0.5),
        nn.Linear(5, 3).weight,
        nn.LSTM(3, 4).weight_hh_l0,
    )


INITIALISERS = ("uniform", "normal", "trunc_normal", "xavier_uniform", "xavier_normal")
INITIALISERS += ("kaiming_uniform", "kaiming_normal", "orthogonal")


def recurrent_dropout():
    net = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
    packed = nn.utils.rnn.pack_padded_sequence(x(5, 2, 3), [5, 3])
    return net(x(5, 2, 3))[0], net(packed)[0].data, nn.GRU(3, 4, 2, dropout=0.5)(x(5, 2, 3))[0]


def attention():
    query = x(2, 2, 6, 4)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3)
    return F.scaled_dot_product_attention(query, query, query, dropout_p=0.3), layer(x(4, 2, 8))


def pooling():
    picture = x(1, 2, 9, 9)
    return F.fractional_max_pool2d(picture, 3, output_size=4), nn.Dropout2d(0.4)(picture)


def distributions():
    kinds = torch.distributions
    gamma, beta = kinds.Gamma(x(4), x(4)), kinds.Beta(x(4), x(4))
    drawn = [d.rsample() for d in (gamma, beta, kinds.Dirichlet(x(3, 4)), kinds.StudentT(x(4)))]
    return *drawn, kinds.Categorical(x(3, 4)).sample((5,)), kinds.Poisson(x(4)).sample()


def gumbel():
    return F.gumbel_softmax(x(4, 5), hard=True), F.rrelu(-x(4, 5), training=True)


def backward():
    """Dropout drawn again by a checkpoint, a hook that draws, and a random backward."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient + torch.randn_like(gradient)

    value = x(6, 4).requires_grad_()
    value.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
    kept = checkpoint(lambda v: F.dropout(v) * 3, value, use_reentrant=False)
    again = checkpoint(lambda v: F.dropout(v) * 3, value, use_reentrant=True)
    Noisy.apply(kept + again).square().sum().backward()
    return kept, again, value.grad, torch.rand(3)


def mapped():
    values = x(4, 3)

    def noisy(value):
        return F.dropout(value) + torch.rand(3) + torch.randn_like(value)

    kinds = ("same", "different")
    drawn = [torch.vmap(noisy, randomness=kind)(values) for kind in kinds]
    return (
        drawn,
        torch.vmap(torch.bernoulli, randomness="different")(values),
        torch.func.grad(lambda v: (F.dropout(v) * v).sum())(values),
    )


def mixed_precision():
    with torch.autocast("cpu", torch.bfloat16):
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 2))
        return net(x(6, 4)), F.dropout(x(6, 4))


def compiled_by_script():
    @torch.jit.script
    def function(value: torch.Tensor) -> torch.Tensor:
        return F.dropout(value, 0.4) + torch.rand_like(value)

    return function(x(6, 4))


def samplers():
    data = TensorDataset(x(20, 2))
    parts = torch.utils.data.random_split(data, [5, 15])
    return [*DataLoader(data, 6, shuffle=True)], [part.indices for part in parts]


def low_rank():
    return torch.svd_lowrank(x(9, 7), q=3), torch.pca_lowrank(x(9, 7), q=3)


FUNCTIONS = [initialisers, recurrent_dropout, attention, pooling, distributions, gumbel, backward]
FUNCTIONS += [mapped, mixed_precision, compiled_by_script, samplers, low_rank]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_built_on_operators(function):
    assert assert_as_in_the_loop(function)


def seeding():
    """Everything that sets, saves or gives back torch's streams."""
    drawn = [torch.rand(2)]
    state = torch.get_rng_state()
    drawn.append(torch.rand(2))
    torch.set_rng_state(state)
    drawn.append(torch.rand(2))
    with torch.random.fork_rng(devices=[]):
        returned = torch.manual_seed(5)
        drawn += [torch.rand(2), torch.rand(2, generator=returned)]
    drawn += [torch.rand(2), torch.tensor(torch.initial_seed())]
    torch.default_generator.manual_seed(8)
    drawn += [torch.rand(2), torch.rand(2, generator=torch.default_generator)]
    drawn += [torch.rand(2, generator=torch.Generator().manual_seed(4))]
    return [
        *drawn,
        torch.default_generator.get_state(),
        torch.default_generator.clone_state().get_state(),
    ]


def test_seeding_and_saving_act_on_the_jobs_stream():
    assert assert_as_in_the_loop(seeding)
    rng, before = JobRng(SEED), everybody()
    with rng.scope():
        assert torch.seed() == torch.initial_seed() == rng.host.initial_seed()
    assert everybody() == before


def test_a_mode_sees_what_it_sees_in_the_loop():
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append((str(function), len(args), sorted(kwargs or {})))
            return function(*args, **(kwargs or {}))

    def function():
        with Seen():
            return F.dropout(x(6, 4)), torch.empty(5).uniform_(), torch.multinomial(x(3, 8), 2)

    calls = []
    assert_as_in_the_loop(function)
    half = len(calls) // 2
    assert calls[:half] == calls[half:]
    assert any("bernoulli" in name for name, *_ in calls)


def test_scopes_nest_and_belong_to_their_thread():
    outer, inner = JobRng(1), JobRng(2)
    torch.manual_seed(3)
    with outer.scope():
        first = torch.rand(2), random.random()
        with inner.scope(), inner.scope():
            second = torch.rand(2)
        third = torch.rand(2)
        assert torch.equal(elsewhere(lambda: torch.rand(2)), torch.rand(2, generator=seeded(3)))
    assert torch.equal(torch.cat([first[0], third]), torch.rand(4, generator=seeded(1)))
    assert torch.equal(second, torch.rand(2, generator=seeded(2)))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_an_error_ends_a_scope():
    with contextlib.suppress(ZeroDivisionError), JobRng(1).scope():
        raise ZeroDivisionError
    torch.manual_seed(4)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=seeded(4)))


# Python and numpy


def python_draws():
    drawn = [random.random(), random.randint(1, 99), random.gauss(0, 1), random.choice("abcdef")]
    items = list(range(9))
    random.shuffle(items)
    state = random.getstate()
    drawn += [items, random.getrandbits(70), random.random()]
    random.setstate(state)
    drawn += [random.sample(range(99), 5)]
    random.seed(3)
    return [*drawn, random.random()]


def numpy_draws():
    np_random = np.random
    drawn = [np_random.rand(3), np_random.randn(3), np_random.randint(9, size=4)]
    drawn += [np_random.permutation(7), np_random.normal(size=2), np_random.choice(9, 3)]
    drawn += [np_random.sample(2), np_random.ranf(2), np_random.mtrand._rand.rand(2)]
    state = np_random.get_state()
    drawn += [np_random.standard_normal(3)]
    np_random.set_state(state)
    drawn += [np_random.standard_normal(3)]
    np_random.seed(3)
    return [part.tolist() for part in [*drawn, np_random.random(3)]]


@pytest.mark.parametrize("function", [python_draws, numpy_draws])
def test_modules_draw_from_the_jobs_copy_of_what_was_there(function):
    random.seed(21)
    np.random.seed(22)
    rng, before = JobRng(SEED), everybody()
    with rng.scope():
        found = function()
        assert elsewhere(everybody) == before
    assert everybody() == before
    assert function() == found  # the loop's own, by the process's streams
    assert (rng.python.getstate(), rng.numpy.get_state()[2]) == (
        (random.getstate(), rng.numpy.get_state()[2])
        if function is python_draws
        else (rng.python.getstate(), np.random.get_state()[2])
    )


@pytest.mark.parametrize("function", [python_draws, numpy_draws])
def test_modules_draw_from_what_was_there_when_the_job_came(function):
    random.seed(21)
    np.random.seed(22)
    rng = JobRng(SEED)
    unused, begun = rng.copy(), everybody()
    expected = function()
    with rng.scope():
        assert function() == expected
    used = rng.copy()
    for twin in (unused, unused.copy()):
        with twin.scope():
            assert function() == expected
    with rng.scope(), used.scope():
        following = function()
    with rng.scope():
        assert function() == following
    assert everybody() != begun


def test_two_threads_that_draw_first_have_one_stream():
    for _ in range(20):
        rng, found = JobRng(SEED), []
        barrier = threading.Barrier(4)

        def look(rng=rng, found=found, barrier=barrier):
            barrier.wait()
            found.append((rng.python, rng.numpy))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(a is rng.python and b is rng.numpy for a, b in found)


def test_another_bit_generator_is_the_jobs_alone():
    rng, before = JobRng(SEED), everybody()
    with rng.scope():
        np.random.set_bit_generator(np.random.MT19937(5))
        found = np.random.rand(3)
    assert everybody() == before
    assert np.array_equal(found, np.random.RandomState(np.random.MT19937(5)).rand(3))


def test_functions_are_still_like_built_in_ones():
    class Holder:
        draw = random.random

    assert 0 <= Holder().draw() < 1  # binds to nothing
    assert random.random.__name__ == "random"
    for function in (random.random, random.shuffle, np.random.rand):
        assert callable(pickle.loads(pickle.dumps(function)))
        assert callable(copy.deepcopy(function))
    copied = pickle.loads(pickle.dumps(random.random))
    assert copied() == random.random()
    assert isinstance(np.random.mtrand._rand, np.random.RandomState)
    numpy_copy = copy.deepcopy(np.random.mtrand._rand)
    assert numpy_copy.rand() == np.random.rand()
    assert isinstance(torch.default_generator, torch.Generator)


def test_installed_twice_is_uninstalled_twice():
    wrapped = random.random
    rng_module.install()
    rng_module.uninstall()
    assert random.random is wrapped


# States


def draws():
    return torch.rand(3).tolist(), random.random(), np.random.randn(3).tolist()


def test_a_copy_draws_the_same_and_a_state_is_come_back_to():
    rng = JobRng(SEED)
    with rng.scope():
        draws()
        state, twin = rng.state(), rng.copy()
        found = draws()
        rng.restore(state)
        assert draws() == found
    with twin.scope():
        assert draws() == found
    with rng.scope(), twin.scope():
        after = draws()
    with rng.scope():
        assert draws() == after


@pytest.mark.parametrize("drawn_before", [True, False])
def test_what_is_drawn_behind_a_mark_is_drawn_again(drawn_before):
    rng = JobRng(SEED)
    with rng.scope():
        if drawn_before:
            draws()
        go_back = rng.mark()
        found = draws()
        for _ in range(2):
            go_back()
            assert draws() == found


def test_worker_processes_are_seeded_from_the_jobs_stream():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.rand(2).double(), torch.tensor([random.random(), np.random.rand()])

    def function():
        return list(DataLoader(Noisy(), 2, shuffle=True, num_workers=2))

    assert assert_as_in_the_loop(function)


def test_threads_draw_together_without_waiting_or_mixing():
    def work(seed):
        with JobRng(seed).scope():
            for _ in range(200):
                last = F.dropout(torch.rand(50))
        return last

    alone = [work(seed) for seed in range(4)]
    gate = threading.Barrier(4)

    def together(seed):
        gate.wait()
        return work(seed)

    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, alone, pool.map(together, range(4))))
