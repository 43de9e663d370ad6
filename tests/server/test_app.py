"""Keys, ids, health, metrics, disconnects, and leaving gracefully."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from scripted import ScriptedSession, eventually, serving
from triptych.errors import ConfigError
from triptych.server.app import create_app
from triptych.server.config import ServerConfig
from triptych.server.listener import listen, url_of
from triptych.server.logs import FactsFormatter
from triptych.server.run import serve
from triptych.server.serving import Serving

USER = [{"role": "user", "content": "slow a b"}]
PATIENT = {"timeout": 60}  # the machine may be busy


def test_a_key_is_asked_for_everywhere_but_at_health_and_version():
    with serving(ScriptedSession(), ServerConfig(api_keys=("sesame", "other"))) as url:
        for path in ("/v1/models", "/metrics", "/v1/nowhere"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sesame"}):
                answer = httpx.get(url + path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "bearer other"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/version").json()["version"]


def test_keys_and_salts_are_tenants():
    session = ScriptedSession()
    with serving(session, ServerConfig(api_keys=("one", "two"))) as url:
        for key, salt in (("one", None), ("two", None), ("one", "s"), ("one", None)):
            body = {"messages": USER, "max_tokens": 1, "cache_salt": salt}
            httpx.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    tenants = [prompt.tenant for prompt in session.prompts]

    assert tenants[0] == tenants[3]
    assert len(set(tenants)) == 3
    assert not any("one" in tenant for tenant in tenants)


def test_a_request_keeps_its_id_and_gets_one_where_it_has_none():
    with serving(ScriptedSession()) as url:
        assert httpx.get(f"{url}/health", headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
        strange = httpx.get(f"{url}/health", headers={"x-request-id": "a b\tc"}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{32}", strange)
        assert httpx.get(f"{url}/nowhere").headers["x-request-id"]


def test_health_is_progress_not_a_constant():
    session = ScriptedSession()
    with serving(session, ServerConfig(stall_s=10)) as url:
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        session.stuck_s = 11
        stalled = httpx.get(f"{url}/health")
        session.stuck_s, session.is_dead = 0, True
        dead = httpx.get(f"{url}/health")

    assert (stalled.status_code, stalled.json()["status"]) == (503, "stalled")
    assert (dead.status_code, dead.json()["status"]) == (503, "dead")


def test_health_answers_while_prompts_are_being_prepared():
    is_preparing, release = threading.Event(), threading.Event()

    def wait() -> None:
        is_preparing.set()
        release.wait(30)

    session = ScriptedSession(while_preparing=wait)
    with serving(session, ServerConfig(text_threads=1)) as url:
        threads = [
            threading.Thread(target=httpx.post, args=(f"{url}/v1/chat/completions",), kwargs={"json": body, **PATIENT})
            for body in [{"messages": USER, "max_tokens": 1}] * 3
        ]
        for thread in threads:
            thread.start()
        assert eventually(is_preparing.is_set)
        assert httpx.get(f"{url}/health", **PATIENT).status_code == 200
        assert not release.is_set()
        release.set()
        for thread in threads:
            thread.join()


PICTURED = [{"type": "image_url", "image_url": "data:,"}, {"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [{"role": "user", "content": PICTURED}]},
        {"messages": USER, "response_format": {"type": "json_object"}},
    ],
    ids=["picture", "form"],
)
def test_what_takes_its_time_to_prepare_does_not_hold_up_text(asked):
    release = threading.Event()
    session = ScriptedSession()
    with serving(session, ServerConfig(text_threads=1, media_threads=1)) as url:
        session.while_preparing = lambda: bool(release.wait(30)) and None
        slow = asked | {"max_tokens": 1}
        thread = threading.Thread(
            target=httpx.post, args=(f"{url}/v1/chat/completions",), kwargs={"json": slow, **PATIENT}
        )
        thread.start()
        text = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, **PATIENT)
        assert not release.is_set()
        release.set()
        thread.join()

    assert text.status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_hangs_up_takes_every_answer_along(stream):
    session = ScriptedSession()
    with serving(session) as url:
        body = json.dumps({"messages": USER, "n": 3, "stream": stream, "max_tokens": 900}).encode()
        with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)) as raw:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            assert eventually(lambda: len(session.streams) == 3)
            if stream:
                assert raw.recv(10)
        assert eventually(lambda: all(one.is_aborted for one in session.streams.values()))
        told = httpx.get(f"{url}/metrics").text

    assert all(one.num_tokens < 900 for one in session.streams.values())
    assert 'vllm:request_success_total{finished_reason="abort",model_name="scripted"} 3.0' in told


def test_a_caller_who_hangs_up_while_the_engine_is_silent_is_noticed():
    session = ScriptedSession(is_stuck=True)
    with serving(session) as url:
        with contextlib.suppress(httpx.ReadTimeout), httpx.Client(timeout=0.3) as client:
            client.post(f"{url}/v1/chat/completions", json={"messages": USER, "stream": True})
        assert eventually(lambda: all(one.is_aborted for one in session.streams.values()))


def test_a_silent_stream_is_kept_open():
    session = ScriptedSession(is_stuck=True)
    with serving(session, ServerConfig(ping_s=0.05)) as url, httpx.Client() as client:
        body = {"messages": USER, "stream": True}
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            assert next(answer.iter_lines()) == ": ping"


def test_metrics_have_vllms_names_and_stages():
    with serving(ScriptedSession()) as url:
        httpx.post(f"{url}/v1/chat/completions", json={"messages": USER, "max_tokens": 3})
        httpx.post(f"{url}/v1/chat/completions", json={"messages": USER, "max_tokens": "3"})
        answer = httpx.get(f"{url}/metrics")
    lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    model = 'model_name="scripted"'

    assert answer.headers["content-type"].startswith("text/plain")
    for name, value in {
        f"vllm:num_requests_running{{{model}}}": 0,
        f"vllm:num_requests_waiting{{{model}}}": 0,
        f"vllm:kv_cache_usage_perc{{{model}}}": 0.25,
        f"vllm:prefix_cache_hits_total{{{model}}}": 40,
        f"vllm:mm_cache_queries_total{{{model}}}": 7,
        f"vllm:num_preemptions_total{{{model}}}": 2,
        f"vllm:prompt_tokens_total{{{model}}}": 500,
        f"vllm:generation_tokens_total{{{model}}}": 90,
        f"vllm:corrupted_requests_total{{{model}}}": 0,
        f"triptych:evicted_tokens_total{{{model}}}": 70,
        f"triptych:kv_compactions_total{{{model}}}": 2,
        f'vllm:request_success_total{{finished_reason="length",{model}}}': 1,
        f"vllm:time_to_first_token_seconds_count{{{model}}}": 1,
        f"vllm:inter_token_latency_seconds_count{{{model}}}": 2,
        f"vllm:e2e_request_latency_seconds_count{{{model}}}": 1,
        f"vllm:request_queue_time_seconds_sum{{{model}}}": 0.001,
        f"vllm:request_generation_tokens_sum{{{model}}}": 3,
        f'triptych:stage_seconds_sum{{modality="text",{model},stage="decode"}}': 1.5,
        f'triptych:prepare_seconds_count{{modality="text",{model}}}': 1,
        f'triptych:refused_requests_total{{code="invalid_value",{model},status="400"}}': 1,
        f'triptych:part_info{{{model},part="decoder",place="CPU (test), f32"}}': 1,
    }.items():
        assert float(lines[name]) == value, name


def test_names_it_answers_to():
    with serving(ScriptedSession(), ServerConfig(model_names=("small", "eye"))) as url:
        assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["small", "eye"]
        for asked, told in (("eye", "eye"), ("small", "small"), (None, "small")):
            answer = httpx.post(f"{url}/v1/chat/completions", json={"model": asked, "messages": USER, "max_tokens": 1})
            assert answer.json()["model"] == told
        body = {"model": "scripted", "messages": USER}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 404


def test_the_log_has_ids_and_figures_but_nothing_a_caller_wrote(caplog):
    with serving(ScriptedSession()) as url, caplog.at_level(logging.INFO, "triptych.server"):
        body = {"messages": [{"role": "user", "content": "sesame"}], "max_tokens": 2}
        httpx.post(f"{url}/v1/chat/completions?q=sesame", json=body, headers={"x-request-id": "r-1"})
        httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "sesame", "content": "sesame"}]})
        assert eventually(lambda: len(caplog.records) >= 2)
    lines = [FactsFormatter().format(record) for record in caplog.records]

    assert "request=r-1 method=POST path=/v1/chat/completions status=200" in lines[0]
    assert "completion_tokens=2 finish=length" in lines[0]
    assert "status=400" in lines[1]
    assert "error=invalid_value" in lines[1]
    assert "sesame" not in "".join(lines)


def test_a_log_line_moves_no_cursor():
    facts = {"path": "/\x1b[2J\x85\u2028", "name": "Straße"}
    line = FactsFormatter().format(logging.makeLogRecord({"msg": "request", "facts": facts}))
    assert line.isprintable()
    assert "name=Straße" in line


def test_a_port_that_is_taken_is_an_error_that_says_so():
    with contextlib.closing(listen("127.0.0.1", 0)) as taken:
        taken.listen()
        port = int(url_of(taken).rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_of_two_that_start_at_once_on_one_port_the_later_is_told_so():
    with contextlib.closing(listen("127.0.0.1", 0)) as first:
        port = int(url_of(first).rsplit(":", 1)[1])
        with contextlib.closing(listen("127.0.0.1", port)) as second:
            first.listen()
            app = create_app(ScriptedSession())
            with pytest.raises(ConfigError, match=f"cannot listen on http://127.0.0.1:{port}: Address already in use"):
                serve(app, second, announce=lambda: None)


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1].split(":")
from scripted import ScriptedSession
from triptych.server import logs, run
from triptych.server.app import create_app
from triptych.server.config import ServerConfig
from triptych.server.listener import listen, url_of
logs.set_up()
listener = listen("127.0.0.1", 0)
app = create_app(ScriptedSession(), ServerConfig(drain_s=float(sys.argv[2])))
run.serve(app, listener, announce=lambda: print(url_of(listener), flush=True))
"""


