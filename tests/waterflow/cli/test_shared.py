"""Exit codes, streams and pictures, apart from any command."""

import pytest
import typer

from waterflow.cli.shared import (
    BAD_INPUT,
    INTERRUPTED,
    check_picture,
    clean_stdout,
    one_line_errors,
    show,
    write_picture,
)
from waterflow.common.errors import BudgetError, JobError, PlanError, ReportError

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("error", [JobError, BudgetError, ReportError])
def test_wrong_input_is_one_line_and_exit_code_2(error, capsys):
    with pytest.raises(typer.Exit) as caught, one_line_errors():
        raise error("two\nlines")
    assert caught.value.exit_code == BAD_INPUT == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "waterflow: two lines\n")


def test_ctrl_c_has_its_own_exit_code(capsys):
    with pytest.raises(typer.Exit) as caught, one_line_errors():
        raise KeyboardInterrupt
    assert caught.value.exit_code == INTERRUPTED == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("error", [PlanError, ZeroDivisionError])
def test_defects_keep_their_traceback(error):
    with pytest.raises(error), one_line_errors():
        raise error("a defect")


def test_what_user_code_prints_stays_off_the_document(capsys):
    with clean_stdout(True):
        print("of the user's own")
    with clean_stdout(False):
        print("shown")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("shown\n", "of the user's own\n")


class Result:
    def to_json(self):
        return "{}"


def test_a_result_is_shown_as_json_or_as_a_table(capsys):
    show(Result(), True, lambda result: "a table")
    show(Result(), False, lambda result: "a table")
    assert capsys.readouterr().out == "{}\na table\n"


@pytest.mark.parametrize("name", ["a.bmp", "a", "png"])
def test_a_picture_that_cannot_be_drawn_is_refused_beforehand(tmp_path, name):
    with pytest.raises(ReportError, match=r"\.png, \.svg, \.pdf"):
        check_picture(tmp_path / name)
    with pytest.raises(ReportError):
        write_picture(tmp_path / name, lambda kind: pytest.fail("drawn all the same"))
    check_picture(None)


def test_a_picture_is_drawn_in_the_kind_that_its_name_says(tmp_path, capsys):
    kinds = []
    write_picture(tmp_path / "a.SVG", lambda kind: kinds.append(kind) or b"<svg>")
    assert kinds == ["svg"]
    assert (tmp_path / "a.SVG").read_bytes() == b"<svg>"
    assert "picture written to" in capsys.readouterr().err
    with pytest.raises(ReportError, match="cannot write"):
        write_picture(tmp_path / "no" / "a.png", lambda kind: b"")
