"""Bytes come from where the operator allows, within their limits, and nothing of them is told to strangers."""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import MediaError
from triptych.media.fetch import MediaPolicy, resolve
from triptych.media.fetch.web import is_public
from triptych.media.image import ImageLimits

PICTURE = bytes(range(256)) * 4
OPEN = MediaPolicy()
SMALL = MediaPolicy(image=ImageLimits(max_bytes=1000))


def refused(source: bytes | str, policy: MediaPolicy = OPEN, **options: object) -> MediaError:
    with pytest.raises(MediaError) as caught:
        resolve(source, policy, **options)  # type: ignore[arg-type]
    return caught.value


# ── data URLs ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64",
        "data:;base64",
        "data:image/jpeg;charset=utf-8;base64",
        "DATA:IMAGE/PNG;BASE64",
        "data:application/octet-stream;name=a.png; base64",
        "  data:image/png;base64",
    ],
)
@given(picture=st.binary(min_size=1, max_size=200))
def test_a_data_url_holds_its_bytes_whatever_its_label(head, picture):
    standard = base64.b64encode(picture).decode()
    forms = [
        standard,
        standard.rstrip("="),
        base64.urlsafe_b64encode(picture).decode(),
        "\r\n".join(standard[at : at + 76] for at in range(0, len(standard), 76)) + "\n",
        quote(standard, safe=""),
    ]
    for form in forms:
        assert resolve(f"{head},{form}", OPEN) == picture


def test_a_data_url_may_be_percent_encoded_instead():
    assert resolve("data:image/gif," + quote(PICTURE), OPEN) == PICTURE


@pytest.mark.parametrize(
    "source",
    [
        "data:image/png;base64,@@@@",
        "data:image/png;base64,aGVsbG8!",
        "data:image/png;base64,a",
        "data:image/png;base64,",
        "data:image/png;base64,ééé",
        "data:image/png;base64",
        "data:",
        "data:,",
    ],
)
def test_a_broken_data_url_is_refused(source):
    assert "sha256" in refused(source).message


@pytest.mark.parametrize(
    ("head", "unit"), [("data:,", "%41"), ("data:;base64,", "%41"), ("data:;base64,", "QQ "), ("data:;base64,", "Q\n")]
)
def test_what_a_data_url_is_made_of_takes_no_more_memory_than_a_few_of_it(head, unit):
    """A list of its pieces would take twenty times its bytes."""
    source = head + unit * (15_000_000 // len(unit))
    tracemalloc.start()
    with contextlib.suppress(MediaError):
        resolve(source, MediaPolicy())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * len(source)


def test_sizes_are_limited_before_anything_is_decoded():
    assert "1,000" in refused(b"x" * 1001, SMALL).message
    assert "1,000" in refused("data:;base64," + "A" * 1400, SMALL).message
    assert "1,000" in refused("data:," + "x" * 1001, SMALL).message
    assert len(resolve("data:," + "%41" * 1000, SMALL)) == 1000


@pytest.mark.parametrize(
    "source", ["", "picture.png", "/etc/passwd", "ftp://host/a.png", "javascript:alert(1)", "iVBORw0KGgo"]
)
def test_what_is_no_url_of_a_picture_is_refused(source):
    assert "data:image" in str(refused(source).hint)


@pytest.mark.parametrize(
    "source", ["data:image/png;base64,SECRETSECRET!", "data:SECRET", "http://SECRET.test/SECRET", "SECRET:SECRET"]
)
def test_errors_tell_length_and_digest_and_never_content(source):
    policy = MediaPolicy(allowed_domains=frozenset({"example.test"}))
    error = refused(source, policy)
    assert "SECRETSECRET" not in str(error)
    assert len(str(error)) < 400


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "my picture.png").write_bytes(PICTURE)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "out.png").symlink_to(tmp_path / "secret.png")
    (folder / "in.png").symlink_to(folder / "deep" / "my picture.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe.png")
    return folder


def test_files_are_off_by_default(root):
    assert "--allowed-local-media-path" in str(refused(f"file://{root}/in.png").hint)


@pytest.mark.parametrize("name", ["deep/my%20picture.png", "in.png", "deep/../in.png"])
def test_a_file_under_the_root_is_read(root, name):
    policy = MediaPolicy(allowed_local_root=root)
    assert resolve(f"file://{root}/{name}", policy) == PICTURE
    assert resolve(f"FILE://localhost{root}/{name}", policy) == PICTURE


