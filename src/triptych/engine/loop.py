"""schedule → run → commit, on a thread of its own."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf

from triptych.core.request import Delta, FinishReason, Request
from triptych.engine.blocks import Blocks
from triptych.engine.config import EnginePlan
from triptych.engine.courier import Courier
from triptych.engine.draft import Drafter
from triptych.engine.pace import Pace
from triptych.engine.qos import Admission, Load, check_fits
from triptych.engine.runner import Decoded, Runner
from triptych.engine.sampler import Choice, said, sample, score
from triptych.engine.scheduler import Limits, Scheduler, Work
from triptych.engine.sequence import Sequence
from triptych.engine.stats import Counts, EngineStats, stats_of
from triptych.errors import BackendError, DeadlineError, RequestError, TriptychError, unwound

log = logging.getLogger("triptych.engine")

RESTART_S = 60.0  # a second fault of the engine's own within so long ends it
IDLE_S = 1.0  # between looks at whether a device still moves
GATHER_S = 0.0005  # in which nothing may come before an engine that rested begins


class Engine:
    """Owns every sequence. `submit` and `abort` may be called from any thread; all else happens on its own."""

    def __init__(
        self, runner: Runner, plan: EnginePlan, *, eos_ids: frozenset[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.plan = plan
        self.runner = runner
        self._eos_ids = eos_ids
        self._clock = clock
        self.pace = Pace(plan.prompt_stretch)  # how fast this engine has been so far
        self._drafter = None if plan.speculation is None else Drafter(plan.speculation, self.pace)
        self._blocks, self._scheduler = self._fresh()
        self._sequences: dict[str, Sequence] = {}
        self._deadlines: dict[str, float] = {}  # of unfinished requests, on the clock
        self._inbox: deque[Sequence | str] = deque()  # new sequences, and ids to abort
        self._wake = threading.Condition()
        self._admission = Admission(  # of what is submitted and not finished; under `_wake`
            self.pace, max_running=plan.max_num_seqs, max_queued=plan.max_num_queued, max_queue_s=plan.max_queue_s
        )
        self._is_closing = False
        self._counts = Counts()
        self._progress_s = clock()
        self._restarted_s: float | None = None
        self._waited_s: float | None = None  # when a request last waited
        self._done = Load()  # since then
        self._courier = Courier()
        self._thread = threading.Thread(target=self._serve, name="triptych-engine", daemon=True)

    # ── any thread ─────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._courier.start()
        self.runner.encoder.start(self._notify)
        self._thread.start()

    def submit(self, request: Request, deliver: Callable[[Delta], None]) -> None:
        """Queue a request; `deliver` is called on the courier's thread and must not block.

        Raises ContextError for what can never fit, OverloadError when the queue is full, RequestError for an id in use.
        """
        check_fits(request, self.plan, None if self.runner.evictor is None else self.runner.evictor.method)
        with self._wake:
            if self._is_closing or (self._thread.ident is not None and not self._thread.is_alive()):
                raise BackendError("the engine has stopped")
            if request.id in self._admission:
                raise RequestError(f"a request named {request.id!r} is under way", hint="give each its own name")
            if not len(self._admission):
                self._progress_s = self._clock()  # the wait for progress begins now
            self._admission.enter(request)
            self._inbox.append(Sequence(request, deliver, now_s=self._clock()))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; it gets a last Delta with FinishReason.ABORT. Unknown ids are ignored."""
        self._inbox.append(request_id)
        self._notify()

    def close(self) -> None:
        """Abort what is unfinished and end the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def stats(self) -> EngineStats:
        now = stats_of(self._counts, self._scheduler, self._admission, self.runner)
        return replace(now, since_progress_s=self._since_progress(), is_alive=self._thread.is_alive())

    def _since_progress(self) -> float:
        """Of the engine, or of the encoder where that is longer: pictures may wait while texts are answered."""
        if not len(self._admission):
            return 0.0
        begun_s = self.runner.encoder.begun_s
        return max(self._clock() - self._progress_s, 0.0 if begun_s is None else time.monotonic() - begun_s)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # ── the engine's thread ────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """One turn. False when there was nothing to do."""
        self._read_inbox()
        self._take_encoded()
        self._end_late()
        most = self.pace.prompt_tokens(self._scheduler.num_answers)
        hits = self._scheduler.prefix_hits
        step = self._scheduler.schedule(now_s=self._clock(), prompt_tokens=most)
        self._done.prompt_tokens += self._scheduler.prefix_hits - hits
        if step.encode:
            self.runner.encoder.begin(step.encode)
        if step.works:
            self._run(step.works)
            self._counts.steps += 1
        self._learn_drift()
        if step.works or step.encode:
            self._progress_s = self._clock()
        return bool(step.works or step.encode)

    def _run(self, works: tuple[Work, ...]) -> None:
        began_s = self._clock()
        try:
            decoded = self.runner.decode(works)
            unscored = [sequence for sequence, places, logits in decoded.scored if not score(sequence, places, logits)]
        except Exception as error:
            self._fail_all([work.sequence for work in works], error)
            return
        self._scheduler.commit(works)
        for sequence in unscored:
            self._corrupted(sequence)
        self._answer(decoded)
        self._learn(works, self._clock() - began_s)

    def _answer(self, decoded: Decoded) -> None:
        """Sample each one's next token, and the one after it where the token that came is the one that was guessed."""
        going = [pair for pair in zip(decoded.due, decoded.logits, strict=True) if not pair[0].sequence.is_finished]
        for place in itertools.count():
            if not going:
                return
            sequences = [work.sequence for work, _ in going]
            try:
                choices = sample([rows[place] for _, rows in going], sequences, eos_ids=self._eos_ids)
            except Exception as error:
                self._fail_all(sequences, error)
                return
            taken = [self._take(sequence, choice) for sequence, choice in zip(sequences, choices, strict=True)]
            going = [
                pair for pair, is_right in zip(going, taken, strict=True) if is_right and place < pair[0].num_drafted
            ]
            for work, _ in going:
                work.sequence.commit(1)  # the guessed token was computed in this step
            self._done.answer_tokens += len(going)
            self._counts.accepted_tokens += len(going)

    def _take(self, sequence: Sequence, choice: Choice | RequestError | None) -> bool:
        """Whether it is the token that was guessed, and more may follow."""
        is_right = False
        if choice is None:
            self._corrupted(sequence)
        elif isinstance(choice, RequestError):
            self._fail(sequence, choice)
        else:
            is_right = self._append(sequence, choice)
            self._forget(sequence)
        return is_right and not sequence.is_finished

    def _learn(self, works: tuple[Work, ...], seconds: float) -> None:
        prompts = [work.num_tokens for work in works if work.num_tokens > 1]
        num_answers, num_prompt_tokens = len(works) - len(prompts), sum(prompts)
        num_drafted, is_alone = sum(work.num_drafted for work in works), not self._scheduler.encoding
        self._done.answer_tokens += num_answers
        self._done.prompt_tokens += num_prompt_tokens
        if self._drafter is not None and num_drafted:
            self._counts.drafts += sum(work.num_drafted > 0 for work in works)
            self._counts.drafted_tokens += num_drafted
            self._drafter.saw(num_answers, num_drafted, seconds, is_alone=is_alone)
        else:
            self.pace.saw_step(num_answers, num_prompt_tokens, seconds, is_alone=is_alone)

    def _learn_drift(self) -> None:
        now_s = self._clock()
        if self._scheduler.waiting and self._waited_s is not None:
            with self._wake:
                self._admission.worked(now_s - self._waited_s, self._done)
        self._waited_s = now_s if self._scheduler.waiting else None
        self._done = Load()

    def _corrupted(self, sequence: Sequence) -> None:
        if not sequence.is_finished:
            self.runner.corrupted += 1
            self._blocks.withdraw(sequence.blocks)  # NaN in a key or value is read again by all who share it
            self._fail(sequence, BackendError("the decoder gave NaN or infinity"))

    def _take_encoded(self) -> None:
        """Give items that were encoded to those who wait for them, and fail those whose item could not be."""
        done = self.runner.encoder.finished()
        for item in done:
            waiting = self._scheduler.encoded(item.digest)
            if item.rows is not None:
                self.pace.saw_tiles(item.num_tiles, item.seconds)
                self._done.tiles += item.num_tiles
                self.runner.features.put(item.digest, item.rows, item.kept)
            for sequence in waiting:
                if item.error is None:
                    sequence.encoded(item.seconds)
                else:
                    self._fail(sequence, item.error)
        if done:
            self.runner.features.shrink()
            self._progress_s = self._clock()

    def _end_late(self) -> None:
        now_s = self._clock()
        for request_id in [name for name, deadline_s in self._deadlines.items() if deadline_s <= now_s]:
            sequence = self._sequences[request_id]
            self._counts.late += 1
            limit_s, num_tokens = sequence.request.deadline_s, sequence.num_answer_tokens
            message = f"not answered within {limit_s:g} s: {num_tokens:,} tokens were"
            hint = "ask for fewer tokens, allow more time, or come back when the server is less busy"
            self._fail(sequence, DeadlineError(message, hint=hint))

    def _append(self, sequence: Sequence, choice: Choice) -> bool:
        """Whether the token had been guessed."""
        if sequence.num_answer_tokens == 0:
            self._counts.prompt_tokens += sequence.num_prompt_tokens
            with self._wake:
                self._admission.began(sequence.request.id)
        self._counts.generation_tokens += 1
        is_right = sequence.append(choice.token_id, now_s=self._clock())
        finish = sequence.finish_of(choice.token_id, self._eos_ids)
        if finish is not None:
            self._end(sequence, finish, choice)
        else:
            self._courier.send(sequence.deliver, said(sequence, choice))
        return is_right

    def _forget(self, sequence: Sequence) -> None:
        if self.runner.evictor is None or sequence.is_finished:
            return
        try:
            self.runner.evictor.forget(sequence, self._blocks)
        except Exception as error:
            log.exception("forgetting failed")
            self._fail(sequence, error)

    def _fail_all(self, sequences: list[Sequence], error: Exception) -> None:
        log.error("a step of %d sequences failed", len(sequences), exc_info=error)
        for sequence in sequences:
            self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        known = error if isinstance(error, TriptychError) else BackendError(f"{type(error).__name__}: {error}")
        self._end(sequence, FinishReason.ERROR, error=unwound(known))

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
        self._deadlines.pop(sequence.request.id, None)
        self._counts.finished[reason.value] += 1
        with self._wake:
            self._admission.leave(sequence.request.id, sequence.num_answer_tokens)
        self._courier.send(sequence.deliver, self._last(sequence, reason, choice, error=error))

    def _last(
        self, sequence: Sequence, reason: FinishReason, choice: Choice | None = None, *, error: TriptychError | None
    ) -> Delta:
        usage, timing = sequence.usage(), sequence.timing(self._clock())
        return said(sequence, choice).but(finish=reason, usage=usage, timing=timing, error=error)

    def _read_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                self._sequences[item.request.id] = item
                self._scheduler.add(item)
                if item.deadline_s is not None:
                    self._deadlines[item.request.id] = item.deadline_s
            elif item in self._sequences:
                self._end(self._sequences[item], FinishReason.ABORT)

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._turn()
                except Exception as error:  # a fault of ours: nobody may wait for ever
                    log.exception("the engine failed")
                    self._start_over(error)
        finally:
            self.runner.encoder.close()
            self._courier.close()

    def _turn(self) -> None:
        while not self._is_closing:
            if not self.step():
                self._rest()
        self._read_inbox()
        for sequence in list(self._sequences.values()):
            self._end(sequence, FinishReason.ABORT)

    def _rest(self) -> None:
        """Until there may be something to do: all who bring some notify, but a deadline comes by itself."""
        left_s = min(self._deadlines.values(), default=inf) - self._clock()
        with self._wake:
            if not (self._inbox or self.runner.encoder.has_finished or self._is_closing):
                self._wake.wait(max(0.0, min(IDLE_S, left_s)))
        seen = 0  # those who come together begin together: the first would hold the others back for its answer
        while seen < len(self._inbox) < self.plan.max_num_seqs and not self._is_closing:
            seen = len(self._inbox)
            time.sleep(GATHER_S)

    def _start_over(self, error: Exception) -> None:
        """Give everyone up and begin with clean caches; a second fault within a minute is the end."""
        now_s = self._clock()
        is_last = self._restarted_s is not None and now_s - self._restarted_s < RESTART_S
        with self._wake:
            self._is_closing = self._is_closing or is_last
            left = [*self._sequences.values(), *(item for item in self._inbox if isinstance(item, Sequence))]
            self._inbox.clear()
            self._admission.clear()
        self._sequences.clear()
        self._deadlines.clear()
        self.runner.features.clear()
        self._blocks, self._scheduler = self._fresh()
        self._restarted_s = now_s
        self._counts.restarts += not is_last
        for sequence in left:
            self._give_up(sequence, error)

    def _fresh(self) -> tuple[Blocks, Scheduler]:
        plan, evictor = self.plan, self.runner.evictor
        blocks = Blocks(plan.num_blocks)
        limits = Limits(
            max_step_tokens=plan.max_num_batched_tokens,
            max_sequences=plan.max_num_seqs,
            max_encode_tiles=plan.vision_batch,
            share_prefixes=plan.share_prefixes,
            min_computed=2 if evictor is None else max(2, evictor.num_queries),
            batch_invariant=plan.batch_invariant,
        )
        return blocks, Scheduler(limits, blocks, self.runner.features, self._drafter)

    def _give_up(self, sequence: Sequence, error: Exception) -> None:
        """Tell its consumer, and touch nothing else: what the engine knows may be wrong."""
        self._counts.finished[FinishReason.ERROR.value] += 1
        failure = BackendError(f"the engine failed: {type(error).__name__}: {error}", hint="please report it")
        self._courier.send(sequence.deliver, self._last(sequence, FinishReason.ERROR, error=failure))
