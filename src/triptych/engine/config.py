"""What the operator asked, resolved into what will be done, each choice with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from triptych.backends.base import BLOCK_TOKENS, CacheType, ComputeType
from triptych.core.filling import STRETCH
from triptych.core.policy import Reduction, Speculation
from triptych.core.spec import ModelSpec
from triptych.engine.blocks import blocks_for
from triptych.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the operator said; None means «you decide»."""

    max_model_len: int | None = None  # tokens of prompt and answer
    max_num_seqs: int | None = None  # answering at once
    max_num_batched_tokens: int | None = None  # a step
    kv_cache_dtype: Literal["auto", "f32", "bf16", "u8", "u4"] = "auto"
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    encoder_cache_bytes: int | None = None
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
    dtype: ComputeType = "auto"
    vision_device: str = "cpu:0"
    decoder_device: str = "cpu:0"
    num_threads: int | None = None
    vision_batch: int | None = None  # tiles through the encoder at once, and a step
    max_multimodal_tokens: int | None = None  # a request, after its reduction
    reduction: Reduction = Reduction()  # of pictures, unless a request says otherwise
    min_keep: float = 0.0  # the least `keep` that a request may ask for
    kv_budget: float | None = None  # share of a prompt's keys and values that stays; None: all, whatever is asked
    speculation: Speculation | None = None  # None: tokens are computed one after another
    max_num_queued: int | None = None
    prompt_stretch: float | None = None  # how much longer prompts may make a step that answers wait for
    batch_invariant: bool = True  # an answer's bits depend on its request alone; on CPUs, and where nothing forgets
    max_queue_s: float | None = None  # of work, by the engine's own pace, that may wait before a request

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_keep <= self.reduction.keep:
            raise ConfigError(
                f"--reduce: the least that a request may keep, {self.min_keep}, is not in 0 to {self.reduction.keep}, "
                "which is kept where it does not say",
                hint="METHOD:KEEP:MIN, such as cenprune:0.5:0.25",
            )
        if self.prompt_stretch is not None and not self.prompt_stretch >= 0.0:
            raise ConfigError(f"--prompt-stretch {self.prompt_stretch} is not 0 or more", hint="0.4, or inf")
        if self.kv_budget is not None and not 0.0 < self.kv_budget <= 1.0:
            raise ConfigError(f"--kv-budget {self.kv_budget} is not in (0, 1]", hint="0.4 keeps two fifths of a prompt")
        if self.speculation is not None and self.kv_budget not in (None, 1.0):
            raise ConfigError(
                f"--speculative-config beside --kv-budget {self.kv_budget}: a cache that forgets takes no guesses back",
                hint="choose one of them",
            )

    @property
    def keeps_bits(self) -> bool:
        """Whether answers are to be batch-invariant, and can be: on a CPU, where nothing forgets."""
        return self.batch_invariant and self.decoder_device.startswith("cpu") and self.kv_budget in (None, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What will be done."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache_type: CacheType
    num_blocks: int
    share_prefixes: bool
    encoder_cache_bytes: int
    max_images: int
    max_multimodal_tokens: int
    reduction: Reduction = Reduction()
    min_keep: float = 0.0
    kv_budget: float | None = None  # a request's own is never less; None: the decoder cannot forget
    vision_batch: int
    speculation: Speculation | None = None
    max_num_queued: int
    max_queue_s: float = 60.0
    prompt_stretch: float = STRETCH
    batch_invariant: bool = False  # an answer's bits depend on its request alone
    choices: tuple[str, ...]  # in words, for the start-up log


def cache_type(config: EngineConfig) -> CacheType:
    """The KV cache's number type: u8 unless full precision or another type was asked for."""
    if config.kv_cache_dtype == "auto":
        return "f32" if config.dtype == "float" else "u8"
    if config.kv_cache_dtype == "bf16" and config.dtype == "float":
        raise ConfigError("a bf16 KV cache needs bf16 arithmetic", hint="leave --dtype at auto, or choose u8")
    return config.kv_cache_dtype


class _Choices:
    """What was decided, in words, while it is being decided."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def take(self, name: str, asked: int | None, default: int, reason: str = "default") -> int:
        value, why = (default, reason) if asked is None else (asked, "as asked")
        self.words.append(f"{name} = {value:,} ({why})")
        return value

    def number(self, name: str, asked: float | None, default: float) -> float:
        value, why = (default, "default") if asked is None else (asked, "as asked")
        self.words.append(f"{name} = {value:g} ({why})")
        return value


def resolve(config: EngineConfig, spec: ModelSpec, *, block_bytes: int, free_bytes: int) -> EnginePlan:
    """Decide what was left open. Raises ConfigError when what was asked cannot be.

    block_bytes: of one 32-token block over all layers. free_bytes: memory that the process may still take.
    """
    choices = _Choices()
    max_model_len = _context(config, spec, choices)
    max_num_seqs, step = _batch(config, choices)
    kind = _lossy(config, choices)
    wanted = max_num_seqs * blocks_for(max_model_len)
    room = min(wanted * block_bytes, max(free_bytes // 4, blocks_for(max_model_len) * block_bytes))
    reason = f"at most a quarter of {free_bytes / GIB:.1f} GiB free memory, and never less than one full context"
    num_blocks = choices.take("kv-cache-bytes", config.kv_cache_bytes, room, reason) // block_bytes
    _check_cache(num_blocks, max_model_len)
    return EnginePlan(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step,
        cache_type=kind,
        batch_invariant=_is_invariant(config, choices),
        num_blocks=min(num_blocks, wanted),
        share_prefixes=config.enable_prefix_caching,
        encoder_cache_bytes=choices.take("encoder-cache-bytes", config.encoder_cache_bytes, 256 << 20),
        max_images=_images(config, choices),
        max_multimodal_tokens=choices.take(
            "max-multimodal-tokens", config.max_multimodal_tokens, max_model_len, "the whole context"
        ),
        reduction=config.reduction,
        min_keep=config.min_keep,
        kv_budget=config.kv_budget,
        vision_batch=choices.take("vision-batch", config.vision_batch, 8),
        speculation=config.speculation,
        max_num_queued=choices.take("max-num-queued-reqs", config.max_num_queued, 1024),
        max_queue_s=choices.number("max-queue-seconds", config.max_queue_s, 60.0),
        prompt_stretch=choices.number("prompt-stretch", config.prompt_stretch, STRETCH),
        choices=tuple(choices.words),
    )


def _lossy(config: EngineConfig, choices: _Choices) -> CacheType:
    """The cache's number type; and what else costs accuracy, in words."""
    if not config.reduction.is_whole:
        choices.words.append(f"reduce = {config.reduction.method}:{config.reduction.keep} (as asked)")
    if config.kv_budget is not None:
        choices.words.append(f"kv-budget = {config.kv_budget} (as asked)")
    if config.speculation is not None:
        method, most = config.speculation.method, config.speculation.num_speculative_tokens
        choices.words.append(f"speculation = {method}, up to {most} tokens a step (as asked)")
    kind = cache_type(config)
    choices.words.append(f"kv-cache-dtype = {kind} ({'default' if config.kv_cache_dtype == 'auto' else 'as asked'})")
    return kind


def _is_invariant(config: EngineConfig, choices: _Choices) -> bool:
    """Whether answers shall not depend on who is computed beside them, where they need not."""
    is_kept = config.keeps_bits
    reason = "as asked" if not config.batch_invariant else "default" if is_kept else "no device but a CPU, no budget"
    choices.words.append(f"batch-invariant = {'yes' if is_kept else 'no'} ({reason})")
    return is_kept


def _batch(config: EngineConfig, choices: _Choices) -> tuple[int, int]:
    """Sequences that answer at once, and tokens of a step."""
    most = config.max_num_batched_tokens
    reason = "default" if most is None or most >= 32 else "one for each token of a step"
    max_num_seqs = choices.take("max-num-seqs", config.max_num_seqs, min(32, most or 32), reason)
    step = choices.take("max-num-batched-tokens", config.max_num_batched_tokens, max(512, max_num_seqs))
    if not 1 <= max_num_seqs <= step:
        raise ConfigError(
            f"--max-num-seqs {max_num_seqs} must be between 1 and --max-num-batched-tokens {step}",
            hint="each answering sequence needs one token a step",
        )
    return max_num_seqs, step


def _context(config: EngineConfig, spec: ModelSpec, choices: _Choices) -> int:
    context = spec.decoder.max_positions
    length = choices.take("max-model-len", config.max_model_len, min(context, 8192), f"the model has {context:,}")
    if not 1 <= length <= context:
        raise ConfigError(f"--max-model-len {length:,} is not in 1 to the model's {context:,} positions")
    return length


def _images(config: EngineConfig, choices: _Choices) -> int:
    limits = config.limit_mm_per_prompt
    other = next((modality for modality, limit in limits.items() if modality != "image" and limit), None)
    if other is not None:
        raise ConfigError(f"limit_mm_per_prompt: no {other} is served, only images", hint='{"image": 4}')
    return choices.take("limit-mm-per-prompt image", limits.get("image"), 16)


def _check_cache(num_blocks: int, max_model_len: int) -> None:
    if num_blocks < blocks_for(max_model_len):
        tokens = num_blocks * BLOCK_TOKENS
        raise ConfigError(
            f"the KV cache holds {tokens:,} tokens, one request may have {max_model_len:,}",
            hint=f"--max-model-len {max(tokens, BLOCK_TOKENS)}, more --kv-cache-bytes, or a smaller --kv-cache-dtype",
        )
