"""Savings measured: what differs between two bundles, what each process is told, which answers are right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from triptych.compress.samples import Conversation
from triptych.core.bundle import Bundle, Manifest, Part, describe, write_bundle
from triptych.core.chat import Chat, Message, TextPart
from triptych.core.policy import Reduction
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import ConfigError
from triptych.plan.saving import plan_runs
from triptych.session.saving import SavingConfig, answer, factors_of, mixed, schedule, way_of
from triptych.testing import tiny_manifest, tiny_session

KIND = RequestKind(name="text", share=1, prompt=Sizes(least=8, most=8), answer=Sizes(least=4, most=4))
WORKLOAD = Workload(name="chat", kinds=(KIND,), rate_per_s=1.0)


def bundle(folder: Path, precision: str, **weights: bytes) -> Bundle:
    """A text model's bundle; each part holds what `weights` gives it."""

    def fill(target: Path) -> Manifest:
        files = []
        for name, content in weights.items():
            (target / f"{name}.bin").write_bytes(content)
            files.append(describe(target / f"{name}.bin", root=target))
        (target / "tokenizer.json").write_text("{}")
        files.append(describe(target / "tokenizer.json", root=target))
        parts = tuple(
            Part(
                name=name,
                modality=0,
                precision=precision,
                files=(f"{name}.bin",),
                inputs=(),
                outputs=(),
                num_parameters=1,
            )
            for name in weights
        )
        digest = files[0].sha256
        return msgspec.structs.replace(tiny_manifest(), parts=parts, files=tuple(files), weights_digest=digest)

    return write_bundle(folder, fill)


@pytest.fixture
def plain(tmp_path: Path) -> Bundle:
    return bundle(tmp_path / "plain", "bf16", decoder=b"sixteen", embedding=b"table")


@pytest.fixture
def ours(tmp_path: Path) -> Bundle:
    return bundle(tmp_path / "ours", "int8", decoder=b"eight", embedding=b"table")


def config(tmp_path: Path, **changes: object) -> SavingConfig:
    return SavingConfig(workload=WORKLOAD, cache=tmp_path / "cache", **changes)


def test_factors_are_what_differs(tmp_path: Path, plain: Bundle, ours: Bundle):
    asked = config(tmp_path, reduction=Reduction(keep=0.5))
    assert factors_of(ours, plain, asked) == ("decoder weights", "KV cache", "batching", "caches")
    asked = config(tmp_path, kv_cache_dtype="bf16", max_num_seqs=1)
    assert factors_of(ours, plain, asked) == ("decoder weights", "caches")


def test_a_bundle_is_not_held_against_itself(tmp_path: Path, plain: Bundle):
    with pytest.raises(ConfigError, match="the baseline's own weights"):
        factors_of(plain, plain, config(tmp_path))


def test_each_factor_is_switched_by_what_its_process_is_told(tmp_path: Path, plain: Bundle, ours: Bundle):
    asked = config(tmp_path, max_num_seqs=8)
    factors = factors_of(ours, plain, asked)
    before, now = (way_of(on, ours, plain, asked) for on in ((), factors))
    assert (before.bundle, before.kv_cache_dtype, before.max_num_seqs, before.caches) == (
        str(plain.path), "bf16", 1, False,
    )  # fmt: skip
    assert (now.kv_cache_dtype, now.max_num_seqs, now.caches) == ("u8", 8, True)
    assert Path(now.bundle, "decoder.bin").read_bytes() == b"eight"
    assert not before.opens_vision  # a text model has none


def test_a_mixture_has_the_parts_that_were_taken(tmp_path: Path, plain: Bundle, ours: Bundle):
    made = mixed(plain, ours, frozenset({"decoder"}), tmp_path)
    assert [(part.name, part.precision) for part in made.manifest.parts] == [("decoder", "int8"), ("embedding", "bf16")]
    assert made.file("decoder.bin").read_bytes() == b"eight"
    assert made.file("tokenizer.json").is_file()
    assert mixed(plain, ours, frozenset({"decoder"}), tmp_path).manifest == made.manifest
    assert mixed(plain, ours, frozenset(), tmp_path) is plain
    assert mixed(plain, ours, frozenset({"decoder", "embedding"}), tmp_path) is ours


def test_baseline_and_ours_come_again_between_the_others():
    factors = tuple("abcdefgh")
    order = list(schedule(factors, 2))
    times = Counter(on for on, _ in order)
    assert set(times) == set(plan_runs(factors))
    assert times[()] == times[factors] >= 2 * times["a",]
    assert len(order) == len(set(order))


def question(text: str, right: str | None) -> Conversation:
    return Conversation(
        name="q", chat=Chat(messages=(Message(role="user", parts=(TextPart(text=text),)),)), right=right
    )


def test_an_answer_is_right_where_its_pattern_is_found():
    with tiny_session() as session:
        asked = session.ask("one", max_tokens=32).text
        assert answer(session, [question("one", "."), question("one", "^$"), question("one", "no such words")]) == [
            bool(asked), not asked, False,
        ]  # fmt: skip


def test_a_question_without_its_right_answer_is_named():
    with tiny_session() as session, pytest.raises(ConfigError, match="question q does not say what is right"):
        answer(session, [question("one", None)])
