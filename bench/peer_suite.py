"""llama.cpp's own HTTP tests, run against our server: which pass, which do not, and why that is meant so.

usage: python bench/peer_suite.py [BUNDLE|demo] --json bench/results/peer_suite.json [-k EXPRESSION]

The tests come out of the source distribution of llama-cpp-python, which holds llama.cpp whole; none of their code is
kept here. They run in an environment of their own under bench/.rivals/peer, through the plugin peers/llama_server.py,
which says what is conceded. A test that fails and has no reason in `MEANT` counts as a fault (exit 1).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import record
from environments import bin_of
from rivals.install import LLAMA_SDIST, LLAMA_SOURCE

HERE = Path(__file__).parent
ENVIRONMENT = HERE / ".rivals" / "peer"
SOURCE = HERE / ".rivals" / "peer-src"
CASES = SOURCE / "cases.jsonl"
TESTS = LLAMA_SOURCE.target / "llama.cpp" / "tools" / "server" / "tests"
TRIPTYCH = Path(sys.executable).with_name("triptych")
FLAGS = "--dtype float"

FILES = (
    "test_basic", "test_chat_completion", "test_completion", "test_compat_anthropic", "test_compat_oai_responses",
    "test_embedding", "test_security", "test_tokenize", "test_tool_call", "test_vision_api",
)  # fmt: skip
NOT_RUN = {
    "test_compat_gcp": "Google's prediction routes", "test_ctx_shift": "a context that is cut in silence",
    "test_ignore_eos": "reads internals of /completion", "test_infill": "filling in the middle",
    "test_kv_keep_only_active": "slots", "test_lora": "adapters", "test_mcp_servers": "MCP inside the server",
    "test_metrics": "the values of llamacpp:… names", "test_proxy": "a proxy for its page", "test_rerank": "reranking",
    "test_router": "several models", "test_sleep": "a model that is unloaded when idle", "test_slot_save": "slots",
    "test_speculative": "draft models", "test_stream": "resuming streams by id", "test_template": "templates by name",
    "test_tools_builtin": "tools that the server runs",
}  # fmt: skip
# of the tests for models that call tools on their own, those whose outcome a schema decides
DESELECTED = ("test_weather", "test_calc_result", "test_thoughts", "test_hello_world", "thinking_with_reasoning_model")
ONE_MODEL = "Qwen2.5-1.5B-Instruct"

# (which test or what it said, why it is meant so)
MEANT: tuple[tuple[str, str], ...] = (
    (r"test_completion\.py::(?!.*openai_library)", "asks /completion, llama.cpp's own; ours is /v1/completions"),
    (r"test_load_split_model", "reads a model in parts"),
    (r"authentication_error", "OpenAI's type of a wrong key is invalid_request_error, its code invalid_api_key"),
    (r"test_vision_completion|test_correct_api_key", "asks /completions without /v1, which is /completion there"),
    (r"startswith\('b'\)|startswith\(\"b\"\)", "a fingerprint that begins with a build number; ours names the weights"),
    (r"__verbose|/apply-template|test_verbose_debug", "the rendered prompt is not shown"),
    (r"exceed_context_size_error", "OpenAI's code context_length_exceeded, and the numbers in the message"),
    (r"test_return_progress|timings|test_server_slots|\.gguf|aliases", "fields of its own"),
    (r"unknown field|test_chat_completions_multiple_choices", "a field of llama.cpp's own"),
    (r"continue_final_message|chat_template_assistant_prefill", "/v1/completions continues a text; a chat is answered"),
    (r"messages7", "two answers one after the other are a conversation that this template takes"),
    (r"cached_tokens", "tokens of another tokenizer; blocks of 32 are shared"),
    (r"test_no_ui", "two servers where it starts one twice: the plugin's"),
    (r"test_logit_bias", "vLLM's /tokenize asks for `prompt`, not `content`"),
    (r"test_tokenize", "/tokenize as vLLM has it, not as llama.cpp"),
    (r"test_server_multiple_addresses", "one address a server"),
    (r"test_completion_with_(json_schema|grammar|invalid_grammar)", "its own fields; ours are OpenAI's and vLLM's"),
    (r"test_vision_chat_completion\[.*IMG_URL_[01]-True", "fetches from the network, which an operator must allow"),
    (r"test_vision_chat_completion\[.*IMG_BASE64_0-True", "a picture without data: around it"),
    (r"assert choice.delta.content is None", "the first chunk's content is empty text, as OpenAI sends it, not null"),
    (r"tool_result_with_image|vision_format_accepted", "expects a model without eyes; ours has some"),
    (r"test_anthropic_thinking", "a model that does not reason refuses to be told how long it may"),
    (r"POST /chat/completions is not served", "paths begin with /v1"),
    (r"test_anthropic_empty_messages", "Anthropic refuses a conversation without messages, and so do we"),
    (r"test_.*multimodal_capability", "its own list beside OpenAI's; ours is /props"),
    (r"test_local_media_file.*True", "file:// names a whole path here, not one below the folder"),
    (r"test_cors_options", "browsers of other origins are let in only where --allowed-origins says so"),
    (r"token_count|input_tokens", "/tokenize and /v1/messages/count_tokens count"),
    (r"test_access_static_assets", "its page's own files"),
    (r"test_embedding|test_vision_embeddings", "see docs/guides/serve.md on embeddings"),
    (r"thinking_history", "a template that shows reasoning; this model's does not"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """outcome: passed, meant (differs, and why), fault, or skipped."""

    name: str
    outcome: str
    why: str | None = None


def prepare() -> None:
    """The environment and the tests."""
    LLAMA_SOURCE.run()
    SOURCE.mkdir(parents=True, exist_ok=True)
    bin_of(ENVIRONMENT, "-r", str(TESTS / "requirements.txt"), "pytest-timeout")


def outcomes() -> dict[str, dict[str, Any]]:
    """Of the last run, by test, in the peer's words; a test that ran again counts as it ended last."""
    lines = CASES.read_text().splitlines() if CASES.exists() else []
    return {found["name"]: found for found in map(json.loads, lines)}


