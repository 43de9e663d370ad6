"""The flags of `triptych serve`, in groups; those that `vllm serve` has mean what they mean there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from triptych.cli.values import HOSTS, KEY, NAME, ORIGINS, Count, Guesses, JsonObject, Limits, Seconds

Function = TypeVar("Function", bound=Callable[..., Any])
Option = Callable[[Any], Any]


def all_of(*groups: tuple[Option, ...]) -> Callable[[Function], Function]:
    """One decorator for many options, shown in their order."""

    def decorate(function: Function) -> Function:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


NETWORK = (
    click.option("--host", default="127.0.0.1", show_default=True,
                 help="Address to listen on. 0.0.0.0 lets other machines in: set --api-key then."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True,
                 help="0 takes a free one and prints it."),
    click.option("--api-key", "api_keys", type=KEY, multiple=True, envvar="TRIPTYCH_API_KEY", metavar="KEY",
                 help="Ask callers for this key; may be given several times, and then no cache is shared between keys. "
                      "Better set TRIPTYCH_API_KEY: flags are seen by every user of the machine."),
    click.option("--served-model-name", "model_names", type=NAME, multiple=True, metavar="NAME",
                 help="Name to answer to instead of the bundle's own; may be given several times."),
    click.option("--allowed-origins", type=ORIGINS, multiple=True, metavar="ORIGIN,…",
                 help="Web pages that may call from a browser, such as https://chat.example.org, or * for all. "
                      "The server's own page needs none."),
    click.option("--page/--no-page", default=True, show_default=True,
                 help="The chat page and its dashboard at `/`."),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
                 help="Log lines on stderr: for people, or an object a line for machines."),
    click.option("--otlp-traces-endpoint", metavar="URL",
                 help="Send a trace of each request there by OTLP over HTTP, such as http://localhost:4318/v1/traces. "
                      "OTEL_EXPORTER_OTLP_ENDPOINT and OpenTelemetry's other variables work too. "
                      "Needs the extra `otel`."),
    click.option("--shutdown-timeout", "drain_s", type=Seconds(0), metavar="SECONDS",
                 help="How long answers may go on after SIGTERM or Ctrl-C; 30 if not given."),
)  # fmt: skip

LIMITS = (
    click.option("--max-requests-per-key", type=Count(), metavar="N",
                 help="Requests that one caller may have under way. A caller is an API key; without keys, an address."),
    click.option("--max-requests-per-minute", type=Count(), metavar="N",
                 help="Requests of one caller, on the average of a minute."),
    click.option("--max-tokens-per-minute", type=Count(), metavar="N",
                 help="Tokens of one caller's prompts and answers, likewise. What is begun is answered; the next one "
                      "waits the longer (429, Retry-After)."),
    click.option("--request-timeout", "request_timeout_s", type=Seconds(0), metavar="SECONDS",
                 help="A request not answered by then ends with an error; 600 if not given. Callers may say less, in "
                      "the body's `timeout` or the header X-Request-Timeout."),
    click.option("--min-priority", type=int, metavar="N",
                 help="The most urgent `priority` that requests may have; 0 if not given: they may let others go "
                      "first, not pass them by."),
    click.option("--max-choices", type=Count(), metavar="N",
                 help="Answers to one request, its prompts times its `n`; 128 if not given. Each waits its turn."),
    click.option("--max-body-bytes", type=Count(), metavar="N",
                 help="Largest request body; 64M if not given. A picture in base64 takes 4/3 of its bytes."),
    click.option("--max-bodies-bytes", type=Count(), metavar="N",
                 help="Memory for all bodies under way; 512M if not given. Beyond it callers wait (429, Retry-After)."),
    click.option("--body-timeout", "body_s", type=Seconds(0, min_open=True), metavar="SECONDS",
                 help="How long a body may take to arrive; 60 if not given. More lets in pictures over slow links."),
    click.option("--max-connections", type=Count(), metavar="N",
                 help="Open at once; 2048 if not given, fewer where `ulimit -n` is less. The longest idle gives way."),
    click.option("--media-threads", type=Count(), metavar="N",
                 help="Requests with pictures prepared at once; 32 if not given. More where their hosts are slow."),
    click.option("--stall-timeout", "stall_s", type=Seconds(0, min_open=True), metavar="SECONDS",
                 help="Work without progress for so long, and /health says `stalled`; 120 if not given. More than "
                      "your model's longest step takes, or whatever watches /health restarts it at work."),
)  # fmt: skip

ENGINE = (
    click.option("--dtype", type=click.Choice(["auto", "half", "bfloat16", "float"]),
                 help="Arithmetic of every part. auto: what the device does best. float: exact, slower."),
    click.option("--max-model-len", type=Count(), metavar="TOKENS",
                 help="Context: tokens of prompt and answer together, such as 4096 or 8K."),
    click.option("--max-num-seqs", type=Count(), metavar="N", help="Answers written at once; the others wait."),
    click.option("--max-num-batched-tokens", type=Count(), metavar="TOKENS",
                 help="Tokens in one step. More: faster prompts. Fewer: answers under way are held up less."),
    click.option("--prompt-stretch", type=float, metavar="SHARE",
                 help="How much longer prompts may make a step that answers wait for: 0.4 if not given. More: prompts "
                      "sooner, answers less even. inf: prompts first, as batch work likes it."),
    click.option("--batch-invariant/--no-batch-invariant", default=None,
                 help="An answer has the same bits alone and under load, cached or not, with guesses and without (on "
                      "CPUs). Off: what was answered may serve the next turn's prompt, and guesses are cheaper."),
    click.option("--kv-cache-dtype", type=click.Choice(["auto", "u8", "u4", "bf16", "f32"]),
                 help="Number type of cached keys and values. u8: half of bf16's bytes, nearly exact. u4: lossy."),
    click.option("--kv-budget", type=float, metavar="SHARE",
                 help="Forget cached keys and values: 0.4 keeps two fifths of a prompt's, as a mean over layers. A "
                      "request may ask for more, up to 1, never for less. Nothing is forgotten unless given."),
    click.option("--kv-cache-bytes", type=Count(), metavar="N", help="Memory for cached keys and values, e.g. 2G."),
    click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=None,
                 help="Compute what prompts have in common once. On unless switched off."),
    click.option("--encoder-cache-bytes", type=Count(), metavar="N",
                 help="Memory for pictures already encoded, e.g. 256M; keyed by content, never by address."),
    click.option("--max-num-queued-reqs", "max_num_queued", type=Count(), metavar="N",
                 help="Requests that may wait; one more is told to come back (429)."),
    click.option("--max-queue-seconds", "max_queue_s", type=Seconds(0), metavar="SECONDS",
                 help="Work that may wait before a request, predicted from what this machine was seen to do; 60 if not "
                      "given. Beyond it callers are told when to come back (429, Retry-After)."),
    click.option("--speculative-config", "speculation", type=Guesses(), metavar="JSON",
                 help="Guess an answer's next tokens by what followed the same ones before, and compute them at once: "
                      "'{\"method\": \"ngram\"}', or ngram. None is answered that would not have come without. Answers "
                      "that repeat their prompt or themselves come faster; where guessing does not pay, none is made. "
                      "Also num_speculative_tokens (15, a step), prompt_lookup_min and prompt_lookup_max (2 and 4, "
                      "tokens in common)."),
    click.option("--num-threads", type=Count(), metavar="N", help="CPU threads of each part."),
    click.option("--vision-device", metavar="DEVICE", help="cpu:N, gpu:N or npu:N, as OpenVINO numbers them."),
    click.option("--decoder-device", metavar="DEVICE", help="Likewise, for the language model."),
    click.option("--vision-batch", type=Count(), metavar="N", help="Picture tiles encoded at once."),
)  # fmt: skip

MEDIA = (
    click.option("--limit-mm-per-prompt", type=Limits(), metavar="JSON",
                 help="Pictures in one request: '{\"image\": 4}' or image=4."),
    click.option("--max-multimodal-tokens", type=Count(), metavar="TOKENS",
                 help="Tokens that the pictures of one request may take, after --reduce."),
    click.option("--max-tiles-bytes", type=Count(), metavar="N",
                 help="Memory for the pictures of all requests: their files until they are cut into tiles, the tiles "
                      "until the answers end; 2G if not given. Beyond it callers wait (429, Retry-After)."),
    click.option("--reduce", metavar="METHOD:KEEP[:MIN]",
                 help="Leave visual tokens out: cenprune:0.5 keeps half of each picture's, where a request does not "
                      "say otherwise. A request may choose its method and keep any share from MIN (0 if not given) "
                      "up to all of them; --max-multimodal-tokens and --max-model-len hold for what it keeps. "
                      "cenprune, or cdpruner, tome, pool, grid, random."),
    click.option("--mm-processor", metavar="NAME",
                 help="Checked against the model's own, such as Idefics3Processor; a mismatch is refused."),
    click.option("--mm-processor-kwargs", type=JsonObject(), metavar="JSON",
                 help="Change how pictures are prepared: do_image_splitting, size, image_grid_pinpoints, where the "
                      "model has them, e.g. '{\"size\": {\"longest_edge\": 1024}}'. Others are refused."),
    click.option("--allowed-local-media-path", type=click.Path(exists=True, file_okay=False, path_type=Path),
                 help="Let requests name files under this folder as file:// URLs. None unless given."),
    click.option("--allowed-media-domains", type=HOSTS, multiple=True, metavar="DOMAIN,…",
                 help="Let requests name pictures on these hosts; `*` for any public one. None unless given: "
                      "pictures come inside the request."),
)  # fmt: skip

# Flags of `vllm serve` that have nothing to do here: accepted, and the log says what happens instead.
IDLE = {
    "--enable-flash-attn": "attention is always one fused, paged operation",
    "--trust-remote-code": "a checkpoint's own code is never run",
    "--enforce-eager": "every part is compiled before it serves, and no graph is captured",
    "--enable-chunked-prefill": "prompts are always read in pieces",
    "--gpu-memory-utilization SHARE": "no share of a device is taken; --kv-cache-bytes bounds the cache",
    "--swap-space GIB": "nothing is swapped out; what is put off is computed again",
    "--cpu-offload-gb GIB": "weights lie in main memory",
    "--enable-auto-tool-choice": "tools of a request are always on offer to the model",
    "--tool-call-parser NAME": "calls are read as the model's own chat template writes them",
    "--disable-log-requests": "what callers write is never logged",
    "--disable-log-stats": "the server's figures are at /metrics and /stats, not in the log",
}
_ONE = "one process serves a model on one device; start several, each with its --port"
_FOLDER = "nothing is downloaded by name; give a folder that has all files of the model"
# Those that ask for what is not done here, or are spelt otherwise: the one value that asks for what happens anyway
# (that is accepted), and what to do instead.
REFUSED = {
    "--tensor-parallel-size N": ("1", _ONE),
    "--pipeline-parallel-size N": ("1", _ONE),
    "--data-parallel-size N": ("1", _ONE),
    "--device NAME": ("cpu", "name devices by --vision-device and --decoder-device"),
    "--quantization METHOD": (None, "weights serve as they were compiled: `triptych compile --weights int4`"),
    "--kv-cache-memory-bytes N": (None, "write --kv-cache-bytes"),
    "--mm-processor-cache-gb GIB": (None, "encoded pictures are kept instead: --encoder-cache-bytes"),
    "--no-enable-chunked-prefill": (None, "prompts are always read in pieces; --max-num-batched-tokens bounds them"),
    "--chat-template FILE": (None, "put it into the model's folder as chat_template.jinja and compile that again"),
    "--reasoning-parser NAME": (None, "reasoning is not told apart: it stays in the answer's text"),
    "--enable-log-requests": (None, "what callers write is never logged; a line a request tells its figures"),
    "--enable-lora": (None, "merge the adapter into the weights and compile those"),
    "--seed N": ("0", "a request may have a `seed` of its own"),
    "--tokenizer NAME": (None, _FOLDER),
    "--revision NAME": (None, _FOLDER),
    "--ssl-keyfile FILE": (None, "put TLS before it: nginx, Caddy or a load balancer"),
}
COMPATIBILITY = tuple(
    click.option(name, is_flag=not value, metavar=value or None, hidden=flag in REFUSED,
                 help=f"Accepted, does nothing: {IDLE.get(flag)}.")
    for flag in (*IDLE, *REFUSED) for name, _, value in [flag.partition(" ")]
)  # fmt: skip


def asked(flag: str, given: Mapping[str, Any]) -> tuple[str, str | None]:
    """The name of such a flag and its value: empty where it takes none, None where it was not given."""
    name = flag.split()[0]
    value = given[name.strip("-").replace("-", "_")]
    return name, None if value in (None, False) else "" if value is True else value
