"""What forgetting costs: each method and budget on the same cached prompts, then forced along the full cache's answer.

usage: quality.py BUNDLE OUT.jsonl [--every N] [--cells expected:0.5,snapkv:0.5:adaptive,…] [--judge]

A prompt is computed once; every method forgets on a copy of its own, beside the full cache, and all are fed the answer
that the full cache gave. So a row differs by what was forgotten alone. Then each answers by itself, for the verdict.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from compression.tasks import MAX_TOKENS, Case, cases

from triptych.core.policy import KVPolicy
from triptych.core.queries import Queries
from triptych.core.request import Sampling
from triptych.engine.blocks import Blocks
from triptych.engine.config import EngineConfig
from triptych.engine.evict.evictor import Evictor
from triptych.engine.evict.layout import Layout, slots_of
from triptych.engine.scheduler import Step, Work
from triptych.engine.sequence import Sequence
from triptych.session import Source
from triptych.session.session import Session

METHODS = ("expected", "snapkv", "tova", "knorm", "window")
BUDGETS = (0.7, 0.5, 0.3)
WINDOW = 32
CELLS = (*(f"{method}:{budget}" for method in METHODS for budget in BUDGETS), "snapkv:0.58", "snapkv:0.58:adaptive")
WHOLE = KVPolicy(method="snapkv")


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to forget."""

    name: str
    policy: KVPolicy
    evictor: Evictor


class Lab:
    """A model with its cache, turned by hand."""

    def __init__(self, bundle: Path, cells: list[str]) -> None:
        adapt = lambda manifest: msgspec.structs.replace(manifest, kv_policy=WHOLE)  # noqa: E731
        config = EngineConfig(kv_budget=0.01, max_model_len=2048, max_num_batched_tokens=2048, kv_cache_bytes=1 << 29)
        self.session = Session.open(Source(model=bundle, adapt=adapt), config=config)
        self.runner = self.session._engine.runner
        self.eos = self.session.manifest.spec.eos_ids
        self.decoder = self.runner._decoder
        self.blocks = Blocks(self.session.plan.num_blocks)
        manifest = json.loads((bundle / "bundle.json").read_text())
        self.base = msgspec.convert(manifest.get("kv_policy") or {}, KVPolicy)
        self.cells = [self._cell(bundle, name) for name in cells]

    def _cell(self, bundle: Path, name: str) -> Cell:
        method, budget, *options = name.split(":")
        policy = msgspec.structs.replace(self.base, method=method, budget=float(budget), window=WINDOW)
        for option in options:
            policy = OPTIONS[option](policy)
        spec, queries = self.session.manifest.spec.decoder, None
        if method == "expected":
            queries = Queries.read(bundle / self.base.statistics, (spec.num_layers, spec.num_heads, spec.head_dim))
        return Cell(name, policy, Evictor(self.decoder, spec, policy, queries))

    def prompt(self, case: Case) -> Sequence:
        """A sequence whose prompt is computed, and the first token of its answer appended."""
        request = self.session.prepare_chat(case.chat()).request(case.id, Sampling(max_tokens=MAX_TOKENS))
        sequence = Sequence(replace(request, kv=WHOLE), lambda delta: None, now_s=0.0)
        sequence.admit([], num_cached=0, now_s=0.0)
        self._room(sequence, sequence.num_tokens)
        work = Work(sequence=sequence, start=0, num_tokens=sequence.num_tokens)
        self.runner.encode(Step(works=(work,), encode=tuple(sequence.patches_in(0, work.end))))
        _, logits = self.runner.decode((work,))
        sequence.commit(work.num_tokens)
        sequence.append(int(logits[0].argmax()), now_s=0.0)
        self.runner.features.release(sequence.held)
        return sequence

    def copy(self, sequence: Sequence, policy: KVPolicy) -> Sequence:
        """Another reader of the same pages."""
        own = Sequence(replace(sequence.request, kv=policy), lambda delta: None, now_s=0.0)
        self.blocks.share(sequence.blocks)
        own.admit(list(sequence.blocks), num_cached=sequence.num_computed, now_s=0.0)
        own.queries = None if sequence.queries is None else sequence.queries.copy()
        own.append(int(sequence.answer[0]), now_s=0.0)
        return own

    def forget(self, sequence: Sequence, evictor: Evictor) -> None:
        """Forget where it is due, and go on in blocks that nobody else reads."""
        evictor.forget(sequence, self.blocks)
        if sequence.layout is None:  # nothing was forgotten: its last block is still shared, and would be written
            rows = [np.arange(sequence.num_computed)] * evictor.deal.num_layers
            old = evictor.deal.pages(sequence.blocks)
            layout = Layout(evictor.deal, rows, sequence.num_computed)
            own = self.blocks.allocate(len(sequence.blocks))
            layout.grow(own, sequence.num_computed)
            self.decoder.move(
                [slots_of(table, tokens) for table, tokens in zip(old, rows, strict=True)],
                [layout.slots(layer, tokens) for layer, tokens in enumerate(rows)],
            )
            self.blocks.release(sequence.blocks)
            sequence.forget(own, layout)

    def forced(self, sequences: list[Sequence], tokens: list[int]) -> np.ndarray:
        """Logits of every token fed, (sequences, tokens, vocab). The sequences grow by them."""
        works = []
        for sequence in sequences:
            for token in tokens[1:]:
                sequence._tokens[sequence.num_tokens] = token
                sequence.num_tokens += 1
            self._room(sequence, sequence.num_tokens)
            works.append(Work(sequence=sequence, start=sequence.num_computed, num_tokens=len(tokens)))
        arrays = self.runner._arrays(tuple(works))
        arrays["sampled"] = np.arange(len(tokens) * len(sequences))
        return self.decoder(arrays)["logits"].reshape(len(sequences), len(tokens), -1)

    def decode(self, sequences: list[Sequence]) -> None:
        """Each to the end of its answer."""
        going = list(sequences)
        while going:
            for sequence in going:
                self._room(sequence, sequence.num_tokens)
            works = tuple(Work(sequence=one, start=one.num_computed, num_tokens=1) for one in going)
            _, logits = self.runner.decode(works)
            for sequence, row in zip(going, logits, strict=True):
                sequence.commit(1)
                sequence.append(int(row.argmax()), now_s=0.0)
            going = [one for one in going if one.answer[-1] not in self.eos and one.num_answer_tokens < MAX_TOKENS]

    def _room(self, sequence: Sequence, num_tokens: int) -> None:
        need = sequence.blocks_for(num_tokens) - len(sequence.blocks)
        sequence.grow(self.blocks.allocate(need), num_tokens)

    def text(self, sequence: Sequence) -> str:
        writer = self.session.text.detokenizer()
        said = writer.push(int(token) for token in sequence.answer if token not in self.eos)
        return said + writer.flush(has_ended=True)


