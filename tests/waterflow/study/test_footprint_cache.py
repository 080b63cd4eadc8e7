"""Captures on disk are found again exactly while nothing that shapes a step has changed."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn, optim

import waterflow as wf
from waterflow.capture.fake_job import build
from waterflow.capture.fingerprint import Fingerprint
from waterflow.common import environment
from waterflow.study import batch_scaling, footprint_cache
from waterflow.study.batch_scaling import footprint_model
from waterflow.study.footprint import capture_footprint
from waterflow.study.footprint_cache import key_of, load, store

pytestmark = pytest.mark.cpu

SHAPES = """
    import torch.nn.functional as F

    def shape(x):
        return F.relu(x)
"""

MODEL = """
    import dataclasses
    import functools
    import torch
    from torch import nn, optim
    import torch.nn.functional as F
    import waterflow as wf
    from {name} import shapes

    WIDTH = 6
    OPTIONS = {{"dropout": 0.0, "layers": [1, 2]}}

    class Net(nn.Module):
        twice = False

        def __init__(self, width):
            super().__init__()
            self.one = nn.Linear(4, width)
            self.two = nn.Linear(width, 3)

        def forward(self, x):
            x = shapes.shape(self.one(x))
            if OPTIONS["dropout"]:
                x = F.dropout(x, OPTIONS["dropout"])
            return self.two(x)

    @dataclasses.dataclass
    class Config:
        scale: float = 2.0

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def scaled_loss(scale, config=Config()):
        def scaled(model, batch):
            return loss(model, batch) * scale * config.scale
        return scaled

    def make(batch, *, scale=1.0, **options):
        model = Net(WIDTH)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
        data = [(torch.randn(batch, 4), torch.randint(3, (batch,)))]
        return wf.Job("it", model=model, optimizer=optimizer, loss=scaled_loss(scale), data=data)
