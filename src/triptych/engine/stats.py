"""What an engine says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    since_progress_s: float  # 0 when there is nothing to do
    is_alive: bool
    stage_seconds: Mapping[tuple[str, str], float]  # by (stage, modality)
    stage_calls: Mapping[tuple[str, str], int]
    stage_buckets: Mapping[tuple[str, str], tuple[int, ...]]  # as `core/stages` has them
