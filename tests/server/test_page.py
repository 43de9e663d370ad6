"""The page's files: whole, open, and held to a policy that runs nothing else. No browser is needed."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import triptych
from scripted import ScriptedSession, serving
from triptych.server.config import ServerConfig

FOLDER = Path(triptych.__file__).parent / "data/page"
SCRIPTS = sorted(FOLDER.glob("*.js"))
INDEX = (FOLDER / "index.html").read_text()


def test_the_page_is_open_where_the_api_is_not():
    with serving(ScriptedSession(), ServerConfig(api_keys=("sesame",))) as url:
        for path in ("/", *(f"/page/{file.name}" for file in FOLDER.iterdir()), "/page/cat.jpg"):
            assert httpx.get(url + path).status_code == 200, path
        for path in ("/stats", "/v1/models"):
            assert httpx.get(url + path).status_code == 401
            assert httpx.get(url + path, headers={"authorization": "Bearer sesame"}).status_code == 200


def test_its_policy_runs_no_script_but_its_own_files_and_lets_no_text_become_markup():
    with serving(ScriptedSession()) as url:
        for path in ("/", "/page/app.js"):
            headers = httpx.get(url + path).headers
            policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert not re.search(r"unsafe|\*|https?:", headers["content-security-policy"])
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


def test_files_are_asked_about_and_sent_once():
    with serving(ScriptedSession()) as url:
        first = httpx.get(f"{url}/page/app.js")
        plain = httpx.get(f"{url}/page/app.js", headers={"accept-encoding": "identity"})
        again = httpx.get(f"{url}/page/app.js", headers={"if-none-match": first.headers["etag"]})

    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    assert first.headers["cache-control"] == "no-cache"
    assert first.headers["content-encoding"] == "gzip"
    assert first.content == plain.content == (FOLDER / "app.js").read_bytes()
    assert "content-encoding" not in plain.headers
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/page/NOTICE", "/page/", "/page/..%2f..%2f__init__.py", "/page/../../errors.py", "/page/x.js"]
)
def test_nothing_but_its_files_is_sent(path):
    with serving(ScriptedSession()) as url:
        assert httpx.get(url + path).status_code == 404


def test_without_the_page_neither_it_nor_its_figures_are_there():
    with serving(ScriptedSession(), ServerConfig(page=False)) as url:
        for path in ("/", "/page/app.js", "/stats"):
            assert httpx.get(url + path).status_code == 404


def test_every_file_that_is_named_exists_and_none_is_left_over():
    named = set(re.findall(r"page/([\w.-]+)", INDEX)) | {"index.html"}
    for script in SCRIPTS:
        text = script.read_text()
        named |= set(re.findall(r'from "\./([\w.-]+)"', text)) | set(re.findall(r'"page/([\w.-]+\.svg)"', text))

    assert named == {file.name for file in FOLDER.iterdir()}


def test_the_document_has_no_script_style_or_handler_of_its_own():
    assert not re.search(r"<script(?![^>]* src=\"page/)", INDEX)
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", INDEX)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_make_nodes_and_never_markup(script):
    text = script.read_text()

    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
    )
    assert set(re.findall(r"https?://[^\s\"'`<>\\)|]+", text)) <= {"http://www.w3.org/2000/svg"}, (
        "nothing comes from elsewhere"
    )


def test_styles_load_nothing():
    for sheet in FOLDER.glob("*.css"):
        assert not re.search(r"url\(|@import|@font-face", sheet.read_text())


def test_every_icon_that_is_used_is_drawn():
    drawn = set(re.findall(r"^  (\w+): \"M", (FOLDER / "dom.js").read_text(), re.MULTILINE))
    used: set[str] = set()
    for script in SCRIPTS:
        text = script.read_text()
        used |= set(re.findall(r"\bicon(?:Button)?\(\"(\w+)\"", text)) | set(re.findall(r'dress\([^,]+, "(\w+)"', text))

    assert used <= drawn


def test_the_dashboards_record_counts_and_has_percentiles():
    body = {"messages": [{"role": "user", "content": "slow a b"}], "max_tokens": 4}
    with serving(ScriptedSession()) as url:
        before = httpx.get(f"{url}/stats").json()
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": []}).status_code == 400
        after = httpx.get(f"{url}/stats").json()

    assert before["state"] == "ok"
    assert before["percentiles"]["first_token"] == {"count": 0, "p50": None, "p95": None, "p99": None}
    assert (before["finished"], before["refused"]) == ({}, {})
    assert after["finished"] == {"length": 1}
    assert after["refused"] == {"invalid_value": 1}
    assert after["percentiles"]["first_token"]["count"] == after["percentiles"]["whole"]["count"] == 1
    assert after["percentiles"]["between_tokens"]["count"] == 3
    assert after["percentiles"]["between_tokens"]["p50"] > 0
    assert {"stage": "decode", "modality": "text", "seconds": 1.5, "calls": 12} in after["stages"]
    assert {stage["stage"] for stage in after["stages"]} >= {"queue", "detokenize"}
    assert after["placements"] == {"decoder": "CPU (test), f32"}
