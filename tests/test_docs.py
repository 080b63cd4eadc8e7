"""The documentation: its links lead somewhere, its names are there, the reference is whole.

`make docs`, a part of `make lint`, builds the pages with warnings as errors. The programs on the
pages run in `test_docs_programs`.
"""

import ast
import functools
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import typer

import waterflow as wf
from tests.support.pages import PAGES, ROOT, indented, programs
from waterflow.cli.main import app

pytestmark = pytest.mark.virtual


def anchors(page):
    """The fragments that a page's headings are reached by, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} in {page.name} leads nowhere"
        assert target.is_relative_to(ROOT), f"{link} in {page.name} leaves the project"
        if fragment and target.suffix == ".md":
            assert fragment in anchors(target), f"{link} in {page.name}: no such heading"


def test_the_check_of_links_sees_headings():
    assert "how-it-compares" in anchors(ROOT / "README.md")
    assert "no-such-heading" not in anchors(ROOT / "README.md")


def unknown_names(text):
    """The names of waterflow that a text mentions and nobody finds."""
    found = set(re.findall(r"\bwf((?:\.[A-Za-z_]\w*)+)", text))
    return {name for name in found if not exists(name.split(".")[1:])}


def exists(path):
    holder = wf
    for name in path:
        if not hasattr(holder, name):
            return False
        holder = getattr(holder, name)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_pages_mention_are_there(page):
    assert unknown_names(page.read_text(encoding="utf-8")) == set()


def test_the_check_of_names_sees_them():
    assert unknown_names("`wf.run` and wf.cluster.ClusterSpec.of, wf.rum") == {".rum"}


#: What pages call things.
VARIABLES = {
    "engine": wf.Engine,
    "handle": wf.JobHandle,
    "hpo": wf.JobHandle,
    "other": wf.JobHandle,
    "report": wf.Report,
}


def unknown_options(tree):
    """Keywords of calls, and attributes of engines, handles and reports, that there are not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func).split(".")
            if function[0] != "wf" or not exists(function[1:]):
                continue
            called = functools.reduce(getattr, function[1:], wf)
            takes = inspect.signature(called).parameters.values()
            names = {each.name for each in takes if each.kind is not each.VAR_KEYWORD}
            if any(each.kind is each.VAR_KEYWORD for each in takes):
                names |= set(inspect.signature(wf.Engine).parameters)
                names |= set(inspect.signature(wf.Job).parameters)
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in names:
                    yield f"{'.'.join(function)}({keyword.arg}=)"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kind = VARIABLES.get(node.value.id)
            known = dir(kind), getattr(kind, "__annotations__", {})
            if kind is not None and not any(node.attr in names for names in known):
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_programs_give_are_there(page):
    assert [name for tree in programs(page) for name in unknown_options(tree)] == []


def test_the_check_of_options_sees_them():
    tree = ast.parse("wf.Job('a', pirority=1, seed=2); engine.resise(1); engine.resize(1)")
    assert list(unknown_options(tree)) == ["wf.Job(pirority=)", "engine.resise"]
    guide = ROOT / "docs" / "guide.md"
    assert len(list(programs(guide))) > 8


def commands(page):
    """The command lines of waterflow, and of its programs, that a page shows."""
    text = "\n".join(
        [*indented(page), *re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", page.read_text("utf-8"))]
    )
    return re.findall(r"^(waterflow [a-z][^\n]*|python -m [\w.]+[^\n]*)", text, re.MULTILINE)


def unknown_parts(line):
    """What of a command line nobody would understand."""
    words = re.split(r"  +| # ", line)[0].replace("`", "").split()
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    if words[0] == "python":
        found = importlib.util.find_spec(words[2])
        if found is None or found.origin is None:
            return [words[2]]
        source = Path(found.origin).read_text("utf-8")
        package = Path(found.origin).parent if found.submodule_search_locations else None
        more = [each.read_text("utf-8") for each in package.glob("*.py")] if package else []
        return [
            each for each in options if not any(f'"{each}"' in text for text in (source, *more))
        ]
    command = typer.main.get_command(app)
    for word in words[1:]:
        inner = getattr(command, "commands", None)
        if not inner:
            break
        if word not in inner:
            return [word]
        command = inner[word]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return sorted(options - known - {"--help"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_are_there(page):
    assert [(line, part) for line in commands(page) for part in unknown_parts(line)] == []


def test_the_check_of_commands_sees_them():
    assert unknown_parts("waterflow run FILE.py --checkpoint runs/a --chekpoint-every 5min") == [
        "--chekpoint-every"
    ]
    assert unknown_parts("waterflow walk FILE.py") == ["walk"]
    assert unknown_parts("python -m benchmarks.optuna --trails 3") == ["--trails"]
    assert unknown_parts("python -m benchmarks.nothing") == ["benchmarks.nothing"]
    assert len(commands(ROOT / "README.md")) > 12


def test_the_reference_has_every_public_name():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/reference/*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    wanted = {f"waterflow.{name}" for name in wf.__all__}
    wanted |= {f"waterflow.cluster.{name}" for name in wf.cluster.__all__}
    wanted -= {"waterflow.cluster.POLICIES"}  # `waterflow cluster policies` lists them
    assert wanted - shown == set()
    assert {name for name in shown if name.count(".") == 1} <= wanted


def test_the_pages_are_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        assert str(page.relative_to(ROOT / "docs")) in menu
