"""Tables lose nothing at any width."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from waterflow.report.table import Column, FittedTable

pytestmark = pytest.mark.virtual

CELLS = st.text(st.characters(categories=("L", "N", "P")), max_size=24)
ROWS = st.lists(st.tuples(CELLS.filter(bool), CELLS, CELLS), min_size=1, max_size=4)


def printed(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def of(rows, wraps=True):
    table = FittedTable("title", Column("job", wraps=wraps), Column("state"), Column("loss"))
    for row in rows:
        table.add_row(*row)
    return table


@given(ROWS, st.integers(20, 130))
def test_every_cell_is_there_and_no_line_is_too_wide(rows, width):
    text = printed(of(rows).add_below(["some words below"]), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    whole = "".join(text.split())
    for row in rows:
        # A name that is folded in a table has its parts in several lines of one column.
        for cell in row[1:]:
            assert "".join(cell.split()) in whole or len(cell) > width - 10


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_rows_become_records_where_they_do_not_fit(width):
    rows = [("a" * 30, "finished", "0.123456789"), ("b", "failed", "-")]
    text = printed(of(rows, wraps=False), width)
    is_table = "──" in text
    assert is_table == (width >= 60)
    if not is_table:
        assert "state finished" in " ".join(text.split())
    assert "a" * 30 in "".join(text.split())


def test_markup_and_escapes_are_shown_as_they_are():
    text = printed(of([("[bold]x[/]", "\x1b[31m", "a\nb")]), 80)
    assert "[bold]x[/]" in text
    assert r"\x1b[31m" in text
    assert r"a\nb" in text


def test_a_row_has_a_cell_for_each_column():
    with pytest.raises(ValueError, match="3 columns, but 2 cells"):
        of([("a", "b")])
