"""`triptych serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triptych.cli import flags
from triptych.cli.compile import in_lines
from triptych.errors import ConfigError

if TYPE_CHECKING:
    from triptych.engine.config import EngineConfig
    from triptych.media.fetch import MediaPolicy
    from triptych.server.config import ServerConfig
    from triptych.server.traces import Traces
    from triptych.session import Session
    from triptych.session.opening import Opening

EXAMPLES = """
\b
Examples:
  triptych serve demo
  triptych serve ./smolvlm --port 0 --served-model-name eye
  triptych serve ./smolvlm --max-model-len 8K --limit-mm-per-prompt image=4
  triptych serve ./smolvlm --config serving.yaml --max-num-seqs 8
  triptych serve ./smolvlm --reduce cenprune:0.5:0.25 --kv-budget 0.4

\b
serving.yaml; a flag beats it, and an unknown key is refused:
  runtime:
    engine: triptych
    vision_encoder: "cpu:0"       --vision-device
    text_decoder: "cpu:0"         --decoder-device
    prefill_batch_size: 8         --vision-batch: tiles prefilled (encoded)
    decode_batch_size: 16         --max-num-seqs
    max_multimodal_tokens: 4096   --max-multimodal-tokens
    reduce: "cenprune:0.5"        --reduce
    kv_budget: 0.4                --kv-budget
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", metavar="BUNDLE|CHECKPOINT|demo")
@flags.all_of(flags.NETWORK, flags.LIMITS, flags.ENGINE, flags.MEDIA, flags.COMPATIBILITY)
@click.option(
    "--config", "config_path", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="SERVING.YAML",
    help="Settings from a file, as shown below.",
)  # fmt: skip
def verb(model: str, config_path: Path | None, **given: Any) -> None:
    """Serve a bundle, a Hugging Face checkpoint's folder (compiled once, into the cache), or `demo`.

    Speaks OpenAI's chat completions, completions, responses and models and Anthropic's messages, all below /v1;
    has /health, /metrics, /props and /version beside them, and a page to talk to it at /. Flags that `vllm serve`
    has too mean what they mean there.
    """
    from triptych.server import logs
    from triptych.server.listener import listen, url_of

    logs.set_up(format=given["log_format"])
    engine, server = _engine_config(given, config_path), _server_config(given)
    _tell_what_happens_instead(given)
    with listen(given["host"], given["port"]) as listener:
        opening = _begin(model, engine, given)
        from triptych.server import run  # the web application is imported while the decoder is opened
        from triptych.server.app import create_app
        from triptych.session import Session

        with _traces(given["otlp_traces_endpoint"]) as traces, Session.of(opening, _media_policy(given)) as session:
            _tell_plan(session, engine.vision_device)
            name, url = (server.model_names or (session.name,))[0], url_of(listener)
            app = create_app(session, server, traces)
            run.serve(app, listener, announce=lambda: click.echo(f"Triptych is serving {name} on {url}"))
    _say("stopped")


def _engine_config(given: Mapping[str, Any], config_path: Path | None) -> EngineConfig:
    from triptych.cli.settings import check_device, read_runtime, settle
    from triptych.engine.config import EngineConfig

    for name, flag in (("vision_device", "--vision-device"), ("decoder_device", "--decoder-device")):
        if given[name] is not None:
            check_device(given[name], flag)
    runtime = {} if config_path is None else read_runtime(config_path)
    names = {entry.name for entry in fields(EngineConfig)} | {"reduce"}
    settled = settle({name: value for name, value in given.items() if name in names}, runtime)
    for reason in settled.reasons:
        _say(reason)
    return settled.engine


def _server_config(given: Mapping[str, Any]) -> ServerConfig:
    from triptych.server.config import ServerConfig

    asked = {one.name: given[one.name] for one in fields(ServerConfig) if given.get(one.name) is not None}
    asked["allowed_origins"] = tuple(one for listed in given["allowed_origins"] for one in listed.split(","))
    return ServerConfig(**asked)


def _media_policy(given: Mapping[str, Any]) -> MediaPolicy:
    from triptych.media.fetch import MediaPolicy

    listed = [name.strip() for names in given["allowed_media_domains"] for name in names.split(",")]
    domains = frozenset(name.lower().rstrip(".") for name in listed if name)
    asked = {one.name: given[one.name] for one in fields(MediaPolicy) if given.get(one.name) is not None}
    return MediaPolicy(allowed_local_root=given["allowed_local_media_path"], allowed_domains=domains, **asked)


@contextmanager
def _traces(endpoint: str | None) -> Iterator[Traces | None]:
    """Where nobody asked for traces, OpenTelemetry is not even imported."""
    from triptych.server.traces import open_traces

    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if endpoint is None and not any(os.environ.get(name) for name in names):
        yield None
        return
    with contextlib.closing(open_traces(endpoint)) as traces:
        yield traces


def _begin(model: str, engine: EngineConfig, given: Mapping[str, Any]) -> Opening:
    from triptych.cli.processor import ProcessorChoice
    from triptych.session.opening import Source, begin

    choice = ProcessorChoice(name=given["mm_processor"], changes=given["mm_processor_kwargs"] or {})
    for name, value in choice.changes.items():
        _say(f"mm-processor-kwargs: {name} = {value}")
    return begin(Source(model=model, progress=in_lines(_say), adapt=choice), engine)


def _tell_what_happens_instead(given: Mapping[str, Any]) -> None:
    """Of other servers' flags. Raises ConfigError on those that ask for what is not done here."""
    for flag, (anyway, hint) in flags.REFUSED.items():
        name, value = flags.asked(flag, given)
        if value not in (None, anyway):
            raise ConfigError(f"{name} {value}".strip() + " is not served", hint=hint)
    for flag, instead in flags.IDLE.items():
        name, value = flags.asked(flag, given)
        if value is not None:
            _say(f"{name}: {instead}")


def _tell_plan(session: Session, vision_device: str) -> None:
    for choice in session.plan.choices:
        _say(choice)
    places = session.placements()
    for part in session.manifest.parts:
        if part.name in places:
            _say(f"{part.name} runs on {places[part.name]}, {part.precision} weights")
        elif part.name != "embedding":
            _say(f"{part.name} opens on {vision_device} with the first picture, {part.precision} weights")


def _say(sentence: str) -> None:
    import logging

    logging.getLogger("triptych.cli").info(sentence)
