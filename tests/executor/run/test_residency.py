"""Where jobs' tensors are: in the user's memory, with a place in the arena that nobody touches."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.arenas import is_inside
from waterflow.allocator_ext import _C
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.residency import Residency

pytestmark = pytest.mark.cpu

POLICIES = ("temporal", "waterwave", "flow")
STEPS = 6


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def make_job(model: nn.Module | None = None, **options: Any) -> wf.Job:
    torch.manual_seed(0)
    model = network() if model is None else model
    data = list(torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(1)))
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), 0.05)
    return wf.Job("a", model=model, optimizer=optimizer, data=data, **{"loss": loss, **options})


def run(job: wf.Job, **options: Any) -> wf.JobReport:
    return wf.run([job], memory="8MiB", threads=1, **options)["a"]


def tensors_of(job: wf.Job) -> list[torch.Tensor]:
    entries = job.optimizer.state.values()
    state = [value for entry in entries for value in entry.values()]
    known = [*job.model.parameters(), *job.model.buffers(), *state]
    return [tensor for tensor in known if isinstance(tensor, torch.Tensor)]


def assert_same_weights(job: wf.Job, other: wf.Job) -> None:
    for name, value in other.model.state_dict().items():
        assert torch.equal(job.model.state_dict()[name], value), name


# The residency itself


@pytest.fixture
def arena() -> Iterator[Any]:
    _C.install_lane_allocator()
    arena = _C.Arena.host(1 << 20, 2)
    _C.register_arena(arena)
    yield arena
    _C.retire_arena(arena)


def test_a_storage_keeps_its_address_and_its_place_is_counted(arena: Any) -> None:
    residency = Residency(arena, HostDevice())
    tensor = torch.arange(100.0)
    pointer = tensor.data_ptr()
    residency.move_in(3, [tensor, tensor[10:]])
    assert tensor.data_ptr() == pointer
    assert residency.users(tensor) == {3}
    assert arena.held(3) == arena.statistics().live == 448
    residency.move_out(3)
    assert tensor.data_ptr() == pointer
    assert arena.statistics().live == 0


def test_a_shared_storage_has_one_place_until_the_last_job_leaves(arena: Any) -> None:
    residency = Residency(arena, HostDevice())
    tensor = torch.zeros(16)
    residency.move_in(0, [tensor])
    residency.move_in(1, [tensor])
    assert residency.users(tensor) == {0, 1}
    residency.move_out(0)
    assert arena.statistics().live == 64
    residency.move_out(1)
    assert arena.statistics().live == 0


def test_what_was_made_in_the_arena_moves_out_and_its_place_stays(arena: Any) -> None:
    residency = Residency(arena, HostDevice())
    with _C.LaneScope(arena, 0, 2):
        made = torch.arange(32.0)
    offset = arena.offset_of(made.data_ptr())
    residency.move_in(2, [made])
    assert not is_inside(made)
    assert torch.equal(made, torch.arange(32.0))
    assert arena.find(arena.pointer_to(offset)).job == 2
    assert arena.held(2) == 128
    residency.move_out(2)
    assert arena.statistics().live == 0


def test_places_move_together_and_nobody_touches_them(arena: Any) -> None:
    residency = Residency(arena, HostDevice())
    tensors = [torch.full((16 * size,), float(size)) for size in (1, 2, 3, 40)]
    residency.move_in(0, tensors)
    residency.drop(tensors[0])
    residency.drop(tensors[2])
    assert arena.statistics().live == 64 * 42
    residency.repack()
    statistics = arena.statistics()
    assert statistics.live == 64 * 42
    assert statistics.largest_free == statistics.free  # the gap above is smaller than the block
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)
    assert ctypes.string_at(arena.pointer_to(0), 64 * 46) == bytes(64 * 46)


def test_settling_forgets_what_was_replaced(arena: Any) -> None:
    residency = Residency(arena, HostDevice())
    parameter = nn.Parameter(torch.zeros(16))
    residency.keep_only(0, [parameter])
    for _ in range(3):
        parameter.data = torch.ones(16)
        residency.keep_only(0, [parameter])
        assert arena.statistics().live == 64
        assert residency.users(parameter) == {0}


def test_no_room_says_who_holds_what(arena: Any) -> None:
    _C.set_job_name(arena, 0, "big")
    residency = Residency(arena, HostDevice())
    tensors = [torch.zeros(1 << 17), torch.zeros(1 << 18)]
    with pytest.raises(torch.OutOfMemoryError, match="job 'big' asked for 1048576 bytes"):
        residency.move_in(0, tensors)
    assert residency.users(tensors[0]) == {0}
    residency.move_out(0)
    assert arena.statistics().live == 0


def test_copy_on_write_weights_get_bytes_of_their_own(arena: Any) -> None:
    residency = Residency(arena, HostDevice())
    original = torch.zeros(64)
    clone = torch._lazy_clone(original)
    residency.move_in(0, [clone])
    clone.add_(1)
    assert torch.equal(original, torch.zeros(64))
    residency.move_out(0)


# What users hold while jobs train


def numpy_view(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    array = weight.detach().numpy()
    return lambda: torch.from_numpy(array)


def memory_view(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    view = memoryview(weight.detach().numpy())
    return lambda: torch.from_numpy(np.asarray(view))


def dlpack(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    array = np.from_dlpack(weight.detach())
    return lambda: torch.from_numpy(array.copy())


def other_tensor(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    view = weight.detach().view(-1)
    return lambda: view.view(weight.shape)


VIEWS = (numpy_view, memory_view, dlpack, other_tensor)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_views_taken_before_and_during_a_run_follow_for_ever(view: Any, capture: bool) -> None:
    job = make_job(capture=capture)
    weight = job.model[0].weight
    views = [view(weight)]

    def look(result: wf.StepResult) -> None:
        views.append(view(weight))
        assert all(torch.equal(seen(), weight) for seen in views)

    job.on_step = look
    report = run(job)
    assert report.state == "finished", report.error
    gc.collect()
    assert len(views) == STEPS + 1
    assert all(torch.equal(seen(), weight) for seen in views)
    weight.detach().add_(1)
    assert all(torch.equal(seen(), weight) for seen in views)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_written_through_a_view_is_trained_on(policy: str) -> None:
    def shrinking() -> wf.Job:
        job = make_job()
        array = job.model[0].weight.detach().numpy()

        def shrink(result: wf.StepResult) -> None:
            array[...] *= 0.5

        job.on_step = shrink
        return job

    job, expected = shrinking(), shrinking()
    assert run(job, policy=policy).losses == wf.run_eager(expected, threads=1).losses
    assert_same_weights(job, expected)


def from_numpy(model: nn.Module, folder: Path) -> None:
    for module in (model[0], model[3]):
        module.weight = nn.Parameter(torch.from_numpy(module.weight.detach().numpy().copy()))


def shared_memory(model: nn.Module, folder: Path) -> None:
    model.share_memory()


def mapped_file(model: nn.Module, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "weights.pt")
    model.load_state_dict(torch.load(folder / "weights.pt", mmap=True), assign=True)


def copy_on_write(model: nn.Module, folder: Path) -> None:
    for module in (model[0], model[3]):
        module.weight = nn.Parameter(torch._lazy_clone(module.weight.detach()))


@pytest.mark.parametrize("prepare", [from_numpy, shared_memory, mapped_file, copy_on_write])
def test_weights_in_any_kind_of_memory_stay_there(prepare: Any, tmp_path: Path) -> None:
    def prepared() -> wf.Job:
        torch.manual_seed(0)
        model = network()
        prepare(model, tmp_path)
        return make_job(model)

    job, expected = prepared(), prepared()
    pointers = [p.untyped_storage().data_ptr() for p in job.model.parameters()]
    assert run(job).losses == wf.run_eager(expected, threads=1).losses
    assert_same_weights(job, expected)
    assert pointers == [p.untyped_storage().data_ptr() for p in job.model.parameters()]


class Decaying(torch.optim.SGD):
    """Replaces the weights' memory at every step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["average"] = state.get("average", 0) * 0.9 + parameter.grad
                parameter.data = parameter.data - 0.01 * state["average"]


