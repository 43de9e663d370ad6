"""What one caller may have, in time and number, over HTTP and by the clock."""

from __future__ import annotations

import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted import ScriptedSession, eventually, serving
from triptych.errors import RateLimitError
from triptych.server.config import ServerConfig
from triptych.server.limits import Account, Bucket, Turnstile, _address
from triptych.testing import Clock, TinyEngine, plan, tiny_session_over

CHAT = "/v1/chat/completions"


def body(text: str = "a b", **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def ask(
    url: str, text: str = "a b", *, key: str | None = None, headers: dict | None = None, **fields
) -> httpx.Response:
    given = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url + CHAT, json=body(text, **fields), headers=given | (headers or {}), timeout=30)


# ── buckets, by the clock ──────────────────────────────────────────────────────────────────────────────────────


def account(clock: Clock, **limits) -> Account:
    return Account(ServerConfig(**limits), clock)


def test_a_minutes_requests_may_come_at_once_and_then_one_every_while():
    clock = Clock()
    held = account(clock, max_requests_per_minute=6)
    for _ in range(6):
        held.enter()
        held.leave(0.1)
    with pytest.raises(RateLimitError, match="6 requests a minute") as refused:
        held.enter()
    clock.advance(refused.value.retry_after_s)
    held.enter()


def test_a_caller_with_all_it_may_have_is_told_when_one_of_them_ends():
    held = account(Clock(), max_requests_per_key=4)
    for _ in range(5):
        held.enter()
        held.leave(10.0)
    for _ in range(4):
        held.enter()
    with pytest.raises(RateLimitError, match="as many as it may have") as refused:
        held.enter()
    assert refused.value.retry_after_s == 3


def test_tokens_beyond_the_minutes_share_are_paid_back_by_waiting():
    clock = Clock()
    held = account(clock, max_tokens_per_minute=600)
    held.enter()
    held.spend(1000)  # what is begun is answered
    with pytest.raises(RateLimitError, match="600 tokens a minute") as refused:
        held.enter()
    assert refused.value.retry_after_s == 41
    clock.advance(40)
    with pytest.raises(RateLimitError):
        held.enter()
    clock.advance(1)
    held.enter()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 200)), max_size=40), st.integers(1, 100))
def test_a_bucket_never_gives_more_than_its_rate_and_one_minute_at_once(draws, per_minute):
    bucket, now_s, drawn = Bucket(per_minute), 0.0, 0
    for wait_s, amount in draws:
        now_s += wait_s
        if bucket.until_s(amount, now_s) == 0:
            bucket.draw(amount, now_s)
            drawn += amount
    assert drawn <= per_minute * (1 + now_s / 60) * (1 + 1e-9)


@settings(deadline=None)
@given(st.integers(1, 10_000), st.integers(0, 50_000), st.floats(0, 1e5))
def test_what_a_bucket_promises_is_true(per_minute, amount, now_s):
    bucket = Bucket(per_minute)
    bucket.draw(amount, now_s)
    wait_s = bucket.until_s(1, now_s)
    assert bucket.level(now_s + wait_s) >= 1 - 1e-6


def test_accounts_of_callers_long_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr("triptych.server.limits.ACCOUNTS_KEPT", 10)
    clock = Clock()
    turnstile = Turnstile(None, ServerConfig(max_requests_per_minute=60), clock)
    busy = turnstile._account("busy")
    busy.enter()
    for index in range(1000):
        turnstile._account(str(index)).enter()
        turnstile._account(str(index)).leave(0.1)
    assert len(turnstile._accounts) <= 11
    assert turnstile._account("busy") is busy, "never one that is under way"


@pytest.mark.parametrize(
    ("client", "caller"),
    [
        (("192.0.2.7", 5), "192.0.2.7"),
        (("::ffff:192.0.2.7", 5), "192.0.2.7"),  # as a socket of IPv6 calls it
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::1", 5), "2001:db8:1:2::/64"),
        (("a socket", 5), "a socket"),
        (None, ""),
    ],
)
def test_an_address_is_a_customers(client, caller):
    assert _address({"client": client}) == caller


