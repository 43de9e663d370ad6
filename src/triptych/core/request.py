"""What crosses the engine's border: Request in, Delta out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.core.policy import KVPolicy, Reduction
from triptych.core.spec import Modality
from triptych.errors import RequestError, TriptychError

RANGES = {
    "min_tokens": (0, inf),
    "temperature": (0.0, 1e6),
    "top_p": (1e-300, 1.0),
    "top_k": (1, inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "seed": (0, 2**63 - 1),
    "num_logprobs": (0, inf),
    "num_prompt_logprobs": (0, inf),
}


class Matcher(Protocol):
    """Follows one answer and says what it may go on with."""

    def allowed(self) -> NDArray[np.bool_]:
        """(vocab,): the tokens that may come next; never none of them. Ends are among them only where it may end."""

    def take(self, token_id: int, *, room: int) -> int:
        """This one comes next, or another with which the form can still be completed in `room` tokens more."""


class Guide(Protocol):
    """The form that answers must have, compiled; each answer gets a matcher of its own (`media/text/guide`)."""

    @property
    def num_least(self) -> int | None:
        """Tokens of the shortest answer, without its end; None where that is not known."""

    def start(self) -> Matcher: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of media tokens in a prompt, all rows of one item.

    Position `start + i` shows row `token_ids[start + i] - base` of the item's features, where `base` is the
    first global id of the modality (`media/registry`).
    """

    start: int
    num_tokens: int
    modality: Modality
    digest: str  # of everything the features depend on: content, geometry, settings, weights, tenant

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """One picture, ready for its encoder.

    tiles: (num_tiles, height, width, 3) uint8 RGB; normalising is part of the vision graph.
    take: (num_tokens,) int32, which rows of [tile 0's rows, tile 1's rows, …, extra rows] stand in the prompt,
    in order. Extra rows are the projector's own constants, such as LLaVA 1.6's newline.
    runs: how many of `take` stand together between marks, in order; a reduction keeps its share of each run.
    question: the text ids that a query-aware reduction looks at, else empty.
    """

    digest: str
    modality: Modality
    tiles: NDArray[np.uint8]
    take: NDArray[np.int32]
    reduction: Reduction = Reduction()
    runs: tuple[int, ...] = ()  # empty: all of `take` is one run
    question: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def num_tokens(self) -> int:
        """Tokens in the prompt: after the reduction."""
        return sum(self.reduction.count(run) for run in self.runs or (len(self.take),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Greedy when `temperature` is 0.

    Raises RequestError for what is out of range: in a step it would fail all who share the step.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # CTRL (arXiv:1909.05858): prompt and answer
    presence_penalty: float = 0.0  # OpenAI's: answer only, as the next
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    num_logprobs: int | None = None  # None: none asked; 0: the chosen token's alone
    num_prompt_logprobs: int | None = None  # likewise, of the prompt's own tokens
    guide: Guide | None = None
    stop_ids: frozenset[int] = frozenset()  # besides the model's own end tokens
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in RANGES}
        for name, value in values.items():
            low, high = RANGES[name]
            if value is not None and not low <= value <= high:
                raise RequestError(f"`{name}` is {value}, it must be in {low} to {high}", param=name)
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -1000.0 <= bias <= 1000.0:
                raise RequestError(f"`logit_bias` moves token {token_id} by {bias}", param="logit_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prepared prompt; nothing in it changes from here on.

    token_ids: (num_tokens,) int32 global ids (`media/registry`): text ids as the tokenizer has them, media ids
    beyond the vocabulary. patches: by digest, one for each digest that `spans` names.
    positions: (num_tokens,) int32, where each token stood before any reduction. Of a media token it is where its
    item's row 0 would have stood: which row a reduced item shows is known once it is encoded. None: 0, 1, 2, …
    """

    id: str
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32] | None = None
    spans: tuple[Span, ...] = ()
    patches: Mapping[str, Patches] = field(default_factory=dict)
    sampling: Sampling
    tenant: str = ""  # caches are never shared between tenants
    caller: str = ""  # who asks; of one priority, callers are served alike
    priority: int = 0  # lower is served first
    deadline_s: float | None = None  # from its submission; an answer not finished by then ends with DeadlineError
    kv: KVPolicy | None = None  # None: nothing is forgotten
    num_protected: int = 0  # tokens at the start that no policy may forget: the system message

    @property
    def num_positions(self) -> int:
        """Length of the prompt before any reduction: the position of the answer's first token."""
        if self.positions is None or not len(self.positions):
            return len(self.token_ids)
        end = next((span for span in self.spans if span.end == len(self.token_ids)), None)
        return int(self.positions[-1]) + (1 if end is None else len(self.patches[end.digest].take))

    @property
    def image_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans if span.modality is Modality.IMAGE)


class FinishReason(Enum):
    """Why an answer ended, in the API's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probabilities before temperature and truncation, as OpenAI gives them."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int  # of the prompt, taken from the prefix cache
    image_tokens: int
    completion_tokens: int
    encoder_hits: int = 0  # media items whose features were cached
    encoder_misses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds on the engine's clock."""

    queue_s: float
    encode_s: float
    prefill_s: float  # from the first scheduled token to the first answer token
    decode_s: float


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What each step makes for each sequence: a frozen dataclass takes seventeen times as long to make."""

    def but(self, **changes: Any) -> Self:
        return msgspec.structs.replace(self, **changes)


class Delta(StepRecord, frozen=True, kw_only=True):
    """What one step gave one request. The last one has `finish`, `usage` and `timing`.

    prompt_logprobs: with the first token, where asked: one for each prompt token, None for the first and for media.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: TriptychError | None = None