class Keeping(torch.optim.SGD):
    """Never clears the gradients, which so accumulate."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


KINDS: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"capture": False},
    "eager, weights replaced": {"capture": False, "optimizer": Decaying},
    "eager, gradients kept": {"capture": False, "optimizer": Keeping},
    "eager optimizer": {"optimizer": torch.optim.ASGD},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_of_the_model_is_ever_in_the_arena(kind: str, policy: str) -> None:
    looks: list[bool] = []

    def look(result: wf.StepResult) -> None:
        kept = [p.grad for p in job.model.parameters() if p.grad is not None]
        looks.append(any(map(is_inside, [*tensors_of(job), *kept])))

    job, expected = make_job(on_step=look, **KINDS[kind]), make_job(**KINDS[kind])
    report = run(job, policy=policy)
    assert report.losses == wf.run_eager(expected, threads=1).losses
    assert_same_weights(job, expected)
    assert looks == [False] * STEPS
    assert not any(map(is_inside, tensors_of(job)))


def test_weights_replaced_at_every_step_take_no_more_room() -> None:
    held: list[int] = []
    job = make_job(capture=False, optimizer=Decaying, on_step=lambda result: held.append(measure()))
    with wf.Engine("8MiB", threads=1) as engine:
        measure = lambda: int(engine._arena.statistics().live)  # noqa: E731
        assert engine.submit(job).result().state == "finished"
    assert len(set(held)) == 1


def test_what_a_model_keeps_of_an_eager_step_stays_readable() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(batch)
            self.last = out.detach()
            return out

    torch.manual_seed(0)
    arrays: list[np.ndarray[Any, Any]] = []
    copies: list[np.ndarray[Any, Any]] = []
    job = make_job(Remembering(), capture=False)

    def look(result: wf.StepResult) -> None:
        arrays.append(job.model.last.numpy())
        copies.append(arrays[-1].copy())

    job.on_step = look
    report = run(job)
    assert report.state == "finished", report.error
    gc.collect()
    assert len(arrays) == STEPS
    assert all(np.array_equal(a, b) for a, b in zip(arrays, copies, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_thread_may_read_the_weights_all_the_time(policy: str) -> None:
    jobs = [make_job(epochs=20), make_job(epochs=20, capture=False)]
    jobs[1].name = "b"
    over, started = threading.Event(), threading.Event()
    tensors = [tensor for job in jobs for tensor in job.model.state_dict(keep_vars=True).values()]
    readings: list[int] = []

    def read() -> None:
        while not over.is_set():
            readings.append(len([tensor.detach().clone() for tensor in tensors]))
            assert not any(map(is_inside, tensors))
            started.set()

    reader = threading.Thread(target=read)
    reader.start()
    started.wait()
    report = wf.run(jobs, memory="8MiB", threads=1, policy=policy)
    over.set()
    reader.join()
    assert report.ok
    assert set(readings) == {len(tensors)}