@pytest.mark.parametrize(
    "name", ["../secret.png", "deep/../../secret.png", "%2e%2e/secret.png", "out.png", "loop.png", "none.png", "a%00b"]
)
def test_what_lies_outside_the_root_is_refused(root, name):
    refused(f"file://{root}/{name}", MediaPolicy(allowed_local_root=root))


@pytest.mark.parametrize(
    "source",
    ["file:///etc/passwd", "file://host/share/a.png", "file:in.png", "file:///dev/zero", "file://[::1/in.png"]
    + [pytest.param("file:///" + "a/" * 9_000_000, id="deep")],
)
def test_other_local_paths_are_refused(root, source):
    refused(source, MediaPolicy(allowed_local_root=root))


def test_nothing_is_told_of_what_lies_outside_the_root(root):
    """Whether a file is there is a secret too."""
    (there, absent) = (
        refused(f"file://{root}/../{name}", MediaPolicy(allowed_local_root=root)).message
        for name in ("secret.png", "no")
    )
    assert "lies outside" in there
    assert "lies outside" in absent


def test_only_plain_files_within_the_limit_are_read(root):
    policy = MediaPolicy(allowed_local_root=root, image=ImageLimits(max_bytes=100))
    assert "plain file" in refused(f"file://{root}/pipe.png", policy).message
    assert "plain file" in refused(f"file://{root}/deep", policy).message
    assert "limit is 100" in refused(f"file://{root}/in.png", policy).message
    assert "plain file" in refused("file:///dev/zero", MediaPolicy(allowed_local_root=Path("/dev"))).message


# ── the web ─────────────────────────────────────────────────────────────────────────────────────────────────────

Answer = Callable[[BaseHTTPRequestHandler], None]


