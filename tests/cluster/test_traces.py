from itertools import pairwise

import pytest

from tests.support.clusters import DATA, public_trace
from waterflow.cluster import read_trace
from waterflow.common.errors import JobError

pytestmark = pytest.mark.virtual

LINES = {  # one line of each format, as published
    "waterflow": "job,submit,gpus,seconds,class,memory_gib\na,5,2,60,opportunistic,1.5\n",
    "itp": "job_id,submission_time,duration,num_gpu\n0bc6e292,911907,709,32\n",
    "itp-models": (
        "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"
        "0bc6e292,911907,10253,deepspeech2,912694,32,32,709\n"
    ),
    "philly": (
        "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,11cb48\n"
    ),
    "muri": (
        "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,"
        "iteration_time,resource_time_0,resource_time_1,resource_time_2,priority\n"
        "1,4,1456000,1005573,resnet18,128,926133000,1456000,921,723,113,73,1\n"
    ),
    "elasticflow": (
        "job_id,submit_time,real_iteration,model_name,ddl,batch_size,num_gpu,real_duration,"
        "duration,iteration\n1,219316,26446831,vgg16,2065619,64,4,1792395,1792395,26446831\n"
    ),
    "chronus": (
        "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,"
        "expect_value_list,best_effort,job_type\n"
        "0,vc_103959,4,12198,6910,resnet101,211,8,282,10,0,strict\n"
    ),
    "tiresias": (
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
        "1,8,30,133,vgg11,147,23\n"
    ),
    "alibaba": (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,"
        "deletion_time,scheduled_time\n"
        "openb-pod-0001,6000,12288,1,460,,LS,Running,427061,12902960,427061\n"
    ),
    "gavel": "Transformer (batch size 128)\tcd x\t-step\t1\t95121\t6.000000\t1\n",
    "gavel-physical": (
        "ResNet-50 (batch size 64)\tpython3 x\timagenet/\t--num_minibatches\t1\t2931\t1\t1\t"
        "-1.000000\t0\n"
    ),
    "shockwave": (
        "LM (batch size 10)\tpython3 x\tlanguage_modeling\t--steps\t1\t134583\t1\tgns\t1\t"
        "-1.000000\t1418\t0\n"
    ),
}
FOUND = {  # submit, GPUs, seconds alone
    "waterflow": (5, 2, 60),
    "itp": (0, 32, 709),
    "itp-models": (0, 32, 709),
    "philly": (0, 1, 66),
    "muri": (1456, 4, 1005573 * 0.921),
    "elasticflow": (219316, 4, 1792395),
    "chronus": (0, 4, 211 * 60),
    "tiresias": (30, 8, 147),
    "alibaba": (0, 1, 12902960 - 427061),
    "gavel": (6, 1, None),
    "gavel-physical": (0, 1, None),
    "shockwave": (0, 1, 1418),
}
ROWS = {  # of the public traces; less those that use no GPU or never ran
    "tiresias/60_job.csv": 60,
    "muri/simulator/trace-data/trace1.csv": 1494,
    "muri/simulator/trace-data/trace2.csv": 5755,
    "muri/simulator/trace-data/trace3.csv": 992,
    "muri/simulator/trace-data/trace4.csv": 2638,
    "philly-pollux/philly.csv": 82247,
    "chronus/trace_job_Philly_SLO.csv": 30940 - 205,
    "alibaba-gpu-v2023/openb_pod_list_default.csv": 6203,
    "elasticflow/philly_103959.csv": 876,
    "gavel/traces/msr/seed=0/0e4a51.trace": 1181,
    "gavel/traces/physical_cluster/minimize_makespan.trace": 100,
    "shockwave/120_0.2_5_100_40_25_0,0.5,0.5_0.6,0.3,0.09,0.01_multigpu_dynamic.trace": 120,
}


@pytest.mark.parametrize("name", LINES)
def test_each_format_is_recognised_by_its_first_line(name, tmp_path):
    path = tmp_path / "trace"
    path.write_text(LINES[name])
    (job,) = read_trace(path)
    submit, gpus, seconds = FOUND[name]
    assert (job.submit, job.gpus) == (submit, gpus)
    assert job.seconds == pytest.approx(seconds) if seconds else job.seconds > 0
    assert read_trace(path, name) == (job,)


@pytest.mark.parametrize("name", ROWS)
def test_public_traces_have_the_rows_they_should(name):
    jobs = read_trace(public_trace(name))
    assert len(jobs) == ROWS[name]
    assert [job.index for job in jobs] == list(range(len(jobs)))
    assert all(a.submit <= b.submit for a, b in pairwise(jobs))


def test_itp_has_69351_jobs(tmp_path):
    import tarfile

    with tarfile.open(public_trace("itp/raw-traces.tar.gz")) as tar:
        tar.extractall(tmp_path, filter="data")
    assert sum(len(read_trace(path)) for path in tmp_path.glob("*.csv")) == 69351


def test_classes_memory_and_stages_are_read(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(LINES["waterflow"])
    (job,) = read_trace(path)
    assert not job.guaranteed
    assert job.memory == 1.5 * 1024**3
    path.write_text(LINES["muri"])
    assert read_trace(path)[0].stages == (0.723, 0.113, 0.073)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("b,-1,1,10", "line 3: submit is -1: it has to be 0 or more"),
        ("b,1,0,10", "line 3: gpus is 0: a job has one GPU or more"),
        ("b,1,1.5,10", "line 3: gpus is 1.5"),
        ("b,1,1,", "line 3: seconds is missing: fill it in"),
        ("b,1,1,soon", "line 3: seconds is 'soon': write a number"),
        ("b,1,1,nan", "line 3: seconds is nan"),
        ("a,1,1,10", "line 3: job 'a' is in line 2, too: give each job a name of its own"),
    ],
)
def test_bad_lines_are_refused_with_line_and_remedy(line, message, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"job,submit,gpus,seconds\na,0,1,10\n{line}\n")
    with pytest.raises(JobError, match=message):
        read_trace(path)


def test_unknown_models_name_those_that_are_near(tmp_path):
    path = tmp_path / "x.trace"
    path.write_text(LINES["gavel"].replace("Transformer", "Transfomer"))
    with pytest.raises(JobError, match=r"line 1: type .* near: Transformer \(batch size 128\)"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "of no format that is known"),
        ("job,submit,gpus,seconds\n", "has no jobs"),
        (LINES["gavel"] + "one\ttwo\n", "line 2: 2 fields instead of 7"),
        ("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,1,1,1000\n", "this list has no times"),
    ],
)
def test_files_that_are_no_trace_are_refused(text, message, tmp_path):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(JobError, match=message):
        read_trace(path)


def test_a_missing_file_and_an_unknown_format_are_refused(tmp_path):
    with pytest.raises(JobError, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(JobError, match="no trace format 'phily'; near: philly"):
        read_trace(DATA / "tiresias_60_jobs.csv", "phily")
