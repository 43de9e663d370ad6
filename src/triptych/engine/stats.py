"""What an engine says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.engine.qos import Admission
from triptych.engine.runner import Runner
from triptych.engine.scheduler import Scheduler


@dataclass(slots=True)
class Counts:
    """What an engine has done. Its thread writes, any thread reads."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    late: int = 0
    restarts: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one moment. Counters only grow."""

    num_running: int
    num_waiting: int
    backlog_s: float  # of work that is unfinished, as predicted
    num_blocks: int
    free_blocks: int
    kv_usage: float  # share of blocks in use, 0 to 1
    held_features: int
    preemptions: int
    prefix_queries: int  # tokens
    prefix_hits: int
    encoder_queries: int  # items
    encoder_hits: int
    encoder_bytes: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    finished: Mapping[str, int]  # by reason
    corrupted: int  # requests and pictures that gave NaN or infinity
    recomputed: int  # pictures that overflowed and were encoded once more in 32-bit floats
    late: int  # requests that were not answered by their deadline
    restarts: int  # of the engine after a fault of its own
    evicted_tokens: int  # as a mean over layers
    compactions: int
    drafts: int  # guesses that were computed, each of one sequence in one step
    drafted_tokens: int
    accepted_tokens: int  # of these, that came
    stage_seconds: Mapping[tuple[str, str], float]  # by (stage, modality)
    stage_buckets: Mapping[tuple[str, str], tuple[int, ...]]  # as `core/stages` has them
    since_progress_s: float = 0.0  # 0 when there is nothing to do
    is_alive: bool = False


def stats_of(counts: Counts, scheduler: Scheduler, admission: Admission, runner: Runner) -> EngineStats:
    """All but what the engine's thread alone can tell."""
    features, clock, blocks, evictor = runner.features, runner.clock, scheduler.blocks, runner.evictor
    done = {name: getattr(counts, name) for name in Counts.__dataclass_fields__}
    return EngineStats(
        **done | {"finished": dict(counts.finished)},
        num_running=len(scheduler.running),
        num_waiting=len(admission) - len(scheduler.running),
        backlog_s=admission.backlog_s,
        num_blocks=blocks.num_blocks,
        free_blocks=blocks.num_free,
        kv_usage=1 - blocks.num_free / blocks.num_blocks,
        held_features=features.num_held,
        preemptions=scheduler.preemptions,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        encoder_queries=features.queries,
        encoder_hits=features.hits,
        encoder_bytes=features.num_bytes,
        corrupted=runner.corrupted + runner.encoder.corrupted,
        recomputed=runner.encoder.recomputed,
        evicted_tokens=0 if evictor is None else evictor.done.rows // evictor.deal.num_layers,
        compactions=0 if evictor is None else evictor.done.compactions,
        stage_seconds=dict(clock.seconds),
        stage_buckets=clock.buckets(),
    )