@contextlib.contextmanager
def program(drain_s: float):
    paths = ":".join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", PROGRAM, paths, str(drain_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_finish_and_leaves_with_zero(number):
    with program(drain_s=20) as (process, url), httpx.Client() as client:
        body = {"messages": USER, "max_tokens": 30, "stream": True}
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(10) == 0
        with pytest.raises(httpx.ConnectError):
            client.get(f"{url}/health")


def test_an_answer_that_outlasts_the_drain_ends_with_an_error():
    with program(drain_s=0.2) as (process, url), httpx.Client() as client:
        body = {"messages": USER, "max_tokens": 900, "stream": True}
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.terminate()
            rest = [line for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "unavailable"
        assert process.wait(10) == 0


def test_a_second_signal_ends_answers_with_an_error_and_without_a_traceback():
    with program(drain_s=60) as (process, url), httpx.Client() as client:
        body = {"messages": USER, "max_tokens": 900, "stream": True}
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "unavailable"
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_prompt_that_is_ready_after_the_drain_is_refused_and_not_begun(monkeypatch):
    is_preparing, is_cut, abort_all = threading.Event(), threading.Event(), Serving.abort_all

    def prepare() -> None:
        is_preparing.set()
        is_cut.wait(30)

    def cut(serving: Serving) -> None:
        abort_all(serving)
        is_cut.set()

    monkeypatch.setattr(Serving, "abort_all", cut)
    session = ScriptedSession(while_preparing=prepare)
    with ThreadPoolExecutor() as pool:
        with serving(session, ServerConfig(drain_s=0.1)) as url:
            body = {"messages": USER, "max_tokens": 900, "stream": True}
            asked = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=60)
            assert is_preparing.wait(30)
        answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert not session.streams


def test_a_web_page_of_an_allowed_origin_may_ask_and_read_refusals_too():
    page, asks = "https://chat.example.org", {"access-control-request-method": "POST"}
    config = ServerConfig(allowed_origins=(page,), api_keys=("sesame",))
    with serving(ScriptedSession(), config) as url:
        before = httpx.options(f"{url}/v1/chat/completions", headers={"origin": page, **asks})
        locked = httpx.get(f"{url}/v1/models", headers={"origin": page})
        other = httpx.options(f"{url}/v1/chat/completions", headers={"origin": "https://evil.example", **asks})

    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == page
    assert locked.status_code == 401
    assert locked.headers["access-control-allow-origin"] == page
    assert "access-control-allow-origin" not in other.headers
    with serving(ScriptedSession()) as url:
        assert "access-control-allow-origin" not in httpx.get(f"{url}/v1/models").headers
