"""Section C: sounds and films are refused by their name, whatever they hold (T20 to T25, and T14)."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from conforming import UNSEALED, refused
from scripted import serving
from triptych.testing import tiny_session

SOUND = base64.b64encode(b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\2\0\x44\xac\0\0").decode()
PARTS: dict[str, dict[str, Any]] = {
    "t20 input_audio": {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}},
    "t22 empty sound": {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    "t14 audio_url": {"type": "audio_url", "audio_url": {"url": f"data:audio/ogg;base64,{SOUND}"}},
    "t23 video_url": {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{SOUND}"}},
    "t24 video": {"type": "video", "video": ["data:image/png;base64,AAAA"] * 3},
    "t25 input_video": {"type": "input_video", "input_video": {"data": SOUND}},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_session() as session, serving(session) as url:
        yield url


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/media/inspect"])
def test_a_part_of_another_modality_is_refused_before_a_stream(url, name, path):
    parts = [{"type": "text", "text": "hear"}, PARTS[name]]
    body = {"messages": [{"role": "user", "content": parts}], "stream": True}
    answer = httpx.post(url + path, json=body, **UNSEALED)
    assert "messages[0].content[1]" in refused(answer)
    assert answer.json()["error"]["param"] == "messages[0].content[1].type"


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(kind=some.from_regex(r"(input_|output_)?(audio|video|file|pdf|text|image)(_url|_embeds)?", fullmatch=True))
def test_a_part_of_any_other_kind_is_refused_by_its_place(url, kind):
    part = {"type": kind, kind: {"data": SOUND}}
    answer = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]}, **UNSEALED
    )
    refused(answer)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/speech", "/v1/images/generations"])
def test_paths_of_other_modalities_do_not_exist(url, path):
    assert path in refused(httpx.post(url + path, **UNSEALED), 404)


@pytest.mark.parametrize("magic", [b"RIFF\0\0\0\0WAVEfmt ", b"ID3\4\0", b"OggS\0\2", b"fLaC\0\0", b"\x1aE\xdf\xa3"])
def test_a_sound_sent_as_a_picture_is_no_picture(url, magic):
    source = "data:image/png;base64," + base64.b64encode(magic + bytes(1000)).decode()
    content = [{"type": "image_url", "image_url": source}]
    answer = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}, **UNSEALED
    )
    assert "no picture format" in refused(answer)