# ── over HTTP ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_key_has_its_own_minute_and_is_told_so():
    config = ServerConfig(api_keys=("one", "two"), max_requests_per_minute=2, max_tokens_per_minute=10_000)
    with serving(ScriptedSession(), config) as url:
        first = ask(url, key="one")
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert int(ask(url, key="one").headers["x-ratelimit-remaining-tokens"]) < 10_000
        refused = ask(url, key="one")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert ask(url, key="two").status_code == 200
        found = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer one"}).text
    assert 'triptych:refused_requests_total{code="rate_limit_exceeded",model_name="scripted",status="429"} 1.0' in found


def test_reading_needs_no_share():
    with serving(ScriptedSession(), ServerConfig(max_requests_per_minute=1)) as url:
        for _ in range(5):
            assert httpx.get(f"{url}/v1/models").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_dialect_passes_the_turnstile_and_says_it_in_its_own_words(path):
    with serving(ScriptedSession(), ServerConfig(max_requests_per_minute=1)) as url:
        httpx.post(url + path, json={})
        refused = httpx.post(url + path, json={})
    assert refused.status_code == 429
    assert "retry-after" in refused.headers
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_so_many_at_once_and_a_place_is_free_when_one_leaves():
    slow = body("slow a b", stream=True, max_tokens=900)
    with serving(ScriptedSession(), ServerConfig(max_requests_per_key=2)) as url:
        with httpx.stream("POST", url + CHAT, json=slow), httpx.stream("POST", url + CHAT, json=slow):
            refused = ask(url)
            assert (refused.status_code, "2 requests" in refused.text) == (429, True)
        assert eventually(lambda: ask(url).status_code == 200), "those who hung up have left"


def test_answers_are_charged_as_they_come():
    session = ScriptedSession()
    with serving(session, ServerConfig(max_tokens_per_minute=20)) as url:
        assert ask(url, max_tokens=400).status_code == 200
        refused = ask(url)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 600


def test_the_least_of_three_limits_of_time_holds():
    session = ScriptedSession()
    with serving(session, ServerConfig(request_timeout_s=100.0)) as url:
        ask(url)
        ask(url, timeout=50)
        ask(url, timeout=50, headers={"x-request-timeout": "20"})
        ask(url, timeout=500)
    limits = [terms.deadline_s for terms in session.terms]
    for limit, most in zip(limits, (100, 50, 20, 100), strict=True):
        assert most - 10 < limit < most


@pytest.mark.parametrize("given", ["soon", "-1", "0", "nan", "inf", "1e999"])
def test_a_time_that_is_none_is_refused(given):
    with serving(ScriptedSession()) as url:
        refused = ask(url, headers={"x-request-timeout": given})
        assert refused.status_code == 400
        assert "X-Request-Timeout" in refused.text


def test_a_prompt_that_is_not_ready_in_time_ends_with_504():
    session = ScriptedSession(while_preparing=lambda: time.sleep(0.3))
    with serving(session) as url:
        refused = ask(url, timeout=0.05)
    assert refused.status_code == 504
    assert refused.json()["error"]["code"] == "deadline_exceeded"
    assert not session.streams


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_finished_in_time_ends_with_an_error(stream):
    tiny = TinyEngine(plan(max_model_len=4096, num_blocks=300))
    step = tiny.engine.step
    tiny.engine.step = lambda: (tiny.clock.advance(0.1), step())[1]
    with tiny_session_over(tiny) as session, serving(session) as url:
        answer = ask(url, timeout=20, max_tokens=400, temperature=0, stream=stream)
        assert "deadline_exceeded" in answer.text
        assert answer.status_code == (200 if stream else 504)
        assert session.stats().late == 1
        assert ask(url, max_tokens=2, temperature=0).status_code == 200


def test_nobody_jumps_the_queue_but_whom_the_operator_lets():
    session = ScriptedSession()
    with serving(session) as url:
        refused = ask(url, priority=-1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert ask(url, priority=3).status_code == 200
    with serving(session, ServerConfig(min_priority=-5)) as url:
        assert ask(url, priority=-5).status_code == 200
    assert [terms.priority for terms in session.terms] == [3, -5]


def test_callers_are_keys_or_where_there_are_none_addresses():
    session = ScriptedSession()
    for keys in ((), ("one",), ("one", "two")):
        with serving(session, ServerConfig(api_keys=keys)) as url:
            ask(url, key="one")
    callers = [terms.caller for terms in session.terms]
    assert callers[:2] == ["127.0.0.1", ""]
    assert len(callers[2]) == 16
