"""The benchmark of everyday jobs: its seconds are not looked at, its numbers are."""

from __future__ import annotations

import json

import pytest

from benchmarks.everyday import kinds, main

pytestmark = pytest.mark.cpu


def test_every_kind_has_the_numbers_of_its_loop(capsys):
    # In a process with transformers, looks lead other tests' jobs far.
    tried = [kind for kind in kinds() if kind != "transformers"]
    main(["--json", "--jobs", "1", "--repeats", "1", "--only", *tried])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["kind"] for row in rows] == tried
    assert all(row["equal"] for row in rows), [row["kind"] for row in rows if not row["equal"]]
