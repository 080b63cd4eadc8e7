import json

import pytest

from tests.support.clusters import DATA
from tests.support.command_line import call, refused
from waterflow.cluster import POLICIES

pytestmark = pytest.mark.virtual

TRACE = DATA / "tiresias_60_jobs.csv"


def test_policies_side_by_side_as_json():
    result = call(
        "cluster", "simulate", TRACE, "--policy", "fifo,srtf", "--nodes", 2, "--gpus-per-node", 4,
        "--compat", "tiresias", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["gpus"] == 8
    assert document["trace"] == str(TRACE)
    rows = document["policies"]
    assert list(rows) == ["fifo", "srtf"]
    assert rows["srtf"]["average_jct"] == pytest.approx(519.867, abs=1e-3)
    assert set(rows["fifo"]) == {
        "average_jct", "p99_jct", "makespan", "preemptions", "migrations", "jobs",
        "seconds_simulating",
    }  # fmt: skip


def test_a_report_is_a_folder_with_a_page(tmp_path):
    out = tmp_path / "report"
    result = call("cluster", "simulate", TRACE, "--policy", "fifo,sjf", "--nodes", 2, "--out", out)
    assert result.exit_code == 0, result.output
    assert "fifo" in result.stdout
    page = (out / "index.html").read_text()
    assert ">sjf</th>" in page
    for name in ("completion_times.png", "gpus_in_use.png", "queue_length.png"):
        assert name in page
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert len((out / "fifo.csv").read_text().splitlines()) == 61


def test_a_cluster_from_a_file(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text("[[node]]\ncount = 2\ngpus = 4\nmemory_gib = 16\n")
    result = call("cluster", "simulate", TRACE, "--cluster", spec, "--json")
    assert json.loads(result.stdout)["gpus"] == 8


def test_quotas_of_a_cluster_are_kept(tmp_path):
    spec, path = tmp_path / "spec.toml", tmp_path / "trace.csv"
    spec.write_text("[[node]]\ngpus = 4\n[quotas]\na = 2\nb = 2\n")
    jobs = "a1,0,2,100,a\na2,0,2,100,a\nb1,10,2,50,b\n"
    path.write_text(f"job,submit,gpus,seconds,tenant\n{jobs}")
    few = ("cluster", "simulate", path, "--cluster", spec, "--policy", "fifo,srtf", "--json")
    rows = json.loads(call(*few).stdout)["policies"]
    assert rows["fifo"]["average_jct"] == rows["srtf"]["average_jct"] == (100 + 200 + 50) / 3
    assert "simulator of muri knows no quotas" in refused(call(*few, "--compat", "muri"))
    path.write_text(f"job,submit,gpus,seconds,tenant\n{jobs}b2,10,3,50,b\nc,10,1,50,bb\n")
    assert "job 'b2' (line 5) asks for 3 GPUs and tenant 'b' has a quota of 2" in refused(
        call(*few)
    )
    result = call(*few, "--skip-too-large")
    assert "2 jobs are too large: left out" in result.stderr
    assert json.loads(result.stdout)["policies"]["fifo"]["jobs"] == 3
    assert "names no tenant" in refused(call("cluster", "simulate", TRACE, "--cluster", spec))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[node]]\ngpus = 4\n[quota]\na = 2\n", "nobody knows what 'quota' is; near: quotas"),
        ("[[node]]\ngpus = 4\nmemory = 2\n", "nobody knows what 'memory' is; near: memory_gib"),
        ("[[node]]\ngpus = 4.5\n", "gpus is 4.5: write a whole number"),
        ("[[node]]\ngpus = 4\ncount = 0\n", "count is 0: a [[node]] is one machine or more"),
        ("[[node]]\ngpus = 4\n[quotas]\na = 'x'\n", "quota a is 'x': write a whole number"),
        ("[[node]]\ngpus = 4\n[quotas]\na = -1\n", "tenant 'a' has a quota of -1 GPUs"),
        ("[[node]]\ngpus = 4\nmemory_gib = nan\n", "memory is nan GiB: give a number"),
    ],
)
def test_a_clusters_file_is_read_strictly(text, message, tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text(text)
    assert message in refused(call("cluster", "simulate", TRACE, "--cluster", spec))


def test_a_report_that_cannot_be_written_is_refused_before_the_first_run(tmp_path):
    (tmp_path / "file").write_text("")
    few = ("cluster", "simulate", TRACE, "--nodes", 1, "--policy", "nop", "--out")
    assert "name a folder (--out report/)" in refused(call(*few, tmp_path / "file"))


def test_jobs_too_large_can_be_left_out():
    few = ("cluster", "simulate", TRACE, "--nodes", 1, "--gpus-per-node", 4, "--json")
    assert "(line 3) asks for 8 GPUs and the cluster has 4" in refused(call(*few))
    result = call(*few, "--skip-too-large")
    assert json.loads(result.stdout)["policies"]["fifo"]["jobs"] < 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "fif"), "no policy 'fif'; near: fifo"),
        (("--policy", ","), "no policy is named: say --policy fifo"),
        (("--memory-gib", "-1"), "less than no memory"),
        (("--compat", "mury"), "no simulator 'mury' to be like; near: muri"),
        (("--costs", "much"), "no costs 'much': say one of free"),
        (("--format", "philli"), "no trace format 'philli'; near: philly"),
        (("--failures", "-1"), "--failures -1.0 is negative"),
        (("--failures", "nan"), "--failures nan is no number of days"),
        (("--memory-gib", "nan"), "memory is nan GiB: give a number of GiB"),
    ],
)
def test_wrong_names_are_refused_with_near_ones(arguments, message):
    assert message in refused(call("cluster", "simulate", TRACE, "--nodes", 2, *arguments))


