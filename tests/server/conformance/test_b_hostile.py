"""Section B: whoever means harm costs himself more than the server, and nobody else anything."""

from __future__ import annotations

import gzip
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from PIL import Image

from asking import bomb, is_clean, png, see
from conforming import UNSEALED, ask, dial, inspect, is_hung_up, read_all, refused, told
from pictures import saved
from scripted import ScriptedSession, eventually, serving
from triptych.media.fetch import MediaPolicy, resolve
from triptych.server.config import ServerConfig
from triptych.server.logs import FactsFormatter, JsonFormatter
from triptych.server.visit import LOOPBACK, address_of
from triptych.session import Session
from triptych.testing import tiny_session

HASTY = ServerConfig(head_s=0.5, body_s=0.5, write_s=0.5, max_body_bytes=1 << 20, max_head_bytes=8192)
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
ROOMY = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "allowed" / "deep").mkdir(parents=True)
    (folder / "secret.png").write_bytes(saved(Image.new("RGB", (4, 4), "red"), "PNG"))
    (folder / "allowed" / "out.png").symlink_to(folder / "secret.png")
    (folder / "allowed" / "up").symlink_to(folder)
    return folder / "allowed"


@pytest.fixture(scope="module")
def session(root: Path) -> Iterator[Session]:
    with tiny_session(policy=MediaPolicy(allowed_local_root=root)) as session:
        yield session


@pytest.fixture(scope="module")
def hasty() -> Iterator[str]:
    with serving(ScriptedSession(), HASTY) as url:
        yield url


def body_of(**fields: Any) -> bytes:
    return json.dumps({"messages": see("a b"), "max_tokens": 2} | fields).encode()


def post(body: bytes, *headers: bytes) -> bytes:
    return POST + b"".join(header + b"\r\n" for header in headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body


# ── pictures ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("side", [12_000, 40_000, 2**31 - 1])
def test_t13_a_bomb_is_refused_by_its_header_on_every_path(url, root, side):
    before = psutil.Process().memory_info().rss
    (root / "bomb.png").write_bytes(resolve(bomb(side), MediaPolicy()))
    for source in (bomb(side), f"file://{root}/bomb.png"):
        began = time.monotonic()
        assert f"{side:,}×{side:,}" in refused(ask(url, source))
        assert f"{side:,}×{side:,}" in inspect(url, source)["refusal"]["message"]
        assert time.monotonic() - began < 30
    assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    "name", ["../secret.png", "out.png", "up/secret.png", "%2e%2e/secret.png", "deep/../../secret.png", "deep"]
)
def test_t16_nothing_outside_the_root_is_read(url, root, name):
    refused(ask(url, f"file://{root}/{name}"))


def test_t16_files_are_off_unless_a_root_is_given(root):
    with tiny_session() as session, serving(session) as url:
        assert "--allowed-local-media-path" in refused(ask(url, "file:///etc/passwd"))


