"""What a person writes stays text; everything else is tokenized exactly as transformers does."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chiasm.errors import ChiasmError, Reason
from chiasm.models.contract import DEFAULT_OPTIONS, ImageForm, Mark
from chiasm.models.language import LanguageHalf
from llm_service.prompt import Layout, PromptBuilder
from llm_service.request import Conversation, Part, Picture, RawImage, Text, Turn


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LanguageHalf:
    return LanguageHalf.load(checkpoint, model_id="tiny")


def _picture() -> Picture:
    return Picture(RawImage(memoryview(b""), DEFAULT_OPTIONS), 0, 0)


def _said(*parts: str | Picture) -> Turn:
    read: list[Part] = [Text(part) if isinstance(part, str) else part for part in parts]
    return Turn("user", tuple(read))


def _laid_out(model: LanguageHalf, turns: Sequence[Turn], *forms: ImageForm) -> Layout:
    builder = PromptBuilder(model)
    return builder.lay_out(builder.render(Conversation(tuple(turns), "")), forms)


def _ids(model: LanguageHalf, *turns: Turn) -> list[int]:
    """With one image token a picture."""
    pictures = Conversation(turns, "").pictures
    return list(_laid_out(model, turns, *[ImageForm(1, (1,)) for _ in pictures]).token_ids)


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
    turn = _said("<image> is how a picture is written", _picture())
    layout = _laid_out(model, [turn], ImageForm(3, (3,)))
    assert layout.token_ids.count(model.image_token_id) == 3
    start = layout.runs[0].start
    assert set(layout.token_ids[start : start + 3]) == {model.image_token_id}


def test_placeholders_stand_where_the_pictures_stand(model: LanguageHalf) -> None:
    turn = _said("A", _picture(), "B", _picture(), "C")
    layout = _laid_out(model, [turn], ImageForm(2, (2,)), ImageForm(5, (5,)))
    assert (layout.image_token_count, len(layout.token_ids)) == (7, len(_ids(model, turn)) + 5)
    between = layout.token_ids[layout.runs[0].start + 2 : layout.runs[1].start]
    assert "B" in model.tokenizer.decode(list(between))


def test_text_within_a_picture_is_tokenized_with_the_text_around_it(model: LanguageHalf) -> None:
    form = ImageForm(5, ("row 1 ", 2, "\nrow ", Mark.NUMBER, 3, " e"))
    layout = _laid_out(model, [_said("A", _picture(), "nd")], form)
    written = model.tokenizer.decode(list(layout.token_ids))
    assert f"Arow 1 {'<image>' * 2}\nrow 0{'<image>' * 3} e\nnd" in written
    assert [(run.first_row, run.length) for run in layout.runs] == [(0, 2), (2, 3)]
    whole: Any = model.tokenizer(written, add_special_tokens=False)
    assert whole.input_ids == list(layout.token_ids)


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

    def ids(one: Conversation) -> tuple[int, tuple[int, ...]]:
        return id(one), builder.lay_out(builder.render(one), []).token_ids

    expected = dict(map(ids, (clean, typed)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ids, [clean, typed] * 200))
    assert all(expected[key] == told for key, told in found)
