"""The lanes' CUDA allocator: that it compiles against the torch here, and what it does on a GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.fake_cuda import library as fake_driver
from tests.support.programs import COMPILER, CORE, EXTENSION, PLAIN, linked, objects
from tests.support.tasks import Task
from waterflow.allocator_ext import _C

TORCH = Path(torch.__file__).parent
MIB = 1 << 20

without_gpu = pytest.mark.virtual
built_for_cuda = pytest.mark.skipif(not _C.cuda_built, reason="built without CUDA")


def on_gpu(test):
    """Marks a test that needs a GPU and the extension's CUDA part."""
    missing = not (_C.cuda_built and torch.cuda.is_available())
    return pytest.mark.cuda(
        pytest.mark.skipif(missing, reason="no GPU, or built without CUDA")(test)
    )


# Without a GPU


def runtime_headers() -> list[Path]:
    """Folders that together have what torch's headers want: a toolkit's, or pip's packages'."""
    toolkits = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [[Path(toolkit) / "include"] for toolkit in toolkits if toolkit]
    packages = importlib.util.find_spec("nvidia")
    for package in (packages and packages.submodule_search_locations) or []:
        places.append(sorted(Path(package).glob("*/include"), reverse=True))
    wanted = ("cuda_runtime_api.h", "crt/host_config.h")
    for folders in places:
        if all(any((folder / name).is_file() for folder in folders) for name in wanted):
            return folders
    return []


def with_cuda_macros(folder: Path) -> Path:
    """A folder with the one header of torch's CUDA part that its builds without CUDA lack."""
    name = "c10/cuda/impl/cuda_cmake_macros.h"
    if not (TORCH / "include" / name).exists():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    return folder


def compile_cuda_part(arguments: list[str], folder: Path) -> None:
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"no compiler {COMPILER[0]}")
    if not (headers := runtime_headers()):
        pytest.skip(
            "no CUDA headers: install a toolkit, or nvidia-cuda-runtime and nvidia-cuda-crt"
        )
    foreign = [
        TORCH / "include",
        TORCH / "include" / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_paths()["include"]),
        with_cuda_macros(folder),
        *headers,
    ]
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-DWATERFLOW_WITH_CUDA"]
    includes = [f"-I{EXTENSION}", *(flag for path in foreign for flag in ("-isystem", str(path)))]
    command = [*COMPILER, *flags, *includes, *arguments]
    built = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr


@without_gpu
@pytest.mark.parametrize("source", sorted(path.name for path in (EXTENSION / "cuda").glob("*.cpp")))
def test_compiles_against_the_installed_torch(source: str, tmp_path: Path) -> None:
    compile_cuda_part(["-fsyntax-only", str(EXTENSION / "cuda" / source)], tmp_path)


