"""A session over the arithmetic model: words in, words out, nothing left behind."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from triptych.core.chat import Chat, ImagePart, Message, TextPart
from triptych.core.policy import METHODS, Compression, KVPolicy, Reduction
from triptych.core.request import FinishReason, Sampling
from triptych.errors import BackendError, ContextError, MediaError, RequestError
from triptych.session import Ending, Session
from triptych.testing import TinyEngine, plain_answer, plan, tiny_manifest, tiny_session, tiny_session_over


@pytest.fixture
def session() -> Iterator[Session]:
    with tiny_session() as made:
        yield made


def png(brightness: int, size=(8, 6)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (brightness,) * 3).save(file, "png")
    return file.getvalue()


def chat(*parts: str | bytes) -> Chat:
    made = tuple(TextPart(text=part) if isinstance(part, str) else ImagePart(source=part) for part in parts)
    return Chat(messages=(Message(role="user", parts=made),))


def settle(session: Session) -> None:
    """Wait until the engine has taken everything back."""
    for _ in range(500):
        stats = session.stats()
        if stats.num_running == 0 and stats.num_waiting == 0:
            return
        time.sleep(0.01)
    raise AssertionError("the engine is still busy")


GREEDY = Sampling(max_tokens=8, temperature=0.0)


def test_a_question_about_a_picture_is_answered_as_the_plain_twin_does(session: Session):
    prompt = session.prepare_chat(chat(png(90), "what is it?"))
    asked = prompt.request("twin", GREEDY)
    answer = session.ask("what is it?", images=[png(90)], max_tokens=8)
    assert list(answer.token_ids) == plain_answer(asked, 8)
    assert answer.finish is FinishReason.LENGTH
    assert answer.usage.image_tokens == 4
    assert answer.text == session.text._tokenizer.decode(list(answer.token_ids))


def test_a_streams_pieces_join_to_the_whole_answer(session: Session):
    pieces = list(session.stream("hello", max_tokens=30))
    assert len(pieces) > 1
    assert "".join(pieces) == session.ask("hello", max_tokens=30).text


def test_a_stop_string_ends_the_answer_before_itself_and_frees_the_engine(session: Session):
    whole = session.ask("tell me", max_tokens=60)
    stop = whole.text[len(whole.text) // 2 :][:7]
    prompt = session.prepare_chat(chat("tell me"))
    sampling = Sampling(max_tokens=60, temperature=0.0)
    stream = session.start(prompt, sampling, request_id="s", ending=Ending(stop=[stop]))
    deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == whole.text[: whole.text.index(stop)]
    assert deltas[-1].finish is FinishReason.STOP
    assert deltas[-1].stop_reason == stop
    assert deltas[-1].usage.completion_tokens == sum(len(delta.token_ids) for delta in deltas)
    kept = session.start(prompt, sampling, request_id="k", ending=Ending(stop=[stop], include_stop=True)).answer()
    assert kept.text == whole.text[: whole.text.index(stop) + len(stop)]
    settle(session)


def test_logprobs_come_with_the_tokens_they_belong_to(session: Session):
    prompt = session.prepare_chat(chat("hello"))
    sampling = Sampling(max_tokens=5, temperature=0.0, num_logprobs=2)
    deltas = list(session.start(prompt, sampling, request_id="l"))
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    assert len(logprobs) == 5
    assert all(logprob.top[0].logprob == logprob.logprob for logprob in logprobs)
    assert b"".join(logprob.token_bytes for logprob in logprobs).decode("utf-8", "replace") == "".join(
        delta.text for delta in deltas
    )


def test_leaving_a_stream_early_gives_everything_back(session: Session):
    stream = session.start(
        session.prepare_chat(chat(png(3), "go on")), Sampling(max_tokens=400, temperature=0.0), request_id="x"
    )
    for _ in stream:
        break
    stream.__iter__().close()
    del stream
    settle(session)
    assert session.stats().held_features == 0


@pytest.mark.parametrize("num_read", [0, 1])
def test_dropping_a_stream_gives_the_request_up(session: Session, num_read: int):
    pieces = session.stream("go on", max_tokens=400, ignore_eos=True)
    for _ in range(num_read):
        next(pieces)
    del pieces
    settle(session)
    assert session.stats().finished == {"abort": 1}


@pytest.mark.parametrize("setting", [{"logit_bias": {997: 1.0}}, {"stop_ids": frozenset({10**9})}])
def test_an_id_beyond_the_vocabulary_is_refused_and_others_go_on(session: Session, setting):
    others = session.stream("go on", max_tokens=30)
    with pytest.raises(RequestError, match="ids go from 0 to 996"):
        session.ask("what?", max_tokens=4, **setting)
    assert "".join(others)


def test_many_streams_are_read_by_coroutines_at_once(session: Session):
    questions = [f"question {index}" for index in range(12)]

    async def one(question: str) -> str:
        prompt = await asyncio.to_thread(session.prepare_chat, chat(question))
        return "".join([delta.text async for delta in session.start(prompt, GREEDY, request_id=question)])

    async def every() -> list[str]:
        return await asyncio.gather(*[one(question) for question in questions])

    assert asyncio.run(every()) == [session.ask(question, max_tokens=8).text for question in questions]


def test_a_request_that_fails_raises_where_it_is_read():
    engine = TinyEngine()
    engine.encoder.fail_when = lambda pixels: bool((pixels == 13).any())
    with tiny_session_over(engine) as session:
        with pytest.raises(BackendError, match="told to fail"):
            session.ask("what?", images=[png(13)], max_tokens=4)
        assert session.ask("what?", images=[png(14)], max_tokens=4).text


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([b"not an image", "?"], MediaError, "in no picture format"),
        ([png(1)] * 17, MediaError, "17 images, the limit is 16"),
        (["x" * 600], ContextError, "the context holds 512"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_engine_sees_it(session: Session, parts, error, message: str):
    with pytest.raises(error, match=message):
        session.prepare_chat(chat(*parts))
    assert session.stats().steps == 0


def test_a_text_far_beyond_the_context_is_refused_by_its_beginning_or_unread(session: Session, monkeypatch):
    lengths: list[int] = []
    encode = type(session.text).encode
    monkeypatch.setattr(
        type(session.text), "encode", lambda self, text: lengths.append(len(text)) or encode(self, text)
    )
    for number, words in ((10**4, "the first 8,192 alone are 8,192 tokens"), (10**6, "at most 16,384 are read")):
        for ask in (session.prepare_text, lambda text: session.prepare_chat(chat(text, "y"))):
            with pytest.raises(ContextError, match=rf"1[0,]+\d characters, {words}; .* 512"):
                ask("x" * number)
    assert max(lengths) == 8192


def test_too_many_picture_tokens_are_refused_with_the_counts():
    too_many = pytest.raises(ContextError, match="need 8 tokens, the limit is 7")
    with tiny_session(plan(max_multimodal_tokens=7)) as session, too_many:
        session.prepare_chat(chat(png(1), png(2)))


def test_a_raw_prompt_may_be_ids_but_only_those_of_the_vocabulary(session: Session):
    assert session.prepare_text([1, 2, 3]).token_ids.tolist() == [1, 2, 3]
    with pytest.raises(RequestError, match="token id 997 is not in 0 to 996"):
        session.prepare_text([1, 997])


def test_user_text_never_becomes_a_picture(session: Session):
    prompt = session.prepare_chat(chat("<image><image>", png(5), "<|im_end|>"))
    assert len(prompt.patches) == 1
    assert sum(span.num_tokens for span in prompt.spans) == 4


def test_the_same_pixels_have_one_digest_and_another_tenant_another(session: Session):
    def digest(data: bytes, tenant: str = "") -> str:
        return next(iter(session.prepare_chat(chat(data, "?"), tenant=tenant).patches))

    bmp = io.BytesIO()
    Image.open(io.BytesIO(png(5))).save(bmp, "bmp")
    assert digest(png(5)) == digest(bmp.getvalue())
    assert digest(png(5)) != digest(png(6))
    assert digest(png(5)) != digest(png(5, size=(6, 8)))
    assert digest(png(5)) != digest(png(5), tenant="t")


def test_closing_ends_what_is_running():
    session = tiny_session()
    prompt = session.prepare_chat(chat("on and on"))
    stream = session.start(prompt, Sampling(max_tokens=400, temperature=0.0), request_id="c")
    finish: list = []
    reader = threading.Thread(target=lambda: finish.extend(delta.finish for delta in stream))
    reader.start()
    session.close()
    reader.join(5)
    assert finish[-1] in (FinishReason.ABORT, FinishReason.LENGTH)


def test_a_thousand_requests_a_third_left_mid_stream_give_everything_back(session: Session):
    generator = np.random.default_rng(0)
    pictures = [session.prepare_chat(chat(png(int(level)), "?")) for level in range(0, 250, 25)]
    words = [session.prepare_chat(chat("w" * int(n))) for n in generator.integers(1, 200, 20)]
    for index in range(1000):
        prompt = (pictures if index % 2 else words)[index % 10]
        stream = session.start(prompt, GREEDY, request_id=str(index))
        if index % 3 == 0:
            stream.abort()
        elif index % 50 == 1:
            assert stream.answer().text
    settle(session)
    stats = session.stats()
    assert stats.free_blocks == stats.num_blocks
    assert stats.held_features == 0
    assert sum(stats.finished.values()) == 1000


# ── leaving out ────────────────────────────────────────────────────────────────────────────────────────────────

HALF = Compression(keep_visual=0.5)


@pytest.mark.parametrize("method", METHODS)
def test_a_request_chooses_how_many_of_its_pictures_tokens_stand_in_the_prompt(session: Session, method: str):
    asked = Compression(keep_visual=0.5, reduce=method)
    prompt = session.prepare_chat(chat(png(90), "what is it?"), compression=asked)
    whole = session.prepare_chat(chat(png(90), "what is it?"))
    assert (prompt.num_tokens, prompt.num_positions) == (whole.num_tokens - 2, whole.num_tokens)
    answer = session.ask("what is it?", images=[png(90)], max_tokens=8, compression=asked)
    assert list(answer.token_ids) == plain_answer(prompt.request("twin", GREEDY), 8)
    assert answer.usage.image_tokens == 2
    assert answer.usage.prompt_tokens == prompt.num_tokens


def test_a_question_is_part_of_a_pictures_name_only_where_it_decides_what_stays(session: Session):
    def digest(question: str, **asked) -> str:
        [name] = session.prepare_chat(chat(png(5), question), compression=Compression(**asked)).patches
        return name

    assert digest("why?", keep_visual=0.5) == digest("how?", keep_visual=0.5)
    assert digest("why?", keep_visual=0.5, reduce="cdpruner") != digest("how?", keep_visual=0.5, reduce="cdpruner")
    assert digest("why?", keep_visual=0.5, reduce="cdpruner") == digest("why?", keep_visual=0.5, reduce="cdpruner")
    names = {digest("why?", keep_visual=keep, reduce=method) for keep in (0.5, 0.25) for method in METHODS}
    assert len(names) == 2 * len(METHODS)
    assert {digest("why?", keep_visual=1, reduce=method) for method in METHODS} == {digest("why?")}


def test_the_last_users_question_is_the_one_that_counts(session: Session):
    turns = (chat(png(5), "first").messages[0], Message(role="assistant", parts=(TextPart(text="so"),)))
    follow = Chat(messages=(*turns, Message(role="user", parts=(TextPart(text="second"),))))
    prompt = session.prepare_chat(follow, compression=Compression(keep_visual=0.5, reduce="cdpruner"))
    [item] = prompt.patches.values()
    assert item.question.tolist() == session.text.encode("second")


def test_a_reduced_prompt_is_counted_as_it_stands_and_its_answer_ends_where_the_model_does():
    whole = tiny_manifest().spec.decoder.max_positions
    with tiny_session(plan(max_multimodal_tokens=4, max_model_len=whole)) as session:
        question = "x" * (whole - 60)
        with pytest.raises(ContextError, match="the images need 8 tokens, the limit is 4"):
            session.prepare_chat(chat(png(1), png(2), question))
        prompt = session.prepare_chat(chat(png(1), png(2), question), compression=HALF)
        assert session.context_of(prompt) == whole - 4
        longer = question + "x" * (whole - prompt.num_positions)
        with pytest.raises(ContextError, match="before its images are reduced to 4, the model has 512 positions"):
            session.prepare_chat(chat(png(1), png(2), longer), compression=HALF)
        answer = session.ask(question, images=[png(1), png(2)], compression=HALF)
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens == whole - 4


def test_what_the_operator_has_is_the_default_and_bounds_what_a_request_may_choose():
    allowed = plan(reduction=Reduction(method="grid", keep=0.5), min_keep=0.25, kv_budget=0.4)
    with tiny_session(allowed) as session:

        def asked(**wish) -> tuple[Reduction, KVPolicy | None]:
            prompt = session.prepare_chat(chat(png(1), "?"), compression=Compression(**wish))
            return next(iter(prompt.patches.values())).reduction, prompt.kv

        reduction, kv = asked()
        assert reduction == Reduction(method="grid", keep=0.5)
        assert kv.budget == 0.4
        assert asked(keep_visual=1)[0].is_whole
        assert asked(keep_visual=0.25, reduce="pool")[0] == Reduction(method="pool", keep=0.25)
        assert asked(kv_budget=0.7)[1].budget == 0.7
        assert asked(kv_budget=1)[1] is None
        with pytest.raises(RequestError, match=r"`triptych.keep_visual` is 0.2, the least .* is 0.25"):
            asked(keep_visual=0.2)
        with pytest.raises(
            RequestError, match=r"`triptych.kv_budget` is 0.3, this server keeps a share of at least 0.4"
        ):
            asked(kv_budget=0.3)


def test_a_server_that_forgets_nothing_says_so(session: Session):
    with pytest.raises(RequestError, match="this server keeps every key and value"):
        session.prepare_chat(chat("?"), compression=Compression(kv_budget=0.5))
    with pytest.raises(RequestError, match="this server keeps every key and value"):
        session.prepare_text("?", compression=Compression(kv_budget=0.5))
    assert session.prepare_chat(chat("?"), compression=Compression(kv_budget=1)).kv is None


def test_the_system_message_is_never_forgotten():
    with tiny_session(plan(kv_budget=0.5)) as session:
        system = Message(role="system", parts=(TextPart(text="be kind"),))
        prompt = session.prepare_chat(Chat(messages=(system, *chat(png(1), "?").messages)))
        assert session.text.detokenizer().push(prompt.token_ids[: prompt.num_protected].tolist()).endswith("be kind\n")
        assert session.prepare_chat(chat("?")).num_protected == 0
