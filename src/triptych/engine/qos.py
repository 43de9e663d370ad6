"""Who may queue and whose turn it is: work is counted in seconds of this device, callers share it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.core.request import Request
from triptych.engine.config import EnginePlan
from triptych.engine.pace import Estimate, Pace
from triptych.errors import ContextError, OverloadError, RequestError

FIRST_GUESS = 128  # tokens of an answer, before any was seen
ANSWER_WEIGHT = 2.0  # of an answer's token beside a prompt's, when callers share (VTC, arXiv:2401.00588)
DRIFT_S = 30.0  # of work that the drift of predictions is measured over
CALLERS_KEPT = 1024  # before those who had least are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request asks of the device."""

    caller: str
    priority: int
    prompt_tokens: int
    tiles: int
    answer_tokens: int  # expected


def check_fits(request: Request, plan: EnginePlan, method: str | None) -> None:
    """Raises ContextError or RequestError for what this engine can never answer. method: by which it forgets."""
    num_prompt, max_tokens = len(request.token_ids), request.sampling.max_tokens
    if request.kv is not None and request.kv.budget < 1.0 and request.kv.method != method:
        has = "keeps every key and value" if method is None else f"forgets by {method!r}"
        raise RequestError(f"the request forgets by {request.kv.method!r}, this engine {has}", param="kv")
    if num_prompt == 0:
        raise ContextError("the prompt has no tokens", hint="say something")
    if max_tokens < 1:
        raise ContextError(f"max_tokens is {max_tokens}, it must be at least 1", param="max_tokens")
    if num_prompt + max_tokens > plan.max_model_len:
        room = plan.max_model_len - num_prompt
        raise ContextError(
            f"the prompt has {num_prompt:,} tokens ({request.image_tokens:,} of them for images) and max_tokens is "
            f"{max_tokens:,}; together they pass the context of {plan.max_model_len:,}",
            hint=f"ask for at most {room:,} tokens" if room > 0 else "shorten the prompt",
            param="max_tokens" if room > 0 else "messages",
        )


class Turns:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996): of one priority, callers are served alike.

    A request's turn is when its caller's earlier ones would be done if all callers were served side by side; so who
    asks a thousand things at once waits behind himself, and who asks one thing is next.
    """

    def __init__(self) -> None:
        self._now = 0.0  # the turn that was served last
        self._done: dict[str, float] = {}  # when each caller's requests so far are done

    def take(self, request: Request) -> float:
        turn = max(self._now, self._done.get(request.caller, 0.0))
        self._done[request.caller] = turn + tokens_of(request)
        if len(self._done) > CALLERS_KEPT:
            ahead = sorted(self._done.items(), key=lambda entry: entry[1])[-CALLERS_KEPT // 2 :]
            self._done = {name: done for name, done in ahead if done > self._now}
        return turn

    def served(self, turn: float) -> None:
        self._now = max(self._now, turn)

    def give_back(self, tokens: Mapping[str, float], ends: Mapping[str, float]) -> None:
        """Callers asked for so much that ended before its turn came. ends: when the last that they wait for is done."""
        for caller, less in tokens.items():
            if follows(done := self._done.get(caller, 0.0), ends[caller]):
                self._done[caller] = self.sooner(done, less)

    def sooner(self, turn: float, tokens: float) -> float:
        """When a turn comes that need not wait for so much; no sooner than one that is taken now."""
        return max(turn - tokens, min(turn, self._now))


def follows(turn: float, end: float) -> bool:
    """Whether a turn waits for its caller's request that is done then, and for nothing later; to half a token."""
    return turn <= end + 0.5


def tokens_of(request: Request) -> float:
    """What a request takes of its caller's share."""
    return len(request.token_ids) + ANSWER_WEIGHT * min(request.sampling.max_tokens, FIRST_GUESS)


@dataclass(slots=True)
class Load:
    """What requests ask of the device: those of one caller and priority that are unfinished, or what was done."""

    number: int = 0
    prompt_tokens: int = 0
    tiles: int = 0
    answer_tokens: int = 0


