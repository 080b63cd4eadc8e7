"""Calls that a step makes: what computes passes, what reaches outside is named with its line."""

import datetime
import functools
import gc
import io
import logging
import math
import operator
import os
import random
import re
import secrets
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from waterflow.account import purity
from waterflow.account.account import Account
from waterflow.account.code_names import names_in
from waterflow.account.trust import is_trusted_code

pytestmark = pytest.mark.cpu


def observed(function):
    """What is impure in a function that has run once before, as a step has."""
    function()
    seen = purity.observer()
    with purity.undisturbed(seen):
        function()
    return purity.impure_calls(seen.calls(), seen.codes())


IMPURE = {
    "time.time": lambda: time.time(),
    "time.perf_counter": lambda: time.perf_counter(),
    "datetime.datetime.now": lambda: datetime.datetime.now(),
    "datetime.date.today": lambda: datetime.date.today(),
    "posix.urandom#os": lambda: os.urandom(2),
    "posix.urandom#secrets": lambda: secrets.token_bytes(2),
    "posix.urandom#uuid": lambda: uuid.uuid4(),
    "_random.Random.random": lambda: random.random(),
    "_random.Random.getrandbits": lambda: random.randint(0, 10),
    "_random.Random.seed": lambda: random.Random(1),
    "io.open#builtin": lambda: open(__file__).close(),
    "_io.open#path": lambda: np.fromfile(__file__, np.uint8),
    "__subclasses__": lambda: nn.Module.__subclasses__(),
    "builtins.print": lambda: print("", file=io.StringIO()),
    "posix.stat": lambda: os.path.getsize(__file__),
    "posix.getpid": lambda: os.getpid(),
    "_thread": lambda: threading.Thread(target=int).start(),
    "subprocess": lambda: subprocess.run(["true"], check=True),
    "write": lambda: logging.getLogger("purity").error("x"),
    "gc.collect": lambda: gc.collect(),
    "sys.getrefcount": lambda: sys.getrefcount(1),
    "sys._getframe": lambda: sys._getframe(),
    "_thread.get_ident": lambda: threading.get_ident(),
    "data_ptr": lambda: torch.ones(1).data_ptr(),
    "_version": lambda: torch.ones(1)._version,
    "breakpoint": lambda: sys.breakpointhook is None or breakpoint(),
}


@pytest.mark.parametrize("name", IMPURE)
def test_impure(name, monkeypatch):
    monkeypatch.setattr(sys, "breakpointhook", lambda *args: None)
    found = observed(IMPURE[name])
    expected = name.partition("#")[0]
    if "open" in expected:
        expected = "open" if name.startswith("io") else "fromfile"
    if expected == "subprocess":
        expected = "fork_exec"
    assert any(expected in each.name for each in found), found
    mine = next(each for each in found if expected in each.name)
    assert mine.file == __file__
    assert mine.line == IMPURE[name].__code__.co_firstlineno
    assert mine.why
    assert str(mine) == f"{mine.name} {mine.why} ({mine.file}:{mine.line})"


class Box:
    def __init__(self):
        self.items = [3, 1, 2]


@functools.lru_cache
def cached(n):
    return n


PURE = {
    "containers": lambda: sorted([*{1: 2}.items(), *zip([1], {2}, strict=True)])[0].index(1),
    "text": lambda: re.sub("a", "b", f"{'a'.upper():>3} {1.5!r}").encode().decode(),
    "numbers": lambda: math.sqrt(max(1, abs(-2), round(2.5))) + operator.add(1, 2),
    "attributes": lambda: (getattr(Box(), "items"), hasattr(Box, "x"), id(Box), hash("x")),  # noqa: B009
    "functions": lambda: (functools.reduce(operator.mul, [1, 2]), cached(1), callable(len)),
    "numpy": lambda: np.exp(np.ones((2, 2)).reshape(4).sum()) + np.einsum("i,i", [1], [2]),
    "torch": lambda: (torch.randn(2, 2).softmax(0) @ torch.ones(2).mul_(2)).tolist(),
    "exceptions": lambda: next(iter([1])) and list(map(str, filter(None, [1]))),
    "environment": lambda: os.environ.get("HOME"),
    "locks": lambda: threading.Lock().acquire(),
    "log level": lambda: logging.getLogger("purity").isEnabledFor(logging.DEBUG),
}


@pytest.mark.parametrize("name", PURE)
def test_pure(name):
    assert observed(PURE[name]) == []


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": 60, **SMALL, "intermediate_size": 32}
MODELS = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TEXT, num_key_value_heads=1)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **{"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2},
            **{"num_heads": 2, "decoder_start_token_id": 0},
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**SMALL, intermediate_size=32, image_size=16, patch_size=8)
    ),
}


class Sequences(nn.Module):
    """torch's own encoder and LSTM."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.1)

    def forward(self, x):
        return self.lstm(self.encoder(x))[0].mean()


def loss(model, batch):
    if isinstance(model, Sequences):
        return model(batch["pixel_values"].flatten(1)[:, :80].reshape(-1, 5, 16))
    if isinstance(model, transformers.ViTForImageClassification):
        return model(**batch, labels=torch.tensor([0, 1])).loss
    ids = batch["pixel_values"].flatten(1)[:, :8].mul(10).long().abs().clamp(max=59)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("name", [*MODELS, "sequences"])
def test_steps_of_libraries_are_pure_and_stay_what_they_are(name):
    model = (MODELS[name]() if name in MODELS else Sequences()).train()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"pixel_values": torch.randn(2, 3, 16, 16)}

    def step():
        optimizer.zero_grad()
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    step()
    seen = purity.observer()
    with purity.undisturbed(seen):
        step()
    assert purity.impure_calls(seen.calls(), seen.codes()) == []
    roots = {"model": model, "loss": loss, "optimizer": optimizer}
    names = names_in(seen.codes(), seen.calls())
    account = Account.take(roots, names, seen.codes())
    assert account.unwalkable == []
    user = [code for code in seen.codes() if not is_trusted_code(code)]
    assert [code.co_qualname for code in user if code not in account.codes] == [step.__qualname__]
    step()
    assert account.differences() == []


def test_collections_wait_for_the_last_thread_that_is_undisturbed():
    """Else a collection in the second's step runs other people's finalizers as if it did."""
    inside, leave = threading.Event(), threading.Event()

    def other():
        with purity.undisturbed():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    assert gc.isenabled()
    with purity.undisturbed():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_who_had_no_collections_has_none_afterwards():
    gc.disable()
    try:
        with purity.undisturbed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
