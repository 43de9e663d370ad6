"""The command line: verbs, flags, serving.yaml, and errors that people can mend."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from triptych.cli import main
from triptych.cli.flags import IDLE, REFUSED
from triptych.cli.processor import ProcessorChoice
from triptych.cli.settings import read_runtime, settle
from triptych.core.bundle import Bundle, Evidence, Manifest, Measure, Part, write_bundle
from triptych.core.policy import Reduction
from triptych.core.spec import ImageSpec, Modality
from triptych.errors import ConfigError
from triptych.testing import tiny_manifest


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """`serve` sets up logging, as a program may; other tests want it as it was."""
    loggers = [logging.getLogger(name) for name in ("triptych", "uvicorn")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def run(*words: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, words)


def bundle_at(folder: Path, **changes: Any) -> Bundle:
    import msgspec

    def fill(scratch: Path) -> Manifest:
        return msgspec.structs.replace(tiny_manifest(), **changes)

    return write_bundle(folder, fill)


EVIDENCE = Evidence(
    subject="decoder",
    twin="fp32 graph",
    inputs="8 prompts",
    measures=(Measure(name="kl_mean", value=0.0123, at_most=0.05), Measure(name="tokens", value=99.0)),
)
DECODER = Part(
    name="decoder", modality=Modality.TEXT, precision="int4", fallbacks=("layers.0: width 100: int8",),
    files=(), inputs=(), outputs=(), num_parameters=1234567,
)  # fmt: skip


# ── help and errors ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("verb", ["compile", "inspect", "serve", "ask"])
def test_every_verb_teaches(verb):
    told = run(verb, "--help")

    assert told.exit_code == 0
    assert "Usage:" in told.output
    if verb != "inspect":
        assert "Examples:" in told.output


def test_the_version_is_told():
    assert run("--version").output.startswith("triptych 0.")


def test_an_error_has_a_hint_and_its_own_exit_code_and_no_traceback(tmp_path):
    (tmp_path / "empty").mkdir()
    told = run("inspect", str(tmp_path / "empty"))

    assert told.exit_code == 4
    assert told.stdout == ""
    assert told.stderr.startswith("error: ")
    assert "hint:  `triptych compile CHECKPOINT -o BUNDLE` writes one" in told.stderr
    assert "Traceback" not in told.output
    assert run("ask", "nowhere", "hi").exit_code == 2
    assert run("serve", "demo", "--max-num-seqs", "none").exit_code == 2


def test_a_folder_that_cannot_be_written_is_told_without_a_traceback(tmp_path, monkeypatch):
    from triptych.session import Session

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/decoder.bin")

    monkeypatch.setattr(Session, "open", full)
    told = run("ask", "demo", "hi")

    assert told.exit_code == 1
    assert told.stderr == "error: /cache/decoder.bin: No space left on device\n"


def test_hosts_are_compared_as_names_are():
    from triptych.cli.serve import _media_policy

    given = {"allowed_media_domains": ("Example.ORG.,b.test",), "allowed_local_media_path": None}
    assert _media_policy(given).allowed_domains == {"example.org", "b.test"}


def test_tiles_may_take_as_much_memory_as_the_operator_says():
    from triptych.cli.serve import _media_policy, verb
    from triptych.media.fetch import MediaPolicy

    given = (verb.make_context("serve", ["demo", *flags]).params for flags in ([], ["--max-tiles-bytes", "1G"]))
    assert [_media_policy(one) for one in given] == [MediaPolicy(), MediaPolicy(max_tiles_bytes=1 << 30)]


def served(*given: str) -> Any:
    """The server's settings, as `triptych serve demo …` makes them."""
    from triptych.cli.serve import _server_config, verb

    return _server_config(verb.make_context("serve", ["demo", *given]).params)


def test_every_setting_of_the_server_has_a_flag_or_is_meant_to_have_none():
    from triptych.cli.serve import verb
    from triptych.server.config import ServerConfig

    names = {one.name for one in dataclasses.fields(ServerConfig)}
    without = names - {one.name for one in verb.params}
    assert without == {"max_head_bytes", "head_s", "write_s", "ping_s", "text_threads", "max_preparing"}
    assert all(f"`{name}`" in str(ServerConfig.__doc__) for name in without)


def test_what_the_flags_say_is_what_the_server_does():
    from triptych.server.config import ServerConfig

    assert served() == ServerConfig()
    given = (
        "--max-connections 9 --body-timeout 5 --stall-timeout 600 --media-threads 2 --max-choices 4 --no-page "
        "--max-bodies-bytes 1G --max-body-bytes 1G --shutdown-timeout 1 --api-key a"
    )
    assert served(*given.split()) == ServerConfig(
        max_connections=9, body_s=5.0, stall_s=600.0, media_threads=2, max_choices=4, max_bodies_bytes=1 << 30,
        max_body_bytes=1 << 30, drain_s=1.0, page=False, api_keys=("a",),
    )  # fmt: skip


