"""schedule → run → commit, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triptych.core.policy import KVPolicy
from triptych.core.request import Delta, FinishReason, Request
from triptych.engine.blocks import Blocks
from triptych.engine.config import EnginePlan
from triptych.engine.courier import Courier
from triptych.engine.runner import Runner
from triptych.engine.sampler import Choice, sample, score
from triptych.engine.scheduler import Limits, Scheduler, Step, Work
from triptych.engine.sequence import Sequence
from triptych.errors import BackendError, ContextError, OverloadError, RequestError, TriptychError

log = logging.getLogger("triptych.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one moment. Counters only grow."""

    num_running: int
    num_waiting: int
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
    corrupted: int
    evicted_tokens: int  # as a mean over layers
    compactions: int
    since_progress_s: float  # 0 when there is nothing to do
    is_alive: bool
    stage_seconds: Mapping[tuple[str, str], float]  # by (stage, modality)
    stage_calls: Mapping[tuple[str, str], int]


class Engine:
    """Owns every sequence. `submit` and `abort` may be called from any thread; all else happens on its own."""

    def __init__(
        self,
        runner: Runner,
        plan: EnginePlan,
        *,
        eos_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.runner = runner
        self._eos_ids = eos_ids
        self._clock = clock
        self._blocks = Blocks(plan.num_blocks)
        self._scheduler = Scheduler(
            Limits(
                max_step_tokens=plan.max_num_batched_tokens,
                max_sequences=plan.max_num_seqs,
                max_encode_tiles=plan.vision_batch,
                share_prefixes=plan.share_prefixes,
                min_computed=1 if runner.evictor is None else max(1, runner.evictor.num_queries),
            ),
            self._blocks,
            runner.features,
        )
        self._sequences: dict[str, Sequence] = {}
        self._inbox: deque[Sequence | str] = deque()  # new sequences, and ids to abort
        self._unfinished: set[str] = set()  # ids submitted and not finished; under `_wake`
        self._wake = threading.Condition()
        self._is_closing = False
        self._finished: Counter[str] = Counter()
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._progress_s = clock()
        self._courier = Courier()
        self._thread = threading.Thread(target=self._serve, name="triptych-engine", daemon=True)

    # ── any thread ─────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._courier.start()
        self._thread.start()

    def submit(self, request: Request, deliver: Callable[[Delta], None]) -> None:
        """Queue a request; `deliver` is called on the courier's thread and must not block.

        Raises ContextError for what can never fit, OverloadError when the queue is full, RequestError for an id in use.
        """
        self._admit(request)
        with self._wake:
            if self._is_closing or (self._thread.ident is not None and not self._thread.is_alive()):
                raise BackendError("the engine has stopped")
            if request.id in self._unfinished:
                raise RequestError(f"a request named {request.id!r} is under way", hint="give each its own name")
            if len(self._unfinished) >= self.plan.max_num_queued + self.plan.max_num_seqs:
                raise OverloadError(
                    f"{len(self._unfinished):,} requests are unfinished, the limit is {self.plan.max_num_queued:,} "
                    f"waiting besides {self.plan.max_num_seqs:,} running",
                    retry_after_s=1.0,
                    hint="try again in a second",
                )
            if not self._unfinished:
                self._progress_s = self._clock()  # the wait for progress begins now
            self._unfinished.add(request.id)
            self._inbox.append(Sequence(request, deliver, now_s=self._clock()))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; it gets a last Delta with FinishReason.ABORT. Unknown ids are ignored."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def close(self) -> None:
        """Abort what is unfinished and end the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def stats(self) -> EngineStats:
        scheduler, features, clock = self._scheduler, self.runner.features, self.runner.clock
        free, evictor = self._blocks.num_free, self.runner.evictor
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(self._unfinished) - len(scheduler.running),
            num_blocks=self._blocks.num_blocks,
            free_blocks=free,
            kv_usage=1 - free / self._blocks.num_blocks,
            held_features=features.num_held,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            encoder_queries=features.queries,
            encoder_hits=features.hits,
            encoder_bytes=features.num_bytes,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=dict(self._finished),
            corrupted=self.runner.corrupted,
            evicted_tokens=0 if evictor is None else evictor.done.rows // evictor.deal.num_layers,
            compactions=0 if evictor is None else evictor.done.compactions,
            since_progress_s=self._clock() - self._progress_s if self._unfinished else 0.0,
            is_alive=self._thread.is_alive(),
            stage_seconds=dict(clock.seconds),
            stage_calls=dict(clock.calls),
        )

    def _admit(self, request: Request) -> None:
        num_prompt, max_tokens = len(request.token_ids), request.sampling.max_tokens
        self._check_policy(request.kv)
        if num_prompt == 0:
            raise ContextError("the prompt has no tokens", hint="say something")
        if max_tokens < 1:
            raise ContextError(f"max_tokens is {max_tokens}, it must be at least 1", param="max_tokens")
        if num_prompt + max_tokens > self.plan.max_model_len:
            room = self.plan.max_model_len - num_prompt
            raise ContextError(
                f"the prompt has {num_prompt:,} tokens ({request.image_tokens:,} of them for images) and max_tokens is "
                f"{max_tokens:,}; together they pass the context of {self.plan.max_model_len:,}",
                hint=f"ask for at most {room:,} tokens" if room > 0 else "shorten the prompt",
                param="max_tokens" if room > 0 else "messages",
            )

    def _check_policy(self, policy: KVPolicy | None) -> None:
        method = None if self.runner.evictor is None else self.runner.evictor.method
        if policy is not None and policy.budget < 1.0 and policy.method != method:
            has = "keeps every key and value" if method is None else f"forgets by {method!r}"
            raise RequestError(f"the request forgets by {policy.method!r}, this engine {has}", param="kv")

    # ── the engine's thread ────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """One turn. False when there was nothing to do."""
        self._read_inbox()
        step = self._scheduler.schedule(now_s=self._clock())
        if not step.works:
            return False
        self._run(step)
        self._steps += 1
        self._progress_s = self._clock()
        return True

    def _run(self, step: Step) -> None:
        works = self._encode(step)
        if not works:
            return
        try:
            decoded = self.runner.decode(works)
            unscored = [sequence for sequence, places, logits in decoded.scored if not score(sequence, places, logits)]
            choices = sample(decoded.logits, [work.sequence for work in decoded.due], eos_ids=self._eos_ids)
        except Exception as error:
            log.exception("a step of %d sequences failed", len(works))
            for work in works:
                self._fail(work.sequence, error)
            return
        self._scheduler.commit(Step(works=works, encode=()))
        for sequence in unscored:
            self._corrupted(sequence)
        for work, choice in zip(decoded.due, choices, strict=True):
            if choice is None:
                self._corrupted(work.sequence)
            elif not work.sequence.is_finished:
                self._append(work.sequence, choice)
                self._forget(work.sequence)

    def _corrupted(self, sequence: Sequence) -> None:
        if not sequence.is_finished:
            self.runner.corrupted += 1
            self._fail(sequence, BackendError("the decoder gave NaN or infinity"))

    def _encode(self, step: Step) -> tuple[Work, ...]:
        """Encode the step's items and fail the sequences whose item could not be; the others go on."""
        failed = self.runner.encode(step)
        if not failed:
            return step.works
        going = []
        for work in step.works:
            digests = {span.digest for span in work.sequence.spans_in(work.start, work.end)}
            errors = [failed[digest] for digest in digests if digest in failed]
            if errors:
                self._fail(work.sequence, errors[0])
            else:
                going.append(work)
        return tuple(going)

    def _append(self, sequence: Sequence, choice: Choice) -> None:
        if sequence.num_answer_tokens == 0:
            self._prompt_tokens += sequence.num_prompt_tokens
        self._generation_tokens += 1
        sequence.append(choice.token_id, now_s=self._clock())
        finish = self._finish_of(sequence, choice.token_id)
        if finish is not None:
            self._end(sequence, finish, choice)
            return
        delta = Delta(
            request_id=sequence.request.id,
            token_ids=(choice.token_id,),
            logprobs=() if choice.logprob is None else (choice.logprob,),
            prompt_logprobs=sequence.prompt_logprobs if sequence.num_answer_tokens == 1 else None,
        )
        self._deliver(sequence, delta)

    def _forget(self, sequence: Sequence) -> None:
        if self.runner.evictor is None or sequence.is_finished:
            return
        try:
            self.runner.evictor.forget(sequence, self._blocks)
        except Exception as error:
            log.exception("forgetting failed")
            self._fail(sequence, error)

    def _finish_of(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        settings = sequence.request.sampling
        ends = settings.stop_ids if settings.ignore_eos else settings.stop_ids | self._eos_ids
        if token_id in ends:
            return FinishReason.STOP
        if sequence.num_answer_tokens >= settings.max_tokens:
            return FinishReason.LENGTH
        return None

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        known = error if isinstance(error, TriptychError) else BackendError(f"{type(error).__name__}: {error}")
        self._end(sequence, FinishReason.ERROR, error=known)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        choice: Choice | None = None,
        *,
        error: TriptychError | None = None,
    ) -> None:
        self._scheduler.finish(sequence)
        del self._sequences[sequence.request.id]
        self._finished[reason.value] += 1
        with self._wake:
            self._unfinished.discard(sequence.request.id)
        self._deliver(
            sequence,
            Delta(
                request_id=sequence.request.id,
                token_ids=() if choice is None else (choice.token_id,),
                logprobs=() if choice is None or choice.logprob is None else (choice.logprob,),
                prompt_logprobs=sequence.prompt_logprobs if choice and sequence.num_answer_tokens == 1 else None,
                finish=reason,
                usage=sequence.usage(),
                timing=sequence.timing(self._clock()),
                error=error,
            ),
        )

    def _deliver(self, sequence: Sequence, delta: Delta) -> None:
        self._courier.send(sequence.deliver, delta)

    def _read_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                self._sequences[item.request.id] = item
                self._scheduler.add(item)
            elif item in self._sequences:
                self._end(self._sequences[item], FinishReason.ABORT)

    def _serve(self) -> None:
        try:
            self._turn()
        except Exception as error:  # a fault of ours: nobody may wait for ever
            log.exception("the engine's thread ends")
            with self._wake:
                self._is_closing = True
                left = [*self._sequences.values(), *(item for item in self._inbox if isinstance(item, Sequence))]
            for sequence in left:
                self._give_up(sequence, error)
        finally:
            self._courier.close()

    def _give_up(self, sequence: Sequence, error: Exception) -> None:
        """Tell its consumer, and touch nothing else: what the engine knows may be wrong."""
        failure = BackendError(f"the engine failed: {type(error).__name__}: {error}", hint="restart; please report it")
        usage, timing = sequence.usage(), sequence.timing(self._clock())
        last = Delta(
            request_id=sequence.request.id, finish=FinishReason.ERROR, usage=usage, timing=timing, error=failure
        )
        self._deliver(sequence, last)

    def _turn(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._scheduler.has_work or self._is_closing):
                    self._wake.wait()
                if self._is_closing:
                    break
            self.step()
        self._read_inbox()
        for sequence in list(self._sequences.values()):
            self._end(sequence, FinishReason.ABORT)
