"""Shared by all tests: profiles go to a folder of the session; case modules can be imported."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "cases"))


@pytest.fixture(scope="session", autouse=True)
def profile_cache(tmp_path_factory):
    """A cache for profiles that the whole session shares, and no other session."""
    before = os.environ.get("WATERFLOW_CACHE")
    folder = tmp_path_factory.mktemp("waterflow-cache")
    os.environ["WATERFLOW_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["WATERFLOW_CACHE"]
    else:
        os.environ["WATERFLOW_CACHE"] = before
