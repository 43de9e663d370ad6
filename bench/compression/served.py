"""One cell in a process of its own, asked through `Session`: answers, forced tokens' logits, times.

usage: served.py quality|speed|capacity BUNDLE CELL.json OUT.json REFERENCE

quality: greedy answers to the cell's questions; then the sampler is replaced by one that writes the reference's answer
whatever the logits say, and keeps the logits. So scheduler, paged cache, reduction and eviction are the served ones,
and each row stands on the same tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from compression.cells import NEVER, WHOLE, Cell
from compression.figures import divergence
from compression.filler import ASKED
from compression.tasks import MAX_TOKENS, Case, cases
from triptych import Session
from triptych.core.policy import KVPolicy, Reduction
from triptych.core.request import Sampling
from triptych.engine import loop
from triptych.engine.config import EngineConfig
from triptych.engine.sampler import Choice
from triptych.engine.sequence import Sequence
from triptych.session import Prompt, Source

TEXT_TOKENS = 48
EVERY = {"single": 3, "long": 2}  # of the questions, which are forced too
NUM_THREADS = 2


def opened(bundle: Path, cell: Cell, **more: Any) -> Session:
    """The cell's own settings, as an operator would give them."""
    settings: dict[str, Any] = {"num_threads": NUM_THREADS, "max_model_len": 2048, "kv_cache_dtype": cell.cache}
    if cell.cache == "f32":
        settings["dtype"] = "float"
    if cell.reduce != WHOLE:
        reducer, keep = cell.reduce.split(":")
        settings["reduction"] = Reduction(method=reducer, keep=float(keep))  # type: ignore[arg-type]
    source, method = Source(model=bundle), cell.evict.split(":")[0]
    if cell.evict != NEVER:
        budget = cell.evict.split(":")[1]
        settings["kv_budget"] = float(budget)
        source = Source(model=bundle, adapt=lambda manifest: _forgetting(manifest, method))
    session = Session.open(source, config=EngineConfig(**(settings | more)))
    if cell.evict != NEVER and not any(f"kv-eviction = {method} " in choice for choice in session.plan.choices):
        session.close()
        raise SystemExit(f"{bundle} does not forget by {method}: {session.plan.choices[-1]}")
    return session


def _forgetting(manifest: Any, method: str) -> Any:
    """What `compress` proposed, by another method. A server falls back where one lacks statistics; a bench does not."""
    policy = manifest.kv_policy or KVPolicy()
    if method == "expected" and not policy.statistics:
        raise SystemExit("`expected` needs a bundle with statistics: one that `triptych compress` measured")
    return msgspec.structs.replace(manifest, kv_policy=msgspec.structs.replace(policy, method=method))


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def answers(session: Session, name: str) -> list[dict[str, Any]]:
    """Every question of a set with its greedy answer and the verdict; of `text`, answers alone."""
    if name == "text":
        return texts(session)
    asked, sampling, done = cases(name), Sampling(max_tokens=MAX_TOKENS, temperature=0.0), []
    for case, answer in zip(asked, _run(session, [case.chat() for case in asked], sampling), strict=True):
        facts = {"id": case.id, "set": case.id.split("-")[0], "kind": case.kind, "split": case.split}
        said = {"text": answer.text, "token_ids": answer.token_ids, "right": case.is_right(answer.text)}
        done.append(facts | said | {"cluster": case.cluster, "prompt_tokens": answer.usage.prompt_tokens})
    return done


def texts(session: Session) -> list[dict[str, Any]]:
    prompts = [_text_chat(session, question) for question in ASKED]
    said = _answers(session, prompts, Sampling(max_tokens=TEXT_TOKENS, temperature=0.0))
    return [
        {"id": f"text-{i}", "set": "text", "text": answer.text, "token_ids": answer.token_ids}
        for i, answer in enumerate(said)
    ]


def _run(session: Session, chats: list[Any], sampling: Sampling) -> list[Any]:
    return _answers(session, [session.prepare_chat(chat) for chat in chats], sampling)


def _answers(session: Session, prompts: list[Prompt], sampling: Sampling) -> list[Any]:
    streams = [
        session.start(prompt, sampling, request_id=f"bench-{time.perf_counter_ns()}-{i}")
        for i, prompt in enumerate(prompts)
    ]
    return [stream.answer() for stream in streams]


