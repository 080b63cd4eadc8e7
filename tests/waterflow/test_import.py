"""What is loaded when: nothing by `import waterflow`, no torch for a command line's help.

Seconds depend on the machine, so what is tested is which modules a fresh process has loaded.
"""

import ast
import importlib
import json
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import waterflow
from waterflow.cli.training import POLICY_NAMES
from waterflow.partitioner.policies import POLICIES

pytestmark = pytest.mark.virtual

HEAVY = {"matplotlib", "networkx", "numpy", "pynvml", "rich", "scipy", "sklearn", "sympy", "torch"}

#: Runs the module `waterflow` as `python -m` does; prints the modules that were loaded.
COMMAND = """
import json, runpy, sys
sys.argv = ["waterflow", *sys.argv[1:]]
try:
    runpy.run_module("waterflow", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(list(sys.modules)), file=sys.stderr)
"""


def python(*arguments):
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result


def loaded_by(statement):
    """Modules that a fresh process has after a statement and had not before."""
    script = f"import json, sys; before = set(sys.modules); {statement}; "
    script += "print(json.dumps(list(set(sys.modules) - before)))"
    return set(json.loads(python("-c", script).stdout))


def packages(modules):
    return {module.partition(".")[0] for module in modules}


def test_importing_waterflow_loads_nothing_else():
    found = loaded_by("import waterflow")
    assert {module for module in found if module.startswith("waterflow")} == {"waterflow"}
    assert not packages(found) & HEAVY


def test_running_jobs_loads_nothing_to_draw_or_print_with():
    found = packages(loaded_by("import waterflow; waterflow.run; waterflow.Report"))
    assert {"torch", "numpy"} <= found
    assert not found & {"matplotlib", "networkx", "rich", "scipy", "sklearn", "typer"}


def test_clusters_are_simulated_without_torch():
    statement = "import waterflow as wf; wf.cluster.simulate; wf.cluster.POLICIES"
    found = packages(loaded_by(statement))
    assert not found & {"matplotlib", "ray", "rich", "torch", "typer"}


def test_planning_alone_needs_no_torch():
    found = loaded_by("from waterflow.partitioner import get_policy, verify")
    assert "numpy" in packages(found)
    assert not packages(found) & (HEAVY - {"numpy"})


COMMANDS = ["", "demo", "run", "compare", "plan", "report", "doctor", "cluster simulate"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_neither_torch_nor_numpy(command):
    result = python("-c", COMMAND, *command.split(), "--help")
    assert "Usage:" in result.stdout
    assert not packages(json.loads(result.stderr)) & HEAVY


def test_the_commands_know_the_policies_names():
    assert tuple(POLICIES) == POLICY_NAMES


@pytest.mark.parametrize("name", waterflow.__all__)
def test_every_public_name_is_there(name):
    found = getattr(waterflow, name)
    assert getattr(importlib.import_module(waterflow._MODULES[name]), name) is found
    assert name in dir(waterflow)
    if name != "STOP":
        assert found.__name__ == name


def declared():
    """Module -> names that it is imported from, for type checkers."""
    tree = ast.parse(Path(waterflow.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {
        alias.name: statement.module
        for statement in block.body
        for alias in statement.names
        if alias.asname is None
    }


def test_type_checkers_see_what_is_there():
    assert declared() == waterflow._MODULES
    assert sorted(waterflow._MODULES) == sorted(waterflow.__all__)


def test_a_star_import_takes_them_all():
    namespace = {}
    exec("from waterflow import *", namespace)
    assert set(waterflow.__all__) <= namespace.keys()
    assert namespace["run"] is waterflow.run


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'waterflow' has no attribute 'rum'"):
        _ = waterflow.rum
    with pytest.raises(ImportError, match="rum"):
        exec("from waterflow import rum")


def test_functions_are_not_hidden_by_modules_of_their_names():
    script = (
        "import waterflow.engine.run, waterflow.study, waterflow.report.report, waterflow.job\n"
    )
    script += "import waterflow\n"
    script += "assert all(map(callable, (waterflow.run, waterflow.plan, waterflow.pair)))\n"
    script += "assert isinstance(waterflow.job, type(sys)) and isinstance(waterflow.Job, type)\n"
    python("-c", "import sys\n" + script)


def test_what_a_callback_may_name_is_known_before_it_runs():
    # An import inside a step would count as something that the step does.
    script = "import waterflow; waterflow.Job; known = vars(waterflow); "
    script += "assert {'STOP', 'StepResult', 'JobError', 'NonFiniteLossError'} <= known.keys(); "
    script += "waterflow.Engine; assert set(waterflow.__all__) - known.keys() <= "
    script += "{'MaxBatch', 'Pair', 'Plan', 'max_batch', 'pair', 'plan', 'run', 'run_eager', "
    script += "'from_lightning', 'from_trainer', "
    script += "'shared'}"
    python("-c", script)


@pytest.mark.parametrize("name", ["run", "Job", "Report", "BudgetError", "plan"])
def test_public_objects_can_be_pickled(name):
    found = getattr(waterflow, name)
    assert pickle.loads(pickle.dumps(found)) is found


def test_help_shows_the_functions():
    text = pydoc.plain(pydoc.render_doc(waterflow))
    assert "run(jobs: " in text
    assert "class Job(" in text
