"""What may be left out: which visual tokens, which cached keys and values; decided by data."""

from __future__ import annotations

from typing import Literal, get_args

from triptych.core.spec import Fact, Modality
from triptych.errors import ConfigError, RequestError

Method = Literal["cenprune", "cdpruner", "tome", "pool", "grid", "random"]
METHODS: tuple[Method, ...] = get_args(Method)
QUERY_AWARE: frozenset[Method] = frozenset({"cdpruner"})  # what they keep depends on the question

Eviction = Literal["expected", "snapkv", "tova", "knorm", "window"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)


class Reduction(Fact, frozen=True, kw_only=True):
    """How many of an item's tokens stand in the prompt, and who chooses them. `keep` 1.0 changes nothing."""

    method: Method = "cenprune"
    keep: float = 1.0  # share of each run of tokens, in (0, 1]

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"no reduction is called {self.method!r}", hint=f"choose one of {', '.join(METHODS)}")
        if not 0.0 < self.keep <= 1.0:
            raise ConfigError(f"keep {self.keep} is not in (0, 1]", hint="0.5 keeps half of the visual tokens")

    @property
    def is_whole(self) -> bool:
        return self.keep == 1.0

    def count(self, num_rows: int) -> int:
        """Rows that stay of a run of `num_rows`: at least one, known from its length alone."""
        return max(1, round(self.keep * num_rows))


class Speculation(Fact, frozen=True, kw_only=True):
    """How an answer's next tokens are guessed, in vLLM's words: none is ever answered that was not chosen."""

    method: Literal["ngram"] = "ngram"  # by what followed the same tokens before, in prompt and answer
    num_speculative_tokens: int = 15  # at most, a step
    prompt_lookup_max: int = 4  # tokens in common
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(f"no speculation is called {self.method!r}", hint="there is ngram")
        if not 1 <= self.num_speculative_tokens <= 31:
            raise ConfigError(f"num_speculative_tokens {self.num_speculative_tokens} is not in 1 to 31")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            has = f"prompt_lookup_min {self.prompt_lookup_min}, prompt_lookup_max {self.prompt_lookup_max}"
            raise ConfigError(f"{has}: they must be at least 1, and in order")


class Compression(Fact, frozen=True, kw_only=True):
    """What one request asks to leave out; None: as the operator has it. Raises RequestError for what cannot be."""

    keep_visual: float | None = None  # share of its pictures' tokens
    reduce: Method | None = None  # who chooses them
    kv_budget: float | None = None  # share of its prompt's keys and values

    def __post_init__(self) -> None:
        for name in ("keep_visual", "kv_budget"):
            share = getattr(self, name)
            if share is None or (type(share) in (int, float) and 0.0 < share <= 1.0):
                continue
            raise RequestError(
                f"`triptych.{name}` is {str(share)[:100]!r}, which is no share: it must be above 0 and at most 1",
                hint="0.5 keeps half, 1 keeps all",
                param=f"triptych.{name}",
            )
        if self.reduce is not None and self.reduce not in METHODS:
            raise RequestError(
                f"`triptych.reduce` is {str(self.reduce)[:100]!r}, which is none of {len(METHODS)} methods",
                hint=f"choose one of {', '.join(METHODS)}",
                param="triptych.reduce",
            )


class KVPolicy(Fact, frozen=True, kw_only=True):
    """Which cached tokens a sequence forgets, and when. Written by `compress`, read by `engine/evict`.

    budget: share of a sequence's tokens, prompt and answer so far, whose keys and values stay, as a mean over layers;
    1.0 evicts nothing. Sinks (the first tokens), the system message and the last `window` tokens are never forgotten,
    nor is what `floors` keep: where those are more than the budget, they are what stays.
    """

    method: Eviction = "expected"
    budget: float = 1.0
    sinks: int = 4
    window: int = 32
    floors: dict[str, float] = {}  # by modality, e.g. {"image": 0.1}: share of its tokens that stays at least
    layer_density: tuple[float, ...] = ()  # measured, one a layer; empty: all alike
    adaptive: float = 0.0  # share of the budget that follows it: with 0.2 triptych-mini lost more (docs/journal.md)
    statistics: str = ""  # file in the bundle with the queries' mean and covariance; "": the method needs none
    devices: tuple[str, ...] = ()  # one a layer, where its cache lies; empty: beside the decoder

    def __post_init__(self) -> None:
        if self.method not in EVICTIONS:
            raise ConfigError(f"no eviction is called {self.method!r}", hint=f"choose one of {', '.join(EVICTIONS)}")
        if not 0.0 < self.budget <= 1.0:
            raise ConfigError(f"the KV budget {self.budget} is not in (0, 1]", hint="0.4 keeps two fifths of a prompt")
        if not 0.0 <= self.adaptive <= 1.0:
            raise ConfigError(f"the adaptive share {self.adaptive} is not in [0, 1]", hint="0.2 is what papers advise")
        for name, share in self.floors.items():
            if name.upper() not in Modality.__members__ or not 0.0 <= share <= 1.0:
                raise ConfigError(f"the KV floor {name}: {share} is no share in 0 to 1 of a modality's tokens")
        if any(not density > 0.0 for density in self.layer_density):
            raise ConfigError("a layer's density is not above 0", hint="layers that look at nothing cannot be measured")
