"""The documentation: its links lead somewhere, its programs run, the reference leaves nothing out.

`make docs`, a part of `make lint`, builds the pages with warnings as errors.
"""

import re
from pathlib import Path

import pytest

import waterflow as wf

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_are_python(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        compile(block, str(page), "exec")


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
