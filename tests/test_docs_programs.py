"""The programs on the documentation's pages run, as a reader would try them.

What a piece leaves to the reader (`...` in a call, `model`, `loader`) is filled in here, by the
name that the page has for it. A job that a piece makes and does not train is trained afterwards.
"""

import ast
import asyncio
import contextlib
import inspect
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from tests.support.data import cross_entropy
from tests.support.pages import PAGES, ROOT, programs

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore::waterflow.BudgetWarning"),  # a page's 16 GiB
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*logging interval.*"),
]

#: Their blocks are diagrams, and what the engine does in the words of a loop.
NO_PROGRAMS = {"docs/design.md", "docs/equality.md"}
#: What pieces come to that leave no report behind.
RESULTS = {"accuracies", "found", "results", "study"}


def loader(rows=64):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(rows, 64, generator=generator)
    return DataLoader(
        TensorDataset(pixels, torch.randint(10, (rows,), generator=generator)), batch_size=16
    )


def network(width=16):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


def rest_of_job(name="job", width=16):
    """All that a job needs."""
    model = network(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {
        "name": name,
        "model": model,
        "optimizer": optimizer,
        "loss": cross_entropy,
        "data": loader(),
        "epochs": 2,
    }


def job(name, width=16, **options):
    return wf.Job(**{**rest_of_job(name, width), **options})


def accuracy(*asked):
    """Of scores for labels, or of a model."""
    if len(asked) == 1:
        pixels, labels = loader().dataset.tensors
        asked = asked[0](pixels), labels
    scores, labels = asked
    return (scores.argmax(1) == labels).float().mean()


def rest_of_trainer(directory):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tests.support import trainers

    torch.manual_seed(0)
    model, data = trainers.MODELS["bert"]()
    arguments = transformers.TrainingArguments(
        str(directory), num_train_epochs=1, report_to="none", use_cpu=True, save_strategy="no"
    )
    return {"model": model, "args": arguments, "train_dataset": data}


def trial_of_the_readme():
    """What the README's program defines before it makes jobs."""
    names = {}
    for statement in programs(ROOT / "README.md")[0].body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "jobs":
            break
        exec(compile(ast.Module([statement], []), "README.md", "exec"), names)
    return names["trial"]


def read_with_evaluations():
    return wf.run([job("lr-0.1", evaluate=accuracy, evaluate_every="epoch")], memory="64MiB")


def folds():
    generator = torch.Generator().manual_seed(1)
    pixels, labels = torch.randn(24, 64, generator=generator), torch.arange(24) % 10
    parts = torch.arange(24).chunk(3)
    return [((pixels, labels), (pixels[part], labels[part])) for part in parts]


def fold(number, train, held):
    return job(
        f"fold-{number}",
        data=[train],
        evaluate=lambda model: (model(held[0]).argmax(1) == held[1]).float().mean(),
    )


def search_trial(trial):
    rate = trial.suggest_float("rate", 1e-3, 1e-1, log=True)
    filled = rest_of_job(f"trial-{trial.number}")
    filled["optimizer"].param_groups[0]["lr"] = rate
    return wf.Job(**filled, evaluate=accuracy)


class Reader:
    """Who tries a piece: has what it leaves out."""

    def __init__(self, directory, stack):
        self.directory, self.stack = directory, stack

    def names_for(self, tree):
        """The names that a piece does not make itself."""
        mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names = {name: make() for name, make in self._makers().items() if name in mentioned}
        if mentioned & {"model", "MyModel"}:
            own = rest_of_job()
            names |= {"model": own["model"], "optimizer": own["optimizer"]}
            names["MyModel"] = lambda: own["model"]
        if "critic_loss" in mentioned:
            generator, critic = network(16), network(24)
            names |= {"loss": torch.zeros(()), "critic_loss": torch.ones(())}
            names |= {"g": generator, "of_g": torch.optim.Adam(generator.parameters())}
            names |= {"c": critic, "of_c": torch.optim.Adam(critic.parameters())}
        if "handles" in mentioned:  # all that happens, until the engine has ended
            names["handles"] = [names["engine"].submit(job(name)) for name in ("one", "two")]
            threading.Thread(target=names["engine"].close).start()
        if "'trace.csv'" in ast.unparse(tree):
            rows = "job,submit,gpus,seconds\na,0,1,60\nb,5,8,600\nc,9,64,60\n"
            (self.directory / "trace.csv").write_text(rows)
        return names

    def _makers(self):
        return {
            "wf": lambda: wf,
            "torch": lambda: torch,
            "F": lambda: functional,
            "functional": lambda: functional,
            "optuna": lambda: pytest.importorskip("optuna"),
            "hf": lambda: pytest.importorskip("transformers"),
            "lightning": lambda: pytest.importorskip("lightning"),
            "loss": lambda: cross_entropy,
            "loader": loader,
            "accuracy": lambda: accuracy,
            "trial": trial_of_the_readme,
            "engine": lambda: self.stack.enter_context(wf.Engine(memory="8GiB")),
            "report": read_with_evaluations,
            "fold": lambda: fold,
            "splits": folds,
            "make_job": lambda: search_trial,
            "names": lambda: ["one", "two"],
            "jobs": lambda: [job("one", width=16), job("two", width=24)],
            "big": lambda: job("big"),
            "another": lambda: job("another"),
            "module": classifier,
            "datamodule": classifier_data,
        }

    def fill(self, function, *given, **options):
        """Calls a function of which a page leaves arguments out."""
        rests = {"Job": rest_of_job, "Trainer": lambda: rest_of_trainer(self.directory)}
        rest = rests[function.__name__]()
        for name, _ in zip(inspect.signature(function).parameters, given, strict=False):
            rest.pop(name, None)
        return function(*given, **{**rest, **options})


def classifier():
    from tests.support.lightning_modules import Classifier

    torch.manual_seed(0)
    return Classifier()


def classifier_data():
    from tests.support.lightning_modules import Digits

    return Digits()


class Filled(ast.NodeTransformer):
    """Has `...` in calls filled in, and keeps what a piece only shows."""

    def visit_Call(self, node):
        self.generic_visit(node)
        given = [each for each in node.args if not is_left_out(each)]
        options = [each for each in node.keywords if not is_left_out(each.value)]
        if len(given) == len(node.args) and len(options) == len(node.keywords):
            return node
        return ast.Call(ast.Name("fill_", ast.Load()), [node.func, *given], options)

    def visit_Expr(self, node):
        self.generic_visit(node)
        shown = ast.Attribute(ast.Name("shown_", ast.Load()), "append", ast.Load())
        return ast.Expr(ast.Call(shown, [node.value], []))


def is_left_out(node):
    return isinstance(node, ast.Constant) and node.value is ...


def tried(tree, names, fill):
    """What a piece has made, by name, and all that there is after it, what it only shows, too."""
    shown = []
    names |= {"fill_": fill, "shown_": shown}
    given = dict(names)
    filled = ast.fix_missing_locations(Filled().visit(tree))
    code = compile(filled, "a page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)
    made = {name: value for name, value in names.items() if value is not given.get(name)}
    return made, [*names.values(), *shown]


def reports_of(values):
    """What has been trained, by `wf.run` or in engines."""
    engines = [value.report() for value in values if isinstance(value, wf.Engine)]
    return [*engines, *(value for value in values if isinstance(value, wf.Report))]


def untrained_jobs(made, values, reports):
    """What a piece leaves to be trained, or shows how to make."""
    trained = {each.name for report in reports for each in report}
    jobs = [value for value in values if isinstance(value, wf.Job) and value.name not in trained]
    if "make_job" in made:
        jobs.append(made["make_job"](4))
    elif not (jobs or reports):
        parts = {name: made[name] for name in ("loss", "data") if name in made}
        jobs += [job(name, **parts) for name in ("one", "two") if parts]
    return jobs


PIECES = [
    pytest.param(page, number, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    if str(page.relative_to(ROOT)) not in NO_PROGRAMS
    for number in range(len(programs(page)))
]


@pytest.mark.parametrize(("page", "number"), PIECES)
def test_programs_run(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = programs(page)[number]
    if "'cuda'" in ast.unparse(tree) and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with contextlib.ExitStack() as stack:
        reader = Reader(tmp_path, stack)
        made, values = tried(tree, reader.names_for(tree), reader.fill)
    reports = reports_of(values)
    if left := untrained_jobs(made, values, reports):
        reports.append(wf.run(left, memory="64MiB"))
    for report in reports:
        assert report.ok, {each.name: each.error for each in report}
        assert any(each.steps for each in report)
    assert reports or made.keys() & RESULTS


def test_the_programs_are_found():
    pages = [page for page in PAGES if programs(page)]
    assert {page.name for page in pages} >= {"README.md", "guide.md", "checkpoints.md"}
    assert len(PIECES) > 18
