"""`run`, `compare` and `demo`: exit codes, streams, and what they say about wrong input."""

import json
import sys
import types

import pytest

import waterflow
from tests.support.command_line import call, refused
from waterflow.common.errors import BudgetError
from waterflow.job import job_file
from waterflow.report.report import JobReport, Report, Timeline

JOBS = "import waterflow as wf\ndef jobs():\n    return [wf.Job('a'), wf.Job('b')]\n"

REAL_JOBS = """
import torch
import waterflow as wf

MEMORY = "64MiB"

def job(name, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    return wf.Job(name, model=model, optimizer=optimizer, loss=loss, data=data, epochs=2, seed=seed)

def jobs():
    print("a line of the user's own")
    return [job("a", 1), job("b", 2)]
"""


class FakeJob:
    def __init__(self, name):
        self.name = name


class FakeEngine:
    """Stands in for the engine: every job's losses are 1.0 and 0.5, unless told otherwise."""

    def __init__(self):
        self.calls = []
        self.changes = {}
        self.loss = 0.5
        self.state = "finished"
        self.error = None

    def run(self, jobs, memory, *, device="cpu", policy="flow", **_):
        self.calls.append({"memory": memory, "device": device, "policy": policy})
        if self.error:
            raise self.error
        print("the engine prints")
        reports = {job.name: self.one(job) for job in jobs}
        reports["b"].state = self.state
        reports["b"].losses[-1] = self.loss
        timeline = Timeline([0.0, 1.0], [0, 1], [2**20, 2**21], list(reports))
        values = {"jobs": reports, "peak_bytes": 3 * 2**20, "budget_bytes": memory, "lanes": 2}
        values |= {"policy": policy, "seconds": 0.25, "timeline": timeline}
        return Report(**(values | self.changes))

    def one(self, job):
        return JobReport(name=job.name, state="finished", losses=[1.0, 0.5], steps=2)


@pytest.fixture
def engine(monkeypatch):
    fake = FakeEngine()
    monkeypatch.setattr(waterflow, "Job", FakeJob, raising=False)
    monkeypatch.setattr(job_file, "Job", FakeJob)
    monkeypatch.setattr(waterflow, "run", fake.run, raising=False)
    eager = types.ModuleType("waterflow.job.training_step")
    eager.run_eager = lambda job, threads: fake.one(job)
    monkeypatch.setitem(sys.modules, "waterflow.job.training_step", eager)
    return fake


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(JOBS)
    return path


def test_run_trains_prints_and_saves(engine, file, tmp_path):
    result = call("run", file, "--memory", "8MiB", "--policy", "temporal")
    assert result.exit_code == 0, result.output
    assert engine.calls == [{"memory": 8 * 2**20, "device": "cpu", "policy": "temporal"}]
    assert "finished" in result.stdout
    assert "3.0 MiB of 8.0 MiB" in result.stdout
    assert Report.load(tmp_path / "waterflow-report").policy == "temporal"


def test_run_as_json_prints_one_document(engine, file, tmp_path):
    file.write_text("print('loading')\n" + JOBS)
    result = call("run", file, "--memory", "8MiB", "--json", "--out", tmp_path / "kept")
    assert json.loads(result.stdout)["jobs"][0]["name"] == "a"
    assert "loading" in result.stderr
    assert "the engine prints" in result.stderr
    assert (tmp_path / "kept" / "memory.png").exists()


def test_the_budget_of_the_file_and_of_the_option(engine, file):
    file.write_text(JOBS + "MEMORY = '4MiB'\n")
    assert call("run", file).exit_code == 0
    assert call("run", file, "--memory", "1GB").exit_code == 0
    assert [made["memory"] for made in engine.calls] == [4 * 2**20, 10**9]


def test_a_failed_job_is_exit_code_1(engine, file):
    for engine.state in ("failed", "out_of_memory"):
        assert call("run", file, "--memory", "8MiB").exit_code == 1
    engine.state = "stopped"
    assert call("run", file, "--memory", "8MiB").exit_code == 0


