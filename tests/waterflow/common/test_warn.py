"""Warnings point at lines of the user's own."""

import functools
import json
import warnings
from pathlib import Path

import pytest
import torch

from waterflow.common.warn import (
    Place,
    place_of_call,
    place_of_error,
    place_of_function,
    warn_at,
    warn_quietly_at,
)

pytestmark = pytest.mark.virtual


def raised(function):
    try:
        function()
    except Exception as error:
        return error


def here(mark):
    lines = Path(__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}")]
    return Place(__file__, line)


def test_the_last_own_line_of_an_error():
    def into_torch():
        torch.nn.Linear(2, 3)(torch.ones(1, 5))  # torch

    def into_the_library():
        json.loads("{")  # library

    assert place_of_error(raised(into_torch)) == here("torch")
    assert place_of_error(raised(into_the_library)) == here("library")
    assert place_of_error(ValueError("never raised")) is None


def test_where_a_function_begins():
    @functools.lru_cache
    def wrapped():  # begins
        return 1

    assert place_of_function(wrapped).line == here("begins").line - 1  # at its decorator
    assert place_of_function(len) is None


def test_where_this_was_called():
    assert place_of_call() == here("call")  # call


def test_the_same_warning_is_shown_again():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            warn_at(Place("file.py", 3), "once more", UserWarning)
    assert [(str(w.message), w.filename, w.lineno) for w in caught] == [
        ("once more", "file.py", 3)
    ] * 2


def test_where_warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            warn_at(Place("file.py", 3), "text", UserWarning)
        warn_quietly_at(Place("file.py", 3), "text", UserWarning)
