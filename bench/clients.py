"""Real clients against our server, case by case: what works, what does not, and what each said.

usage: python bench/clients.py [BUNDLE|demo] --json bench/results/clients.json [--only openai,langchain]
       python bench/clients.py --url http://HOST:PORT --json OUT

openai, anthropic, LangChain, LlamaIndex, LiteLLM with instructor, bodies as Open WebUI sends them, the Vercel AI SDK
(where there is node), each as installed today in environments under bench/.rivals. The cases are in peers/clients.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import record
from environments import bin_of
from peers.clients.case import picture_base64
from traffic.served import Served, found, serving

HERE = Path(__file__).parent
CASES = HERE / "peers" / "clients"
RIVALS = HERE / ".rivals"
PYTHON, NODE = RIVALS / "clients", RIVALS / "vercel"
PACKAGES = (
    "openai", "anthropic", "langchain", "langchain-openai", "langchain-anthropic", "llama-index-core",
    "llama-index-llms-openai-like", "litellm", "instructor", "httpx", "mcp",
)  # fmt: skip
NODE_PACKAGES = ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod")
CLIENTS = ("openai", "anthropic", "langchain", "llamaindex", "litellm", "webui")
FLAGS = ("--max-model-len", "4096", "--max-num-seqs", "8")
LIMIT_S = 3600  # a busy machine is no failure


def install() -> None:
    """Both environments, made once."""
    bin_of(PYTHON, *PACKAGES)
    if shutil.which("npm") and not (NODE / "node_modules").is_dir():
        NODE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "init", "--yes"], cwd=NODE, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", *NODE_PACKAGES], cwd=NODE, check=True)


def ask(client: str, served: Served) -> list[dict[str, Any]]:
    """One client's cases. Raises SystemExit when it did not get so far."""
    out, log = RIVALS / f"clients-{client}.json", RIVALS / f"clients-{client}.log"
    out.unlink(missing_ok=True)
    if client == "vercel":
        script = NODE / "vercel.mjs"
        shutil.copy(CASES / "vercel.mjs", script)
        command = ["node", str(script), served.url, served.model, str(out), picture_base64()]
    else:
        command = [str(PYTHON / "bin" / "python"), str(CASES / "main.py"), client, served.url, served.model, str(out)]
    quiet = os.environ | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "OPENAI_API_KEY": "none",
    }
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False, env=quiet)
    if not out.exists():
        raise SystemExit(f"{client} did not run, see {log}")
    return list(json.loads(out.read_text()))


def versions() -> dict[str, str]:
    """Of the clients, as installed."""
    pip = [str(PYTHON / "bin" / "pip"), "list", "--format", "json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(pip, capture_output=True, text=True, check=True).stdout)
    had = {one["name"]: one["version"] for one in listed if one["name"] in PACKAGES}
    for name in NODE_PACKAGES if NODE.is_dir() else ():
        package = NODE / "node_modules" / name / "package.json"
        if package.exists():
            had[name] = json.loads(package.read_text())["version"]
    return had


@contextlib.contextmanager
def served_by(url: str | None, model: str, flags: Sequence[str]) -> Iterator[Served]:
    if url:
        yield found(url, None)
    else:
        with serving(model, [*FLAGS, *flags], RIVALS / "clients.log") as served:
            yield served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--url")
    parser.add_argument("--only", help="some clients, such as openai,langchain")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="after --, for triptych serve")
    asked = parser.parse_args()
    install()
    has_node = shutil.which("node") is not None and (NODE / "node_modules").is_dir()
    wanted = asked.only.split(",") if asked.only else [*CLIENTS, *(["vercel"] if has_node else [])]
    with served_by(asked.url, asked.model, asked.flags) as served:
        made = [case for client in wanted for case in ask(client, served)]
    passed = Counter(case["client"] for case in made if case["ok"])
    measures = [record.measure("cases that work", client, "", [passed[client]]) for client in dict.fromkeys(wanted)]
    failed = [case for case in made if not case["ok"]]
    for case in failed:
        print(f"FAIL {case['client']}: {case['case']}\n     {case['error']}")
    print(", ".join(f"{client} {passed[client]}/{sum(c['client'] == client for c in made)}" for client in wanted))
    aims = [record.Target(name="cases that do not work", value=len(failed), unit="", at_most=0.0)]
    if asked.json:
        facts = {"flags": " ".join([*FLAGS, *asked.flags]), "clients": versions(), "cases": made}
        record.write(asked.json, record.record("clients", measures, aims, facts))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