OPTIONS: dict[str, Any] = {
    "adaptive": lambda policy: msgspec.structs.replace(policy, adaptive=0.2),
    "nofloor": lambda policy: msgspec.structs.replace(policy, floors={}),
}


def look(lab: Lab, case: Case, *, judge: bool) -> dict[str, dict[str, Any]]:
    """Every cell's figures on one question."""
    prompt = lab.prompt(case)
    full = lab.copy(prompt, WHOLE)
    lab.forget(full, lab.cells[0].evictor)
    lab.decode([full])
    answer = [int(token) for token in full.answer]
    found = forced(lab, prompt, answer)
    if judge:
        found["full"] = {"right": case.is_right(lab.text(full))}
        readers = [lab.copy(prompt, cell.policy) for cell in lab.cells]
        for reader, cell in zip(readers, lab.cells, strict=True):
            lab.forget(reader, cell.evictor)
        lab.decode(readers)
        for cell, reader in zip(lab.cells, readers, strict=True):
            found[cell.name]["right"] = case.is_right(lab.text(reader))
            lab.blocks.release(reader.blocks)
    lab.blocks.release(full.blocks)
    lab.blocks.release(prompt.blocks)
    assert lab.blocks.num_free == lab.blocks.num_blocks
    return found


def forced(lab: Lab, prompt: Sequence, answer: list[int]) -> dict[str, dict[str, Any]]:
    """How far every cell is from the whole cache along its answer, and what forgetting took."""
    readers, found = [lab.copy(prompt, WHOLE)], {}
    lab.forget(readers[0], lab.cells[0].evictor)
    for cell in lab.cells:
        reader, done = lab.copy(prompt, cell.policy), cell.evictor.done
        rows, seconds = done.rows, done.seconds
        lab.forget(reader, cell.evictor)
        readers.append(reader)
        share = (done.rows - rows) / (prompt.num_computed * cell.evictor.deal.num_layers)
        found[cell.name] = {"kept": 1 - share, "seconds": done.seconds - seconds, "tokens": prompt.num_computed}
        found[cell.name] |= {"kld": [], "same": []}
    if len(answer) > 1:
        rows = lab.forced(readers, answer[:-1]).astype(np.float64)
        logs = rows - rows.max(-1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
        kld = (np.exp(logs[0]) * (logs[0] - logs)).sum(-1)
        same = rows.argmax(-1) == rows[0].argmax(-1)
        for i, cell in enumerate(lab.cells, start=1):
            found[cell.name] |= {"kld": kld[i].tolist(), "same": same[i].tolist()}
    for reader in readers:
        lab.blocks.release(reader.blocks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--judge", action="store_true")
    asked = parser.parse_args()
    lab = Lab(asked.bundle, asked.cells.split(","))
    lines = []
    for case in cases("long")[:: asked.every]:
        lines.append({"id": case.id, "split": case.split, "cells": look(lab, case, judge=asked.judge)})
        asked.out.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    lab.session.close()
    show(lines)


def show(lines: list[dict[str, Any]]) -> None:
    cells: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        for name, cell in line["cells"].items():
            cells[name].append(cell)
    for name, runs in cells.items():
        words = [f"{name:24}"]
        if "kld" in runs[0]:
            kld, same = (np.concatenate([run[figure] for run in runs]) for figure in ("kld", "same"))
            unchanged = np.mean([all(run["same"]) for run in runs])
            words.append(f"kld {kld.mean():.4f} 99% {np.quantile(kld, 0.99):.3f} same {same.mean():.3f}")
            words.append(f"unchanged {unchanged:.3f} kept {np.mean([run['kept'] for run in runs]):.3f}")
            words.append(f"ms {1e3 * np.median([run['seconds'] for run in runs]):.0f}")
        if "right" in runs[0]:
            words.append(f"right {np.mean([run['right'] for run in runs]):.3f}")
        print(" ".join(words), flush=True)


if __name__ == "__main__":
    main()