def _text_chat(session: Session, question: str) -> Prompt:
    from triptych.core.chat import Chat, Message, TextPart

    return session.prepare_chat(Chat(messages=(Message(role="user", parts=(TextPart(text=question),)),)))


# ── forced tokens ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Forced:
    """Writes what it is told and keeps what the model would have said."""

    texts: dict[str, list[int]]  # by request id
    keep: Callable[[str, int, NDArray[np.float32]], None]  # (request id, place in the answer, logits)
    rows: int = field(default=0)

    def __call__(self, logits: NDArray[np.float32], sequences: list[Sequence], **settings: Any) -> list[Choice | None]:
        chosen: list[Choice | None] = []
        for row, sequence in zip(logits, sequences, strict=True):
            place = sequence.num_answer_tokens
            self.keep(sequence.request.id, place, row)
            self.rows += 1
            chosen.append(Choice(token_id=self.texts[sequence.request.id][place], logprob=None))
        return chosen


@contextmanager
def forcing(chooser: Forced) -> Iterator[None]:
    plain, loop.sample = loop.sample, chooser  # type: ignore[assignment]
    try:
        yield
    finally:
        loop.sample = plain


def force(session: Session, texts: dict[str, list[int]], keep: Callable[[str, int, NDArray[np.float32]], None]) -> None:
    """Have each request of `texts` answered with its text."""
    by_id: dict[str, Case] = {case.id: case for name in EVERY for case in cases(name)}
    with forcing(Forced(texts, keep)):
        streams = []
        for key, text in texts.items():
            prompt = (
                _text_chat(session, ASKED[int(key[5:])])
                if key.startswith("text-")
                else session.prepare_chat(by_id[key].chat())
            )
            sampling = Sampling(max_tokens=len(text), temperature=0.0, ignore_eos=True)
            streams.append(session.start(prompt, sampling, request_id=key))
        for stream in streams:
            stream.answer()


