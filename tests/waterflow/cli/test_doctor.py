"""The doctor: complete, honest about what fails, and never a traceback."""

import io
import json
import sys
import types

import pytest
from rich.console import Console

import waterflow
from tests.support import fake_cuda
from tests.support.command_line import call
from waterflow.cli import doctor
from waterflow.cli.doctor import diagnose, render
from waterflow.executor.device.cuda import CudaDevice
from waterflow.report.report import JobReport, Report


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


def no_driver(library, index):
    raise RuntimeError(f"{library} cannot be loaded")


@pytest.fixture
def works(monkeypatch):
    """A machine where the extension imports and the engine trains."""
    extension = types.ModuleType("waterflow.allocator_ext._C")
    extension.__file__ = "_C.so"
    extension.Arena = FakeArena
    extension.BackendError = RuntimeError
    extension.CudaDevice = no_driver
    extension.cuda_built = False
    monkeypatch.setitem(sys.modules, "waterflow.allocator_ext._C", extension)
    monkeypatch.setattr(doctor, "_train_two_jobs", lambda device: f"trained on {device}")


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
    for what in ("compiler", "torch CUDA", "NVIDIA management"):
        assert not item(diagnosis, what)["required"]
    assert diagnosis["summary"] == "CPU engine: ready."


def test_json_and_exit_code(works):
    result = call("doctor", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] is True
    assert "ready" in call("doctor").stdout


def test_an_extension_that_does_not_import(works, monkeypatch):
    monkeypatch.setitem(sys.modules, "waterflow.allocator_ext._C", None)
    diagnosis = diagnose()
    found = item(diagnosis, "extension")
    assert not diagnosis["ok"]
    assert "cannot be imported: " in found["detail"]
    assert "pip install" in found["remedy"]
    assert call("doctor").exit_code == 1


def test_an_arena_that_fails(works, monkeypatch):
    monkeypatch.setattr(FakeArena, "host", lambda capacity: 1 / 0)
    diagnosis = diagnose()
    assert not diagnosis["ok"]
    assert any("ZeroDivisionError" in found["detail"] for found in diagnosis["items"])


def test_an_engine_that_fails(works, monkeypatch):
    def fail(device):
        raise RuntimeError(f"undefined symbol on {device}")

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
        doctor._train_two_jobs("cpu")


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
    assert item(diagnosis, "NVIDIA management")["detail"] == "580.0"
    assert item(diagnosis, "GPU 1")["detail"] == "GPU number 1, 16.0 GiB, 1.0 GiB free"
    assert nvml.open == 0


def test_no_driver_and_no_pynvml(works, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    assert "Not Found" in item(diagnose(), "NVIDIA management")["detail"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    diagnosis = diagnose()
    assert diagnosis["ok"]
    assert "nvidia-ml-py" in item(diagnosis, "NVIDIA management")["remedy"]


def test_reasons_why_cuda_is_missing(works, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    assert "without CUDA" in item(diagnose(), "torch CUDA")["detail"]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    diagnosis = diagnose()
    assert "no usable GPU" in item(diagnosis, "torch CUDA")["detail"]
    assert "headers" in item(diagnosis, "extension CUDA")["remedy"]
    assert "libcuda.so.1 cannot be loaded" in item(diagnosis, "CUDA driver")["detail"]
    assert "not tried" in item(diagnosis, "CUDA engine")["detail"]
    assert diagnosis["ok"], "a GPU is not needed to train on the CPU"


def test_a_machine_with_a_gpu(works, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    sys.modules["waterflow.allocator_ext._C"].cuda_built = True
    diagnosis = diagnose()
    assert item(diagnosis, "extension CUDA")["ok"]
    assert item(diagnosis, "CUDA engine")["detail"] == "trained on cuda"


@pytest.mark.fakecuda
def test_devices_are_opened_as_the_engine_does(monkeypatch):
    driver = fake_cuda.FakeDriver()
    driver.reset()
    driver.devices(2)
    monkeypatch.setattr(CudaDevice, "library", str(fake_cuda.library()))
    second = item(diagnose(), "device cuda:1")
    assert second["detail"].startswith("Fake GPU 1, 256.0 MiB of 256.0 MiB free, driver for CUDA")
    driver.reset()


@pytest.mark.cpu
def test_the_real_engine():
    pytest.importorskip("waterflow.engine.engine")
    diagnosis = diagnose()
    assert diagnosis["ok"], json.dumps(diagnosis, indent=1)
