"""Top-k masks over visual tokens, trained straight-through and continuously: which one answers better when hard?

usage: OMP_NUM_THREADS=1 python bench/masks.py [--json bench/results/masks.json] [--steps 16] [--seeds 3]

Frozen triptych-mini in torch (`TorchPart`), its products in bf16 (0.0004 nats a token from fp32), attention and masks
in f32. Questions of `compression/tasks.py` with their true answers, 60 of 310 held out. Two places for a mask, both
trained by the cross-entropy of the answers' tokens, for the same steps, from the same seeds, on the same questions in
the same order:

  attention   every text row of every layer and head keeps 4 of the 32 image keys (the article's 12 lose next to
              nothing untrained, which is measured too). Trained: one linear layer a decoder layer, from a visual
              token's embedding to what is added to its logit, a head, when the keys are ranked; 155,520 numbers
  tokens      12 of a picture's 32 tokens are kept for all layers, the others are seen by nobody. Trained: a scorer of
              visual tokens (layer norm, 576 → 32 → 1, and a number for each place); 19,681 numbers

Held-out questions are always asked with HARD masks. Baselines: no mask, the mask untrained, and for `tokens` chance
and `media/reduce`'s default method.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import record
import torch
from compression.tasks import Case, cases, digest
from torch import Tensor, nn
from torch.nn import functional

from triptych.backends.torch_graph import Hooks, TorchPart
from triptych.compile.mini import assemble
from triptych.compress.masks import (
    CrossModalMask,
    Kind,
    MaskConfig,
    hard_top_k,
    renormalised,
    soft_top_k,
    straight_through,
)
from triptych.compress.samples import Conversation, Sample
from triptych.core.spec import Modality
from triptych.media.reduce.diversity import cenprune
from triptych.media.reduce.run import Run
from triptych.session.calibration import prepare
from triptych.session.compression import in_fp32
from triptych.session.opening import CACHE

KINDS: tuple[Kind, ...] = ("straight_through", "continuous")
BATCH = 6  # questions in a step
TAU, RATE = (1.0, 0.1), 1e-2
KEPT = {"attention": 4, "tokens": 12}
HELD_OUT = 60
TEXT, IMAGE = int(Modality.TEXT), int(Modality.IMAGE)
Caches = dict[str, tuple[Tensor, Tensor]]  # of a layer, the keys and values of what stands before every picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    num_layers: int
    num_heads: int
    hidden: int
    num_places: int  # visual tokens of a picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question and its true answer from its picture on: what stands before is the same for all, and computed once.

    keys (past + T,): a Modality each; before_answer (R,): rows whose next token, `truth` (R,), is the answer's.
    """

    embeddings: Tensor
    keys: Tensor
    before_answer: Tensor
    truth: Tensor

    @property
    def past(self) -> int:
        return len(self.keys) - len(self.embeddings)

    @property
    def rows(self) -> Tensor:
        return self.keys[self.past :]

    @property
    def allowed(self) -> Tensor:
        return torch.ones(len(self.embeddings), len(self.keys), dtype=torch.bool).tril(self.past)


# ── the two places ──────────────────────────────────────────────────────────────────────────────────────────────


