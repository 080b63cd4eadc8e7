"""The GPU benchmarks' logic, tried on the CPU with tiny models: none of their numbers is looked at.

Most run in this process, their workers too; one starts real ones.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import (
    baselines,
    elastic,
    equality,
    launch,
    max_batch,
    overhead,
    race,
    search,
    summary,
    throughput,
    worker,
)
from benchmarks.gpu.gate import Gate
from benchmarks.gpu.jobs import MODELS, Case, make_job

ROOT = Path(__file__).resolve().parents[2]

TINY = ["--device", "cpu", "--tiny", "--json", "--repeats", "1"]


class LocalWorker:
    """A worker without a process: the same questions, answered here."""

    alive = True

    def __init__(self, environment=None):
        self.reply = None

    def call(self, function, timeout, **arguments):
        self.ask(function, **arguments)
        return self.answer(timeout)

    def ask(self, function, **arguments):
        question = json.dumps({"function": function, "arguments": arguments})
        self.reply = json.loads(json.dumps(worker._answer(question)))

    def answer(self, timeout):
        if "error" in self.reply:
            raise worker.WorkerError(self.reply["error"], self.reply["kind"])
        return self.reply["value"]

    def close(self):
        pass

    end = close


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a benchmark in this process; returns what it printed and the file it kept."""
    for module in (race, max_batch, overhead):
        monkeypatch.setattr(module, "Worker", LocalWorker)
    before = signal.getsignal(signal.SIGTERM)

    def run(module, *arguments):
        kept = tmp_path / "result.json"
        code = 0
        try:
            module.main([*TINY, "--out", str(kept), *arguments])
        except SystemExit as ended:
            code = ended.code
        (line,) = capsys.readouterr().out.splitlines()
        result = json.loads(line)
        assert json.loads(kept.read_text()).items() <= result.items()
        return code, result

    yield run
    torch.use_deterministic_algorithms(False)
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.cpu
def test_equality(run):
    names = ["resnet50", "lstm"]
    arguments = ("--steps", "2", "--policies", "waterwave", "--jobs", ",".join(names))
    code, result = run(equality, *arguments)
    assert (code, result["equal"]) == (0, True)
    assert result["eager_again"]["equal"]
    jobs = {name: job["first_differing_step"] for name, job in result["waterwave"]["jobs"].items()}
    assert jobs == dict.fromkeys(names, None)


@pytest.mark.virtual
def test_what_differs():
    wanted = ({"a": [1.0, float("nan"), 3.0]}, {"a": "x"})
    assert equality.compare(wanted, wanted)["equal"]
    found = equality.compare(({"a": [1.0, 2.0, 3.5]}, {"a": "x"}), wanted)
    assert (found["equal"], found["jobs"]["a"]["first_differing_step"]) == (False, 2)
    assert not equality.compare((wanted[0], {"a": "y"}), wanted)["equal"]
    assert not equality.compare(({"a": [1.0]}, {"a": "x"}), wanted)["equal"]


@pytest.mark.cpu
def test_launch(run):
    _, result = run(launch, "--cases", "mlp:fp32:4")
    (case,) = result["cases"]
    assert all(value > 0 for value in case["ratios"].values())
    assert [row["goal"] for row in result["goals"]] == [1.49, 1.0, 1.0]


@pytest.mark.cpu
def test_overhead(run):
    _, result = run(overhead)
    (case,) = result["cases"]
    assert case["ratio"] > 0
    assert case["host_ms_per_step"]["waterflow"] > 0


@pytest.mark.cpu
def test_elastic(run):
    code, result = run(elastic)
    assert code == 0
    assert [row["limit_ratio"] for row in result["rows"]] == [1.0, *elastic.RATIOS]
    whole, *limited = result["rows"]
    assert whole["moved_bytes"] == 0
    assert any(row.get("moved_bytes", 0) > 0 for row in limited)
    assert all(row["peak_bytes"] <= row["limit_bytes"] for row in limited if "error" not in row)
    assert {"suspend_ms", "resume_ms", "shrink_ms_per_gib", "grow_ms_per_gib"} <= result.keys()
    (pair,) = result["pairs"]
    assert {"slowdown_unthrottled", "slowdown", "opportunistic_share"} <= pair.keys()
    assert result["link"] is None
    assert result["not_reached"] == []


def test_throughput(run):
    _, result = run(throughput, "--cases", "mlp:bf16:4", "--without", "two_processes")
    (case,) = result["cases"]
    assert case["ratios"]["vmap"] > 0
    assert case["contenders"]["compile"] == {"step_ms": None, "reason": "needs CUDA"}
    assert "eager" in result["best"]["mlp bf16"]
    assert result["not_reached"] == []


@pytest.mark.cpu
def test_what_cannot_take_part_says_why():
    case = Case(model="resnet50", batch=2, device="cpu", tiny=True)
    with pytest.raises(baselines.Unsupported, match="BatchNorm"):
        baselines.Vmap(case, 2)


@pytest.mark.cpu
def test_vmap_trains_as_the_plain_loop_does():
    case = Case(model="mlp", batch=4, device="cpu", tiny=True)
    plain, fused = baselines.Eager(case, 2), baselines.Vmap(case, 2)
    plain.advance(3)
    fused.advance(3)
    for index, job in enumerate(plain.made):
        for name, parameter in job.model.named_parameters():
            torch.testing.assert_close(fused._state[name][index], parameter)


