"""Events of text, whose surroundings are encoded once."""

import json

from hypothesis import given
from hypothesis import strategies as st

from chiasm.v1 import llm_service_pb2
from gateway.http.events import TextEvent, event
from gateway.openai.answer import Chunks, Form, Head

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_S = llm_service_pb2


@given(text=TEXT, name=TEXT)
def test_an_event_of_text_is_the_event_of_the_whole_chunk(text: str, name: str) -> None:
    around = {"model": name, "choices": [{"delta": {"content": ""}, "content": ""}]}
    whole = {"model": name, "choices": [{"delta": {"content": text}, "content": ""}]}
    assert TextEvent(around, "content").of(text) == event(whole)


def test_a_model_named_like_the_field_changes_nothing() -> None:
    around = {"model": '"content":""', "delta": {"content": ""}}
    made = TextEvent(around, "content").of("\N{PARAGRAPH SEPARATOR}\r\n\0")
    assert made.count(b"\n") == 2
    assert made.endswith(b"\n\n")
    assert json.loads(made.removeprefix(b"data: ")) == {
        "model": '"content":""',
        "delta": {"content": "\N{PARAGRAPH SEPARATOR}\r\n\0"},
    }


def test_each_choice_keeps_its_index_and_tokens_without_text_give_no_chunk() -> None:
    chunks = Chunks(Head("m"), Form(choices=2), include_usage=True)
    deltas = [
        _S.Delta(choice_index=1, text="b", token_ids=[1]),
        _S.Delta(choice_index=0, text="", token_ids=[2]),
        _S.Delta(choice_index=0, text="a", token_ids=[3, 4]),
        _S.Delta(choice_index=1, text="B", token_ids=[5]),
    ]
    told = chunks.take(_S.GenerateResponse(delta=_S.DeltaBatch(deltas=deltas)))
    made = [json.loads(one.removeprefix(b"data: ")) for one in told.split(b"\n\n")[:-1]]
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in made] == [
        (1, {"content": "b"}),
        (0, {"content": "a"}),
        (1, {"content": "B"}),
    ]
    assert all(chunk["usage"] is None for chunk in made)