def body(data: bytes, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def redirect(location: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", location)
        handler.end_headers()

    return answer


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 4096)


def drip(handler: BaseHTTPRequestHandler) -> None:
    """Never silent for long, never done: only a deadline for the whole ends it."""
    while True:
        handler.wfile.write(b"H")
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.fixture
def site() -> Iterator[tuple[dict[str, Answer], int, list[str]]]:
    answers: dict[str, Answer] = {}
    hosts: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hosts.append(self.headers["Host"])
            try:
                answers[self.path](self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *details: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield answers, server.server_port, hosts
    server.shutdown()
    thread.join()
    server.server_close()


def lan(**changes: object) -> MediaPolicy:
    settings: dict[str, object] = {"allowed_domains": frozenset({"pictures.test"}), "allows_private": True}
    return MediaPolicy(**(settings | changes))  # type: ignore[arg-type]


def here(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def test_the_web_is_off_by_default():
    assert "--allowed-media-domains" in str(refused("https://pictures.test/a.png").hint)


def test_a_picture_of_an_allowed_host_is_fetched_under_its_own_name(site):
    answers, port, hosts = site
    answers["/a.png"] = body(PICTURE)
    assert resolve(f"http://pictures.test:{port}/a.png", lan(), lookup=here) == PICTURE
    assert resolve(f"HTTP://Pictures.Test.:{port}/a.png", lan(), lookup=here) == PICTURE
    assert hosts[0] == f"pictures.test:{port}"


@pytest.mark.parametrize(
    "url",
    ["http://other.test/a.png", "http://pictures.test.other.test/", "http://pictures.test@other.test/", "http:///"],
)
def test_other_hosts_are_refused(url):
    refused(url, lan(), lookup=here)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1"]
    + ["240.0.0.1", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::127.0.0.1"]
    + ["fec0::1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe"],
)
def test_a_name_that_leads_inside_is_refused_before_anything_is_sent(address):
    for policy in (lan(allows_private=False), lan(allows_private=False, allowed_domains=frozenset({"*"}))):
        error = refused("http://pictures.test/a.png", policy, lookup=lambda host, port: ["93.184.216.34", address])
        assert "internal" in error.message


def test_where_any_host_may_be_asked_other_services_may_not():
    anywhere = lan(allows_private=False, allowed_domains=frozenset({"*"}))
    for url in ("http://pictures.test:6379/a.png", "https://pictures.test:80/a.png", "http://pictures.test:22/"):
        assert "port" in refused(url, anywhere, lookup=lambda host, port: ["93.184.216.34"]).message


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_public(address):
    assert is_public(address)


def test_the_name_is_looked_up_once_so_that_it_cannot_change_its_mind(site):
    answers, port, _ = site
    answers["/a.png"] = body(PICTURE)
    asked = []

    def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    resolve(f"http://pictures.test:{port}/a.png", lan(), lookup=lookup)
    assert asked == ["pictures.test"]


def test_the_next_address_is_tried_where_nobody_answers(site):
    answers, port, _ = site
    answers["/a.png"] = body(PICTURE)
    found = resolve(f"http://pictures.test:{port}/a.png", lan(), lookup=lambda host, port: ["127.0.0.2", "127.0.0.1"])
    assert found == PICTURE


def test_redirects_are_followed_to_allowed_places_only(site):
    answers, port, _ = site
    answers["/a.png"] = redirect("/b.png")
    answers["/b.png"] = body(PICTURE)
    answers["/other"] = redirect(f"http://other.test:{port}/b.png")
    answers["/file"] = redirect("file:///etc/passwd")
    answers["/loop"] = redirect("/loop")
    assert resolve(f"http://pictures.test:{port}/a.png", lan(), lookup=here) == PICTURE
    assert "not allowed" in refused(f"http://pictures.test:{port}/other", lan(), lookup=here).message
    assert "redirected to" in refused(f"http://pictures.test:{port}/file", lan(), lookup=here).message
    assert "more than 3 times" in refused(f"http://pictures.test:{port}/loop", lan(), lookup=here).message


@pytest.mark.parametrize(
    "location", ["http://[::1", "http://a:b:c/", "http://pictures.test:99999999/", "//", "\x7f://"]
)
def test_a_redirect_that_leads_nowhere_is_a_refusal(site, location):
    answers, port, _ = site
    answers["/a.png"] = redirect(location)
    refused(f"http://pictures.test:{port}/a.png", lan(), lookup=here)


def test_a_redirect_is_looked_up_and_checked_again(site):
    """The public name redirects to itself, and by then leads inside."""
    answers, port, _ = site
    answers["/a.png"] = redirect("/b.png")
    answers["/b.png"] = body(PICTURE)
    later = iter([["127.0.0.1"], []])
    error = refused(f"http://pictures.test:{port}/a.png", lan(), lookup=lambda host, port: next(later))
    assert "no address" in error.message


def test_a_body_is_given_up_at_the_limit(site):
    answers, port, _ = site
    answers["/endless"] = endless
    answers["/announced"] = body(b"", Content_Length="999999999")
    small = lan(image=ImageLimits(max_bytes=10_000))
    assert "limit is 10,000" in refused(f"http://pictures.test:{port}/endless", small, lookup=here).message
    assert "999,999,999" in refused(f"http://pictures.test:{port}/announced", small, lookup=here).message


def test_compressed_bodies_are_refused(site):
    answers, port, _ = site
    answers["/a.png"] = body(PICTURE, Content_Encoding="gzip")
    assert "compressed" in refused(f"http://pictures.test:{port}/a.png", lan(), lookup=here).message


def test_other_answers_are_told_by_number(site):
    answers, port, _ = site
    answers["/a.png"] = lambda handler: handler.send_error(404)
    answers["/cut"] = body(b"abc", Content_Length="1000")
    assert "404" in refused(f"http://pictures.test:{port}/a.png", lan(), lookup=here).message
    assert "broke off" in refused(f"http://pictures.test:{port}/cut", lan(), lookup=here).message


def test_the_deadline_is_for_the_whole_and_not_for_each_byte(site):
    answers, port, _ = site
    answers["/drip"] = drip
    hasty = lan(timeout_s=0.3)
    began = time.monotonic()
    assert "0.3 s" in refused(f"http://pictures.test:{port}/drip", hasty, lookup=here).message
    assert time.monotonic() - began < 5


def test_a_resolver_that_hangs_is_not_waited_for():
    began = time.monotonic()
    refused("http://pictures.test/a.png", lan(timeout_s=0.2), lookup=lambda host, port: time.sleep(20) or [])
    assert time.monotonic() - began < 10


def test_nobody_listening_is_said():
    assert "cannot be reached" in refused("http://pictures.test:1/a.png", lan(), lookup=here).message
