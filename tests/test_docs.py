"""The documents tell the truth: generated blocks are fresh, links lead somewhere, and what they show has been run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from docs.generate import FOLDERS, MAKERS, documents, fill, record_tables, verbs

ROOT = Path(__file__).parents[1]
PAGES = [*documents(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", documents(), ids=name)
def test_generated_blocks_are_fresh(page):
    text = page.read_text()
    assert fill(text, MAKERS) == text, "run `python docs/generate.py`"


def test_a_stale_block_is_noticed_and_the_rest_of_the_page_is_left_alone():
    page = "before\n<!-- generated: x -->\nold\n<!-- end: x -->\nafter\n"
    assert fill(page, {"x": lambda: r"new \1"}) == page.replace("old", r"new \1")


def test_a_block_that_nobody_makes_is_an_error():
    with pytest.raises(KeyError, match="y"):
        fill("<!-- generated: y -->\n<!-- end: y -->\n", {})


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(aim.read_text()), f"{name(page)} links to {target}: no such heading"


def anchors(text: str) -> set[str]:
    """The anchors a forge makes of headings: lower case, spaces to dashes, the rest of the punctuation gone."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", documents(), ids=name)
def test_files_named_in_code_marks_exist(page):
    """`media/registry.py`, `docs/…`, `tests/…`: a page that names a file that has moved is stale."""
    for path in re.findall(r"`((?:src|docs|tests|bench|recipes|examples)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{name(page)} names {path}"
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)}|cli)/[\w/]+\.py)`", page.read_text()):
        assert (ROOT / "src/triptych" / path).exists(), f"{name(page)} names {path}"


def test_every_bench_is_named_and_every_result_is_read():
    named = (ROOT / "bench/README.md").read_text()
    for script in (ROOT / "bench").glob("*.py"):
        assert "__main__" not in script.read_text() or f"bench/{script.name}" in named, f"{script.name} is not named"
    text = "".join(path.read_text() for path in (*documents(), *(ROOT / "docs/measured").glob("*.py")))
    for result in (ROOT / "bench/results").glob("*.json"):
        assert f'"{result.stem}"' in text or f"`bench/results/{result.name}`" in text, f"nobody reads {result.name}"


def test_decisions_are_numbered_and_say_what_was_given_up():
    pages = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text()
        assert text.startswith(f"# {page.name[:4]} · ")
        assert {"context", "decision", "what-we-gave-up"} <= anchors(text), f"{page.name} lacks a section"


def test_every_verb_has_help_and_is_documented():
    reference = (ROOT / "docs/reference/cli.md").read_text()
    for verb in verbs():
        assert f"## triptych {verb}\n" in reference
        assert f"triptych {verb}" in (ROOT / "README.md").read_text()


def test_record_tables_show_fields_types_defaults_and_remarks():
    table = record_tables("core/spec")
    assert "### DecoderSpec" in table
    assert r"| `sliding_window` | `int \| None` | `None` |  |" in table
    assert "| `num_tokens` | `int` |  | rows out per tile |" in table


def test_the_way_of_a_request_names_functions_that_are_there():
    """`engine/loop.py` · `Engine.step`: the file defines the class, and the class the method."""
    steps = re.findall(r"`([\w/]+\.py)` ·\s+`([\w.]+)`", (ROOT / "docs/concepts/one-request.md").read_text())
    assert len(steps) > 15
    for path, name in steps:
        body = ast.parse((ROOT / "src/triptych" / path).read_text()).body
        for part in name.split("."):
            found = next((node for node in body if getattr(node, "name", None) == part), None)
            assert found is not None, f"{path} has no {name}"
            body = getattr(found, "body", [])