"""

NUMBER = itertools.count()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache; and this package's own files may be edited while a test runs."""
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "_OWN_PACKAGES", ())


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of a model and a file it imports; each call loads it anew, with changed text."""
    name = f"users_models_{next(NUMBER)}"
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(file, text, change):
        text = textwrap.dedent(text)
        if change is not None:
            before, after = change
            assert before in text
            text = text.replace(before, after)
        (folder / file).write_text(text)

    def again(model=None, shapes=None):
        write("__init__.py", "", None)
        write("shapes.py", SHAPES, shapes)
        write("model.py", MODEL.format(name=name), model)
        for loaded in [module for module in sys.modules if module.startswith(name)]:
            del sys.modules[loaded]
        importlib.invalidate_caches()
        return importlib.import_module(f"{name}.model")

    yield again
    for loaded in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[loaded]


def key(make, batch=8, vouched=None):
    built = build(lambda: make(batch), "it")
    assert not built.real
    return key_of(make, built, "test", vouched)


@pytest.mark.parametrize(
    "change",
    [
        ("WIDTH = 6", "WIDTH = 7"),
        ("self.two(x)", "self.two(x).tanh()"),
        ("* scale * config.scale", "* scale + config.scale"),
        ("lr=0.1", "lr=0.2"),
        ("momentum=0.9", "momentum=0.9, nesterov=True"),
        ("nn.Linear(4, width)", "nn.Linear(4, width, bias=False)"),
        ("torch.randn(batch, 4)", "torch.randn(batch, 2, 4)[:, 0]"),
        ("twice = False", "twice = True"),
        ("scale: float = 2.0", "scale: float = 3.0"),
        ("data=data)", "data=data, clip_grad_norm=1.0)"),
    ],
)
def test_another_source_is_another_key(package, change):
    before = key(package().make)
    assert before is not None
    assert key(package().make) == before
    assert key(package(model=change).make) != before
    assert key(package().make) == before


def test_a_file_that_the_models_file_imports_counts(package):
    before = key(package().make)
    assert key(package(shapes=("F.relu(x)", "F.gelu(x)")).make) != before
    assert key(package().make) == before


def test_what_the_program_changes_while_it_runs_counts(package):
    """The files are the same throughout."""
    module = package()
    keys = [key(module.make)]

    def note():
        keys.append(key(module.make))

    module.OPTIONS["dropout"] = 0.5
    note()
    module.OPTIONS["layers"].append(3)
    note()
    module.Net.twice = True
    note()
    module.WIDTH = 9
    note()
    module.shapes.shape = torch.tanh
    note()
    module.Net.forward = lambda self, x: self.two(self.one(x))
    note()
    module.scaled_loss.__defaults__[0].scale = 4.0
    note()
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_closures_defaults_and_arguments_count(package):
    module = package()

    def scaled(scale):
        return lambda batch: module.make(batch, scale=scale)

    makers = [
        module.make,
        scaled(1.0),
        scaled(2.0),
        functools.partial(module.make, scale=2.0),
        functools.partial(module.make, weight_decay=0.1),
        lambda batch, scale=3.0: module.make(batch, scale=scale),
        lambda batch, scale=4.0: module.make(batch, scale=scale),
    ]
    keys = [key(make) for make in makers]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(scaled(2.0)) == keys[2]


def attribute(model):
    model.flag = 7


def frozen(model):
    model.one.bias.requires_grad_(False)


def evaluated(model):
    model.eval()


def buffered(model):
    model.register_buffer("more", torch.zeros(3))


def hooked(model):
    model.one.register_forward_hook(lambda *_: None)


def gradient_hooked(model):
    model.one.weight.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize(
    "change", [attribute, frozen, evaluated, buffered, hooked, gradient_hooked]
)
def test_the_model_as_it_is_counts(package, change):
    """The factory is the same; what it has made differs, however that came."""
    module = package()
    plain, changed = (build(lambda: module.make(8), "it") for _ in range(2))
    keys = [key_of(module.make, built, "test", None) for built in (plain, changed)]
    assert keys[0] == keys[1]
    change(changed.job.model)
    assert key_of(module.make, changed, "test", None) not in (None, keys[0])


def test_values_of_tensors_do_not_count(package):
    module = package()
    torch.manual_seed(1)
    before = key(module.make)
    torch.manual_seed(2)
    assert key(module.make) == before
    one, two = Fingerprint(), Fingerprint()
    one.add("model", nn.Linear(3, 3))
    two.add("model", nn.Linear(3, 3))
    assert one.digest() == two.digest()


def flags():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    with torch.no_grad():
        yield


def test_this_packages_files_count(tmp_path, monkeypatch):
    before = environment.environment()
    monkeypatch.setattr(environment, "_OWN_PACKAGES", ("waterflow.executor",))
    lines = set(environment.environment().split("\n")) - set(before.split("\n"))
    assert {"waterflow.executor/run/tape.py", "waterflow.executor/profile/fake.py"} <= {
        line.split()[0] for line in lines
    }
    assert all(len(line.split()[1]) == 64 for line in lines)


def test_a_comment_in_a_loaded_file_counts(package):
    """Whatever the walk may have missed: the files are part of the key as well."""
    before = key(package().make)
    assert key(package(shapes=("def shape", "# shapes\ndef shape")).make) != before


def test_flags_versions_and_packages_count(package, tmp_path, monkeypatch):
    module = package()
    keys = [key(module.make)]
    for _ in flags():
        keys.append(key(module.make))
    assert key(module.make) == keys[0]
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    keys.append(key(module.make))
    monkeypatch.undo()
    site = tmp_path / "site-packages"
    (site / "other-1.0.dist-info").mkdir(parents=True)
    folders = (*environment._library_folders(), str(site))
    monkeypatch.setattr(environment, "_library_folders", lambda: folders)
    keys.append(key(module.make))
    (site / "other-1.0.dist-info").rename(site / "other-1.1.dist-info")
    keys.append(key(module.make))
    assert len(set(keys)) == len(keys)


def test_functions_put_in_the_place_of_torchs_count(package, monkeypatch):
    module = package()
    before = key(module.make)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", lambda *args: None)
        built = build(lambda: module.make(8), "it")
        assert key_of(module.make, built, "test", None) not in (None, before)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x)
        assert key(module.make) not in (None, before)
    assert key(module.make) == before


def reads_a_file(batch):
    open(os.devnull).close()
    return plain(batch)


def reads_the_environment(batch):
    os.environ.get("WIDTH")
    return plain(batch)


def imports_late(batch):
    if batch < 0:
        import no_such_module_of_mine  # noqa: F401
    return plain(batch)


COUNTER = itertools.count()


def counts(batch):
    next(COUNTER)
    return plain(batch)


def plain(batch):
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return wf.Job("p", model=model, optimizer=optimizer, loss=square, data=[torch.randn(batch, 4)])


def square(model, x):
    return model(x).square().mean()


def generates(batch):
    made = plain(batch)
    made.data = (torch.randn(batch, 4) for _ in range(2))
    return made


class Shy:
    @property
    def __class__(self):
        raise PermissionError("look away")


SHY = Shy()


def looks_away(batch):
    assert SHY is not None
    return plain(batch)


DOUBTFUL = [reads_a_file, reads_the_environment, imports_late, counts, generates]


@pytest.mark.parametrize("make", DOUBTFUL)
def test_in_doubt_there_is_no_key_but_the_callers(make):
    assert key(make) is None
    one, two = key(make, vouched="data of May"), key(make, vouched="data of June")
    assert None not in (one, two)
    assert one != two
    assert key(make, vouched="data of May") == one


def test_objects_that_refuse_to_be_looked_at_leave_no_key():
    assert key(looks_away) is None
    assert key(looks_away, vouched="anything") is None
    endless = []
    endless.append(endless)
    assert key(lambda batch: plain(batch) if endless else None) is None


def test_a_file_that_cannot_be_read_leaves_no_key(package, tmp_path):
    module = package()
    assert key(module.make) is not None
    (path,) = tmp_path.rglob("shapes.py")
    path.unlink()
    assert key(module.make) is None


def test_without_a_key_nothing_is_kept(tmp_path):
    footprint_model(counts, name="mine")
    assert not list(tmp_path.rglob("*.npz"))
    footprint_model(counts, name="mine", key="I know what it counts")
    assert len(list(tmp_path.rglob("*.npz"))) == 1


def test_values_are_told_apart():
    values = [
        *(0, 0.0, -0.0, False, None, "0", b"0", (0,), [0], {0: 0}, {0}, 1, True, 1.5, 1 + 0j),
        *({"a": 1, "b": 2}, {"b": 2, "a": 1}, float("nan"), range(3), slice(1), int, Ellipsis),
        *(
            torch.float32,
            torch.device("cpu"),
            np.float32(1),
            np.float64(1),
            np.ones(3),
            np.zeros(3),
        ),
        *(torch.ones(3), torch.ones(3, 1), torch.ones(3).double(), nn.Parameter(torch.ones(3))),
        *(torch.relu, torch.tanh, nn.functional.gelu, nn.ReLU, nn.ReLU(), nn.ReLU(True), len),
        *("a".join, "b".join, functools.partial(max, 1), functools.partial(max, 2), math_like(2)),
        *(math_like(3), plain, square, os, sys, optim.SGD, list[int], int | str),
    ]
    digests = []
    for value in values:
        identity = Fingerprint()
        identity.add("value", value)
        assert not identity.doubts, value
        digests.append(identity.digest())
    assert len(set(digests)) == len(values)


def math_like(n):
    return lambda x: x**n


def test_cycles_and_shared_objects_are_told_apart():
    shared, cycle = [1], []
    cycle.append(object_with(cycle))
    values = [(shared, shared), ([1], [1]), cycle]
    a, b = object_with(1), object_with(1)
    values += [(a, a), (a, b)]
    digests = set()
    for value in values[2:]:
        identity = Fingerprint()
        identity.add("value", value)
        digests.add(identity.digest())
    assert len(digests) == 3


class Holder:
    def __init__(self, held):
        self.held = held


def object_with(held):
    return Holder(held)


# Files


@functools.cache
def footprint():
    built = build(lambda: plain(8), "it")
    return capture_footprint(built.job, built.batch)


def equal(one, other):
    for left, right in ((one.first, other.first), (one.steady, other.steady)):
        assert (left is None) == (right is None)
        if left is not None:
            assert (left.operators, left.boundary) == (right.operators, right.boundary)
            for field in ("event_nodes", "event_blocks", "allocates", "sizes", "flops"):
                np.testing.assert_array_equal(getattr(left, field), getattr(right, field))
                assert getattr(left, field).dtype == getattr(right, field).dtype
    np.testing.assert_array_equal(one.persistent, other.persistent)


def test_what_is_stored_comes_back():
    assert load("k") is None
    store("k", footprint(), slope=np.arange(3))
    found, also = load("k")
    equal(found, footprint())
    assert list(also) == ["slope"]
    np.testing.assert_array_equal(also["slope"], np.arange(3))
    store(None, footprint())
    assert load(None) is None


def test_damaged_files_are_as_good_as_none(tmp_path):
    store("k", footprint())
    (path,) = tmp_path.rglob("k.npz")
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"x" * 100, content[:-30] + b"y" * 30):
        path.write_bytes(damaged)
        assert load("k") is None
    store("k", footprint())
    equal(load("k")[0], footprint())


def test_files_of_another_format_are_as_good_as_none(monkeypatch):
    monkeypatch.setattr(footprint_cache, "_VERSION", 0)
    store("k", footprint())
    monkeypatch.undo()
    assert load("k") is None


def test_parts_that_do_not_fit_are_as_good_as_none(tmp_path):
    store("k", footprint())
    (path,) = tmp_path.rglob("k.npz")
    with np.load(path) as arrays:
        parts = dict(arrays)
    for name, value in (
        ("steady_event_blocks", parts["steady_event_blocks"] + 1),
        ("steady_sizes", parts["steady_sizes"][:-1]),
        ("steady_sizes", parts["steady_sizes"].astype(np.float64)),
        ("header", np.array(json.dumps({"version": 1, "also": []}))),
    ):
        np.savez(path, **{**parts, name: value})
        assert load("k") is None, name


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path / "file" / "below"))
    store("k", footprint())
    assert load("k") is None
    assert footprint_model(plain, name="mine").is_affine


def test_a_damaged_family_is_captured_again(tmp_path, monkeypatch):
    before = footprint_model(plain, name="mine").at(20)
    (path,) = tmp_path.rglob("*.npz")
    path.write_bytes(path.read_bytes()[:100])
    after = footprint_model(plain, name="mine").at(20)
    np.testing.assert_array_equal(before.steady.events, after.steady.events)
    assert path.stat().st_size > 100
    monkeypatch.setattr(batch_scaling, "capture_built", None)
    assert footprint_model(plain, name="mine").is_affine, "no capture, it is on disk"


SCRIPT = """
from waterflow.study.footprint_cache import key_of
from waterflow.capture.fake_job import build_real
from users_script.model import make

print(key_of(make, build_real(lambda: make(8), "it"), "test", None))
"""


def test_a_fresh_process_finds_the_same_key(package, tmp_path):
    """Where strings hash otherwise, too."""
    package()
    (folder,) = (path for path in tmp_path.iterdir() if path.name.startswith("users_models"))
    for file in folder.glob("*.py"):
        file.write_text(file.read_text().replace(folder.name, "users_script"))
    folder.rename(tmp_path / "users_script")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    keys = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        keys.append(done.stdout.strip())
    assert keys[0] == keys[1]
    assert len(keys[0]) == 64
