"""Rules of the engine's benchmark: what it sends, what it reads, what it reports."""

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from benchmarks.engine_burst import Mix, Observed, burst, mix_figures
from benchmarks.engine_checkpoint import SMALL, build
from benchmarks.engine_client import Answer, AnswerFailed, AnswerReader, EventReader, Server, ask
from benchmarks.engine_compare import Plan, parts
from benchmarks.engine_drive import Cell, drive, figures, percentile
from benchmarks.engine_load import Ask, bodies, picture, prompt
from benchmarks.engine_report import Measure, Round, number, rows, table
from benchmarks.engine_step import bytes_read, common_steps, step_times
from benchmarks.engine_systems import Extra, Layout, Peer
from llm_service.engine.values import DecoderParts
from tests.system.processes import start_encoder, start_gateway, start_llm

EVENTS = (b'{"a": 1}', b'{"b": "\\u00e4\\n"}', b"[DONE]")
WIRE = b": a comment\n\ndata: " + EVENTS[0] + b"\n\nid: 7\r\ndata:" + EVENTS[1] + b"\r\n\r\n"
WIRE += b"event: end\ndata: " + EVENTS[2] + b"\n\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "small"
    build(directory, SMALL)
    return directory


def answer(*arrivals: float, began: float = 0.0, tokens: int | None = None) -> Answer:
    count = len(arrivals) if tokens is None else tokens
    return Answer(began, arrivals, arrivals[-1], len(arrivals), 10, count)


# The checkpoint


def test_transformers_finds_every_tensor_of_the_checkpoint_and_no_other(checkpoint: Path) -> None:
    loaded: Any = LlavaForConditionalGeneration.from_pretrained(
        checkpoint, output_loading_info=True
    )
    model, report = loaded
    assert not any(report.values())
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_every_id_of_the_vocabulary_is_a_token(checkpoint: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    assert sorted(tokenizer.get_vocab().values()) == list(range(SMALL.vocabulary))


def test_a_prompt_is_a_token_a_word(checkpoint: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    assert 60 <= len(tokenizer(prompt("some seed"))["input_ids"]) <= 80


# What is sent


def test_no_prompt_begins_as_another_and_no_picture_comes_twice() -> None:
    seeds = [f"{place}" for place in range(40)]
    assert len({prompt(seed)[:40] for seed in seeds}) == len(seeds)
    assert len({picture(seed) for seed in seeds}) == len(seeds)


def test_bodies_ask_for_an_exact_length_and_hold_their_pictures_first() -> None:
    first, second = (json.loads(body) for body in bodies(Ask("m", 2, 5), 2, "seed"))
    assert first["max_tokens"] == 5
    assert first["ignore_eos"] is True
    kinds = [part["type"] for part in first["messages"][0]["content"]]
    assert kinds == ["image_url", "image_url", "text"]
    assert first["messages"] != second["messages"]


# What is read


@given(st.lists(st.integers(0, len(WIRE)), max_size=12))
def test_events_are_the_same_however_the_bytes_are_split(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WIRE)]
    reader = EventReader()
    pieces = (WIRE[begin:end] for begin, end in pairwise(edges))
    assert tuple(event for piece in pieces for event in reader.feed(piece)) == EVENTS


def test_text_that_comes_at_once_is_one_arrival_and_empty_text_is_none() -> None:
    reader = AnswerReader(1.0)
    reader.feed(response(chunk("")), 2.0)
    reader.feed(chunked(chunk("a") + chunk("b")), 3.0)
    reader.feed(chunked(chunk("c")), 5.0)
    reader.feed(chunked(usage(3) + b"data: [DONE]\n\n"), 6.0)
    read = reader.answer(3)
    assert (read.arrivals, read.pieces, read.completion_tokens) == ((3.0, 5.0), 3, 3)
    assert (read.first_after, read.gaps) == (2.0, ((5.0, 2.0),))


def test_an_answer_of_another_length_fails() -> None:
    reader = AnswerReader(0.0)
    reader.feed(response(chunk("a") + usage(1) + b"data: [DONE]\n\n"), 1.0)
    with pytest.raises(AnswerFailed, match="1 tokens came, not 2"):
        reader.answer(2)


def test_a_stream_without_its_end_fails() -> None:
    reader = AnswerReader(0.0)
    reader.feed(response(chunk("a") + usage(1)), 1.0)
    with pytest.raises(AnswerFailed, match="ended early"):
        reader.answer(1)


def test_an_error_in_the_stream_fails() -> None:
    reader = AnswerReader(0.0)
    with pytest.raises(AnswerFailed, match="too long"):
        reader.feed(response(b'data: {"error": {"message": "too long"}}\n\n'), 1.0)


def test_a_refusal_fails_with_its_words() -> None:
    reader = AnswerReader(0.0)
    body = b'{"error": "unknown model"}'
    head = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(body)
    reader.feed(head + body, 1.0)
    with pytest.raises(AnswerFailed, match=r"status 404.*unknown model"):
        reader.answer(None)


def chunk(text: str) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": text}}]}).encode()


def usage(tokens: int) -> bytes:
    told = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}
    return b"data: %b\n\n" % json.dumps(told).encode()


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(body)