def test_a_body_that_may_be_larger_than_all_together_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="one body may have 1,073,741,824 bytes, all together 536,870,912"):
        served("--max-body-bytes", "1G")


def test_no_colour_where_none_is_wanted(tmp_path):
    program = [sys.executable, "-c", "from triptych.cli import main; main()", "inspect", str(tmp_path)]
    told = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"}, check=False)

    assert told.returncode == 4
    assert "\x1b" not in told.stderr


# ── inspect ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_inspect_shows_parts_and_what_was_verified(tmp_path):
    bundle_at(tmp_path / "b", parts=(DECODER,), evidence=(EVIDENCE,))
    told = run("inspect", str(tmp_path / "b"), "--no-open")

    assert told.exit_code == 0
    for words in ("decoder", "int4", "1,234,567", "yes, 1 gates", "fp32 graph", "0.0123", "≤ 0.05", "not opened",
                  "decoder: layers.0: width 100: int8"):  # fmt: skip
        assert words in told.output


def test_a_name_is_shown_as_it_is_whatever_it_looks_like(tmp_path):
    bundle_at(tmp_path / "b", name="eye[v2][/]")
    told = run("inspect", str(tmp_path / "b"), "--no-open")

    assert told.exit_code == 0
    assert told.stdout.startswith("eye[v2][/]  ")


def test_inspect_as_json(tmp_path):
    bundle_at(tmp_path / "b", parts=(DECODER,), evidence=(EVIDENCE,))
    told = json.loads(run("inspect", str(tmp_path / "b"), "--json", "--no-open").stdout)

    assert told["manifest"]["parts"][0]["precision"] == "int4"
    assert told["placements"] == {}


# ── serving.yaml ───────────────────────────────────────────────────────────────────────────────────────────────


def yaml_at(folder: Path, text: str) -> Path:
    path = folder / "serving.yaml"
    path.write_text(text)
    return path


WHOLE = """
runtime:
  engine: triptych
  vision_encoder: "gpu:0"
  text_decoder: "cpu:0"
  prefill_batch_size: 8
  decode_batch_size: 16
  max_multimodal_tokens: 4096
  reduce: "pool:0.5:0.25"
  kv_budget: 0.4
"""


def test_serving_yaml_is_read_and_a_flag_beats_it(tmp_path):
    runtime = read_runtime(yaml_at(tmp_path, WHOLE))
    settled = settle({"max_num_seqs": 4, "max_model_len": 2048, "dtype": None}, runtime)

    assert settled.engine.vision_device == "gpu:0"
    assert settled.engine.decoder_device == "cpu:0"
    assert settled.engine.vision_batch == 8
    assert settled.engine.max_num_seqs == 4
    assert settled.engine.max_model_len == 2048
    assert settled.engine.max_multimodal_tokens == 4096
    assert (settled.engine.reduction, settled.engine.min_keep) == (Reduction(method="pool", keep=0.5), 0.25)
    assert settled.engine.kv_budget == 0.4
    assert settled.engine.dtype == "auto"
    assert "reduce = pool:0.5:0.25 (serving.yaml: reduce)" in settled.reasons
    assert "max-num-seqs = 4 (flag)" in settled.reasons
    assert "serving.yaml's decode_batch_size = 16 gives way to --max-num-seqs 4" in settled.reasons
    assert "vision-batch = 8 (serving.yaml: prefill_batch_size)" in settled.reasons


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runtime:\n  decode_batch: 4", "did you mean `decode_batch_size`"),
        ("runtimes: {}", "did you mean `runtime`"),
        ("runtime:\n  zebra: 1", "the known ones are engine"),
        ("runtime:\n  engine: vllm", "this server's engine is `triptych`"),
        ("runtime:\n  vision_encoder: cuda", "devices are cpu:N"),
        ("runtime:\n  vision_encoder: 3", "devices are cpu:N"),
        ("runtime:\n  decode_batch_size: many", "not a whole number"),
        ("runtime:\n  decode_batch_size: true", "not a whole number"),
        ("runtime:\n  decode_batch_size: 0", "not a whole number"),
        ("runtime:\n  reduce: 0.5", 'write METHOD:KEEP, such as "cenprune:0.5"'),
        ("runtime:\n  reduce: half", "is not METHOD:KEEP"),
        ("runtime:\n  reduce: magic:0.5", "choose one of cenprune"),
        ("runtime:\n  kv_budget: most", "not a share"),
        ("runtime:\n  kv_budget: .nan", "not a share"),
        ("runtime: [1]", "is not a mapping"),
        ("runtime: []", "is not a mapping"),
        ("- a", "is not a mapping"),
        ("runtime: {", "serving.yaml"),
        ("", "is not a mapping"),
    ],
)
def test_what_serving_yaml_may_not_say_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError) as told:
        read_runtime(yaml_at(tmp_path, text))

    assert words in str(told.value)


