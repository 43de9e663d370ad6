"""What a text-only request costs on a multimodal bundle, against the bundle of its language model alone.

usage: python bench/text_only.py [BUNDLE|demo] --json OUT

Both are open in one process and take turns with the same questions, through the whole session: chat template,
tokenizer, engine, detokenizer. The bare bundle is the same files without the vision and projector parts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import msgspec
import record

from triptych import Session
from triptych.core.bundle import Bundle, Manifest, write_bundle
from triptych.core.chat import Chat, Message, TextPart
from triptych.core.request import Sampling
from triptych.engine.config import EngineConfig
from triptych.session.opening import Source, find_bundle

BARE = Path(__file__).parent / ".rivals" / "models" / "bare"
NEW_TOKENS = 48
TOPICS = ("rivers", "bridges", "bread", "winter", "music", "gardens", "trains", "the moon")


def bare(bundle: Bundle) -> Path:
    """The bundle's language model alone, beside the rivals' models."""

    def fill(folder: Path) -> Manifest:
        manifest = bundle.manifest
        parts = tuple(part for part in manifest.parts if part.name in ("decoder", "embedding"))
        gone = {path for part in manifest.parts if part not in parts for path in part.files}
        files = tuple(file for file in manifest.files if file.path not in gone)
        for file in files:
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(bundle.file(file.path).absolute(), folder / file.path)
        spec = msgspec.structs.replace(manifest.spec, vision=None, projector=None, image=None)
        return msgspec.structs.replace(manifest, name=f"{manifest.name}-bare", spec=spec, parts=parts, files=files)

    return write_bundle(BARE, fill).path


def ask(session: Session, number: int) -> tuple[float, tuple[int, ...]]:
    """Seconds to the last token of one answer, and its tokens."""
    words = " ".join(f"Tell me about {topic} in the year {1900 + number}." for topic in TOPICS)
    chat = Chat(messages=(Message(role="user", parts=(TextPart(text=words),)),))
    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    answer = session.start(session.prepare_chat(chat), sampling, request_id=f"text-{number}").answer()
    return time.perf_counter() - started, answer.token_ids


def compare(whole: Session, alone: Session, count: int) -> tuple[list[float], list[float]]:
    """Seconds of each, pair by pair; who goes first alternates. Raises SystemExit when their answers differ."""
    for number in range(2):
        ask(whole, number), ask(alone, number)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(2, count + 2):
        order = ((whole, seconds[0]), (alone, seconds[1]))
        answers = set()
        for session, had in order if number % 2 else reversed(order):
            taken, tokens = ask(session, number)
            had.append(taken)
            answers.add(tokens)
        if len(answers) != 1:
            raise SystemExit(f"question {number}: the two bundles answer differently")
    if "vision" in whole.placements():
        raise SystemExit("a text-only request opened the vision encoder")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", default="demo")
    parser.add_argument("--count", type=int, default=24, help="pairs of requests")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    bundle = find_bundle(Source(model=asked.bundle))
    config = EngineConfig(num_threads=2, enable_prefix_caching=False, kv_cache_bytes=256 << 20)
    with Session.open(bundle.path, config=config) as whole, Session.open(bare(bundle), config=config) as alone:
        with_vision, without = compare(whole, alone, asked.count)
    extra = [100 * (one / other - 1) for one, other in zip(with_vision, without, strict=True)]
    found = [
        record.measure("text-only request", "multimodal bundle", "s", with_vision),
        record.measure("text-only request", "bare language model", "s", without),
    ]
    low, *_, high = statistics.quantiles(extra, n=4) if len(extra) > 1 else extra * 2
    aim = record.Target(
        name="text-only request, more than bare", unit="%", value=statistics.median(extra),
        at_most=2.0, lowest=low, highest=high,
    )  # fmt: skip
    record.write(asked.json, record.record("text_only", found, [aim], {"spread": "quartiles", "pairs": asked.count}))
    print(f"text-only request on the multimodal bundle: {aim.value:+.2f} % ({low:+.2f} to {high:+.2f})")


if __name__ == "__main__":
    main()