@pytest.mark.parametrize(
    ("url", "port", "path"),
    [
        ("http://host:8000", 8000, "/v1/chat/completions"),
        ("http://host:8000/v1", 8000, "/v1/chat/completions"),
        ("https://host/models/v1/", 443, "/models/v1/chat/completions"),
    ],
)
def test_a_url_may_have_its_version_or_not(url: str, port: int, path: str) -> None:
    assert (Server(url).host, Server(url).port, Server(url).path) == ("host", port, path)


async def test_a_server_that_is_not_there_fails_the_request() -> None:
    with pytest.raises(AnswerFailed, match="ConnectionRefusedError"):
        await ask(Server("http://127.0.0.1:1"), b"{}")


# What is reported


def test_a_percentile_lies_between_its_two_nearest_ranks() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert math.isnan(percentile([], 50))


def test_rates_count_the_tokens_of_usage_and_gaps_are_pooled() -> None:
    found = figures([answer(1.0, 1.5, tokens=4), answer(2.0, 2.1, 2.2)], 2.0, 0.5)
    assert (found.requests_per_second, found.tokens_per_second) == (1.0, 3.5)
    assert found.first_p50 == 1500
    assert found.gap_p50 == pytest.approx(100)
    assert found.pieces_per_token == pytest.approx(5 / 7)
    assert found.client_cpu == 0.25


def test_gaps_count_in_the_burst_while_pictures_are_in_hand() -> None:
    texts = [answer(1.0, 2.0, 5.0, 6.0, 9.0)]
    seen = Observed(texts, [answer(7.0, 8.0, began=2.5)], began=0.0, first_burst=2.5)
    assert seen.burst_gaps() == [3.0, 1.0]
    found = mix_figures([answer(1.0, 1.5)], seen)
    assert (found.burst_gap_p50, found.calm_gap_p99, found.burst_gaps) == (2000, 500, 2)
    assert found.tokens_per_second == pytest.approx(7 / 9)
    assert found.picture_seconds == 5.5


def test_ratios_are_of_medians_and_judged_by_their_targets() -> None:
    fast = Measure("0@8", "tokens_per_second")
    start = Measure("start-up", "seconds_to_ready")
    rounds = [
        Round(system, turn, {fast: rate, start: seconds})
        for system, seconds, rates in (("chiasm", 4.0, (10, 36, 30)), ("vllm", 20.0, (20, 25, 90)))
        for turn, rate in enumerate(rates)
    ]
    found = {row.measure: row for row in rows(rounds)}
    assert (found[fast].ours, found[fast].peer, found[fast].ratio) == (30, 25, 1.2)
    assert (found[fast].verdict, found[start].verdict) == ("met", "missed")


def test_the_stall_is_each_systems_burst_over_its_own_calm() -> None:
    calm, stalled = Measure("burst", "calm_gap_p99"), Measure("burst", "burst_gap_p99")
    rounds = [
        Round("chiasm", 0, {calm: 10.0, stalled: 19.0}),
        Round("vllm", 0, {calm: 20.0, stalled: 1000.0}),
    ]
    line = rows(rounds)[-1]
    assert (line.ours, line.peer, line.verdict) == (1.9, 50.0, "met")
    assert "| burst | p99 in the burst / without | 1.90 | 50.0 |" in table([line])


