"""The commands in terminals of three widths: real pseudo-terminals, real processes."""

import re

import pytest

from tests.support.tables import soaked, thinned
from tests.support.terminal import at_widths, in_terminal
from waterflow.report.report import JobReport, Report, Timeline

WIDTHS = (60, 80, 120)
#: Names that are long, wide, and hostile.
NAMES = (
    "lr-0.001-weight-decay-0.1-dropout-0.25-width-1024-seed-17",
    "日本語のジョブ名",
    "\x1b[31mred\x1b]0;title\x07\n\u202ebackwards",
    "[bold]markup[/bold]",
)
JOBS = """
import torch
import waterflow as wf

MEMORY = "16MiB"

def job(name):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    data = [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    if name.startswith("["):
        loss = lambda model, batch: batch["\\x1b[2J"]
    return wf.Job(name, model=model, optimizer=optimizer, loss=loss, data=data, seed=0)

def jobs():
    return [job(name) for name in {names!r}]
"""


def shown(name):
    """The name as it may be shown, without white space, which folding adds."""
    return "".join(name.encode("unicode_escape").decode().split()) if "\x1b" in name else name


@pytest.fixture
def saved(tmp_path):
    jobs = {
        name: JobReport(
            name=name, state="out_of_memory", losses=[0.123456], steps=123456,
            peak_bytes=123_456_789, solo_peak_bytes=987_654_321, wall_seconds=7384.0,
            error="no room\x1b[2J", error_type="OutOfMemoryError", captured="opaque optimizer",
        )
        for name in NAMES
    }  # fmt: skip
    Report(jobs=jobs, policy="flow", lanes=2, timeline=Timeline([0.0], [0], [1], list(jobs))).save(
        tmp_path / "saved"
    )
    return tmp_path


@pytest.mark.virtual
def test_a_report_loses_nothing(saved):
    for screen in at_widths("report", "saved", widths=WIDTHS, cwd=saved):
        check_report(screen)


def check_report(screen):
    assert screen.code == 0
    assert screen.too_wide == []
    assert screen.foreign_controls == []
    assert "\x1b[31m" not in screen.raw
    assert "\x1b[2J" not in screen.raw
    assert "\x07" not in screen.raw
    assert "\u202e" not in screen.raw
    for what in ("out_of_memory", "123456", "0.1235", "117.7MiB", "941.9MiB", "2h03min", "opaque"):
        assert screen.joined.count(what) >= len(NAMES), what
    for name in NAMES[1:]:
        assert shown(name) in screen.joined.replace("─", "") or screen.width >= 80
    for part in NAMES[0].split("-"):
        assert part in screen.text


@pytest.mark.virtual
@pytest.mark.parametrize("command", [(), ("run",), ("cluster",)])
def test_help_is_whole(tmp_path, command):
    for screen in at_widths(*command, "--help", widths=WIDTHS, cwd=tmp_path):
        assert screen.code == 0
        assert screen.too_wide == []
        assert "..." not in screen.text.replace("[ARGS]...", "").replace("COMMAND [ARGS]", "")
        if not command:
            words = " ".join(screen.text.split())
            assert "Say whether jobs fit a budget together, without training: peak," in words


@pytest.mark.cpu
@pytest.mark.parametrize("width", thinned(WIDTHS, keep=[60]))
def test_a_run_shows_every_job_and_its_state(tmp_path, width):
    (tmp_path / "jobs.py").write_text(JOBS.replace("{names!r}", repr(NAMES)))
    screen = in_terminal("run", "jobs.py", width=width, cwd=tmp_path)
    assert screen.code == 1
    assert screen.foreign_controls == []
    assert "\x1b[31m" not in screen.raw
    assert "\x1b]0" not in screen.raw
    assert "\u202e" not in screen.raw
    wide = [line for line in screen.too_wide if "jobs.py:" not in line]  # a warning is one line
    assert wide == []
    bars = [line for line in screen.lines if re.search(r" \d/3 ", line)]
    assert any(line.startswith("lr-0.001") and line.rstrip().endswith("finished") for line in bars)
    assert any(line.startswith("[bold]") and line.rstrip().endswith("failed") for line in bars)
    assert screen.joined.count("finished") >= 3
    assert "job'[bold]markup[/bold]'failedafter0steps:" in screen.joined
    assert "report written to waterflow-report" in screen.text


STUDIES = [
    ("max-batch", "espcn", "vae", "--memory", "64MiB"),
    soaked(("plan", "espcn:batch=2", "vae:batch=2", "--memory", "64MiB")),
    soaked(("pair", "espcn:batch=2", "vae:batch=2", "--memory", "64MiB")),
    ("compare", "jobs.py", "--policy", "flow"),
]
HEADINGS = {
    "max-batch": ("espcn", "vae", "of alone", "peak", "overlap", "speed", "waterwave", "temporal"),
    "plan": ("peak", "overlap", "speed", "waterwave", "temporal"),
    "pair": ("batches", "samples/s", "peak", "overlap", "speed", "espcn", "vae"),
    "compare": ("time", "setup", "steps/s", "speed", "peak", "losses", "eager", "flow"),
}


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("command", STUDIES, ids=lambda command: command[0])
def test_studies_lose_no_column(tmp_path, command):
    (tmp_path / "jobs.py").write_text(JOBS.replace("{names!r}", repr(NAMES[:2])))
    for screen in at_widths(*command, widths=WIDTHS, cwd=tmp_path):
        assert screen.code == 0, screen.text
        assert screen.too_wide == []
        assert "…" not in screen.text
        for heading in HEADINGS[command[0]]:
            assert heading in screen.text, heading
        assert "v100" not in screen.text


@pytest.mark.cpu
def test_a_report_is_not_replaced_without_a_word(tmp_path):
    (tmp_path / "jobs.py").write_text(JOBS.replace("{names!r}", repr(NAMES[:1])))
    for expected in ("waterflow-report", "waterflow-report-2"):
        screen = in_terminal("run", "jobs.py", width=80, cwd=tmp_path)
        assert screen.code == 0
        assert f"report written to {expected}\n" in screen.text
        assert (tmp_path / expected / "report.json").exists()
    refused = in_terminal("run", "jobs.py", "--out", "waterflow-report", width=80, cwd=tmp_path)
    assert refused.code == 2
    assert "already holds a report" in refused.text
