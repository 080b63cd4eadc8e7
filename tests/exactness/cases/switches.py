"""Cases: steps that set switches of torch's, which belong to the process or to a thread."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import nn

from tests.exactness.case import STEPS, at, batches, case, cross_entropy, job, mlp, sgd
from waterflow.common import switches

CUDA, MKLDNN = torch.backends.cuda, torch.backends.mkldnn


@contextlib.contextmanager
def put_back():
    before, threads = switches.now(), torch.get_num_threads()
    try:
        yield
    finally:
        switches.put_back(before)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        torch.set_default_device(None)


case_alone = functools.partial(case, around=put_back, alone=True)


# -- kept from step to step: whoever runs a step once more than the loop, to trace it, moves it


def _default_device(there):
    torch.set_default_device("meta" if there else None)


def _precision(there):
    MKLDNN.conv.fp32_precision = "bf16" if there else "ieee"


def _mkldnn(there):
    MKLDNN.set_flags(there)


SWITCHES = {
    "default_dtype": (
        lambda there: torch.set_default_dtype(torch.float64 if there else torch.float32),
        lambda: torch.get_default_dtype() == torch.float64,
    ),
    "determinism": (
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled,
    ),
    "precision_of_products": (
        lambda there: torch.set_float32_matmul_precision("medium" if there else "highest"),
        lambda: torch.get_float32_matmul_precision() == "medium",
    ),
    "precision_of_convolutions": (
        _precision,
        lambda: MKLDNN.conv.fp32_precision == "bf16",
    ),
    "flash_attention": (CUDA.enable_flash_sdp, CUDA.flash_sdp_enabled),
    "fast_path_of_attention": (
        torch.backends.mha.set_fastpath_enabled,
        torch.backends.mha.get_fastpath_enabled,
    ),
    "anomaly_mode": (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled),
    "mkldnn": (_mkldnn, torch._C._get_mkldnn_enabled),
    "default_device": (_default_device, lambda: torch.get_default_device().type == "meta"),
    "threads": (
        lambda there: torch.set_num_threads(2 if there else 1),
        lambda: torch.get_num_threads() == 2,
    ),
}


def toggled(name, put, is_on):
    """Enters two cases, in which the loss moves a switch, or a hook of the optimizer does."""

    def by_the_loss(live):
        def loss(model, batch):
            found = cross_entropy(model, batch) * (2.0 if is_on() else 1.0)
            if live:
                put(not is_on())
            return found

        put(False)
        return job(mlp(), loss)

    def by_the_optimizer(live):
        model = mlp()
        optimizer = sgd(model)
        if live:
            optimizer.register_step_post_hook(lambda *arguments: put(not is_on()))
        loss = lambda m, b: cross_entropy(m, b) * (2.0 if is_on() else 1.0)  # noqa: E731
        put(False)
        return job(model, loss, optimizer=optimizer)

    by_the_loss.__name__ = f"{name}_moved_by_the_loss"
    by_the_optimizer.__name__ = f"{name}_moved_by_the_optimizer"
    case_alone("opaque")(by_the_loss)
    case_alone("opaque")(by_the_optimizer)


for name, switch in SWITCHES.items():
    toggled(name, *switch)


# -- asked for by the step's own Python alone


def asked(name, is_on, switch_on):
    """Enters a case whose loss asks for a switch that a callback moves."""

    def by_the_loss(live):
        was_on = is_on()
        loss = lambda m, b: cross_entropy(m, b) * (1.0 if is_on() == was_on else 2.0)  # noqa: E731
        return job(mlp(), loss, on_step=at(4, live, switch_on))

    by_the_loss.__name__ = f"{name}_asked_for_by_the_loss"
    case_alone("recaptured")(by_the_loss)


asked(
    "precision_of_recurrent_layers",
    lambda: MKLDNN.rnn.fp32_precision == "bf16",
    lambda: setattr(MKLDNN.rnn, "fp32_precision", "bf16"),
)
asked(
    "accumulation_in_half_precision",
    lambda: CUDA.matmul.allow_fp16_accumulation,
    lambda: setattr(CUDA.matmul, "allow_fp16_accumulation", True),
)
asked(
    "paths_of_einsum",
    lambda: torch.backends.opt_einsum.strategy == "greedy",
    lambda: setattr(torch.backends.opt_einsum, "strategy", "greedy"),
)


# -- set for a part of each step and put back: the operators of a graph would ask in vain


@case_alone("opaque")
def denormals_flushed_in_the_step(live):
    """At first there are none."""
    scales = [1.0] * 5 + [1e-38] * (STEPS - 5)

    def loss(model, batch):
        torch.set_flush_denormal(live)
        tiny = model(batch[0]) * batch[2]
        torch.set_flush_denormal(False)
        return (tiny / batch[2]).square().mean()

    data = [(x, y, torch.tensor(scale)) for (x, y), scale in zip(batches(), scales, strict=True)]
    return job(mlp(), loss, data=data)


@case_alone("opaque", matters=False)
def convolutions_without_mkldnn(live):
    """They would be the same, had they not as many channels."""
    convolution = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 3), nn.Flatten())
    model = nn.Sequential(convolution, nn.Linear(8, 4))

    def loss(model, batch):
        with MKLDNN.flags(enabled=not live):
            return cross_entropy(model, batch)

    return job(model, loss)


@case_alone("opaque", matters=False)
def deterministic_in_the_step(live):
    def loss(model, batch):
        torch.use_deterministic_algorithms(live)
        found = cross_entropy(model, batch)
        torch.use_deterministic_algorithms(False)
        return found

    return job(mlp(), loss)


@case_alone("captured", matters=False)
def attention_chosen_in_the_step(live):
    """Of which operators attention is made a trace decides."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 4)

        def forward(self, x):
            query, key, value = self.into(x).view(1, 1, -1, 3, 16).unbind(3)
            with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
                return self.out(nn.functional.scaled_dot_product_attention(query, key, value)[0, 0])

    return job(Attention())
