"""`waterflow doctor`: what this machine can run, and what to do about the rest.

Every finding is tried, not guessed: the extension is imported, and two small jobs train under a
budget. Whether that works decides the exit code; what is only good to know (a GPU, a compiler)
never does.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from waterflow.common.units import format_bytes

_OLDEST_TORCH = (2, 11)
_REINSTALL = "reinstall waterflow in this environment: pip install --force-reinstall waterflow"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at; `required` ones decide whether training works here at all."""

    what: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = False


def diagnose() -> dict[str, Any]:
    """Return {"ok": bool, "summary": str, "items": [finding as a dict]}; raises nothing."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python, _torch, _extension, _engine, _processor, _memory, _compiler, _torch_cuda,
        _extension_cuda, _cuda_driver, _cuda_engine, _management,
    )  # fmt: skip
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # a doctor that dies on a sick machine helps nobody
            what = check.__name__.strip("_").replace("_", " ")
            required = check in (_torch, _extension, _engine)
            findings.append(Finding(what=what, ok=False, detail=_line(error), required=required))
    works = all(finding.ok for finding in findings if finding.required)
    return {"ok": works, "summary": _summary(works), "items": [asdict(f) for f in findings]}


def render(diagnosis: dict[str, Any]) -> RenderableType:
    """Return what `diagnose` found as a table and a sentence for a terminal."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for item in diagnosis["items"]:
        mark = Text("ok", "green") if item["ok"] else Text("--", "dim")
        if item["required"] and not item["ok"]:
            mark = Text("FAIL", "bold red")
        detail = Text(item["detail"])
        if item["remedy"]:
            detail.append(f"\n{item['remedy']}", style="yellow")
        table.add_row(mark, Text(item["what"]), detail)
    return Group(table, Text(), Text(diagnosis["summary"]))


def _summary(works: bool) -> str:
    return f"CPU engine: {'ready' if works else 'not ready: see FAIL above'}."


def _python() -> Iterator[Finding]:
    where = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding(what="python", ok=True, detail=where)


def _torch() -> Iterator[Finding]:
    import torch

    numbers = torch.__version__.split("+")[0].split(".")[:2]
    supported = tuple(int(number) for number in numbers) >= _OLDEST_TORCH
    oldest = ".".join(map(str, _OLDEST_TORCH))
    remedy = "" if supported else f"needs torch {oldest} or newer: pip install -U torch"
    yield Finding(
        what="torch", ok=supported, detail=torch.__version__, remedy=remedy, required=True
    )
    yield Finding(what="torch threads", ok=True, detail=f"{torch.get_num_threads()} per operator")


def _extension() -> Iterator[Finding]:
    import torch  # noqa: F401  (the extension links against torch's libraries, already loaded then)

    try:
        extension = importlib.import_module("waterflow.allocator_ext._C")
    except ImportError as error:
        yield Finding(
            what="extension",
            ok=False,
            detail=f"cannot be imported: {_line(error)}",
            remedy=f"built for another torch, or not at all: {_REINSTALL}",
            required=True,
        )
        return
    yield Finding(what="extension", ok=True, detail=str(extension.__file__), required=True)
    arena = extension.Arena.host(1 << 20)
    address = arena.allocate(4096, lane=0, job=0)
    held = arena.held(0)
    arena.free(address, lane=0)
    detail = f"{format_bytes(held)} of {format_bytes(1 << 20)} allocated and freed"
    yield Finding(what="host arena", ok=held >= 4096, detail=detail, required=True)


def _engine() -> Iterator[Finding]:
    try:
        detail = _train_two_jobs("cpu")
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{_line(error)} ({os.path.basename(last.filename)}, line {last.lineno})"
        remedy = f"if the items above are ok, report this; else first {_REINSTALL}"
        yield Finding(what="CPU engine", ok=False, detail=detail, remedy=remedy, required=True)
        return
    yield Finding(what="CPU engine", ok=True, detail=detail, required=True)


