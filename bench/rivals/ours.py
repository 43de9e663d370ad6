"""Triptych itself, asked what its rivals are asked: a real `Session`, its engine loop, streams read as a server does.

usage: ours.py BUNDLE [ngram]   (ngram: next tokens are guessed by prompt look-up)
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import worker

from triptych import Session
from triptych.core.policy import Speculation
from triptych.core.request import Sampling
from triptych.engine.config import EngineConfig
from triptych.session.answer import Stream


@dataclass(slots=True, kw_only=True)
class Arrivals:
    """When each token of one stream was in the reader's hands."""

    token_ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    async def read(self, stream: Stream) -> None:
        async for delta in stream:
            now = time.perf_counter()
            self.token_ids += delta.token_ids
            self.seconds += [now] * len(delta.token_ids)


class Ours:
    def __init__(self, bundle: Path, speculation: Speculation | None = None) -> None:
        self.weights = bundle
        config = EngineConfig(
            num_threads=worker.NUM_THREADS,
            max_num_seqs=worker.NUM_SEQUENCES,
            enable_prefix_caching=False,
            prompt_stretch=math.inf,  # prompts first, as the others are asked
            speculation=speculation,
        )
        self._session = Session.open(bundle, config=config)
        self._ids = itertools.count()
        self.settings = {
            "weights": {part.name: part.precision for part in self._session.manifest.parts},
            "decoder": self._session.placements()["decoder"],
            "choices": self._session.plan.choices,
            "prefix_caching": False,
        }
        self.versions = {name: version(name) for name in ("triptych", "openvino")}

    def prefill(self, prompt: list[int]) -> float:
        started = time.perf_counter()
        (arrivals,) = self._run([prompt], 1)
        return len(prompt) / (arrivals.seconds[0] - started)

    def decode(self, prompts: list[list[int]], new: int) -> float:
        """Counted while all sequences answer: from the last one's first token to the first one's last."""
        answers = self._run(prompts, new + 1)
        started = max(arrivals.seconds[0] for arrivals in answers)
        ended = min(arrivals.seconds[-1] for arrivals in answers)
        num_tokens = sum(started < second <= ended for arrivals in answers for second in arrivals.seconds)
        return num_tokens / (ended - started)

    def answer(self, prompt: list[int], new: int) -> list[int]:
        return self._run([prompt], new)[0].token_ids

    def _run(self, prompts: list[list[int]], new: int) -> list[Arrivals]:
        sampling = Sampling(max_tokens=new, temperature=0.0, ignore_eos=True)
        ready = [self._session.prepare_text(prompt) for prompt in prompts]

        async def run() -> list[Arrivals]:
            streams = [self._session.start(prompt, sampling, request_id=f"bench-{next(self._ids)}") for prompt in ready]
            answers = [Arrivals() for _ in streams]
            await asyncio.gather(*(answer.read(stream) for answer, stream in zip(answers, streams, strict=True)))
            return answers

        return asyncio.run(run())


if __name__ == "__main__":
    worker.serve(lambda: Ours(Path(sys.argv[1]), Speculation() if "ngram" in sys.argv else None))