def test_a_system_alone_has_figures_but_no_ratio() -> None:
    (line,) = rows([Round("chiasm", 0, {Measure("0@1", "tokens_per_second"): 5.0})])
    assert line.ours == 5.0
    assert (math.isnan(line.ratio), line.verdict) == (True, "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (99.95, "100.0"), (12.34, "12.3"), (0.01234, "0.012"), (0.0, "0")],
)
def test_numbers_show_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def plan(*layouts: Layout) -> Plan:
    cells = (Cell(0, 1, 1), Cell(1, 1, 1))
    text, pictured, mixed = layouts
    return Plan(
        Path("model"), cells, 4, Mix(), 1, 1, (text, pictured, mixed), Extra(),
        Peer("python", "all", eager=True), None,
    )  # fmt: skip


def test_scenarios_of_one_layout_share_a_start() -> None:
    first, second = parts(plan("shared", "shared", "split"), "chiasm")
    assert (first.layout, len(first.cells), first.mix) == ("shared", 2, None)
    assert (second.layout, second.cells, second.mix) == ("split", (), Mix())
    (only,) = parts(plan("shared", "shared", "split"), "vllm")
    assert (len(only.cells), only.mix) == (2, Mix())


def test_a_plan_without_a_burst_starts_nothing_for_it() -> None:
    (only,) = parts(replace(plan("shared", "shared", "split"), mix=None), "chiasm")
    assert only.layout == "shared"


# The decode step


def test_steps_count_while_all_sequences_decode() -> None:
    assert common_steps([[1.0, 2.0, 4.0, 7.0, 8.0], [3.0, 5.0, 7.5]]) == [3.0]


def test_a_steps_limit_is_its_bytes_over_the_bandwidth() -> None:
    found = step_times([0.02, 0.03, 0.04], 1, 100_000_000, 10.0)
    assert (found.limit, found.median, found.of_limit) == (10.0, 30.0, 3.0)


def test_tied_embeddings_are_read_once_a_step(checkpoint: Path) -> None:
    model: Any = LlavaForConditionalGeneration.from_pretrained(checkpoint)
    decoder = model.get_decoder()
    decoder_parts = DecoderParts(
        decoder, model.get_input_embeddings(), model.lm_head, 2, 1, 64, (2,), 64,
        torch.bfloat16, "cpu",
    )  # fmt: skip
    assert bytes_read(decoder_parts) == 2 * sum(one.numel() for one in decoder.parameters())


# A real system


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    flags = ("--dtype", "bfloat16")
    with (
        start_encoder(checkpoint, *flags) as encoder,
        start_llm(checkpoint, "--encoders", encoder.target, *flags) as llm,
        start_gateway(llm.port) as gateway,
    ):
        yield gateway.url


@pytest.mark.system
def test_a_closed_loop_counts_each_request_and_every_token(url: str) -> None:
    found = asyncio.run(drive(Server(url), Ask("small", 1, 6), Cell(1, 2, 5), "seed"))
    assert found.requests == 5
    assert found.tokens_per_second == pytest.approx(found.requests_per_second * 6)
    assert found.prompt_tokens > SMALL.image_rows + 60
    assert 0 < found.first_p50 <= found.first_p99
    assert 0 < found.pieces_per_token <= 1


@pytest.mark.system
def test_text_is_timed_with_and_without_a_burst(url: str) -> None:
    mix = Mix(2, stream_tokens=400, bursts=2, burst_size=2, every=0.1, picture_tokens=3)
    found = asyncio.run(burst(Server(url), "small", mix, "seed"))
    assert 0 < found.calm_gap_p50 <= found.calm_gap_p99
    assert found.burst_gaps > 0
    assert found.picture_seconds > 0.1


@pytest.mark.system
def test_a_loop_ends_with_its_first_failed_request(url: str) -> None:
    with pytest.raises(AnswerFailed, match="status 404"):
        asyncio.run(drive(Server(url), Ask("another", 0, 4), Cell(0, 2, 4), "seed"))