@without_gpu
@pytest.mark.slow
@pytest.mark.parametrize("core", [linked("core", PLAIN, objects(CORE, PLAIN), "-r")], ids=str)
def test_what_goes_where_on_a_stub(core: Task[Path], tmp_path: Path) -> None:
    """In a process of its own: the stub takes the place of torch's CUDA library."""
    stub = tmp_path / "stub.so"
    sources = [
        Path(__file__).with_name("cuda_stub.cpp"),
        EXTENSION / "runtime" / "lane.cpp",
        *(EXTENSION / "cuda").glob("*.cpp"),
        core.result(),
    ]
    library = ["-O0", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wl,-Bsymbolic"]
    torch_library = [f"-L{TORCH / 'lib'}", "-lc10", "-ldl"]
    compile_cuda_part([*library, *map(str, sources), *torch_library, "-o", str(stub)], tmp_path)
    run = "import ctypes, sys, torch; _, stub, driver = sys.argv; "
    run += "sys.exit(ctypes.CDLL(stub).run_stub(driver.encode()))"
    command = [sys.executable, "-c", run, str(stub), str(fake_driver())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def virtual_members(header: str, class_name: str) -> set[str]:
    text = re.sub(r"//[^\n]*", "", (TORCH / "include" / header).read_text())
    found = re.search(rf"(?:class|struct) (?:\w+ )?{class_name} (?::[^{{]*)?{{.*?\n}};", text, re.S)
    assert found is not None, class_name
    return set(re.findall(r"virtual\s+[^~;{}()]*?(\w+)\(", found[0]))


@without_gpu
def test_every_call_is_forwarded() -> None:
    """A virtual with a default would go unnoticed: PyTorch would get the default, not an answer."""
    allocators = {
        "Allocator": "c10/core/Allocator.h",
        "DeviceAllocator": "c10/core/CachingDeviceAllocator.h",
        "CUDAAllocator": "c10/cuda/CUDACachingAllocator.h",
    }
    members = {name: virtual_members(header, name) for name, header in allocators.items()}
    assert {name: len(found) > 3 for name, found in members.items()} == dict.fromkeys(members, True)
    forwarded = set(
        re.findall(r"inner(?:_)?\.(\w+)\(", (EXTENSION / "cuda/forwarding.h").read_text())
    )
    assert set().union(*members.values()) - forwarded == set()


@without_gpu
@built_for_cuda
def test_installed_once_without_a_gpu() -> None:
    before = torch._C._cuda_getAllocatorBackend()
    for _ in range(2):
        _C.install_cuda_lane_allocator()
    assert _C.is_cuda_lane_allocator_installed()
    assert torch._C._cuda_getAllocatorBackend() == before


# On a GPU


@dataclass
class Lanes:
    """Two lanes of an arena. The test's own thread becomes either."""

    streams: "_C.LaneStreams"
    arena: _C.Arena

    @contextmanager
    def lane(self, lane: int = 0) -> Iterator[torch.cuda.Stream]:
        user = torch.cuda.current_stream()
        _C.LaneDevice.cuda(self.streams, False).bind(lane)
        stream = torch.cuda.current_stream()
        stream.wait_stream(user)
        try:
            with _C.LaneScope(self.arena, lane, 0):
                yield stream
        finally:
            _C.unbind_cuda_stream(user.device_index)
            torch.cuda.set_stream(user)
            user.wait_stream(stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.arena.owns(tensor.data_ptr())


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    torch.zeros(1, device="cuda").add_(1).item()  # PyTorch has long been using the device
    _C.install_cuda_lane_allocator()
    streams = _C.LaneStreams(_C.CudaDevice("libcuda.so.1", torch.cuda.current_device()), 2)
    arena = _C.Arena.cuda(streams, 512 * MIB, host_tensors=False)
    arena.commit()
    _C.register_arena(arena)
    yield Lanes(streams, arena)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    _C.retire_arena(arena)


def assert_still_works() -> None:
    tensor = torch.arange(1000.0, device="cuda")
    assert tensor.sum().item() == 499500.0


@on_gpu
def test_only_a_lanes_tensors_come_from_the_arena(lanes: Lanes) -> None:
    before = torch.ones(1000, device="cuda")
    with lanes.lane():
        inside = torch.ones(1000, device="cuda")
        total = before + inside
        host = torch.ones(1000)
    after = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    held = [lanes.holds(tensor) for tensor in (before, inside, total, host, after)]
    assert held == [False, True, True, False, False]
    assert (total.cpu() == 2).all()
    assert inside.device == before.device
    assert lanes.arena.statistics().live >= 8000
    with lanes.lane():
        del inside, total, before  # memory of both kinds
    assert lanes.arena.statistics().live == 0
    assert_still_works()


@on_gpu
def test_a_lane_reuses_what_it_freed(lanes: Lanes) -> None:
    with lanes.lane():
        first = torch.ones(MIB, device="cuda")
        address = first.data_ptr()
        del first
        assert torch.ones(MIB, device="cuda").data_ptr() == address


@on_gpu
def test_raw_memory_of_both_kinds_is_freed_anywhere(lanes: Lanes) -> None:
    outside = torch.cuda.caching_allocator_alloc(MIB)
    with lanes.lane():
        inside = [torch.cuda.caching_allocator_alloc(MIB) for _ in range(2)]
        torch.cuda.caching_allocator_delete(inside[0])
        torch.cuda.caching_allocator_delete(outside)
    assert [lanes.arena.owns(pointer) for pointer in (*inside, outside)] == [True, True, False]
    assert lanes.arena.statistics().live == MIB
    torch.cuda.caching_allocator_delete(inside[1])
    assert lanes.arena.statistics().live == 0


@on_gpu
def test_a_side_stream_on_a_lane_uses_pytorchs_memory(lanes: Lanes) -> None:
    side = torch.cuda.Stream()
    with lanes.lane():
        with torch.cuda.stream(side):
            beside = torch.ones(1000, device="cuda")
        assert not lanes.holds(beside)
        assert lanes.holds(torch.ones(1000, device="cuda"))


@on_gpu
def test_statistics_are_those_of_pytorch(lanes: Lanes) -> None:
    before = torch.cuda.memory_allocated()
    with lanes.lane():
        inside = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == before
    outside = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == before + 64 * MIB
    del outside
    assert torch.cuda.memory_allocated() == before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == before
    assert "Allocated memory" in torch.cuda.memory_summary()
    outside = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_snapshot()
    del outside
    assert torch.cuda.get_per_process_memory_fraction() > 0
    assert torch.cuda.mem_get_info()[0] > 0
    assert (inside == 1).all()


@on_gpu
def test_cudnn_benchmark_inside_and_outside(lanes: Lanes, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    image = torch.randn(4, 8, 32, 32)
    weight = torch.randn(16, 8, 3, 3)
    wanted = torch.conv2d(image, weight)
    with lanes.lane():
        inside = torch.conv2d(image.cuda(), weight.cuda())
        assert lanes.holds(inside)
        torch.testing.assert_close(inside.cpu(), wanted, rtol=1e-3, atol=1e-3)
    outside = torch.conv2d(image.cuda(), weight.cuda())
    assert not lanes.holds(outside)
    torch.testing.assert_close(outside.cpu(), wanted, rtol=1e-3, atol=1e-3)


@on_gpu
def test_out_of_memory_in_a_lane(lanes: Lanes) -> None:
    _C.set_job_name(lanes.arena, 0, "greedy")
    with lanes.lane():
        with pytest.raises(torch.OutOfMemoryError, match="job 'greedy' asked for"):
            torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
        kept = torch.ones(MIB, device="cuda")
        assert lanes.holds(kept)
        assert kept.sum().item() == MIB
    assert torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda").numel() == 1024 * MIB
    assert_still_works()


def read_late(block: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
    """A copy that the side stream makes, a long while after this returns."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(300_000_000)
        return block.clone()


@on_gpu
@pytest.mark.parametrize("recorded", [True, False])
def test_record_stream_holds_back_the_next_user(lanes: Lanes, recorded: bool) -> None:
    side = torch.cuda.Stream()
    with lanes.lane():
        block = torch.full((MIB,), 1.0, device="cuda")
        address = block.data_ptr()
        copy = read_late(block, side)
        if recorded:
            block.record_stream(side)
        del block
        reused = torch.full((MIB,), 2.0, device="cuda")
        assert reused.data_ptr() == address
        assert not side.query(), "the sleep is over too early for this test to show anything"
    torch.cuda.synchronize()
    assert (copy == (1.0 if recorded else 2.0)).all()  # 2: the test sees the race it is about


@on_gpu
def test_a_recorded_block_freed_outside_waits_for_its_streams(lanes: Lanes) -> None:
    side = torch.cuda.Stream()
    with lanes.lane():
        block = torch.full((MIB,), 1.0, device="cuda")
        copy = read_late(block, side)
        block.record_stream(side)
        assert not side.query()
    del block
    assert side.query()
    assert (copy == 1).all()
    assert lanes.arena.statistics().live == 0


@on_gpu
def test_record_stream_of_pytorchs_own_memory(lanes: Lanes) -> None:
    side = torch.cuda.Stream()
    block = torch.full((MIB,), 1.0, device="cuda")
    address = block.data_ptr()
    copy = read_late(block, side)
    block.record_stream(side)
    del block
    assert torch.full((MIB,), 2.0, device="cuda").data_ptr() != address
    torch.cuda.synchronize()
    assert (copy == 1).all()


@on_gpu
def test_graph_capture_outside_lanes(lanes: Lanes) -> None:
    source = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (source * 2).sum()
    source.fill_(3)
    graph.replay()
    assert result.item() == 6000
    assert not lanes.holds(result)


@on_gpu
def test_graphs_and_pools_on_a_lane_keep_their_own_memory(lanes: Lanes) -> None:
    pool = torch.cuda.MemPool()
    with lanes.lane() as stream:
        with torch.cuda.use_mem_pool(pool):
            pooled = torch.ones(1000, device="cuda")
        source = torch.ones(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = source * 2
        graph.replay()
        held = [lanes.holds(tensor) for tensor in (pooled, source, result)]
        assert held == [False, True, False]
        assert (result == 2).all()
    del pooled
    assert_still_works()


@on_gpu
def test_mem_pool_outside_lanes(lanes: Lanes) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.ones(MIB, device="cuda")
    assert pool.snapshot()
    assert (pooled == 1).all()
    del pooled, pool
    torch.cuda.empty_cache()
    assert_still_works()


@on_gpu
def test_a_lanes_tensor_is_not_shared_between_processes(lanes: Lanes) -> None:
    with lanes.lane():
        tensor = torch.ones(1000, device="cuda")
    with pytest.raises(RuntimeError, match="cannot be shared with another process"):
        tensor.untyped_storage()._share_cuda_()
    assert (tensor == 1).all()