class Admission:
    """Bounds the queue. Its methods are called under one lock, from any thread."""

    def __init__(self, pace: Pace, *, max_running: int, max_queued: int, max_queue_s: float) -> None:
        self._pace = pace
        self._max_running = max_running
        self._max_number = max_running + max_queued
        self._max_queue_s = max_queue_s
        self._unfinished: dict[str, Work] = {}  # by request id
        self._begun: set[str] = set()  # whose prompts are computed
        self._loads: dict[tuple[str, int], Load] = defaultdict(Load)  # by caller and priority
        self._answers = Estimate(float(FIRST_GUESS), 1)
        self._took_s = self._expected_s = DRIFT_S / 3  # what was done while requests waited

    def __len__(self) -> int:
        return len(self._unfinished)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    def enter(self, request: Request) -> None:
        """Count a request in. Raises OverloadError that says when there will be room."""
        work = self.work_of(request)
        self._check_number(work)
        wait_s = self.wait_s(work)
        limit_s = min(self._max_queue_s, math.inf if request.deadline_s is None else request.deadline_s)
        if wait_s > limit_s:
            has = f"about {wait_s:,.1f} s of work wait before this request, the limit is {limit_s:,g} s"
            raise OverloadError(has, retry_after_s=wait_s - limit_s)
        self._unfinished[request.id] = work
        load = self._loads[work.caller, work.priority]
        load.number += 1
        load.prompt_tokens += work.prompt_tokens
        load.tiles += work.tiles
        load.answer_tokens += work.answer_tokens

    def began(self, request_id: str) -> None:
        """Its first token is there: what is left is its answer."""
        work = self._unfinished[request_id]
        self._begun.add(request_id)
        load = self._loads[work.caller, work.priority]
        load.prompt_tokens -= work.prompt_tokens
        load.tiles -= work.tiles

    def worked(self, seconds: float, done: Load) -> None:
        """So much was done in so long a time, in which requests waited; what was found in a cache counts as done."""
        if not (self._pace.prompt_token_s and self._answer_token_s):
            return
        fade = math.exp(-seconds / DRIFT_S)
        self._took_s = fade * self._took_s + seconds
        self._expected_s = fade * self._expected_s + self._seconds(done, with_answers=True)

    def leave(self, request_id: str, num_answer_tokens: int) -> None:
        work = self._unfinished.pop(request_id)
        load = self._loads[work.caller, work.priority]
        if request_id in self._begun:
            self._begun.discard(request_id)
            self._answers.see(num_answer_tokens)
        else:
            load.prompt_tokens -= work.prompt_tokens
            load.tiles -= work.tiles
        load.answer_tokens -= work.answer_tokens
        load.number -= 1
        if not load.number:
            del self._loads[work.caller, work.priority]

    def clear(self) -> None:
        self._unfinished.clear()
        self._begun.clear()
        self._loads.clear()

    def work_of(self, request: Request) -> Work:
        return Work(
            caller=request.caller,
            priority=request.priority,
            prompt_tokens=len(request.token_ids),
            tiles=sum(len(item.tiles) for item in request.patches.values()),
            answer_tokens=min(request.sampling.max_tokens, math.ceil(self._answers.value)),
        )

    def wait_s(self, work: Work) -> float:
        """How long such a request would wait for its turn: for all that is its caller's own, and as much of others'.

        While there is room for another answer, answers under way hold nobody up.
        """
        is_full = len(self._unfinished) >= self._max_running
        waiting: dict[str, float] = defaultdict(float)
        for (caller, priority), load in self._loads.items():
            if priority <= work.priority:
                waiting[caller] += self._seconds(load, with_answers=is_full)
        own_s = waiting.pop(work.caller, 0.0)
        share_s = own_s + self._seconds(work, with_answers=is_full)
        return self._drift * (own_s + sum(min(other_s, share_s) for other_s in waiting.values()))

    @property
    def backlog_s(self) -> float:
        """Of everything that is unfinished, answers too."""
        return self._drift * sum(self._seconds(load, with_answers=True) for load in list(self._loads.values()))

    @property
    def _drift(self) -> float:
        """How much longer things take than each by itself: caches and crowded steps are in no single measurement."""
        return min(4.0, max(0.25, self._took_s / self._expected_s))

    @property
    def _answer_token_s(self) -> float:
        return self._pace.answers_s(self._max_running) / self._max_running

    def _seconds(self, of: Work | Load, *, with_answers: bool) -> float:
        prompt_s = of.prompt_tokens * self._pace.prompt_token_s + of.tiles * self._pace.tile_s
        return prompt_s + (of.answer_tokens * self._answer_token_s if with_answers else 0.0)

    def _check_number(self, work: Work) -> None:
        """So many may wait; a caller with less than an equal share of them may pass that bound, but not twice it."""
        most, number = self._max_number, len(self._unfinished)
        if number < most:
            return
        own = sum(load.number for (caller, _), load in self._loads.items() if caller == work.caller)
        callers = {work.caller, *(caller for caller, _ in self._loads)}
        if number >= 2 * most or own * len(callers) >= most:
            has = (
                f"{number:,} requests are unfinished, the limit is {most - self._max_running:,} waiting besides "
                f"{self._max_running:,} running"
            )
            raise OverloadError(has, retry_after_s=self.backlog_s / number)