def test_ctrl_c_writes_the_report(engine, file, tmp_path):
    engine.changes = {"interrupted": True}
    result = call("run", file, "--memory", "8MiB", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["interrupted"] is True
    assert Report.load(tmp_path / "waterflow-report").interrupted


def test_ctrl_c_before_training(engine, file):
    file.write_text("raise KeyboardInterrupt")
    for command in ("run", "compare"):
        result = call(command, file, "--memory", "8MiB")
        assert result.exit_code == 130
        assert "interrupted" in result.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no function jobs()"),
        ("jobs = 3", "no function jobs()"),
        ("def jobs(): return 5", "must return a list of wf.Job, not int"),
        ("def jobs(): return 'ab'", "must return a list of wf.Job, not str"),
        ("def jobs(): return []", "returned no job"),
        ("def jobs(): return [1]", "jobs()[0] is not a wf.Job but int"),
        ("def jobs(n): return []", "TypeError"),
        ("def jobs():\n    x = 1\n    return 1 / 0", "line 3: ZeroDivisionError: division by zero"),
        ("\nimport no_such_module_here", "line 2: ModuleNotFoundError"),
        ("def jobs(:", "line 1: SyntaxError"),
        ("raise SystemExit(0)", "line 1: SystemExit: 0"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("x = '\0'", "SyntaxError"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(engine, file, text, expected):
    file.write_text(text)
    for command in ("run", "compare"):
        line = refused(call(command, file, "--memory", "8MiB"))
        assert expected in line
        assert "train.py" in line


def test_wrong_options_before_the_file_runs(engine, file, tmp_path):
    file.write_text("raise AssertionError('must not run')")
    (tmp_path / "taken").write_text("x")
    assert "512MiB" in refused(call("run", file, "--memory", "8 bananas"))
    assert "there is no policy 'fifo'" in refused(call("run", file, "--policy", "fifo"))
    assert "there is no policy 'fifo'" in refused(call("compare", file, "--policy", "fifo"))
    assert "taken" in refused(call("run", file, "--memory", "8MiB", "--out", tmp_path / "taken"))
    assert "missing.py does not exist" in refused(call("run", "missing.py", "--memory", "8MiB"))
    assert "is a folder" in refused(call("run", tmp_path, "--memory", "8MiB"))
    assert "512MiB" in refused(call("demo", "--memory", "much"))


def test_a_budget_is_required_and_checked(engine, file):
    assert "no memory budget: give --memory" in refused(call("run", file))
    file.write_text(JOBS + "MEMORY = True\n")
    assert "True" in refused(call("run", file))
    engine.error = BudgetError("job a needs\n9.0 MiB, the budget is 8.0 MiB")
    file.write_text(JOBS)
    assert "needs 9.0 MiB" in refused(call("run", file, "--memory", "8MiB"))


def test_the_file_may_import_its_neighbours_and_any_name(engine, tmp_path):
    (tmp_path / "neighbour_of_the_jobs.py").write_text("NAMES = ['a', 'b']")
    path = tmp_path / "report.py"
    path.write_text(
        "import waterflow as wf\nfrom neighbour_of_the_jobs import NAMES\nMEMORY = 2**23\n"
        "def jobs(): return [wf.Job(name) for name in NAMES]"
    )
    assert call("run", path).exit_code == 0


def test_a_defect_of_the_engine_keeps_its_traceback(engine, file):
    engine.error = RuntimeError("a defect")
    result = call("run", file, "--memory", "8MiB")
    assert result.exit_code == 1
    assert result.exception is engine.error


def test_compare_runs_every_policy_on_fresh_jobs(engine, file):
    file.write_text(JOBS.replace("def jobs():", "def jobs():\n    print('made')"))
    result = call("compare", file, "--memory", "8MiB", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["memory_bytes"] == 8 * 2**20
    names = [row["name"] for row in document["rows"]]
    assert names[0].startswith("eager")
    assert {"temporal", "waterwave", "waterwave-s"} <= set(names)
    assert all(row["equal"] is not False for row in document["rows"])
    assert result.stderr.count("made") == len(names)


def test_compare_shows_a_difference_and_a_failure(engine, file):
    engine.loss = 0.5 + 2**-53
    result = call("compare", file, "--memory", "8MiB", "--policy", "temporal")
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout
    engine.loss, engine.state = 0.5, "failed"
    result = call("compare", file, "--memory", "8MiB", "--policy", "temporal")
    assert result.exit_code == 1
    assert "failed: b" in result.stdout


def test_compare_interrupted_shows_what_is_complete(engine, file):
    engine.error = KeyboardInterrupt()
    result = call("compare", file, "--memory", "8MiB", "--json")
    assert result.exit_code == 130
    rows = json.loads(result.stdout)["rows"]
    assert rows
    assert all(row["name"].startswith("eager") for row in rows)


def test_demo_is_called_with_the_options(monkeypatch, tmp_path):
    seen = []

    def fake(json, memory, out):
        seen.append((json, memory, out))
        return 1

    module = types.ModuleType("waterflow.cli.demo")
    module.main = fake
    monkeypatch.setitem(sys.modules, "waterflow.cli.demo", module)
    assert call("demo", "--json", "--memory", "64MiB", "--out", tmp_path).exit_code == 1
    assert seen == [(True, "64MiB", tmp_path)]


def test_demo_without_scikit_learn_says_what_to_install(monkeypatch):
    def fake(**_):
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    module = types.ModuleType("waterflow.cli.demo")
    module.main = fake
    monkeypatch.setitem(sys.modules, "waterflow.cli.demo", module)
    assert "waterflow[demo]" in refused(call("demo"))


@pytest.mark.cpu
def test_run_with_the_real_engine(file, tmp_path):
    pytest.importorskip("waterflow.engine.engine")
    file.write_text(REAL_JOBS)
    result = call("run", file, "--json", "--out", tmp_path / "kept")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [job["steps"] for job in document["jobs"]] == [6, 6]
    assert 0 < document["peak_bytes"] <= document["budget_bytes"] == 64 * 2**20
    assert Report.load(tmp_path / "kept").timeline.peak_bytes() > 0


@pytest.mark.cpu
def test_compare_with_the_real_engine(file):
    pytest.importorskip("waterflow.engine.engine")
    file.write_text(REAL_JOBS)
    result = call("compare", file, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) >= 4
    assert all(row["equal"] is not False for row in rows)


@pytest.mark.cpu
def test_a_budget_too_small_for_the_real_engine(file):
    pytest.importorskip("waterflow.engine.engine")
    file.write_text(REAL_JOBS.replace('print("a line of the user\'s own")', "pass"))
    assert "too small" in refused(call("run", file, "--memory", "1KiB"))


def test_a_lost_device_saves_the_report_so_far(engine, file, tmp_path):
    lost = waterflow.DeviceLostError("cuda:0 is lost: an illegal address")
    lost.report = Report(jobs={"a": engine.one(FakeJob("a"))}, device="cuda:0")
    engine.error = lost
    result = call("run", file, "--memory", "64MiB", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "cuda:0 is lost" in result.stderr
    assert Report.load(tmp_path / "out")["a"].losses == [1.0, 0.5]


def test_run_writes_checkpoints_and_goes_on_from_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.py").write_text(REAL_JOBS)
    options = ["--checkpoint", "runs", "--checkpoint-every", "2 steps", "--resume", "runs"]
    for resumed in (0, 6):
        result = call("run", "work.py", *options, "--json")
        assert result.exit_code == 0, result.output
        jobs = json.loads(result.stdout)["jobs"]
        assert [(job["steps"], job["resumed_steps"]) for job in jobs] == [(6, resumed)] * 2
    assert (tmp_path / "runs" / "a" / "checkpoint.json").exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--resume", "runs"], "there is no checkpoint at runs"),
        (["--checkpoint-every", "5min"], "no checkpoint= says where to"),
        (["--checkpoint", "runs", "--checkpoint-every", "often"], "cannot be 'often'"),
    ],
)
def test_wrong_checkpoint_options_are_refused_in_one_line(tmp_path, monkeypatch, options, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.py").write_text(REAL_JOBS)
    result = call("run", "work.py", *options)
    assert result.exit_code == 2
    assert result.stdout.replace("a line of the user's own\n", "") == ""
    assert what in result.stderr