@pytest.mark.parametrize("kind", ["image_embeds", "audio_embeds", "video_embeds"])
def test_t19_features_made_elsewhere_are_refused(url, kind):
    parts = [{"type": kind, kind: {"grid_thw": [1 << 40, 1, 1], "data": "AAAA"}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert kind in refused(httpx.post(f"{url}/v1/chat/completions", json=body, **UNSEALED))


def test_a_decoder_that_is_killed_costs_one_request_at_most(session, url):
    told(ask(url, png(1)))
    for process_id in session._decoders.process_ids:
        os.kill(process_id, signal.SIGKILL)
    answers = [ask(url, png(brightness)) for brightness in range(2, 6)]
    assert sum(answer.status_code != 200 for answer in answers) <= 1
    assert eventually(lambda: is_clean(session))


# ── what is logged ──────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(where=some.data())
def test_t17_the_log_holds_nothing_of_a_body_whatever_is_wrong_with_it(url, caplog, where):
    """A secret stands in any place of a body, under any path; its lines are read as an operator would."""
    secret = f"SESAME{secrets.token_hex(8)}"
    long = secret + "A" * where.draw(some.sampled_from([0, 50_000]))
    body: dict[str, Any] = {"messages": see("hi", png(3)), "prompt": "hi", "input": "hi", "max_tokens": 1}
    value = where.draw(some.sampled_from([long, [long], {long: long}, {"url": f"data:image/png;base64,{long}"}]))
    match where.draw(some.sampled_from(["field", "name", "text", "url", "role", "raw"])):
        case "field":
            body[where.draw(some.sampled_from(["model", "stop", "seed", "messages", "prompt", "tools", "user"]))] = (
                value
            )
        case "name":
            body[long] = value
        case "text":
            body["messages"] = see(long)
        case "url":
            scheme = where.draw(
                some.sampled_from(["data:image/png;base64,", "data:,", "http://", "file:///", "x:", ""])
            )
            body["messages"] = see("hi", scheme + long)
        case "role":
            body["messages"] = [{"role": long, "content": [{"type": long, "text": value}]}]
        case _:
            body = {}
    raw = json.dumps(body).encode() if body else b'{"messages": "' + long.encode() + b"\xff"
    path = where.draw(
        some.sampled_from(
            [
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/media/inspect",
                "/v1/responses",
                "/v1/messages",
                "/tokenize",
            ]
        )
    )
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        httpx.post(f"{url}{path}?{secret}", content=raw, headers={"x-request-id": f"a {secret}"}, **UNSEALED)
        assert eventually(lambda: any(record.getMessage() == "request" for record in caplog.records))
    ours = [record for record in caplog.records if record.name.startswith(("triptych", "uvicorn", "asyncio"))]
    assert secret not in "".join(FactsFormatter().format(record) for record in ours)


@pytest.mark.parametrize("formatter", [FactsFormatter(), JsonFormatter()])
def test_t17_an_error_nobody_foresaw_repeats_at_most_a_line_of_what_caused_it(formatter):
    try:
        try:
            raise ValueError("first\n" + "SESAME" * 10**6)
        except ValueError as error:
            raise ExceptionGroup("x" * 10**6, [KeyError("y" * 10**6)]) from error
    except ExceptionGroup:
        record = logging.getLogger().makeRecord("a", logging.ERROR, "f", 1, "unexpected", (), sys.exc_info())
    line = formatter.format(record)
    assert "SESAME" not in line
    assert "KeyError" in line
    assert len(line) < 4000


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("packed", ["gzip", "br", "deflate", "zstd", "gzip, gzip"])
def test_a_packed_body_is_refused_before_it_is_unpacked(url, packed):
    body = gzip.compress(body_of())
    headers = {"content-encoding": packed}
    for path in ("/v1/chat/completions", "/v1/media/inspect"):
        assert "without Content-Encoding" in refused(httpx.post(url + path, content=body, headers=headers), 415)


def test_megabytes_of_blanks_are_refused_quickly(url):
    began = time.process_time()
    for text in (" " * 10_000_000, "\n" * 10_000_000, "a" * 10_000_000):
        assert "characters" in refused(ask(url, text=text))
    assert time.process_time() - began < 10


@pytest.mark.parametrize("value", [b"{}", b"[]", b"1.5", b'""', b"[[[[[[]]]]]]"])
def test_a_body_of_many_small_values_is_refused_before_it_is_unpacked(url, value):
    """60 MB of them would take 1.5 GB, and every thread would wait for it."""
    body = b'{"messages": [' + (value + b",") * (30_000_000 // (len(value) + 1)) + value + b"]}"
    before = psutil.Process().memory_info().rss
    for path in ("/v1/chat/completions", "/v1/media/inspect"):
        assert "values, the limit is" in refused(httpx.post(url + path, content=body, **UNSEALED))
    assert psutil.Process().memory_info().rss - before < 300 << 20


LONG = "a b " * 1_000_000


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG[:9000]}] * 400}]},
        {"messages": see("a"), "chat_template_kwargs": {"deep": [{"er": LONG}]}},
        {"messages": see("a"), "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
        {
            "messages": see("a"),
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": LONG}}}],
        },
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": LONG}}]},
            ]
        },
        {
            "messages": see("a"),
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"title": LONG}}},
        },
        {"messages": see("a"), "structured_outputs": {"regex": LONG}},
        {"messages": see("a"), "structured_outputs": {"choice": [LONG, "b"]}},
        {"messages": see("a"), "stop": [LONG]},
    ],
    ids=["system", "parts", "arguments", "tool", "schema of a tool", "call", "schema", "regex", "choice", "stop"],
)
def test_a_text_too_long_is_refused_quickly_wherever_it_stands(url, body):
    began = time.process_time()
    refused(httpx.post(f"{url}/v1/chat/completions", json=body, **UNSEALED))
    assert time.process_time() - began < 10


CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
FUNCTION = {"name": "f", "parameters": {"title": LONG}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            (path, {"messages": see("a"), "tools": [{"type": "function", "function": FUNCTION}]})
            for path in ("/v1/chat/completions", "/v1/media/inspect", "/tokenize")
        ),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}],
                                       "tools": [{"name": "f", "input_schema": {"title": LONG}}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": LONG, "arguments": "{}"}}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [
            {"id": LONG, "function": {"name": "f", "arguments": "{}"}}]}]}),
        ("/v1/chat/completions", {"messages": [CALLED, {"role": "tool", "tool_call_id": LONG, "content": "a"}]}),
        ("/v1/chat/completions",
         {"messages": [CALLED, {"role": "tool", "tool_call_id": "1", "name": LONG, "content": "a"}]}),
        ("/v1/chat/completions", {"messages": see("a"), "chat_template_kwargs": {LONG: 1}}),
    ],
)  # fmt: skip
def test_what_a_template_is_given_counts_as_text_on_every_path(url, path, body):
    began = time.process_time()
    answer = httpx.post(url + path, json=body, **UNSEALED)
    if path == "/v1/media/inspect" and answer.status_code == 200:
        assert answer.json()["refusal"]
    else:
        assert answer.status_code == 400
    assert time.process_time() - began < 10


def test_tokenizing_leaves_the_lock_of_python_to_others(session):
    """Nothing else would run while a long text is cut: no stream, no health."""
    text, seen = "ab c" * 100_000, []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            seen.append(time.monotonic())

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.monotonic()
    session.text.encode(text)
    ended = time.monotonic()
    is_over.set()
    thread.join()
    assert sum(began < at < ended for at in seen) > 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[65] * 400] * 128, "echo": True, "logprobs": 20, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [[65] * 400] * 128, "prompt_logprobs": 20, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": see("a"), "n": 128, "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 400, "stream": True}),
    ],
)
def test_probabilities_that_would_fill_the_memory_are_refused_with_their_number(url, path, body):
    assert "probabilities are asked for, the limit is 262,144" in refused(httpx.post(url + path, json=body, **UNSEALED))


def test_one_answer_may_have_all_the_probabilities_it_has_room_for(url):
    assert told(ask(url, logprobs=True, top_logprobs=20, max_tokens=None))


LAWLESS = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(60)} | {"d60": {"pattern": "a*b"}}
LAWLESS_SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": LAWLESS}
CHAIN = "start: r0\n" + "".join(f"r{at}: r{at + 1} /b/ | /c/\n" for at in range(3000)) + "r3000: /d/"


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": LAWLESS_SCHEMA}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": LAWLESS_SCHEMA}}]},
        {"guided_grammar": CHAIN},
    ],
    ids=["schema", "tool", "grammar"],
)
def test_a_form_that_would_end_the_server_ends_its_own_request(url, form):
    assert "cannot be held" in refused(
        httpx.post(f"{url}/v1/chat/completions", json={"messages": see("a")} | form, **UNSEALED)
    )
    told(ask(url))


def test_bodies_together_have_a_limit(caplog):
    config = ServerConfig(max_body_bytes=300_000, max_bodies_bytes=300_000)
    session = ScriptedSession(is_stuck=True)
    with serving(session, config) as url:
        half = body_of(user="x" * 200_000)
        with dial(url) as first:
            first.sendall(post(half))
            assert eventually(lambda: len(session.streams) == 1)
            with dial(url) as second, dial(url) as third:
                second.sendall(POST + b"Content-Length: 200000\r\n\r\n" + b" " * 150_000)
                answer = second.recv(65536)
                assert answer.startswith(b"HTTP/1.1 429")
                assert b"retry-after: 2" in answer.lower()
                third.sendall(ROOMY)
                assert third.recv(65536).startswith(b"HTTP/1.1 200")
        assert eventually(lambda: httpx.post(f"{url}/v1/models", content=half).status_code == 405)
    assert "Traceback" not in caplog.text


# ── sockets ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_head_that_comes_byte_by_byte_is_given_up(hasty):
    with dial(hasty) as slow:
        assert is_hung_up(slow, (bytes([byte]) for byte in POST + b"X-Slow: " + b"a" * 5000), pause_s=0.01)


def test_a_head_that_stops_is_answered_408_and_silence_with_silence(hasty):
    with dial(hasty) as stopped, dial(hasty) as silent:
        stopped.sendall(POST)
        assert read_all(stopped).startswith(b"HTTP/1.1 408 ")
        assert read_all(silent) == b""


def test_the_next_head_on_a_used_connection_has_its_deadline_too(hasty):
    with dial(hasty) as slow:
        slow.sendall(ROOMY)
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
        slow.sendall(b"GET /")
        assert b"HTTP/1.1 408 " in read_all(slow)


