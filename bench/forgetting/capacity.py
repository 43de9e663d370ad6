"""How many sequences run at once in the same KV memory, and how fast they answer: one setting in one process.

usage: capacity.py BUNDLE OUT.json --cache u8 [--budget 0.58] [--bytes N] [--requests 24] [--answer 192]

Long conversations about several pictures are asked all at once, each answered with as many tokens. Memory is the limit:
the cache holds `--bytes`, however many requests wait. Figures are of the time in which requests were waiting.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from compression.tasks import cases

from triptych import Session
from triptych.core.request import Sampling
from triptych.engine.config import EngineConfig
from triptych.session import Source

NUM_THREADS = 2


def conversations(count: int) -> list[Any]:
    """The longest question of each conversation, longest conversations first, so that no two share a prefix."""
    longest: dict[str, Any] = {}
    for case in cases("long"):
        longest[case.cluster] = case  # a conversation's last question has all before it
    chosen = sorted(longest.values(), key=lambda case: -len(case.messages))
    return [chosen[i % len(chosen)] for i in range(count)]


class Watched:
    """What the engine's own runner did, step by step."""

    def __init__(self, session: Session) -> None:
        self._runner = session._engine.runner
        self._engine = session._engine
        self._decode = self._runner.decode
        self.steps: list[tuple[int, int, float, int, int]] = []  # sequences, tokens, seconds, waiting, blocks in use
        self._runner.decode = self  # type: ignore[method-assign, assignment]

    def __call__(self, works: Any) -> Any:
        started = time.perf_counter()
        found = self._decode(works)
        seconds = time.perf_counter() - started
        stats = self._engine.stats()
        used = stats.num_blocks - stats.free_blocks
        self.steps.append((stats.num_running, sum(w.num_tokens for w in works), seconds, stats.num_waiting, used))
        return found


def run(session: Session, count: int, answer: int) -> dict[str, Any]:
    prompts = [session.prepare_chat(case.chat()) for case in conversations(count)]
    sampling = Sampling(max_tokens=answer, temperature=0.0, ignore_eos=True)
    session.start(prompts[-1], Sampling(max_tokens=4, temperature=0.0), request_id="warm").answer()
    watched = Watched(session)
    evictor = session._engine.runner.evictor
    before = 0.0 if evictor is None else evictor.done.seconds
    started = time.perf_counter()
    streams = [session.start(prompt, sampling, request_id=f"r{i}") for i, prompt in enumerate(prompts)]
    for stream in streams:
        stream.answer()
    seconds = time.perf_counter() - started
    full = [step for step in watched.steps if step[3] > 0]
    pure = [step for step in full if step[1] == step[0]]
    if not pure:
        raise SystemExit("nobody waited while others answered: ask more --requests, or give fewer --bytes")
    stats = session.stats()
    return {
        "seconds": seconds,
        "prompt_tokens": sum(prompt.num_tokens for prompt in prompts) / count,
        "answers_per_s": count * answer / seconds,
        "running": sum(step[0] for step in pure) / len(pure),
        "running_most": max(step[0] for step in full),
        "decode_per_s": sum(step[1] for step in pure) / sum(step[2] for step in pure),
        "step_ms": 1e3 * sum(step[2] for step in pure) / len(pure),
        "preemptions": stats.preemptions,
        "compactions": stats.compactions,
        "evicted_tokens": stats.evicted_tokens,
        "compaction_s": 0.0 if evictor is None else evictor.done.seconds - before,
        "num_blocks": stats.num_blocks,
        "blocks_a_sequence": sum(step[4] / step[0] for step in pure) / len(pure),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", default="u8")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--bytes", type=int, default=120_000_000)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--answer", type=int, default=192)
    asked = parser.parse_args()
    config = EngineConfig(
        kv_cache_dtype=asked.cache,
        kv_cache_bytes=asked.bytes,
        kv_budget=asked.budget,
        max_model_len=1536,
        max_num_seqs=32,
        num_threads=NUM_THREADS,
    )
    with Session.open(Source(model=asked.bundle), config=config) as session:
        found = run(session, asked.requests, asked.answer)
    found |= {"cache": asked.cache, "budget": asked.budget, "bytes": asked.bytes}
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