def test_a_cluster_is_needed_and_has_gpus(tmp_path):
    assert "--nodes 20, or --cluster" in refused(call("cluster", "simulate", TRACE))
    assert "no GPUs" in refused(call("cluster", "simulate", TRACE, "--nodes", 0))
    spec = tmp_path / "spec.toml"
    spec.write_text("[[node]]\ngpus = 0\n")
    assert "leave nodes without GPUs out" in refused(
        call("cluster", "simulate", TRACE, "--cluster", spec)
    )
    spec.write_text("gpus = 3\n")
    assert "does not describe a cluster" in refused(
        call("cluster", "simulate", TRACE, "--cluster", spec)
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("b,1,99,10", "job 'b' (line 3) asks for 99 GPUs and the cluster has 8: simulate a larger"),
        ("b,1,1,10,7", "line 3: 1 fields more than the first line names, from '7' on"),
        ("b,-1,1,10", "line 3: submit is -1: it has to be 0 or more; remove the line"),
        ("b,,1,10", "line 3: submit is missing: fill it in, or remove the line"),
        ("a,1,1,10", "line 3: job 'a' is in line 2, too: give each job a name of its own"),
    ],
)
def test_bad_jobs_are_refused_with_line_and_remedy(lines, message, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"job,submit,gpus,seconds\na,0,1,10\n{lines}\n")
    assert message in refused(call("cluster", "simulate", path, "--nodes", 1))


def test_what_a_trace_says_of_memory_is_checked(tmp_path):
    path = tmp_path / "trace.csv"
    head = "job,submit,gpus,seconds,memory_gib,memory_curve,adaptive\n"
    path.write_text(f"{head}a,0,1,10,8,0.1:0.5 0.5:0.9,yes\nb,0,1,10,99,,\n")
    assert "(line 3) needs 106300440576 bytes on each GPU" in refused(
        call("cluster", "simulate", path, "--nodes", 1)
    )
    result = call("cluster", "simulate", path, "--nodes", 1, "--memory-gib", 100, "--json")
    assert result.exit_code == 0
    for curve in ("0.5:0.9 0.1:0.5", "0.5", "2:1", "a:b"):
        path.write_text(f"{head}a,0,1,10,8,{curve},\n")
        text = refused(call("cluster", "simulate", path, "--nodes", 1))
        assert f"line 2: memory_curve is '{curve}': write shares from small to large" in text
    path.write_text(f"{head}a,0,1,10,8,,perhaps\n")
    text = refused(call("cluster", "simulate", path, "--nodes", 1))
    assert "line 2: adaptive is 'perhaps': write yes or no" in text


def test_unknown_models_are_refused_with_near_ones(tmp_path):
    path = tmp_path / "itp.csv"
    path.write_text(
        "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"
        "a,911907,10253,deepspech2,912694,32,2,709\n"
    )
    text = refused(call("cluster", "simulate", path, "--nodes", 1))
    assert "line 2: model_name 'deepspech2' has no measured throughput: near: deepspeech2" in text


def test_pairs_of_the_planner_can_be_given(tmp_path):
    pairs = tmp_path / "pairs.json"
    pairs.write_text("[]")
    arguments = ("cluster", "simulate", TRACE, "--nodes", 2, "--policy", "gandiva", "--json")
    assert "waterflow pair JOB JOB" in refused(call(*arguments, "--pairs", pairs))
    pairs.write_text('[{"names": ["vgg16", "resnet50"], "speed": 1.9}]')
    assert call(*arguments, "--pairs", pairs).exit_code == 0


def test_an_interrupted_run_keeps_what_is_done(monkeypatch):
    from waterflow.cluster.policies.fifo import Fifo

    decide, asked = Fifo.decide, []

    def interrupted(self, state):
        asked.append(state.now)
        if len(asked) > 60:
            raise KeyboardInterrupt
        return decide(self, state)

    monkeypatch.setattr(Fifo, "decide", interrupted)
    result = call("cluster", "simulate", TRACE, "--nodes", 2, "--policy", "fifo,srtf", "--json")
    assert result.exit_code == 130
    rows = json.loads(result.stdout)["policies"]
    assert list(rows) == ["fifo"]
    assert 0 < rows["fifo"]["jobs"] < 60


def test_the_policies_are_listed_with_their_papers():
    text = call("cluster", "policies").stdout
    rows = json.loads(call("cluster", "policies", "--json").stdout)
    assert set(rows) == set(POLICIES)
    assert all(row["source"] and row["summary"] for row in rows.values())
    assert "tiresias" in text
