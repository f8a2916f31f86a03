"""What the wire asks for becomes plain values, and what is wrong is named."""

from pathlib import Path
from typing import Any

import pytest

from chiasm.errors import ChiasmError, Reason
from chiasm.models.checkpoint import CheckpointError
from chiasm.models.language import GenerationDefaults
from chiasm.v1 import llm_service_pb2
from llm_service.app import check_defaults
from llm_service.engine.values import SamplingParams
from llm_service.request import (
    MAX_CHOICES,
    check_token_ids,
    read_choice_count,
    read_salt,
    read_sampling,
)

_S = llm_service_pb2
NOTHING = GenerationDefaults()
CHECKPOINT = GenerationDefaults(
    temperature=0.6, top_p=0.9, top_k=50, min_p=0.02, repetition_penalty=1.1, max_new_tokens=77
)


def _read(defaults: GenerationDefaults = NOTHING, **fields: Any) -> SamplingParams:
    return read_sampling(_S.SamplingParameters(**fields), defaults)


def _refusal(**fields: Any) -> ChiasmError:
    with pytest.raises(ChiasmError) as caught:
        _read(**fields)
    assert caught.value.reason is Reason.REQUEST_INVALID
    return caught.value


def test_an_empty_request_draws_as_the_schema_says() -> None:
    assert _read() == SamplingParams()


def test_what_the_request_leaves_open_is_the_checkpoints() -> None:
    assert _read(CHECKPOINT) == SamplingParams(
        temperature=0.6, top_p=0.9, top_k=50, min_p=0.02, repetition_penalty=1.1, max_tokens=77
    )


def test_what_the_request_says_wins_over_the_checkpoint_even_where_it_is_zero() -> None:
    asked: dict[str, Any] = {
        "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1,
        "max_token_count": 5,
    }  # fmt: skip
    assert _read(CHECKPOINT, **asked) == SamplingParams(temperature=0, max_tokens=5)


def test_a_checkpoint_that_does_not_sample_is_greedy_until_a_temperature_is_asked_for() -> None:
    greedy = GenerationDefaults(do_sample=False, temperature=0.6)
    assert _read(greedy).temperature == 0
    assert _read(greedy, temperature=0.5).temperature == 0.5


@pytest.mark.parametrize(
    "wrong", [{"top_p": 0.0}, {"top_k": -1}, {"repetition_penalty": 3.0}, {"top_p": "0.9"}]
)
def test_a_checkpoint_whose_defaults_no_request_could_use_is_refused_at_the_start(
    wrong: dict[str, Any],
) -> None:
    check_defaults(CHECKPOINT, Path("somewhere"))
    with pytest.raises(CheckpointError, match=r"somewhere/generation_config\.json"):
        check_defaults(GenerationDefaults(**wrong), Path("somewhere"))


def test_all_fields_arrive_as_they_were_written() -> None:
    read = _read(
        presence_penalty=0.1, frequency_penalty=-1.7, repetition_penalty=1.05, seed=-3,
        logit_bias={5: -99.9, 6: 0.3}, logprobs=True, top_logprob_count=4, min_token_count=2,
        ignore_eos=True, stop=["x"], stop_token_ids=[7],
    )  # fmt: skip
    assert read == SamplingParams(
        presence_penalty=0.1, frequency_penalty=-1.7, repetition_penalty=1.05, seed=-3,
        logit_bias=((5, -99.9), (6, 0.3)), top_logprobs=4, min_tokens=2, ignore_eos=True,
        stop=("x",), stop_token_ids=(7,),
    )  # fmt: skip


def test_log_probabilities_without_alternatives_are_asked_for_alone() -> None:
    assert _read(logprobs=True).top_logprobs == 0
    assert _read(logprobs=False).top_logprobs is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1), ("temperature", float("nan")), ("top_p", 0), ("top_k", -1),
        ("min_p", 1.1), ("presence_penalty", 2.5), ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", 2.5),
        ("repetition_penalty", float("inf")), ("max_token_count", 0), ("min_token_count", -1),
        ("logit_bias", {3: 100.5}), ("logit_bias", {3: float("nan")}),
        ("top_logprob_count", 3), ("top_logprob_count", -1),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    assert _refusal(**{field: value}).field == f"sampling.{field}"


def test_more_than_twenty_alternatives_are_refused() -> None:
    assert _refusal(logprobs=True, top_logprob_count=21).field == "sampling.top_logprob_count"


@pytest.mark.parametrize("fields", [{"stop_token_ids": [32]}, {"logit_bias": {-1: 1.0}},
                                    {"logit_bias": {1: 1.0, 32: 1.0}}])  # fmt: skip
def test_a_token_outside_the_vocabulary_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(ChiasmError) as caught:
        check_token_ids(_read(**fields), 32)
    assert caught.value.field == f"sampling.{next(iter(fields))}"


def test_the_number_of_choices_is_one_by_default_and_bounded() -> None:
    def count(**fields: Any) -> int:
        return read_choice_count(_S.SamplingParameters(**fields))

    assert (count(), count(choice_count=1), count(choice_count=128)) == (1, 1, MAX_CHOICES)
    for wrong in (0, -1, 129):
        with pytest.raises(ChiasmError) as caught:
            count(choice_count=wrong)
        assert caught.value.field == "sampling.choice_count"


def test_no_two_pairs_of_tenant_and_cache_salt_share_a_salt() -> None:
    pairs = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("é", ""), ("", "é")]
    salts = [read_salt(_S.GenerateRequest(tenant=t, cache_salt=c)) for t, c in pairs]
    assert len({*salts}) == len(pairs)


def test_a_cache_salt_that_is_too_long_is_named() -> None:
    with pytest.raises(ChiasmError) as caught:
        read_salt(_S.GenerateRequest(cache_salt="x" * 129))
    assert (caught.value.reason, caught.value.field) == (Reason.REQUEST_INVALID, "cache_salt")
