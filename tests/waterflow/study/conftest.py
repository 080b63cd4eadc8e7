import pytest


@pytest.fixture
def kept_captures(one_thread, monkeypatch, tmp_path_factory):
    """Captures that the tests of studies share, apart from other sessions'."""
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