@pytest.mark.slow
@pytest.mark.cpu
def test_largest_batch(run):
    arguments = ("--models", "mlp", "--budgets", "64KiB", "--policies", "temporal")
    _, result = run(max_batch, *arguments, "--seconds", "30", "--search-seconds", "15")
    (solo,), (pair,) = result["solo"], result["pairs"]
    assert solo["tested"]
    assert pair["tested"]
    assert 0 < pair["ratio"] < 1
    assert result["not_reached"] == []
    assert [goal["what"] for goal in result["goals"]] == []


@pytest.mark.slow
@pytest.mark.cpu
def test_worker_processes_and_the_script(tmp_path):
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "OUT": str(tmp_path),
        "GPU_ARGS": "--device cpu --tiny --repeats 1 --cases mlp:fp32:4",
        "WATERFLOW_COMMIT": "abc",
    }
    script = ["bash", "benchmarks/gpu/check.sh", "throughput"]
    ended = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert document["commit"] == "abc"
    part = document["parts"]["throughput"]
    assert part["status"] == "ok"
    (case,) = part["result"]["cases"]
    assert case["ratios"]["two_processes"] > 0
    assert (tmp_path / "throughput.log").exists()


@pytest.mark.virtual
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_is_well_formed():
    script = ROOT / "benchmarks/gpu/check.sh"
    subprocess.run(["bash", "-n", script], check=True)
    unknown = subprocess.run(["bash", script, "nonsense"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "max_batch" in unknown.stderr


@pytest.mark.virtual
def test_the_summary_fails_for_a_wrong_number_and_not_for_a_missed_goal(tmp_path, monkeypatch):
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    out.mkdir()
    missed = {"what": "speed", "value": 0.5, "goal": 1.0, "at_most": False, "met": False}
    (scratch / "launch.json").write_text(json.dumps({"goals": [missed]}))
    monkeypatch.setattr(sys, "argv", ["summary", str(scratch), str(out)])

    def exit_code(status):
        (scratch / "status").write_text(status)
        with pytest.raises(SystemExit) as ended:
            summary.main()
        return ended.value.code

    assert exit_code("build 0 3\nlaunch 1 4\n") == 0
    assert exit_code("equality 1 3\n") == "failed: equality"
    (path,) = out.glob("*.json")
    assert set(json.loads(path.read_text())["parts"]) == {"build", "launch", "equality"}


# The search for a batch


def searched(largest, guess, *, tested=None, budget=1000, patience=60.0):
    """A search where peaks are 100 + 3 a batch, and tests refuse what is above `tested`."""

    def attempt(batch, steps):
        limit = largest if steps == 2 or tested is None else tested
        return search.Outcome(batch, steps, batch <= limit, 100 + 3 * batch)

    found = search.Search(attempt, guess, budget, time.monotonic() + patience, 2, 20)
    found.run()
    return found


@pytest.mark.virtual
@pytest.mark.parametrize("guess", [1, 10, 290, 299, 300, 301, 320, 2000])
@pytest.mark.parametrize("largest", [300, 217, 3])
def test_the_search_finds_the_batch_from_any_guess(guess, largest):
    found = searched(largest, guess)
    assert found.tested
    assert largest - found.unit < found.batch <= largest
    assert found.refused - found.accepted <= found.unit


@pytest.mark.virtual
def test_a_good_line_saves_runs():
    assert len(searched(300, 280).outcomes) <= 5


@pytest.mark.virtual
def test_tests_overrule_the_search():
    found = searched(300, 80, tested=296)
    assert (found.tested, found.batch, found.refused) == (True, 295, 297)
    assert [o.batch for o in found.outcomes if o.steps == 20] == [300, 297, 295]


@pytest.mark.virtual
def test_nothing_fits_and_no_time():
    assert searched(0, 50).batch is None
    late = searched(300, 50, patience=-1.0)
    assert (late.batch, late.tested, late.stopped_by) == (None, False, "its time limit")


@pytest.mark.virtual
def test_side_by_side():
    assert max_batch.side_by_side(["a", "b", "a", "b"])
    assert max_batch.side_by_side(["a", "a"])
    assert not max_batch.side_by_side(["a", "a", "b", "b"])


# The gate, the jobs


@pytest.mark.virtual
def test_the_gate_counts_steps_and_passes_errors_on():
    gate = Gate(1)
    seen = []

    def train():
        counter = gate.counter(0)
        for batch in gate.batches(["x", "y", "z"]):
            seen.append(batch)
            counter.step()

    thread = threading.Thread(target=train)
    thread.start()
    gate.run(2, 10)
    assert seen == ["x", "y"]
    gate.run(2, 10)
    assert seen == ["x", "y", "z", "x"]
    gate.close()
    thread.join()
    with pytest.raises(TimeoutError, match=r"\[4\], wanted: 5"):
        gate.run(1, 0.01)
    gate.fail(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        gate.run(1, 10)


@pytest.mark.cpu
@pytest.mark.parametrize("model", MODELS)
def test_jobs_are_the_same_by_the_same_seed(model):
    case = Case(model=model, batch=2, device="cpu", tiny=True)
    first, second = (make_job(case, seed=3, steps=2) for _ in range(2))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(first.data) == 2
    assert not torch.equal(first.data[0][0], first.data[1][0])
    assert torch.isfinite(first.loss(first.model, first.data[0]))