def forced_texts(said: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Of the reference's answers those that are forced: each third question, each second long one, all texts."""
    count: dict[str, int] = defaultdict(int)
    texts = {}
    for each in said:
        count[each["set"]] += 1
        if count[each["set"]] % EVERY.get(each["set"], 1) == 0:
            texts[each["id"]] = list(each["token_ids"])
    return texts


class Reference:
    """The reference's logits on disk, of each set: row by row as they came, with an index by request and place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, session: Session, name: str, texts: dict[str, list[int]]) -> None:
        index: dict[str, int] = {}
        with self._logits(name).open("wb") as file:

            def keep(key: str, place: int, row: NDArray[np.float32]) -> None:
                index[f"{key} {place}"] = len(index)
                file.write(np.ascontiguousarray(row, np.float32).tobytes())

            force(session, texts, keep)
        self._index(name).write_text(json.dumps({"texts": texts, "rows": index}))

    def _logits(self, name: str) -> Path:
        return self.folder / f"{name}.logits.f32"

    def _index(self, name: str) -> Path:
        return self.folder / f"{name}.index.json"

    def compare(self, session: Session, name: str) -> list[dict[str, Any]]:
        """Divergences of each forced request of a set, and whether the top tokens agree."""
        facts = json.loads(self._index(name).read_text())
        rows = facts["rows"]
        logits = np.memmap(self._logits(name), np.float32, "r").reshape(len(rows), -1)
        found: dict[str, list[tuple[int, float, bool]]] = defaultdict(list)

        def keep(key: str, place: int, row: NDArray[np.float32]) -> None:
            kld, same = divergence(logits[rows[f"{key} {place}"]][None], row[None])
            found[key].append((place, float(kld[0]), bool(same[0])))

        force(session, facts["texts"], keep)
        return [
            {
                "id": key,
                "set": key.split("-")[0],
                "kld": [each[1] for each in sorted(had)],
                "same": [each[2] for each in sorted(had)],
            }
            for key, had in found.items()
        ]


def quality(session: Session, cell: Cell, reference: Reference) -> dict[str, Any]:
    """Set by set, so that forced prompts find their beginning in the prefix cache."""
    found: dict[str, Any] = {"answers": [], "rows": []}
    for name in cell.sets:
        said = answers(session, name)
        found["answers"] += said
        if cell.is_reference:
            reference.write(session, name, forced_texts(said))
        found["rows"] += reference.compare(session, name)
    found["block_bytes"] = session._engine.runner._decoder.block_bytes  # type: ignore[attr-defined]
    return found


# ── speed ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def speed(session: Session) -> dict[str, Any]:
    """Times of single requests on pictures never seen before, and decoding on its own. Seconds, tokens/s, bytes."""
    found: dict[str, list[float]] = defaultdict(list)
    chats = {
        "1 picture": [case.chat() for case in cases("single")[:12]],
        "many": [case.chat() for case in cases("long")[::6][:4]],
    }
    _run(session, [case.chat() for case in cases("single")[-3:]], Sampling(max_tokens=4, temperature=0.0))
    for name, each in chats.items():
        for chat in each:
            prompt, before = session.prepare_chat(chat), session.stats().stage_seconds
            started = time.perf_counter()
            stream = session.start(
                prompt, Sampling(max_tokens=2, temperature=0.0, ignore_eos=True), request_id=f"t{started}"
            )
            next(iter(stream))
            found[f"{name}, TTFT"].append(time.perf_counter() - started)
            for _ in stream:
                pass
            after = session.stats().stage_seconds
            for stage in ("encode", "project", "reduce", "prefill"):
                spent = sum(seconds - before.get(key, 0.0) for key, seconds in after.items() if key[0] == stage)
                found[f"{name}, {stage}"].append(spent)
    for batch in (1, 8):
        found[f"decode {batch}"].append(_decode(session, batch))
    return {"figures": found, "memory_bytes": _resident(), "block_bytes": session._engine.runner._decoder.block_bytes}


def _decode(session: Session, batch: int, new: int = 48) -> float:
    rng = np.random.default_rng(batch)
    prompts = [session.prepare_text([int(token) for token in rng.integers(1000, 40000, 128)]) for _ in range(batch)]
    sampling = Sampling(max_tokens=new, temperature=0.0, ignore_eos=True)
    streams = [session.start(prompt, sampling, request_id=f"d{batch}-{i}") for i, prompt in enumerate(prompts)]
    timings = [stream.answer().timing for stream in streams]
    return batch * (new - 1) / max(timing.decode_s for timing in timings)


# ── how many fit ───────────────────────────────────────────────────────────────────────────────────────────────────

CACHE_BYTES = 96 << 20
ANSWER_TOKENS = 96


def capacity(session: Session) -> dict[str, Any]:
    """All long conversations at once, each on its own, in CACHE_BYTES: how many run together, and how fast."""
    first = {case.cluster: case for case in cases("long")}
    prompts = [session.prepare_chat(case.chat()) for case in first.values()]
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    _answers(session, prompts[:1], Sampling(max_tokens=2, temperature=0.0))
    counts, before, started = [], session.stats(), time.perf_counter()
    streams = [session.start(prompt, sampling, request_id=f"room-{i}") for i, prompt in enumerate(prompts)]
    while (stats := session.stats()).num_running or stats.num_waiting:
        counts.append(stats.num_running)
        time.sleep(0.05)
    seconds = time.perf_counter() - started
    tokens = sum(len(stream.answer().token_ids) for stream in streams)
    decode_s = sum(
        spent - before.stage_seconds.get(key, 0.0) for key, spent in stats.stage_seconds.items() if key[0] == "decode"
    )
    return {
        "at_once": max(counts),
        "mean_at_once": float(np.mean(counts)),
        "tokens_per_s": tokens / seconds,
        "decode_tokens_per_s": tokens / max(decode_s, 1e-9),
        "cache_bytes": stats.num_blocks * session._engine.runner._decoder.block_bytes,
        "preemptions": stats.preemptions - before.preemptions,
        "prompt_tokens": sum(prompt.num_tokens for prompt in prompts),
    }


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    task, bundle, cell_file, out, folder = sys.argv[1:]
    cell = Cell(**json.loads(Path(cell_file).read_text()))
    more: dict[str, Any] = {}
    if task in ("speed", "capacity"):
        more = {"enable_prefix_caching": False, "max_num_seqs": 16}
    if task == "capacity":
        more |= {"kv_cache_bytes": CACHE_BYTES, "max_num_seqs": 32, "max_model_len": 1280}
    with opened(Path(bundle), cell, **more) as session:
        started = time.perf_counter()
        if task == "quality":
            result = quality(session, cell, Reference(Path(folder)))
        else:
            result = {"speed": speed, "capacity": capacity}[task](session)
        stats = session.stats()
        plan = {"choices": session.plan.choices, "places": session.placements(), "preemptions": stats.preemptions}
    Path(out).write_text(json.dumps(result | {"plan": plan, "seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