def test_a_body_nobody_asked_for_keeps_no_connection(hasty):
    """The answer is out at once; the rest of the body would trickle for ever."""
    with dial(hasty) as slow:
        slow.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
        assert is_hung_up(slow, (b"x" for _ in range(5000)), pause_s=0.01)


def test_a_body_that_trickles_is_given_up_and_its_connection_closed(hasty):
    with dial(hasty) as slow:
        slow.sendall(POST + b"Content-Length: 100000\r\n\r\n")
        is_hung_up(slow, (b"x" for _ in range(60)), pause_s=0.01)
        assert b"took longer than" in slow.recv(65536)
        assert is_hung_up(slow, (b"x" for _ in range(5000)), pause_s=0.01)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % at for at in range(200)) + b"\r\n", 431),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: x\r\n folded\r\nX: \x00\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n\r\n", 400),
        (POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_what_is_no_request_is_refused_in_the_form_of_other_refusals(hasty, head, status):
    with dial(hasty) as odd:
        odd.sendall(head)
        said = read_all(odd)
    assert said.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_body_in_crumbs_is_refused_and_holds_up_nobody(hasty):
    with dial(hasty) as crumbs:
        crumbs.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        assert is_hung_up(crumbs, (b"1\r\n \r\n" * 20_000 for _ in range(100)))
        assert httpx.get(f"{hasty}/health", **UNSEALED).status_code == 200


def test_a_body_in_chunks_of_a_sane_size_is_read(hasty):
    whole = body_of(user="x" * 100_000)
    pieces = (whole[at : at + 512] for at in range(0, len(whole), 512))
    assert httpx.post(f"{hasty}/v1/chat/completions", content=pieces, **UNSEALED).status_code == 200


def test_requests_in_a_row_without_waiting_are_answered_in_their_order(hasty):
    with dial(hasty) as eager:
        eager.sendall(post(body_of()) + ROOMY + post(body_of(), b"Connection: close"))
        said = read_all(eager)
    assert said.count(b"HTTP/1.1 200") == 3
    assert said.index(b"chat.completion") < said.index(b'"version"') < said.rindex(b"chat.completion")


def test_who_sends_ahead_and_hangs_up_takes_the_answer_along():
    session = ScriptedSession()
    with serving(session) as url:
        with dial(url) as eager:
            eager.sendall(post(body_of(messages=see("slow a"), max_tokens=900)) + ROOMY[:-2])
            assert eventually(lambda: len(session.streams) == 1)
        assert eventually(lambda: all(one.is_aborted for one in session.streams.values()))


def test_who_sends_ahead_without_end_is_not_read():
    session = ScriptedSession(is_held=True)
    with serving(session) as url, dial(url) as eager:
        eager.sendall(post(body_of(messages=see("slow a"), max_tokens=2)))
        assert eventually(lambda: len(session.streams) == 1)
        eager.settimeout(1)
        with pytest.raises(TimeoutError):
            is_hung_up(eager, (ROOMY * 500 for _ in range(4000)))
        session.is_held = False


def test_a_half_closed_connection_is_a_caller_who_left():
    session = ScriptedSession()
    with serving(session) as url, dial(url) as half:
        half.sendall(post(body_of(messages=see("slow a"), max_tokens=900)))
        assert eventually(lambda: len(session.streams) == 1)
        half.shutdown(socket.SHUT_WR)
        assert eventually(lambda: all(one.is_aborted for one in session.streams.values()))


def test_a_reader_who_takes_nothing_is_given_up():
    session = ScriptedSession()
    with serving(session, HASTY) as url, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        where = httpx.URL(url)
        slow.connect((where.host, where.port))
        slow.sendall(post(body_of(messages=see("word" * 500), max_tokens=900, n=20, stream=True)))
        assert eventually(lambda: len(session.streams) == 20)
        assert eventually(lambda: all(one.is_aborted for one in session.streams.values()), within_s=30)


def test_when_all_connections_are_taken_the_idlest_makes_room():
    with serving(ScriptedSession(), ServerConfig(max_connections=5)) as url:
        idle = [dial(url) for _ in range(20)]
        for _ in range(5):
            assert httpx.get(f"{url}/health", **UNSEALED).status_code == 200
        assert read_all(idle[0]) == b""
        for connection in idle:
            connection.close()


FEW_FILES = """
import resource, sys
sys.path[:0] = sys.argv[1].split(":")
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from scripted import ScriptedSession
from triptych.server import run
from triptych.server.listener import listen, url_of
from triptych.server.app import create_app
listener = listen("127.0.0.1", 0)
run.serve(create_app(ScriptedSession()), listener, announce=lambda: print(url_of(listener), flush=True))
"""


def test_more_connections_than_the_system_has_files_for_shut_nobody_out():
    paths = ":".join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, "-c", FEW_FILES, paths]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        crowd = [dial(url) for _ in range(500)]
        for _ in range(3):
            assert httpx.get(f"{url}/health", **UNSEALED).status_code == 200
        for connection in crowd:
            connection.close()
        process.terminate()
        assert "Too many open files" not in process.communicate()[1]


