"""Every command and every program of the README is run, over a tiny model in place of the real one.

They run in the order they stand in, as written, in a folder that holds what the text takes for granted: a checkpoint
called `SmolVLM-256M-Instruct` (a tiny random one of that family), `picture.png` and `samples.jsonl`. What is changed
before a run is in `FAST` (commands that would install or download) and `as_run` (the demo's name, the port).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SHEET = "import msgspec.json; from triptych.plan.sheets import load; print(msgspec.json.encode(load('epyc')).decode())"
# Run by CI itself or on a machine of one's own; here we see that make knows how. What a busy machine can do is
# measured nowhere: a data sheet is in its place.
FAST = {
    "triptych measure -o machine.json": f'{sys.executable} -c "{SHEET}" > machine.json',
    "make demo": f"make --dry-run --directory {ROOT} demo",
    "make test": f"make --dry-run --directory {ROOT} test",
    "make bench": f"make --dry-run --directory {ROOT} bench",
    "pip install .": "true",
    "hf download HuggingFaceTB/SmolVLM-256M-Instruct --local-dir SmolVLM-256M-Instruct": "ls SmolVLM-256M-Instruct",
}
PATIENCE_S = 150
ASKED = ("What is this?", "Which colour is it?", "How many are there?", "Where is it?")


def asked(text: str) -> dict[str, object]:
    """A line of samples.jsonl: a question about the picture."""
    image = {"type": "image_url", "image_url": {"url": "picture.png"}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Each line of each `bash` block; a trailing comment is not part of it."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The folder the README's reader sits in, and the server that runs once `triptych serve` was typed."""

    folder: Path
    servers: list[subprocess.Popen[str]]
    urls: list[str]

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": path, "HOME": str(self.folder), "PYTHONWARNINGS": "default"}

    def as_run(self, text: str) -> str:
        """The demo is the tiny checkpoint, since nothing is downloaded here; the port is one that is free."""
        url = self.urls[-1] if self.urls else "http://127.0.0.1:8000"
        text = re.sub(r"\bdemo\b(?=[\"' ]|$)", "SmolVLM-256M-Instruct", text).replace("http://127.0.0.1:8000", url)
        return text.replace("--port 8000", "--port 0")

    def run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def serve(self, command: str) -> None:
        server = subprocess.Popen(
            shlex.split(command), cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        self.servers.append(server)
        assert server.stdout is not None
        said = server.stdout.readline()
        self.urls.append(re.findall(r"http://\S+", said)[0])

    def close(self) -> None:
        for server in self.servers:
            with server:
                server.send_signal(signal.SIGTERM)
                assert server.wait(timeout=PATIENCE_S) == 0


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The reader's folder after every command of the README was typed, in order."""
    from checkpoints import make, picture

    folder = tmp_path_factory.mktemp("reader")
    (folder / "SmolVLM-256M-Instruct").symlink_to(make("smolvlm", tmp_path_factory.getbasetemp(), seed=0))
    (folder / "src").symlink_to(ROOT / "src")
    picture(80, 60).save(folder / "picture.png")
    (folder / "samples.jsonl").write_text("\n".join(json.dumps({"messages": [asked(text)]}) for text in ASKED))
    stage = Stage(folder=folder, servers=[], urls=[])
    try:
        for command in commands():
            if command.startswith("triptych serve"):
                stage.serve(stage.as_run(command))
            else:
                stage.run(["bash", "-euo", "pipefail", "-c", FAST.get(command, stage.as_run(command))])
        yield stage
    finally:
        stage.close()


@pytest.mark.reference
@pytest.mark.timeout(300)
def test_every_command_runs_as_written(stage):
    assert (stage.folder / "smolvlm" / "bundle.json").is_file()
    assert (stage.folder / "smolvlm-w4" / "compression.json").is_file()
    assert len(stage.urls) == 2


@pytest.mark.reference
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_every_program_runs_as_written(stage, number):
    assert stage.run([sys.executable, "-c", stage.as_run(blocks("python")[number])])


@pytest.mark.reference
@pytest.mark.timeout(300)
def test_the_examples_run(stage):
    session, client = ROOT / "examples" / "session.py", ROOT / "examples" / "openai_client.py"
    assert stage.run([sys.executable, str(session), "smolvlm", "picture.png", "What is this?"])
    assert stage.run([sys.executable, str(client), "--url", stage.urls[0], "--image", "picture.png"])


def test_the_readme_has_commands_and_programs_to_run():
    assert {"make demo", "make test"} <= set(commands())
    assert len(blocks("python")) >= 2


def test_the_makefile_knows_every_target_that_documents_name():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"`make ([a-z-]+)`", page.read_text()):
            assert target in targets, f"{page.name} names `make {target}`"