def test_an_empty_runtime_decides_nothing(tmp_path):
    assert read_runtime(yaml_at(tmp_path, "runtime:\n")) == {}


# ── values ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-model-len", "8q", "is not a number such as"),
        ("--max-model-len", "0", "is not a number such as"),
        ("--max-model-len", "1.0005k", "is not a number such as"),
        ("--limit-mm-per-prompt", "{image: 4}", "is not JSON"),
        ("--limit-mm-per-prompt", '{"image": -1}', "is not a number of items"),
        ("--limit-mm-per-prompt", '{"smell": 1}', "is no modality"),
        ("--limit-mm-per-prompt", "video=2", "no video is served yet"),
        ("--kv-cache-dtype", "fp8", "is not one of"),
        ("--dtype", "int3", "is not one of"),
        ("--mm-processor-kwargs", "[1]", "is not a JSON object"),
        ("--port", "70000", "is not in the range"),
        ("--vision-device", "cuda:0", "names no device"),
        ("--api-key", "", "a header must carry it"),
        ("--api-key", "ключ", "a header must carry it"),
        ("--served-model-name", " ", "more than spaces"),
        ("--shutdown-timeout", "nan", "not a number of seconds"),
        ("--shutdown-timeout", "inf", "not a number of seconds"),
        ("--allowed-media-domains", "https://example.org", "name hosts alone"),
        ("--reduce", "cenprune", "is not METHOD:KEEP"),
        ("--reduce", "cenprune:half", "is not METHOD:KEEP"),
        ("--reduce", "cenprune:0.5:0.2:0.1", "is not METHOD:KEEP"),
        ("--reduce", "zip:0.5", "no reduction is called 'zip'"),
        ("--reduce", "grid:0", "keep 0.0 is not in (0, 1]"),
        ("--reduce", "grid:nan", "keep nan is not in (0, 1]"),
        ("--reduce", "grid:0.5:0.6", "0.6, is not in 0 to 0.5"),
        ("--reduce", "grid:0.5:nan", "nan, is not in 0 to 0.5"),
        ("--kv-budget", "0", "is not in (0, 1]"),
        ("--kv-budget", "nan", "is not in (0, 1]"),
        ("--kv-budget", "all", "is not a valid float"),
        ("--host", "999.1.1.1", "is --host an address of this machine"),
    ],
)
def test_a_flag_that_cannot_be_is_told_so(flag, value, words):
    told = run("serve", "demo", flag, value)

    assert told.exit_code == 2
    assert words in " ".join(told.stderr.split())


@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_of_vllms_that_asks_for_what_is_not_done_is_refused_with_what_to_do(flag):
    name, _, value = flag.partition(" ")
    told = run("serve", "demo", name, *(["7"] if value else []))

    assert told.exit_code == 2
    assert f"{name} 7 is not served" in told.stderr or f"{name} is not served" in told.stderr
    assert f"hint:  {REFUSED[flag][1]}" in told.stderr


def test_a_flag_of_vllms_that_has_nothing_to_do_says_what_happens_instead(caplog):
    from triptych.cli.serve import _tell_what_happens_instead, verb

    idle = [word for flag in IDLE for word in ([flag.split()[0], "9"] if " " in flag else [flag])]
    as_ever = ["--tensor-parallel-size", "1", "--seed", "0"]
    with caplog.at_level(logging.INFO, "triptych.cli"):
        _tell_what_happens_instead(verb.make_context("serve", ["demo", *idle, *as_ever]).params)

    assert [record.getMessage() for record in caplog.records] == [f"{x.split()[0]}: {IDLE[x]}" for x in IDLE]