class Attention(nn.Module):
    """Masks within every layer's attention; what ranks the keys is their logit and a learned addition."""

    def __init__(self, kind: Kind, k: int, facts: Facts, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        k_of = {Modality.TEXT: k, Modality.IMAGE: 2 * k}  # as the article's 12 and 24
        self.mask = CrossModalMask(MaskConfig(kind=kind, k=k_of, tau=TAU))
        layers = [nn.Linear(facts.hidden, facts.num_heads, bias=False) for _ in range(facts.num_layers)]
        self.added = nn.ModuleList(layers)
        for layer in layers:
            nn.init.normal_(layer.weight, std=1e-3)  # as good as nothing is added before the training

    def anneal(self, share: float) -> None:
        self.mask.anneal(share)

    def attend(self, layer: int, logits: Tensor, asked: Asked) -> Tensor:
        is_image = (asked.keys == IMAGE).to(logits.dtype)
        rows = functional.layer_norm(asked.embeddings, asked.embeddings.shape[-1:])
        added = functional.pad(self.added[layer](rows).T, (asked.past, 0)) * is_image  # (heads, keys)
        return self.mask(logits, asked.rows, asked.keys, asked.allowed, logits + added[:, None, :])


class Tokens(nn.Module):
    """One weight a visual token, for every layer, head and row but its own."""

    def __init__(self, kind: Kind, k: int, facts: Facts, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind, self.k, self.tau = kind, k, TAU[0]
        self.scorer = nn.Sequential(
            nn.LayerNorm(facts.hidden), nn.Linear(facts.hidden, 32), nn.GELU(), nn.Linear(32, 1)
        )
        self.place = nn.Parameter(torch.zeros(facts.num_places))
        self._seen: dict[int, Tensor] = {}

    def anneal(self, share: float) -> None:
        self.tau = TAU[0] * (TAU[1] / TAU[0]) ** share

    def scores(self, rows: Tensor) -> Tensor:
        """Rows (places, hidden) → (places,)."""
        found: Tensor = self.scorer(rows)[..., 0] + self.place
        return found

    def attend(self, layer: int, logits: Tensor, asked: Asked) -> Tensor:
        if layer == 0:  # the same for all layers of a run
            self._seen[id(asked)] = self._weights(asked)
        return renormalised(logits, self._seen[id(asked)])

    def _weights(self, asked: Asked) -> Tensor:
        """(rows, keys): an image key's weight, but 1 for its own row; 1 for text; 0 for what comes later."""
        scores = self.scores(asked.embeddings[asked.rows == IMAGE])[None]
        among, k = torch.ones_like(scores, dtype=torch.bool), torch.tensor([[self.k]])
        choose: Callable[[Tensor, Tensor, Tensor, float], Tensor] = hard_top_k
        if self.training:
            choose = straight_through if self.kind == "straight_through" else soft_top_k
        weights = torch.ones(len(asked.keys)).masked_scatter(asked.keys == IMAGE, choose(scores, k, among, self.tau)[0])
        own = torch.eye(len(asked.rows), len(asked.rows), dtype=torch.bool)
        own = functional.pad(own, (asked.past, 0))
        return torch.where(own, 1.0, weights[None]) * asked.allowed


class Chosen(Tokens):
    """Tokens chosen by a rule that nobody trained."""

    def __init__(self, k: int, facts: Facts, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__("straight_through", k, facts, 0)
        self.rule = rule

    def scores(self, rows: Tensor) -> Tensor:
        return self.rule(rows)


def by_cenprune(k: int) -> Callable[[Tensor], Tensor]:
    def rule(rows: Tensor) -> Tensor:
        empty = np.empty((0, rows.shape[1]), np.float32)
        kept = cenprune(Run(rows=rows.numpy(), question=empty, seed=0), k)
        return torch.zeros(len(rows)).index_fill(0, torch.from_numpy(kept.astype(np.int64)), 1.0)

    return rule


def by_chance(seed: int) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda rows: torch.rand(len(rows), generator=generator)


# ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class Masked:
    """The frozen decoder with `mask` in its attention; None: its own attention, from the cached prefix on."""

    decoder: TorchPart
    caches: Caches
    mask: Attention | Tokens | None = None

    def logits(self, batch: Sequence[Asked]) -> Tensor:
        """(R, vocab) before each answer token of all questions; they run as one sequence, each attending to itself."""
        lengths = [len(asked.embeddings) for asked in batch]
        begins = [sum(lengths[:place]) for place in range(len(batch))]
        mixed: list[Tensor] = []

        def attend(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
            layer, parts = len(mixed), []
            for asked, begin, length in zip(batch, begins, lengths, strict=True):
                own = slice(begin, begin + length)
                keys, values = (
                    torch.cat([kept, new[0, :, own].float()], 1)
                    for kept, new in zip(self.caches[name], (key, value), strict=True)
                )
                with torch.autocast("cpu", enabled=False):
                    logits = (query[0, :, own].float() @ keys.mT) * query.shape[-1] ** -0.5
                    parts.append((self._weights(layer, logits, asked) @ values).transpose(0, 1).flatten(1))
            mixed.append(torch.cat(parts))

        def replace(name: str, value: Tensor) -> Tensor:
            return mixed[-1] if name.endswith(".mixed") else value

        arrays = {
            "embeddings": torch.cat([asked.embeddings for asked in batch]),
            "position_ids": torch.cat([torch.arange(asked.past, len(asked.keys)) for asked in batch]),
            "sampled": torch.cat([asked.before_answer + begin for asked, begin in zip(batch, begins, strict=True)]),
        }
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = self.decoder(arrays, Hooks(on_attention=attend, on_value=replace))["logits"]
        return found.float()

    def _weights(self, layer: int, logits: Tensor, asked: Asked) -> Tensor:
        if self.mask is None:
            return torch.softmax(logits.masked_fill(~asked.allowed, -math.inf), -1)
        return self.mask.attend(layer, logits, asked)


@torch.no_grad()
def cached(decoder: TorchPart, sample: Sample, past: int) -> Caches:
    """The keys and values of the first `past` tokens, a layer."""
    caches: Caches = {}

    def keep(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        caches[name] = key[0].float(), value[0].float()

    arrays = {"embeddings": sample.embeddings[:past], "position_ids": np.arange(past), "sampled": np.array([past - 1])}
    with torch.autocast("cpu", torch.bfloat16):
        decoder(arrays, Hooks(on_attention=keep))
    return caches


def train(masked: Masked, questions: Sequence[Asked], steps: int, seed: int) -> None:
    mask = masked.mask
    assert mask is not None
    optimizer = torch.optim.Adam(mask.parameters(), lr=RATE)
    order = np.random.default_rng(seed)
    mask.train()
    for step in range(steps):
        mask.anneal(step / max(steps - 1, 1))
        optimizer.zero_grad()
        batch = [questions[index] for index in order.choice(len(questions), BATCH, replace=False)]
        truth = torch.cat([asked.truth for asked in batch])
        functional.cross_entropy(masked.logits(batch), truth).backward()
        optimizer.step()
    mask.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    loss: float  # nats an answer token
    accuracy: float  # share of answer tokens that were the likeliest
    whole: float  # share of answers all of whose tokens were, teacher-forced


@torch.no_grad()
def evaluate(masked: Masked, questions: Sequence[Asked]) -> Score:
    losses: list[float] = []
    rights: list[bool] = []
    wholes: list[bool] = []
    for begin in range(0, len(questions), BATCH):
        batch = questions[begin : begin + BATCH]
        truth = torch.cat([asked.truth for asked in batch])
        logits = masked.logits(batch)
        losses += functional.cross_entropy(logits, truth, reduction="none").tolist()
        right = logits.argmax(-1) == truth
        rights += right.tolist()
        wholes += [bool(own.all()) for own in right.split([len(asked.truth) for asked in batch])]
    return Score(loss=statistics.fmean(losses), accuracy=statistics.fmean(rights), whole=statistics.fmean(wholes))


# ── the whole ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class Ablation:
    """Scores by what was done, one a seed."""

    decoder: TorchPart
    caches: Caches
    facts: Facts
    used: Sequence[Asked]
    held: Sequence[Asked]
    scores: dict[str, list[Score]] = field(default_factory=dict)

    def score(self, subject: str, mask: Attention | Tokens | None) -> None:
        masked = Masked(decoder=self.decoder, caches=self.caches, mask=None if mask is None else mask.eval())
        score = evaluate(masked, self.held)
        self.scores.setdefault(subject, []).append(score)
        print(f"{subject:42} loss {score.loss:.4f}  tokens {score.accuracy:.3f}  whole {score.whole:.3f}", flush=True)

    def baselines(self, seeds: int) -> None:
        self.score("no mask", None)
        for k in (12, KEPT["attention"]):
            self.score(f"attention, k {k}, untrained", Attention("continuous", k, self.facts, 0))
        k = KEPT["tokens"]
        self.score(f"tokens, k {k}, cenprune", Chosen(k, self.facts, by_cenprune(k)))
        for seed in range(seeds):
            self.score(f"tokens, k {k}, chance", Chosen(k, self.facts, by_chance(seed)))
            self.score(f"tokens, k {k}, untrained", Tokens("continuous", k, self.facts, seed))

    def trained(self, where: str, kind: Kind, steps: int, seed: int) -> None:
        k = KEPT[where]
        mask = (Attention if where == "attention" else Tokens)(kind, k, self.facts, seed)
        train(Masked(decoder=self.decoder, caches=self.caches, mask=mask), self.used, steps, seed)
        self.score(f"{where}, k {k}, {kind}", mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ablation = opened()
    began = time.monotonic()
    for where in ("tokens", "attention"):
        for seed in range(options.seeds):
            for kind in KINDS:
                ablation.trained(where, kind, options.steps, seed)
                write(ablation, options, time.monotonic() - began)
    ablation.baselines(options.seeds)
    write(ablation, options, time.monotonic() - began)


def write(ablation: Ablation, options: argparse.Namespace, seconds: float) -> None:
    if options.json is None:
        return
    settings = {
        "steps": options.steps, "questions_a_step": BATCH, "seeds": options.seeds, "tau": TAU, "rate": RATE,
        "trained_on": len(ablation.used), "held_out": len(ablation.held), "seconds": seconds, "tasks": digest(),
    }  # fmt: skip
    record.write(options.json, record.record("masks", measures(ablation), settings=settings))


def measures(ablation: Ablation) -> list[record.Measure]:
    units = {"loss": "nats a token", "accuracy": "share of tokens", "whole": "share of answers"}
    return [
        record.measure(name, subject, unit, [getattr(score, name) for score in scores])
        for subject, scores in ablation.scores.items()
        for name, unit in units.items()
    ]


def opened() -> Ablation:
    """The demo in fp32, and its questions."""
    bundle = in_fp32(assemble(CACHE), CACHE, tell)
    told = [
        Conversation(name=case.id, chat=case.chat(), answer=truth(case)) for case in cases("single") if is_fair(case)
    ]
    samples = prepare(bundle, told, tell)
    first = samples[0]
    past = int(np.flatnonzero(first.modality == IMAGE)[0])
    assert all((one.token_ids[:past] == first.token_ids[:past]).all() for one in samples)
    questions = [asked_of(sample, past) for sample in samples]
    spec, decoder = bundle.manifest.spec, TorchPart.open(bundle.file("decoder.xml"))
    decoder.weights = {name: held.bfloat16() if held.ndim > 1 else held for name, held in decoder.weights.items()}
    assert spec.projector is not None
    facts = Facts(
        num_layers=spec.decoder.num_layers,
        num_heads=spec.decoder.num_heads,
        hidden=spec.decoder.hidden,
        num_places=spec.projector.num_tokens,
    )
    held = np.random.default_rng(0).permutation(len(questions))
    return Ablation(
        decoder=decoder,
        caches=cached(decoder, first, past),
        facts=facts,
        used=[questions[index] for index in held[HELD_OUT:]],
        held=[questions[index] for index in held[:HELD_OUT]],
    )


def asked_of(sample: Sample, past: int) -> Asked:
    judged = torch.from_numpy(sample.judged)
    return Asked(
        embeddings=torch.from_numpy(sample.embeddings[past:]),
        keys=torch.from_numpy(sample.modality.astype(np.int64)),
        before_answer=judged - past,
        truth=torch.from_numpy(sample.token_ids.astype(np.int64))[judged + 1],
    )


def is_fair(case: Case) -> bool:
    """Of what the panel sees: names in a style that it never saw are mostly wrong, and photographs are six."""
    return case.kind in ("colour", "count") or (case.kind, case.split) == ("name", "seen")


def truth(case: Case) -> str:
    """As the demo was taught to say it."""
    from recipes.mini.questions import NUMBERS, answer
    from recipes.mini.questions import Facts as Shown

    names = tuple(case.truth) if case.kind == "name" else ("thing",) * (case.truth if case.kind == "count" else 1)
    colour = case.truth if case.kind == "colour" else ""
    return answer(case.kind, Shown(photo=False, names=names, colour=colour, count=NUMBERS[len(names)]))


def tell(what: str, share: float) -> None:
    print(f"{what} {share:.0%}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
