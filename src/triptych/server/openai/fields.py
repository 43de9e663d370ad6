"""Which fields OpenAI's bodies may have, and what is said of those that cannot be served."""

from __future__ import annotations

from triptych.server.body import Fields, Refused
from triptych.server.openai.bodies import ChatBody, ChatMessage, CompletionBody

# Change no answer: kept in no log, checked for nothing.
BOOKKEEPING = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
)

_OLD_NAME = "the old name of tools: send `tools` and `tool_choice`"

BOTH_REFUSED: Refused = {
    "best_of": ((1,), "one answer is made for each choice; use `n` and choose yourself"),
    "use_beam_search": ((False,), "beam search is not served; use `n`"),
    "length_penalty": ((1, 1.0), "it belongs to beam search, which is not served"),
    "service_tier": (("auto", "default"), "there is one tier; `priority` orders requests within it"),
    "store": ((False,), "answers are never stored"),
    "skip_special_tokens": ((True,), "special tokens never reach the text; read `logprobs` to see each token"),
    "spaces_between_special_tokens": ((True,), "special tokens never reach the text"),
    "truncate_prompt_tokens": ((), "a prompt is never cut in silence; shorten it yourself"),
    "logits_processors": ((), "no code from a request is run; `logit_bias` moves single tokens"),
    "allowed_token_ids": ((), "use `logit_bias`, or `structured_outputs` with a `regex`"),
    "bad_words": (([],), "use `logit_bias` with -100 for each token"),
    "guided_decoding_backend": ((), "llguidance holds every form"),
    "guided_whitespace_pattern": ((), "JSON has one blank, or a new line and its indent, where it may have any"),
    "request_id": ((), "send it as the X-Request-Id header; it comes back in the reply's"),
    "return_token_ids": ((False,), "token ids are not returned"),
    "return_tokens_as_token_ids": ((False,), "tokens are returned as text and bytes"),
}

CHAT_REFUSED: Refused = {
    **BOTH_REFUSED,
    "functions": (([],), _OLD_NAME),
    "function_call": (("none", "auto"), _OLD_NAME),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "predicted outputs are not served; the answer would be the same without it"),
    "reasoning_effort": (("none",), "this model does not reason before it answers"),
    "verbosity": (("medium",), "ask for a short or a long answer in a message"),
    "web_search_options": ((), "nothing is looked up on the web"),
    "chat_template": ((), "the model's own template is used; render another yourself and call /v1/completions"),
    "continue_final_message": ((False,), "render the prompt yourself and call /v1/completions to continue a text"),
    "echo": ((False,), "a chat is not echoed; /v1/completions can"),
    "documents": ((), "put documents into a message"),
    "media_io_kwargs": (({},), "pictures are decoded in one way, which docs/guides/serve.md describes"),
}

COMPLETION_REFUSED: Refused = {
    **BOTH_REFUSED,
    "suffix": (("",), "filling in the middle is not served"),
    "parallel_tool_calls": ((True, False), "a text completion calls no tools"),
    "add_special_tokens": ((True,), "send token ids as the prompt to choose each token yourself"),
}

MESSAGE_REFUSED: Refused = {
    "function_call": ((), "the old name of a tool call: send `tool_calls`"),
    "refusal": ((), "send the refusal's text as the content"),
    "audio": ((), "send the answer's text as the content"),
    "annotations": (([],), "annotations are not shown to the model"),
    "reasoning_content": ((), "a former answer's reasoning is not shown to the model"),
    "reasoning": ((), "a former answer's reasoning is not shown to the model"),
}

CHAT = Fields(record=ChatBody, ignored=BOOKKEEPING, refused=CHAT_REFUSED)
COMPLETION = Fields(record=CompletionBody, ignored=BOOKKEEPING, refused=COMPLETION_REFUSED)
MESSAGE = Fields(record=ChatMessage, refused=MESSAGE_REFUSED)
