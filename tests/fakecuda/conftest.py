"""A fake driver of these tests' own: a copy of the library is another driver."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_cuda import Cuda, FakeDriver, driver_with, library
from tests.support.waiting import wait_until


@pytest.fixture
def make_driver(tmp_path: Path) -> Callable[[], FakeDriver]:
    """Loads drivers that nobody has initialised."""

    def make() -> FakeDriver:
        return FakeDriver(Path(shutil.copy(library(), tmp_path / "libfresh.so")))

    return make


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """The driver that engines load, with 2 GiB."""
    with driver_with(2 << 30) as driver:
        yield driver


@pytest.fixture(scope="session")
def session_driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    driver = FakeDriver(Path(shutil.copy(library(), tmp_path_factory.mktemp("fakecuda"))))
    Cuda(driver).cuInit(0)
    return driver


@pytest.fixture
def fake(session_driver: FakeDriver) -> Iterator[FakeDriver]:
    """The driver as it was after cuInit; whatever a test leaves alive fails the test."""
    session_driver.reset()
    yield session_driver
    session_driver.reset()
    wait_until(lambda: session_driver.busy() == 0)
    assert not any(session_driver.live_objects().values()), session_driver.live_objects()


@pytest.fixture
def cuda(fake: FakeDriver) -> Cuda:
    return Cuda(fake)


@pytest.fixture
def context(fake: FakeDriver, cuda: Cuda) -> Iterator[int]:
    """Device 0's context, current on the test's thread."""
    context = cuda.new("cuDevicePrimaryCtxRetain", 0)
    cuda.cuCtxPushCurrent_v2(context)
    yield context
    fake.reset()
    cuda.new("cuCtxPopCurrent_v2")
    cuda.cuDevicePrimaryCtxRelease_v2(0)