def run(model: str, expression: str | None, files: list[str]) -> None:
    """Run tests; their outcomes are added to `CASES`."""
    wanted = " and ".join([f"not {name}" for name in DESELECTED] + [f"(not real_model or {ONE_MODEL})"])
    options = ["-p", "llama_server", "-q", "--timeout", "600", "-k", expression or wanted, "-p", "no:cacheprovider"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE / "peers"), os.environ.get("PYTHONPATH")])),
        "TRIPTYCH": f"{TRIPTYCH} serve {model} {FLAGS}",
        "TRIPTYCH_CASES": str(CASES),
        "TRIPTYCH_LOG": str(SOURCE / "triptych.log"),
        "SLOW_TESTS": "1",
    }
    with (SOURCE / "pytest.log").open("w") as log:
        command = [str(ENVIRONMENT / "bin" / "python"), "-m", "pytest", *options, *files]
        subprocess.run(command, cwd=TESTS, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if not CASES.exists():
        raise SystemExit(f"no test ran, see {SOURCE / 'pytest.log'}")


def judged(found: dict[str, Any]) -> Case:
    name, said = found["name"], found["said"]
    if found["outcome"] == "passed":
        return Case(name=name, outcome="passed")
    if found["outcome"] == "skipped":
        return Case(name=name, outcome="skipped", why=said.removeprefix("Skipped: "))
    why = next((why for pattern, why in MEANT if re.search(pattern, name) or re.search(pattern, said)), None)
    if why is not None:
        return Case(name=name, outcome="meant", why=why)
    errors = [line for line in said.splitlines() if line.startswith("E ")]
    return Case(name=name, outcome="fault", why="; ".join(line[1:].strip() for line in errors[:3])[:400])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-k", dest="expression", help="pytest's, to run a few")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="only what was a fault last time; the rest is kept")
    asked = parser.parse_args()
    faults = [case.name for case in map(judged, outcomes().values()) if case.outcome == "fault"]
    if not asked.again:
        CASES.unlink(missing_ok=True)
    files = [f"unit/{name}" for name in (faults if asked.again else [f"{name}.py" for name in FILES])]
    if files:
        prepare()
        run(asked.model, asked.expression, files)
    cases = [judged(found) for found in outcomes().values()]
    counts = Counter(case.outcome for case in cases)
    for case in cases:
        if case.outcome == "fault":
            print(f"FAULT {case.name}\n      {case.why}")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    found = [
        record.measure(f"tests that {what}", "llama.cpp's server tests", "", [counts[outcome]])
        for what, outcome in (("pass", "passed"), ("differ by design", "meant"), ("need what is not here", "skipped"))
    ]
    aims = [record.Target(name="tests that fail without a reason", value=counts["fault"], unit="", at_most=0.0)]
    facts = {"source": LLAMA_SDIST, "flags": FLAGS, "files_not_run": NOT_RUN, "cases": [asdict(case) for case in cases]}
    if asked.json:
        record.write(asked.json, record.record("peer_suite", found, aims, facts))
    if counts["fault"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
