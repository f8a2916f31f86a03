"""What a person writes stays text; everything else is tokenized exactly as transformers does."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chiasm.errors import ChiasmError, Reason
from chiasm.models.language import LanguageHalf
from chiasm.v1 import image_pb2
from llm_service.prompt import PromptBuilder
from llm_service.request import Conversation, Part, Picture, RawImage, Text, Turn


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LanguageHalf:
    return LanguageHalf.load(checkpoint, model_id="tiny")


def _picture() -> Picture:
    return Picture(RawImage(memoryview(b""), image_pb2.ImageOptions()), 0, 0)


def _said(*parts: str | Picture) -> Turn:
    read: list[Part] = [Text(part) if isinstance(part, str) else part for part in parts]
    return Turn("user", tuple(read))


def _ids(model: LanguageHalf, *turns: Turn) -> list[int]:
    return PromptBuilder(model).render_ids(Conversation(turns, ""))


def test_a_plain_conversation_is_tokenized_as_transformers_does(model: LanguageHalf) -> None:
    turns = [_said("What is  this?", _picture(), " And that?\n"), Turn("assistant", (Text("é"),))]
    messages: Any = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is  this?"},
                {"type": "image"},
                {"type": "text", "text": " And that?\n"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "é"}]},
    ]
    expected = model.tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert _ids(model, *turns) == expected


@pytest.mark.parametrize("word", ["<|im_end|>", "<|im_start|>", "<image>", "</s>", "<pad>"])
def test_a_typed_special_token_is_text(model: LanguageHalf, word: str) -> None:
    special: Any = model.tokenizer.convert_tokens_to_ids(word)
    clean = _ids(model, _said("say please"))
    typed = _ids(model, _said(f"say {word} please"))
    assert typed.count(special) == clean.count(special)
    assert word in model.tokenizer.decode(typed, skip_special_tokens=True)


def test_a_typed_placeholder_takes_no_pictures_place(model: LanguageHalf) -> None:
    ids = _ids(model, _said("<image> is how a picture is written", _picture()))
    builder = PromptBuilder(model)
    layout = builder.expand(ids, [3])
    assert ids.count(model.image_token_id) == 1
    assert layout.token_ids.count(model.image_token_id) == 3
    start = layout.starts[0]
    assert set(layout.token_ids[start : start + 3]) == {model.image_token_id}


def test_placeholders_stand_where_the_pictures_stand(model: LanguageHalf) -> None:
    ids = _ids(model, _said("A", _picture(), "B", _picture(), "C"))
    layout = PromptBuilder(model).expand(ids, [2, 5])
    assert (layout.image_token_count, len(layout.token_ids)) == (7, len(ids) + 5)
    between = layout.token_ids[layout.starts[0] + 2 : layout.starts[1]]
    assert "B" in model.tokenizer.decode(list(between))


def test_a_role_that_the_template_drops_pictures_of_is_refused(
    model: LanguageHalf, checkpoint: Path
) -> None:
    from dataclasses import replace

    silent = replace(
        model,
        chat_template="{% for m in messages %}{% for p in m['content'] %}"
        "{{ p['text'] if p['type'] == 'text' else '' }}{% endfor %}{% endfor %}",
    )
    with pytest.raises(ChiasmError) as caught:
        _ids(silent, _said("look", _picture()))
    assert caught.value.reason is Reason.REQUEST_INVALID
    assert "0 of 1" in caught.value.message


def test_a_template_that_refuses_the_roles_is_the_callers_error(model: LanguageHalf) -> None:
    from dataclasses import replace

    strict = replace(
        model,
        chat_template="{% if messages[0]['role'] != 'user' %}"
        "{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'][0]['text'] }}",
    )
    with pytest.raises(ChiasmError) as caught:
        _ids(strict, Turn("assistant", (Text("hello"),)))
    assert (caught.value.reason, caught.value.field) == (Reason.REQUEST_INVALID, "messages")


def test_threads_do_not_change_each_others_treatment_of_special_tokens(
    model: LanguageHalf,
) -> None:
    builder = PromptBuilder(model)
    clean = Conversation((_said("hello there"),), "")
    typed = Conversation((_said("hello <|im_end|> there"),), "")
    expected = {id(one): builder.render_ids(one) for one in (clean, typed)}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: (id(one), builder.render_ids(one)), [clean, typed] * 200))
    assert all(expected[key] == ids for key, ids in found)
