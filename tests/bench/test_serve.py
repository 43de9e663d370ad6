"""`bench/serve.py` for a second on the arithmetic model, and what it reads out of other clients' reports."""

from __future__ import annotations

import asyncio
import random

import pytest
import serve
from tokenizers import Tokenizer, models, pre_tokenizers
from traffic import aiperf, guidellm
from traffic.outside import OUTPUT_TOKENS, Figure, Plan, Seen, agreement, counted
from traffic.questions import WORDS
from traffic.served import found

from scripted import serving
from triptych.testing import plan, tiny_session


@pytest.fixture
def tokenizer(tmp_path):
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("has_pictures", [False, True])
def test_what_our_client_saw_is_what_the_server_counted(tokenizer, has_pictures, monkeypatch):
    monkeypatch.setattr(serve, "OUTSIDE", {})
    asked = Plan(tokenizer, rate=40.0, num_requests=12, has_pictures=has_pictures)
    with tiny_session(plan(max_model_len=2048, num_blocks=600)) as session, serving(session) as url:
        measures, targets = serve.compare(found(url, None), asked)

    figures = {one.name: one.value for one in measures}
    assert (figures["answered"], figures["failed"], figures["tokens"]) == (12, 0, 12 * OUTPUT_TOKENS)
    assert figures["whole answer mean"] > figures["whole answer mean, counted by the server"] > 0
    assert [one.value for one in targets if one.unit == "share"] == [0, 0]
    assert {one.subject for one in measures} == {f"ours, {'pictures' if has_pictures else 'text'}, 40 requests/s"}


def test_all_that_arrives_by_chance_is_waited_for():
    mix = serve.Mix(max_tokens=(3,), ttft_s=60.0, tpot_s=60.0)
    with tiny_session(plan(max_model_len=2048, num_blocks=600)) as session, serving(session) as url:
        made = asyncio.run(serve.open_loop(found(url, None), mix.question, 50.0, 10))
    figures = {one.name: one.value for one in serve.measures(made, mix, 50.0)}
    assert (figures["answered"], figures["rejected"], figures["failed"], figures["goodput"]) == (10, 0, 0, 50.0)


def test_words_are_cut_to_so_many_tokens_and_no_two_pictures_are_alike(tokenizer):
    rng = random.Random(1)
    text = Plan(tokenizer, 1.0, 1, has_pictures=False).question(rng).body["messages"][0]["content"][0]["text"]
    assert len(text.split()) == 128
    pictured = Plan(tokenizer, 1.0, 1, has_pictures=True)
    assert pictured.question(rng).body["messages"] != pictured.question(rng).body["messages"]


def test_a_client_that_counts_otherwise_is_noticed():
    before = {"vllm:e2e_request_latency_seconds_count": 5.0, "vllm:e2e_request_latency_seconds_sum": 50.0}
    after = {
        "vllm:e2e_request_latency_seconds_count": 7.0, "vllm:e2e_request_latency_seconds_sum": 54.0,
        "vllm:time_to_first_token_seconds_sum": 1.0, "vllm:request_generation_tokens_sum": 62.0,
    }  # fmt: skip
    own = counted(before, after)
    assert own.seconds == {"TTFT": 0.5, "TPOT": 0.05, "whole answer": 2.0}
    figures = {name: Figure(mean=s, p50=s, p99=s, lowest=s, highest=s) for name, s in own.seconds.items()}
    seen = Seen(figures=figures | {"TTFT": figures["whole answer"]}, num_answered=1, num_failed=0, num_tokens=62)
    missed = [target.name for target in agreement("somebody", seen, own) if not target.is_met]
    assert missed == ["TTFT, apart: somebody", "answers, off: somebody"]


def test_reports_of_outside_clients_are_read_in_our_units():
    milliseconds = {"mean": 40.0, "avg": 40.0, "p50": 30.0, "p99": 90.0, "min": 20.0, "max": 95.0}
    whole = {name: value / 1e3 for name, value in milliseconds.items()}
    theirs = {"successful": milliseconds | {"percentiles": {"p50": 30.0, "p99": 90.0}}}
    of_guidellm = {
        "time_to_first_token_ms": theirs, "inter_token_latency_ms": theirs,
        "request_latency": {"successful": whole | {"percentiles": {"p50": 0.03, "p99": 0.09}}},
        "request_totals": {"successful": 3, "errored": 1, "incomplete": 0, "total": 4},
        "output_token_count": {"successful": {"total_sum": 96.0}},
    }  # fmt: skip
    of_aiperf = {
        "time_to_first_token": milliseconds, "inter_token_latency": milliseconds, "request_latency": milliseconds,
        "request_count": {"avg": 3.0}, "error_request_count": {"avg": 1.0}, "total_output_tokens": {"avg": 96.0},
    }  # fmt: skip
    figure = Figure(mean=0.04, p50=0.03, p99=0.09, lowest=0.02, highest=0.095)
    expected = Seen(
        figures={"TTFT": figure, "TPOT": figure, "whole answer": figure}, num_answered=3, num_failed=1, num_tokens=96.0
    )
    assert guidellm.read({"benchmarks": [{"metrics": of_guidellm}]}) == expected
    assert aiperf.read(of_aiperf) == expected
