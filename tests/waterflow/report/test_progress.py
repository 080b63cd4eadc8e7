"""Progress: few lines in a log, bars on a terminal, and no harm to the training."""

import io
import threading

from waterflow.report.progress import Progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Closed(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_log_gets_a_line_per_job_in_two_seconds():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    progress.start([("a", 1000), ("b", None)])
    for step in range(1, 1001):
        clock.now += 0.01
        progress.update("a", step, 1 / step, "running")
        progress.update("b", step, None, "running")
    progress.stop()
    lines = stream.getvalue().splitlines()
    for name in "ab":
        assert 4 <= sum(line.startswith(f"{name}: ") for line in lines) <= 6
    assert any("/1000  loss 0.0" in line and "100.0 it/s" in line for line in lines)


def test_a_change_of_state_is_always_shown():
    stream = io.StringIO()
    progress = Progress(stream, Clock())
    progress.start([("a", 2)])
    for step, state in [(0, "running"), (1, "running"), (2, "running"), (2, "finished")]:
        progress.update("a", step, 0.5, state)
    progress.update("joined", 1)
    progress.stop()
    progress.stop()
    progress.update("a", 3, 0.1, "failed")
    lines = stream.getvalue().splitlines()
    assert [line.split()[-1] for line in lines] == ["running", "finished", "running"]
    assert lines[1] == "a: step 2/2  loss 0.5  0.0 it/s  finished"


def test_bars_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = Progress(stream)
    progress.start([("[bold]odd[/]", 4), ("b", None)])
    progress.update("[bold]odd[/]", 4, 0.25, "finished")
    progress.update("late", 1, float("nan"))
    progress.stop()
    shown = stream.getvalue()
    for expected in ("[bold]odd[/]", "4/4", "loss 0.25", "finished", "late", "loss nan", "queued"):
        assert expected in shown


def test_a_closed_pipe_does_not_end_the_training():
    progress = Progress(Closed())
    progress.start([("a", 1)])
    progress.update("a", 1, 0.5, "finished")
    progress.stop()


def test_many_threads():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start([(str(index), 200) for index in range(4)])
    errors = []

    def work(name):
        try:
            for step in range(200):
                progress.update(name, step, 0.0, f"state {step % 2}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    progress.stop()
    assert not errors
    assert len(stream.getvalue().splitlines()) == 800


def test_writes_to_stderr_by_default(capsys):
    progress = Progress()
    progress.start([("a", 1)])
    progress.update("a", 1, 0.5, "finished")
    assert capsys.readouterr() == ("", "a: step 1/1  loss 0.5  0.0 it/s  finished\n")


def test_stop_without_start():
    stream = io.StringIO()
    Progress(stream).stop()
    assert stream.getvalue() == ""


def test_jobs_may_join_later(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(stream, Clock())
        progress.start([])
        progress.join("late", 4)
        progress.update("late", 4, 0.5, "finished")
        progress.stop()
        assert "4/4" in stream.getvalue()
        assert "finished" in stream.getvalue()
