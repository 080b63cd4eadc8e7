"""What Python runs to import a module is no part of what a step runs."""

from __future__ import annotations

import sys

import pytest

from waterflow.account.importers import without_importers

pytestmark = pytest.mark.virtual


class Finder:
    def find_spec(self, name, path, target=None):
        return getattr(self, f"spec_of_{name}", lambda: None)()


def other():
    return 1


def test_finders_have_no_part(monkeypatch):
    codes = [Finder.find_spec.__code__, other.__code__]
    calls = [(getattr, codes[0], 1), (len, codes[1], 1)]
    assert without_importers(codes, calls) == (codes, calls)
    for finder in (Finder, Finder()):
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        assert without_importers(codes, calls) == (codes[1:], calls[1:])
