"""The doctor: complete, honest about what fails, and never a traceback."""

import io
import json
import sys
import types

import pytest
from rich.console import Console
from typer.testing import CliRunner

import waterflow
from waterflow import doctor
from waterflow.cli import app
from waterflow.doctor import diagnose, render
from waterflow.report import JobReport, Report


class FakeArena:
    @classmethod
    def host(cls, capacity):
        return cls()

    def allocate(self, size, *, lane, job):
        self.size = size
        return 1

    def held(self, job):
        return self.size

    def free(self, address, *, lane):
        assert address == 1


@pytest.fixture
def works(monkeypatch):
    """A machine where the extension imports and the engine trains."""
    extension = types.ModuleType("waterflow.allocator_ext._C")
    extension.__file__ = "_C.so"
    extension.Arena = FakeArena
    monkeypatch.setitem(sys.modules, "waterflow.allocator_ext._C", extension)
    monkeypatch.setattr(doctor, "_train_two_jobs", lambda: "trained")


def item(diagnosis, what):
    return next(found for found in diagnosis["items"] if found["what"] == what)


def test_a_machine_that_works(works):
    diagnosis = diagnose()
    assert diagnosis["ok"] is True
    for found in diagnosis["items"]:
        assert found.keys() == {"what", "ok", "detail", "remedy", "required"}
        assert found["detail"]
    for what in (
        "python",
        "torch",
        "torch threads",
        "extension",
        "host arena",
        "CPU engine",
        "cores",
        "memory",
    ):
        assert item(diagnosis, what)
    for what in ("compiler", "torch CUDA", "NVIDIA driver"):
        assert not item(diagnosis, what)["required"]
    assert "CUDA backend is not part of it yet" in diagnosis["summary"]


def test_json_and_exit_code(works):
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] is True
    assert "ready" in CliRunner().invoke(app, ["doctor"]).stdout


def test_an_extension_that_does_not_import(works, monkeypatch):
    monkeypatch.setitem(sys.modules, "waterflow.allocator_ext._C", None)
    diagnosis = diagnose()
    found = item(diagnosis, "extension")
    assert not diagnosis["ok"]
    assert "cannot be imported: " in found["detail"]
    assert "pip install" in found["remedy"]
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_an_arena_that_fails(works, monkeypatch):
    monkeypatch.setattr(FakeArena, "host", lambda capacity: 1 / 0)
    diagnosis = diagnose()
    assert not diagnosis["ok"]
    assert any("ZeroDivisionError" in found["detail"] for found in diagnosis["items"])


def test_an_engine_that_fails(works, monkeypatch):
    def fail():
        raise RuntimeError("undefined symbol")

    monkeypatch.setattr(doctor, "_train_two_jobs", fail)
    diagnosis = diagnose()
    assert not diagnosis["ok"]
    assert "undefined symbol" in item(diagnosis, "CPU engine")["detail"]
    console = Console(file=io.StringIO(), width=120)
    console.print(render(diagnosis))
    assert "FAIL" in console.file.getvalue()


def test_a_job_that_fails_in_the_check_is_a_failure(monkeypatch):
    class FakeJob:
        def __init__(self, name, **_):
            self.name = name

    def run(jobs, **_):
        failed = JobReport(name="first", state="failed", error="boom")
        return Report(jobs={"first": failed})

    monkeypatch.setattr(waterflow, "Job", FakeJob, raising=False)
    monkeypatch.setattr(waterflow, "run", run, raising=False)
    with pytest.raises(RuntimeError, match="failed: boom"):
        doctor._train_two_jobs()


def test_a_check_that_breaks_is_a_finding(works, monkeypatch):
    def broken(_):
        raise ValueError("[odd] sysconf")

    monkeypatch.setattr(doctor.os, "sysconf", broken)
    diagnosis = diagnose()
    assert diagnosis["ok"]
    assert item(diagnosis, "memory")["detail"] == "ValueError: [odd] sysconf"
    Console(file=io.StringIO()).print(render(diagnosis))


def test_an_old_torch_is_refused(works, monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.9.1+cu128")
    diagnosis = diagnose()
    assert not diagnosis["ok"]
    assert "2.11 or newer" in item(diagnosis, "torch")["remedy"]


class FakeNvml(types.ModuleType):
    class NVMLError(Exception):
        pass

    def __init__(self, *, driver):
        super().__init__("pynvml")
        self.driver = driver
        self.open = 0

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return b"580.0"

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return f"GPU number {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(total=16 * 2**30, free=2**30)


def test_gpus_are_listed(works, monkeypatch):
    nvml = FakeNvml(driver=True)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    diagnosis = diagnose()
    assert item(diagnosis, "NVIDIA driver")["detail"] == "580.0"
    assert item(diagnosis, "GPU 1")["detail"] == "GPU number 1, 16.0 GiB, 1.0 GiB free"
    assert nvml.open == 0


def test_no_driver_and_no_pynvml(works, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    assert "Not Found" in item(diagnose(), "NVIDIA driver")["detail"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    diagnosis = diagnose()
    assert diagnosis["ok"]
    assert "nvidia-ml-py" in item(diagnosis, "NVIDIA driver")["remedy"]


def test_reasons_why_cuda_is_missing(works, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    assert "without CUDA" in item(diagnose(), "torch CUDA")["detail"]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no usable GPU" in item(diagnose(), "torch CUDA")["detail"]


@pytest.mark.cpu
def test_the_real_engine():
    pytest.importorskip("waterflow.engine")
    diagnosis = diagnose()
    assert diagnosis["ok"], json.dumps(diagnosis, indent=1)
