"""The commands plan, max-batch and pair: what they print, and what they say about wrong input."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import call

pytestmark = pytest.mark.cpu

TABLE, LSTM = "deepfm_small", "lstm_lm_small"

FACTORY = """
import torch
import waterflow as wf

WIDTH = 32

def make_job(batch):
    layers = torch.nn.Linear(8, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    data = [(torch.randn(batch, 8), torch.randn(batch, 1))]
    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    return wf.Job("mine", model, optimizer, loss, data)

def make_nothing(batch):
    return None

def jobs():
    print("a line of the user's own")
    return [make_job(4)]
"""


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "mymodels.py"
    path.write_text(FACTORY)
    return path


def test_max_batch_as_a_table_and_a_picture(tmp_path):
    out = tmp_path / "frontier.svg"
    result = call("max-batch", TABLE, TABLE, "--memory", "4MiB", "--out", out)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.split()}
    assert {"alone", "temporal", "waterwave", "waterwave-s", "flow"} <= set(rows)
    assert "simulated" in result.stdout
    assert out.read_text().lstrip().startswith("<?xml")


def test_max_batch_as_json_of_a_factory(factory):
    result = call("max-batch", f"{factory}:make_job", "--memory", "1MiB", "--jobs", 3, "--json")
    found = json.loads(result.stdout)
    assert [job["name"] for job in found["jobs"]] == [f"make_job-{n}" for n in (1, 2, 3)]
    assert found["policies"]["flow"]["batch"][0] < found["jobs"][0]["solo"]


def test_plan_of_a_model_beside_a_file_of_jobs(factory, tmp_path):
    out = tmp_path / "plan.png"
    named = (f"{LSTM}:batch=4", factory)
    result = call("plan", *named, "--memory", "4MiB", "--hardware", "cpu", "--out", out, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [job["name"] for job in found["jobs"]] == [LSTM, "mine"]
    assert [job["batch"] for job in found["jobs"]] == [4, None]
    assert out.read_bytes().startswith(b"\x89PNG")


def test_plan_that_does_not_fit_ends_with_1(tmp_path):
    out = tmp_path / "plan.pdf"
    result = call("plan", f"{LSTM}:batch=4", "--memory", "8KiB", "--out", out)
    assert result.exit_code == 1
    assert "1 job does not fit" in result.stdout
    assert out.read_bytes().startswith(b"%PDF")


def test_measured_profiles(factory):
    result = call("plan", factory, "--memory", "1MiB", "--hardware", "cpu", "--measure", "--json")
    assert [job["source"] for job in json.loads(result.stdout)["jobs"]] == ["measured"]


def test_pair_names_the_batches():
    result = call("pair", TABLE, LSTM, f"{TABLE}:batch=2", "--memory", "1MiB", "--json")
    found = json.loads(result.stdout)
    assert len(found) == 3
    fixed = [pair["batch"][pair["places"].index(2)] for pair in found if 2 in pair["places"]]
    assert set(fixed) <= {1, 2}
    assert "samples/s" in call("pair", TABLE, LSTM, "--memory", "1MiB").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["max-batch", "resnet51", "--memory", "1GiB"], "did you mean resnet50"),
        (["max-batch", TABLE, "--memory", "a lot"], "cannot read 'a lot' as a size"),
        (["max-batch", TABLE, "--memory", "1KiB"], "a batch of 1 needs"),
        (["max-batch", TABLE, "--memory", "1GiB", "--out", "x.jpeg"], ".png, .svg, .pdf"),
        (["plan", f"{TABLE}:batch=-1", "--memory", "1GiB"], "whole number above 0"),
        (["plan", TABLE, "--memory", "1GiB"], f"{TABLE}:batch=32"),
        (["plan", "nowhere.py", "--memory", "1GiB"], "nowhere.py does not exist"),
        (["plan", f"{TABLE}:batch=2", "--memory", "1GiB", "--hardware", "tpu"], "hardware 'tpu'"),
        (["pair", TABLE, "--memory", "1GiB"], "at least two candidates"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("make_jobs", "has no function make_jobs(batch) that returns a wf.Job; it has make_job"),
        ("make_nothing", "returned no wf.Job but NoneType"),
    ],
)
def test_factories_that_are_none(factory, function, message):
    result = call("max-batch", f"{factory}:{function}", "--memory", "1MiB")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_factory_that_raises_is_told_with_its_line(factory):
    factory.write_text(FACTORY.replace("model = torch", "model = undefined.nn"))
    result = call("max-batch", f"{factory}:make_job", "--memory", "1MiB")
    assert result.exit_code == 2
    assert "mymodels.py, line 9" in result.stderr
    assert "name 'undefined' is not defined" in result.stderr
