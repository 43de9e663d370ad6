"""Samples: chat messages become conversations, and what is wrong is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from triptych.compress.samples import Sample, builtin, load, read, save, split
from triptych.core.chat import ImagePart
from triptych.core.spec import Modality
from triptych.errors import ConfigError


def written(folder: Path, *lines: object) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def user(*parts: object) -> dict:
    return {"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}


def sample(name: str, num_media: int = 0) -> Sample:
    modality = np.array([Modality.IMAGE] * num_media + [Modality.TEXT] * 5, np.uint8)
    size = len(modality)
    return Sample(
        name=name,
        token_ids=np.arange(size, dtype=np.int32),
        embeddings=np.ones((size, 3), np.float32),
        modality=modality,
        is_answer=np.arange(size) >= size - 2,
        tiles=np.zeros((int(num_media > 0), 4, 4, 3), np.uint8),
        rows=np.arange(num_media, dtype=np.int32),
    )


def test_pictures_lie_beside_the_file_and_the_last_assistants_message_is_the_answer(tmp_path):
    (tmp_path / "a.png").write_bytes(b"picture")
    picture = {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}
    turns = [user(picture, {"type": "text", "text": "What?"}), {"role": "assistant", "content": "A cat."}]

    one, two = read(written(tmp_path, {"messages": turns}, {"id": "own", "messages": [user("Why?")]}))

    assert (one.name, one.answer, two.name, two.answer) == ("mine-1", "A cat.", "own", None)
    assert one.chat.messages[0].parts[0] == ImagePart(source=b"picture", detail="low")
    assert len(one.chat.messages) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: .*truncated"),
        ({"messages": []}, "line 2: the messages do not end with a user's"),
        ({"messages": [user("?")], "idd": "x"}, "line 2: .*`idd`"),
        ({"messages": [user({"type": "image_url", "image_url": "no.png"})]}, r"line 2: no\.png: No such file"),
        ({"messages": [user({"type": "image_url", "image_url": "https://x.org/a.png"})]}, "line 2: .*is not fetched"),
        ({"messages": [user({"type": "txt", "text": "?"})]}, "(?s)line 2: .*did you mean `text`"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, told, tmp_path):
    path = written(tmp_path, {"messages": [user("Fine.")]}, line)

    with pytest.raises(ConfigError) as caught:
        read(path)

    assert caught.match(told)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no samples"):
        read(written(tmp_path, ""))


def test_the_builtin_set_has_pictures_and_text():
    found = builtin()

    with_pictures = [one for one in found if any(isinstance(p, ImagePart) for m in one.chat.messages for p in m.parts)]
    assert 12 <= len(with_pictures) < len(found)
    assert len({one.name for one in found}) == len(found)
    assert builtin(sees=False) == [one for one in found if one not in with_pictures]


def test_a_digest_tells_conversations_apart(tmp_path):
    (tmp_path / "a.png").write_bytes(b"one")
    path = written(tmp_path, {"id": "x", "messages": [user({"type": "image_url", "image_url": "a.png"})]})
    first = read(path)[0].digest
    again = read(path)[0].digest
    (tmp_path / "a.png").write_bytes(b"two")

    assert first == again != read(path)[0].digest


def test_one_in_four_of_each_kind_is_held_out():
    samples = [*(sample(f"text {i}") for i in range(5)), *(sample(f"picture {i}", 2) for i in range(4))]

    used, held = split(samples)

    assert [one.name for one in held] == ["picture 3", "text 3"]
    assert sorted(one.name for one in used + held) == sorted(one.name for one in samples)


def test_a_kind_of_which_there_are_few_serves_for_both():
    few = [sample("a"), sample("b", 2)]
    more = [*(sample(f"text {i}") for i in range(8)), *(sample(f"picture {i}", 2) for i in range(3))]

    for samples, num_used, held_names in (
        (few, 2, ["b", "a"]),
        (more, 9, ["picture 0", "picture 1", "picture 2", "text 3", "text 7"]),
    ):
        used, held = split(samples)
        assert len(used) == num_used
        assert [one.name for one in held] == held_names


def test_a_sample_is_read_as_it_was_saved(tmp_path):
    one = sample("kept", 2)
    save(one, tmp_path / "deep" / "kept.safetensors")

    back = load(tmp_path / "deep" / "kept.safetensors")

    assert back.name == "kept"
    for name in ("token_ids", "embeddings", "modality", "is_answer", "tiles", "rows"):
        np.testing.assert_array_equal(getattr(back, name), getattr(one, name))
    assert back.judged.tolist() == [4, 5]  # they predict tokens 5 and 6