@pytest.mark.parametrize(
    ("text", "value"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2G", 2 << 30)]
)
def test_counts_are_written_as_vllm_writes_them(text, value):
    from triptych.cli.values import Count

    assert Count().convert(text, None, None) == value


@pytest.mark.parametrize("text", ['{"image": 4}', '{"image": {"count": 4}}', "image=4", "image=4,video=0"])
def test_limits_are_read_in_each_of_vllms_forms(text):
    from triptych.cli.values import Limits

    assert Limits().convert(text, None, None)["image"] == 4


# ── the processor ──────────────────────────────────────────────────────────────────────────────────────────────

SPLIT = ImageSpec(
    tiling="split", tile_size=512, tokens_per_tile=64, resample="lanczos", longest_edge=2048, placeholder="<image>"
)


def manifest(image: ImageSpec | None, family: str = "idefics3") -> Manifest:
    import msgspec

    tiny = tiny_manifest()
    return msgspec.structs.replace(tiny, spec=msgspec.structs.replace(tiny.spec, image=image, family=family))


def test_the_processors_own_name_is_checked():
    own = manifest(SPLIT)
    assert ProcessorChoice(name="SmolVLMProcessor")(own) == own
    assert ProcessorChoice()(own) == own
    with pytest.raises(ConfigError, match="`Idefics3Processor`"):
        ProcessorChoice(name="LlavaProcessor")(own)
    with pytest.raises(ConfigError, match="which is none"):
        ProcessorChoice(name="LlavaProcessor")(manifest(None))


def test_the_processors_settings_are_applied():
    whole = ProcessorChoice(changes={"do_image_splitting": False})(manifest(SPLIT)).spec.image
    smaller = ProcessorChoice(changes={"size": {"longest_edge": 1024}})(manifest(SPLIT)).spec.image

    assert whole is not None
    assert smaller is not None
    assert whole.tiling == "one"
    assert (smaller.tiling, smaller.longest_edge) == ("split", 1024)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_pixels": 3}, "unknown setting `max_pixels`"),
        ({"do_image_splitting": "yes"}, "not true or false"),
        ({"size": {"longest_edge": 9999}}, "from 512 (one tile) to 2048 pixels"),
        ({"size": 512}, "from 512"),
        ({"image_grid_pinpoints": [[1, 1]]}, "the model's own"),
    ],
)
def test_settings_the_processor_cannot_have_are_refused(changes, words):
    with pytest.raises(ConfigError) as told:
        ProcessorChoice(changes=changes)(manifest(SPLIT))

    assert words in str(told.value)


def test_parts_and_precisions_are_checked_before_anything_is_read(tmp_path):
    for parts, words in (("vison=int8", "the parts are"), ("vision=int3", "it can be held in")):
        told = run("compile", str(tmp_path), "-o", str(tmp_path / "out"), "--parts", parts)
        assert told.exit_code == 2
        assert words in told.stderr


# ── from a checkpoint to an answer, as a user goes ─────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from checkpoints import make

    return make("smolvlm", tmp_path_factory.getbasetemp(), seed=0)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from checkpoints import picture as draw

    path = tmp_path_factory.mktemp("pictures") / "a.png"
    draw(90, 60).save(path)
    return path


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundles") / "tiny"
    told = run("compile", str(checkpoint), "-o", str(target), "--weights", "int8", "--parts", "projector=fp32")
    assert told.exit_code == 0, told.output
    assert told.stdout.strip() == str(target)
    return target


@pytest.mark.reference
def test_a_compiled_bundle_is_inspected_and_tells_where_it_runs(bundle):
    told = run("inspect", str(bundle))

    assert told.exit_code == 0, told.output
    assert told.output.count("CPU (") >= 3
    assert "fp32" in told.output
    assert "int8" in told.output
    assert run("inspect", str(bundle), "--digests", "--no-open").exit_code == 0


@pytest.mark.reference
def test_a_question_is_answered_on_stdout_and_figures_go_to_stderr(bundle, picture):
    words = ("ask", str(bundle), "What is this?", "--image", str(picture), "--max-tokens", "6")
    first, again = run(*words), run(*words)

    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout != "\n"
    assert "of pictures" in first.stderr
    assert "6 out (cut by --max-tokens)" in first.stderr


@pytest.mark.reference
def test_serve_announces_itself_answers_and_leaves_with_zero(bundle, picture):
    import base64
    import signal

    import openai

    command = [
        sys.executable, "-c", "from triptych.cli import main; main()", "serve", str(bundle), "--port", "0",
        "--served-model-name", "eye", "--api-key", "sesame", "--max-num-seqs", "4", "--dtype", "float",
        "--enable-flash-attn", "--trust-remote-code", "--mm-processor", "SmolVLMProcessor",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        name, _, url = process.stdout.readline().removeprefix("Triptych is serving ").strip().partition(" on ")
        assert name == "eye"
        uri = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What is this?"}]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="eye", messages=[{"role": "user", "content": content}], max_tokens=6, temperature=0
            )
        assert answer.usage.completion_tokens == 6
        assert answer.usage.prompt_tokens_details.image_tokens > 0
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()

    assert process.returncode == 0
    for words in (
        "max-num-seqs = 4 (flag)", "attention is always one fused, paged operation", "own code is never run",
        "decoder runs on CPU (", "vision opens on cpu:0 with the first picture", "vision runs on CPU (", "stopped",
    ):  # fmt: skip
        assert words in log
    assert "sesame" not in log
