"""The benchmark of everyday jobs: its seconds are not looked at, its numbers are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.everyday import kinds, main

pytestmark = pytest.mark.cpu


def equal_in(text):
    return {row["kind"]: row["equal"] for row in json.loads(text)["rows"]}


#: In a process with it, looks lead other tests' jobs far.
APART = "transformers"
OPTIONS = ("--json", "--jobs", "1", "--repeats", "1", "--only")


def test_every_kind_has_the_numbers_of_its_loop(capsys):
    tried = [kind for kind in kinds() if kind != APART]
    main([*OPTIONS, *tried])
    assert equal_in(capsys.readouterr().out) == dict.fromkeys(tried, True)
    command = [sys.executable, "-m", "benchmarks.everyday", *OPTIONS, APART]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert equal_in(found.stdout) == {APART: True}
