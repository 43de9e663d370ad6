"""Text arrives as it becomes certain, whole characters only, and adds up to what decoding all at once gives."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from triptych.errors import CheckpointError
from triptych.media.text import StopStrings, Text

WORDS = ["▁Hello", "▁wor", "ld", "▁", "!", "é", "字", "👍🏽", "▁▁", "a▁b"]


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = [("Ġ", "a"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĳ"), ("å", "Ń")]
    vocab |= {left + right: len(vocab) + index for index, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer)


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocab |= {word: len(vocab) + index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<tōol>", special=False)])
    return tokenizer


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
KINDS = {
    "byte-level": byte_level(),
    "llama": sentencepiece(LLAMA),
    "gemma": sentencepiece(GEMMA),
    "metaspace": sentencepiece(decoders.Metaspace(prepend_scheme="always")),
    "metaspace, no prefix": sentencepiece(decoders.Metaspace(prepend_scheme="never")),
    "none": sentencepiece(decoders.Fuse()),
}
HAS_LONE_BYTES = ("llama", "gemma")


def streamed(text: Text, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = text.detokenizer()
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pushed = [detokenizer.push(ids[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    return [*pushed, detokenizer.flush(has_ended=True)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 100), max_size=40))
def test_the_pieces_add_up_to_the_whole(kind, data, cuts):
    tokenizer = KINDS[kind]
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.one_of(st.integers(0, size + 3), st.integers(size - 16, size - 1)), max_size=30))
    whole = tokenizer.decode([token for token in ids if token < size], skip_special_tokens=True)
    pieces = streamed(Text(tokenizer), ids, cuts)
    if kind in HAS_LONE_BYTES and "\ufffd" in whole:  # a whole character beside a broken one is kept here
        assert "".join(pieces) == "".join(streamed(Text(tokenizer), ids, []))
        shown = iter("".join(pieces))
        assert all(character in shown for character in whole if character != "\ufffd")
    else:
        assert "".join(pieces) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(said=st.text(max_size=12))
@example(said="👩‍👩‍👧‍👦 家族 naïve  ")
@example(said=" leading")
def test_real_text_is_never_shown_broken(kind, said):
    text = Text(KINDS[kind])
    ids = KINDS[kind].encode(said).ids
    whole = KINDS[kind].decode(ids)
    shown = ""
    detokenizer = text.detokenizer()
    for token in ids:
        shown += detokenizer.push([token])
        assert whole.startswith(shown)
    assert shown + detokenizer.flush(has_ended=True) == whole


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_an_answer_cut_within_a_character_ends_before_it(kind):
    tokenizer = KINDS[kind]
    ids = byte_ids(tokenizer, "a👍".encode()[:-1])
    detokenizer = Text(tokenizer).detokenizer()
    assert detokenizer.push(ids) == "a"
    assert detokenizer.flush() == ""
    assert detokenizer.flush(has_ended=True) == ""


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_an_answer_that_ends_within_a_character_says_so(kind):
    tokenizer = KINDS[kind]
    ids = byte_ids(tokenizer, "a👍".encode()[:-1])
    detokenizer = Text(tokenizer).detokenizer()
    assert detokenizer.push(ids) + detokenizer.flush(has_ended=True) == "a" + "\ufffd" * (3 if kind == "llama" else 1)


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    names = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = []
    for byte in raw:
        name = f"<0x{byte:02X}>"
        if tokenizer.token_to_id(name) is None:
            latin = bytes([byte]).decode("latin-1")
            name = next(token for token, _ in names.pre_tokenize_str(latin)) if byte < 0x80 else BYTE_NAMES[byte]
        index = tokenizer.token_to_id(name)
        assert index is not None
        found.append(index)
    return found


def _byte_names() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


BYTE_NAMES = _byte_names()


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_the_bytes_of_tokens_make_the_text(kind):
    text = Text(KINDS[kind])
    ids = KINDS[kind].encode("naïve 👍 字").ids
    assert b"".join(map(text.token_bytes, ids)).decode().strip() == "naïve 👍 字"
    special = KINDS[kind].token_to_id("</s>")
    assert text.token_bytes(special) == b"</s>"
    assert text.token_bytes(10**6) == b""


def test_a_decoder_of_an_unknown_kind_is_refused():
    with pytest.raises(CheckpointError, match="WordPiece"):
        Text(sentencepiece(decoders.WordPiece()))


# ── stop strings ────────────────────────────────────────────────────────────────────────────────────────────────


def plain_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The slow twin: character by character, the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab!", max_size=4), max_size=12),
    stops=st.lists(st.text("ab!", min_size=1, max_size=4), max_size=4, unique=True),
    include=st.booleans(),
)
@example(pieces=["a", "b", "a", "b", "!"], stops=["abab!", "ba"], include=False)
def test_stop_strings_are_found_however_the_text_is_cut(pieces, stops, include):
    stopper, shown, match = StopStrings(stops, include=include), "", None
    for piece in pieces:
        text, match = stopper.push(piece)
        shown += text
        if match is not None:
            break
    if match is None:
        shown += stopper.flush()
    assert (shown, match) == plain_stop("".join(pieces), stops, include)


def test_what_cannot_become_a_stop_string_is_shown_at_once():
    stopper = StopStrings(["\n\nUser:", "END"])
    assert stopper.push("Hello\n") == ("Hello", None)
    assert stopper.push("\nE") == ("\n\n", None)
    assert stopper.push("very") == ("Every", None)
    assert stopper.flush() == ""


def test_without_stop_strings_nothing_is_held():
    assert StopStrings([]).push("text") == ("text", None)
    assert StopStrings([""]).push("text") == ("text", None)
