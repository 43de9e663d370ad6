"""Workloads written down by people: what they may say, and what they are told when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.cli.workloads import read_workload, shipped
from triptych.core.workload import Sizes
from triptych.errors import ConfigError

GOOD = "arrivals: closed\nconcurrency: 4\nkinds:\n  chat: {prompt: 64-512, answer: 32}\n"


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", shipped())
def test_what_is_shipped_can_be_read_by_its_name(name: str) -> None:
    assert read_workload(name).name == name


def test_sizes_may_be_a_range_or_a_number(tmp_path: Path) -> None:
    kind = read_workload(written(tmp_path, GOOD)).kinds[0]

    assert (kind.prompt, kind.answer) == (Sizes(least=64, most=512), Sizes(least=32, most=32))


def test_a_file_names_the_workload_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert read_workload(written(tmp_path, GOOD)).name == "mine"
    assert read_workload(written(tmp_path, f"name: other\n{GOOD}")).name == "other"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("concurrency: 4", "concurency: 4", "concurency"),
        ("concurrency: 4", "num_requests: 9", "closed arrivals need `concurrency`"),
        ("arrivals: closed", "arrivals: poisson", "rate_per_s"),
        ("64-512", "512-64", "512 to 64"),
        ("64-512", "many", "kinds.chat.prompt is 'many'"),
        ("answer: 32", "answer: 0", "kinds.chat.answer"),
        ("answer: 32", "answer: 32, share: -1", "share"),
        ("answer: 32", "answer: 32, images: 1, image_side: big", "image_side is 'big'"),
        ("answer: 32", "answer: 32, shared_prefix: 80", "shared_prefix is 80"),
        ("  chat: {prompt: 64-512, answer: 32}", "  chat: 3", "kinds.chat is 3"),
        ("kinds:\n  chat: {prompt: 64-512, answer: 32}", "kinds: []", "`kinds` is []"),
        (GOOD, "- 1", "not a mapping"),
        (GOOD, "{", "mine.yaml"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(tmp_path: Path, before: str, after: str, said: str) -> None:
    with pytest.raises(ConfigError, match="mine.yaml") as caught:
        read_workload(written(tmp_path, GOOD.replace(before, after)))

    assert said in str(caught.value)


def test_a_name_that_is_neither_shipped_nor_a_file_is_told_what_is() -> None:
    with pytest.raises(ConfigError, match="mixed, pictures"):
        read_workload("mixd")
