"""The official `openai` client, unmodified, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from scripted import IMAGE_TOKENS, ScriptedSession, serving

PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def session() -> ScriptedSession:
    return ScriptedSession()


@pytest.fixture(scope="module")
def client(session: ScriptedSession) -> Iterator[openai.OpenAI]:
    with serving(session) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def say(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_answered_whole(client):
    answer = client.chat.completions.create(model="scripted", messages=say("red green blue"), max_tokens=4)

    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.message.content) == ("assistant", "RED GREEN BLUE RED ")
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert choice.triptych["ttft_s"] == 0.011
    assert choice.triptych["tokens_per_s"] == 30.0


def test_a_stream_says_what_the_whole_answer_says(client):
    stream = client.chat.completions.create(
        model="scripted", messages=say("red green"), max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "RED GREEN RED "
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, None, None, None, "length"]
    assert chunks[-2].choices[0].delta.content is None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_pictures_stay_where_they_were_said(client, session):
    content = [
        {"type": "text", "text": "before"},
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        {"type": "text", "text": "after all"},
    ]
    messages = [
        {"role": "system", "content": [{"type": "image_url", "image_url": PIXEL}, {"type": "text", "text": "style"}]},
        {"role": "user", "content": content},
    ]
    answer = client.chat.completions.create(model="scripted", messages=messages, max_tokens=2)

    chat = session.chats[-1]
    assert [type(part).__name__ for part in chat.messages[0].parts] == ["ImagePart", "TextPart"]
    assert [type(part).__name__ for part in chat.messages[1].parts] == ["TextPart", "ImagePart", "TextPart"]
    assert chat.messages[1].parts[1].detail == "low"
    assert answer.usage.prompt_tokens_details.image_tokens == 2 * IMAGE_TOKENS
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_an_answer_can_be_sent_back_as_it_came(client):
    first = client.chat.completions.create(model="scripted", messages=say("one two"), max_tokens=2)
    messages = [*say("one two"), first.choices[0].message, *say("three")]

    second = client.chat.completions.create(model="scripted", messages=messages, max_tokens=1)

    assert second.choices[0].message.content == "THREE "


def test_n_answers_have_their_own_seeds_and_can_be_repeated(client, session):
    def ask(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model="scripted", messages=say("a b c d e f g h"), n=3, seed=seed, temperature=1.0, max_tokens=9
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 27
        assert answer.usage.prompt_tokens == 8
        return [choice.message.content for choice in answer.choices]

    first = ask(5)
    assert ask(5) == first
    assert len(set(first)) == 3
    assert [sampling.seed for sampling in session.samplings[-3:]] == [5, 6, 7]


def test_n_streams_are_interleaved_by_index(client):
    stream = client.chat.completions.create(
        model="scripted", messages=say("slow a b"), n=3, max_tokens=6, stream=True, temperature=0
    )
    order = [chunk.choices[0].index for chunk in stream]

    assert {order.count(index) for index in range(3)} == {8}  # role, six words, finish
    assert order != sorted(order)


def test_stop_strings_end_an_answer_and_are_told(client):
    answer = client.chat.completions.create(
        model="scripted", messages=say("red green blue"), stop=["BLUE", "never"], max_tokens=9
    )

    assert answer.choices[0].message.content == "RED GREEN "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "BLUE"


def test_logprobs_of_a_chat(client):
    answer = client.chat.completions.create(
        model="scripted", messages=say("red green"), logprobs=True, top_logprobs=2, max_tokens=2
    )
    content = answer.choices[0].logprobs.content

    assert [one.token for one in content] == ["RED ", "GREEN "]
    assert content[0].bytes == list(b"RED ")
    assert [other.logprob for other in content[0].top_logprobs] == [-0.25, -1.5]


def test_logprobs_of_a_streamed_chat(client):
    stream = client.chat.completions.create(
        model="scripted", messages=say("red green"), logprobs=True, max_tokens=2, stream=True
    )
    found = [c.choices[0].logprobs.content[0].token for c in stream if c.choices[0].logprobs is not None]

    assert found == ["RED ", "GREEN "]


def test_a_text_completion_with_echo_and_logprobs(client):
    answer = client.completions.create(model="scripted", prompt="red green", max_tokens=2, logprobs=2)

    assert answer.object == "text_completion"
    assert answer.choices[0].text == "RED GREEN "
    assert answer.choices[0].logprobs.tokens == ["RED ", "GREEN "]
    assert answer.choices[0].logprobs.text_offset == [0, 4]
    assert answer.choices[0].logprobs.top_logprobs[0] == {"RED ": -0.25, "other": -1.5}
    echoed = client.completions.create(model="scripted", prompt="red ", max_tokens=1, echo=True)
    assert echoed.choices[0].text == "red RED "


def test_the_bill_so_far_comes_with_every_chunk_where_it_is_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model="scripted", messages=say("red green"), max_tokens=3, stream=True, stream_options=options
    )
    bills = [chunk.usage for chunk in stream]

    assert [bill.completion_tokens for bill in bills] == [1, 1, 2, 3, 3, 3]
    assert {bill.prompt_tokens for bill in bills} == {2}


def test_several_prompts_of_texts_or_ids(client):
    texts = client.completions.create(model="scripted", prompt=["a", "b"], n=2, max_tokens=1)
    ids = client.completions.create(model="scripted", prompt=[[1], [2, 3]], max_tokens=2, echo=True)
    flat = client.completions.create(model="scripted", prompt=[4, 5], max_tokens=2)

    assert [choice.text for choice in texts.choices] == ["A ", "A ", "B ", "B "]
    assert texts.usage.prompt_tokens == 2
    assert texts.usage.completion_tokens == 4
    assert [choice.text for choice in ids.choices] == ["w1W1 W1 ", "w2 w3W2 W3 "]
    assert flat.choices[0].text == "W4 W5 "


def test_a_streamed_text_completion(client):
    stream = client.completions.create(
        model="scripted", prompt="a b", max_tokens=3, stream=True, echo=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    assert "".join(c.choices[0].text for c in chunks[:-1]) == "a bA B A "
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 3


def test_text_completions_answer_sixteen_tokens_unless_told(client):
    assert client.completions.create(model="scripted", prompt="a").usage.completion_tokens == 16


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").max_model_len == 1000
    with pytest.raises(openai.NotFoundError, match="use `scripted`"):
        client.models.retrieve("gpt-9")


def test_errors_arrive_as_the_clients_own(client):
    with pytest.raises(openai.BadRequestError, match="`temperature`") as found:
        client.chat.completions.create(model="scripted", messages=say("a"), temperature=3)
    assert found.value.param == "temperature"
    assert found.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=say("a"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="1,000") as long:
        client.chat.completions.create(model="scripted", messages=say("a"), max_tokens=5000)
    assert long.value.code == "context_length_exceeded"


def test_an_error_in_the_middle_of_a_stream_reaches_the_reader(client):
    stream = client.chat.completions.create(model="scripted", messages=say("breaks now"), max_tokens=9, stream=True)
    seen = [next(stream).choices[0].delta.content for _ in range(4)]
    assert seen == ["", "BREAKS ", "NOW ", "BREAKS "]
    with pytest.raises(openai.APIError, match="the device is gone"):
        next(stream)


def test_an_error_before_the_first_token_keeps_its_status_even_for_a_stream(client):
    with pytest.raises(openai.InternalServerError, match="9 GB"):
        client.chat.completions.create(model="scripted", messages=say("refused"), stream=True)


async def chat_many(url: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        import asyncio

        async def one(number: int) -> str:
            messages = say(f"slow w{number}")
            if number % 2:
                answer = await client.chat.completions.create(model="scripted", messages=messages, max_tokens=4)
                return answer.choices[0].message.content
            stream = await client.chat.completions.create(
                model="scripted", messages=messages, max_tokens=4, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return await asyncio.gather(*(one(number) for number in range(16)))


def test_sixteen_at_once_each_get_their_own_answer():
    import asyncio

    with serving(ScriptedSession()) as url:
        answers = asyncio.run(chat_many(url))

    assert answers == [f"SLOW W{number} SLOW W{number} " for number in range(16)]