def test_when_all_connections_are_busy_the_next_is_told_so():
    session = ScriptedSession(is_stuck=True)
    with serving(session, ServerConfig(max_connections=3)) as url:
        busy = [dial(url) for _ in range(3)]
        for connection in busy:
            connection.sendall(post(body_of(stream=True)))
        assert eventually(lambda: len(session.streams) == 3)
        with dial(url) as late:
            assert read_all(late).startswith(b"HTTP/1.1 503 ")
        for connection in busy:
            connection.close()
        assert eventually(lambda: httpx.get(f"{url}/health").status_code == 200)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    noise=some.binary(max_size=300), ahead=some.sampled_from([b"", POST, POST + b"Content-Length: 9\r\n\r\n", ROOMY])
)
def test_any_bytes_get_an_answer_or_a_closed_connection_and_the_next_caller_is_served(hasty, noise, ahead):
    with dial(hasty) as odd:
        odd.sendall(ahead + noise)
        odd.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 5" not in read_all(odd)
    with dial(hasty) as good:
        good.sendall(ROOMY)
        assert good.recv(65536).startswith(b"HTTP/1.1 200")


def test_health_answers_while_many_send_slowly():
    with serving(ScriptedSession(), ServerConfig(max_connections=400)) as url:
        slow = [dial(url) for _ in range(100)]
        is_over = threading.Event()

        def trickle() -> None:
            while not is_over.wait(0.05):
                for connection in slow:
                    connection.sendall(b"X")

        for connection in slow:
            connection.sendall(POST + b"X-Slow: ")
        thread = threading.Thread(target=trickle)
        thread.start()
        waits = []
        for _ in range(20):
            began = time.monotonic()
            assert httpx.get(f"{url}/health", **UNSEALED).status_code == 200
            waits.append(time.monotonic() - began)
        is_over.set()
        thread.join()
        for connection in slow:
            connection.close()
    assert sorted(waits)[10] < 5


# ── other people's web pages ────────────────────────────────────────────────────────────────────────────────────


def test_loopback_is_known_in_the_words_of_a_socket_of_ipv6():
    assert address_of({"client": ("::ffff:127.0.0.1", 1)}) in LOOPBACK
    assert address_of({"client": ("::1", 1)}) in LOOPBACK
    assert address_of({}) in LOOPBACK
    assert address_of({"client": ("192.0.2.1", 1)}) not in LOOPBACK


def asks_from(url: str, origin: str | None, host: str | None = None) -> int:
    """The status that a page of `origin` gets, which found the server under the name `host`."""
    where = httpx.URL(url)
    headers = {"host": host or f"{where.host}:{where.port}", "content-type": "text/plain", "x-forwarded-for": "8.8.8.8"}
    if origin is not None:
        headers["origin"] = origin
    return httpx.post(f"{url}/v1/chat/completions", content=body_of(), headers=headers, **UNSEALED).status_code


def test_another_sites_page_cannot_make_a_visitors_browser_ask_this_server():
    with serving(ScriptedSession()) as url:
        port = httpx.URL(url).port
        assert asks_from(url, None) == 200
        assert asks_from(url, url) == 200
        assert asks_from(url, f"http://localhost:{port}", f"localhost:{port}") == 200
        assert asks_from(url, "https://evil.test") == 403
        assert asks_from(url, "null") == 403
        assert asks_from(url, f"http://evil.test:{port}", f"evil.test:{port}") == 403  # a name made to lead here
        assert asks_from(url, "http://[::1", "[::1") == 403


def test_pages_that_the_operator_allows_may_ask_and_with_a_key_any_that_has_it():
    with serving(ScriptedSession(), ServerConfig(allowed_origins=("https://good.test",))) as url:
        assert asks_from(url, "https://good.test") == 200
        assert asks_from(url, "https://evil.test") == 403
    with serving(ScriptedSession(), ServerConfig(api_keys=("k",))) as url:
        assert asks_from(url, "https://evil.test") == 401