def _train_two_jobs(device: str) -> str:
    """Train two tiny jobs under a budget; raises if one fails."""
    import torch

    import waterflow as wf

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    def job(name: str) -> Any:
        generator = torch.Generator().manual_seed(1)
        data = [(torch.randn(4, 8, generator=generator), torch.zeros(4, 1)) for _ in range(2)]
        model = torch.nn.Linear(8, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return wf.Job(name, model=model, optimizer=optimizer, loss=loss, data=data, epochs=1)

    with torch.random.fork_rng(devices=[]):  # a check leaves the caller's random numbers alone
        jobs = [job("first"), job("second")]
        report = wf.run(jobs, memory="32MiB", device=device, progress=False)
    for one in report:
        if one.state != "finished":
            raise RuntimeError(f"a test job ended as {one.state}: {one.error}")
    return f"two test jobs trained together in {format_bytes(report.peak_bytes)}"


def _processor() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    remedy = "" if (usable or 1) > 1 else "with one core, jobs share memory but gain no time"
    yield Finding(what="cores", ok=not remedy, detail=f"{usable} usable", remedy=remedy)


def _memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"{format_bytes(total)} in the machine"
    limit = _container_limit()
    if limit is not None and limit < total:
        detail += f", {format_bytes(limit)} allowed to this container"
    yield Finding(what="memory", ok=True, detail=detail)


def _container_limit() -> int | None:
    """Return the control group's memory limit in bytes; a container's budget must stay below it."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _compiler() -> Iterator[Finding]:
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        remedy = "only needed to build waterflow from source: install g++ or clang++"
        yield Finding(what="compiler", ok=False, detail="no C++ compiler found", remedy=remedy)
        return
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    first = (done.stdout.splitlines() or ["version unknown"])[0]
    yield Finding(what="compiler", ok=done.returncode == 0, detail=f"{path}: {first}")


_FOR_A_GPU = "only needed to train on a GPU"


def _torch_cuda() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        reason = "this torch is built without CUDA"
        remedy = f"{_FOR_A_GPU}: install a CUDA build of torch, then reinstall waterflow beside it"
    elif not torch.cuda.is_available():
        reason = f"torch is built for CUDA {torch.version.cuda} but finds no usable GPU and driver"
        remedy = f"{_FOR_A_GPU}: see the lines below"
    else:
        detail = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs"
        yield Finding(what="torch CUDA", ok=True, detail=detail)
        return
    yield Finding(what="torch CUDA", ok=False, detail=reason, remedy=remedy)


def _extension_cuda() -> Iterator[Finding]:
    extension = importlib.import_module("waterflow.allocator_ext._C")
    if extension.cuda_built:
        yield Finding(what="extension CUDA", ok=True, detail="built for this torch's CUDA")
        return
    remedy = (
        f"{_FOR_A_GPU}: {_REINSTALL}, with --no-build-isolation, beside a CUDA build of torch and "
        "the CUDA toolkit's headers (or pip's nvidia-cuda-runtime and nvidia-cuda-crt)"
    )
    detail = "built without CUDA: torch had none, or its headers were missing"
    yield Finding(what="extension CUDA", ok=False, detail=detail, remedy=remedy)


def _cuda_driver() -> Iterator[Finding]:
    """Opens every device as the engine does."""
    extension = importlib.import_module("waterflow.allocator_ext._C")
    from waterflow.executor.device.cuda import CudaDevice

    index = 0
    while True:
        try:
            device = extension.CudaDevice(CudaDevice.library, index)
        except extension.BackendError as error:
            if index == 0:
                detail = f"cannot be used: {' '.join(str(error).split())}"
                yield Finding(what="CUDA driver", ok=False, detail=detail, remedy=_FOR_A_GPU)
            return
        free, total = device.memory()
        version = f"{device.driver_version // 1000}.{device.driver_version % 1000 // 10}"
        detail = f"{device.name}, {format_bytes(free)} of {format_bytes(total)} free"
        detail += f", driver for CUDA {version}"
        yield Finding(what=f"device cuda:{index}", ok=True, detail=detail)
        index += 1


def _cuda_engine() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        detail = "not tried: torch finds no GPU"
        yield Finding(what="CUDA engine", ok=False, detail=detail, remedy=_FOR_A_GPU)
        return
    try:
        detail = _train_two_jobs("cuda")
    except Exception as error:
        yield Finding(what="CUDA engine", ok=False, detail=_line(error), remedy="see above")
        return
    yield Finding(what="CUDA engine", ok=True, detail=detail)


def _management() -> Iterator[Finding]:
    try:
        import pynvml
    except ImportError as error:
        remedy = "pip install nvidia-ml-py"
        yield Finding(what="NVIDIA management", ok=False, detail=_line(error), remedy=remedy)
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        detail = f"NVML, the driver's library, does not answer: {error}"
        remedy = "not needed: only a machine with an NVIDIA GPU has it"
        yield Finding(what="NVIDIA management", ok=False, detail=detail, remedy=remedy)
        return
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        yield Finding(what="NVIDIA management", ok=True, detail=_text(version))
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            detail = f"{_text(pynvml.nvmlDeviceGetName(handle))}, {format_bytes(memory.total)}"
            detail += f", {format_bytes(memory.free)} free"
            yield Finding(what=f"GPU {index}", ok=True, detail=detail)
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
