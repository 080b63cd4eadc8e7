"""Text of others is shown whole, in one line where asked, and moves no terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterflow.common.text import error_line, lines, one_line, printable

pytestmark = pytest.mark.virtual

SHOWN = [
    ("plain", "plain"),
    ("日本語 emoji 👩\u200d👧", "日本語 emoji 👩\u200d👧"),
    ("\x1b[31mred", r"\x1b[31mred"),
    ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
    ("two\nlines\tand\rmore", r"two\nlines\tand\rmore"),
    ("\x9b2J", r"\x9b2J"),
    ("abc\u202edcba", r"abc\u202edcba"),
    ("\u2028\u2029\ufeff", r"\u2028\u2029\ufeff"),
    ("lone \ud800", r"lone \ud800"),
]


@pytest.mark.parametrize(("text", "shown"), SHOWN)
def test_what_is_no_visible_character_is_shown_as_its_escape(text, shown):
    assert printable(text) == shown


@given(st.text())
def test_nothing_that_is_shown_moves_a_terminal(text):
    for shown in (printable(text), one_line(text), *lines(text).split("\n")):
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)
        shown.encode()


def test_a_long_line_keeps_its_end():
    text = "Caught IndexError in worker\n" + "frames\n" * 200 + "IndexError: row 30 is broken"
    shown = one_line(text, 120)
    assert len(shown) <= 120
    assert shown.startswith("Caught IndexError")
    assert shown.endswith("row 30 is broken")


def test_lines_stay_lines():
    assert lines("one\ntwo\x1b[0m") == "one\ntwo\\x1b[0m"


def test_an_error_in_one_line():
    assert error_line(ValueError("a\nb")) == "ValueError: a b"
    assert error_line(KeyboardInterrupt()) == "KeyboardInterrupt"
