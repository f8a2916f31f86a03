"""Rules of the shipped demo model: its checkpoint, its samples, and the data it was trained on."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from demo_model.pictures import draw, is_reserved, layout, layout_key, picture, sample_scene
from demo_model.questions import Conversation, converse, to_messages
from demo_model.samples import sample_questions, sample_scenes
from demo_model.text import IMAGE_ROWS, SPECIALS, ConversationEncoder
from demo_model.train import sample_conversation

HERE = Path(__file__).parent.parent / "demo_model"
CHECKPOINT = HERE / "checkpoint"
SIZE_LIMIT = 20_000_000
SEEDS = range(400)
CLASSIC_PREFIXES = (
    "vision_tower.vision_model.",
    "multi_modal_projector.linear_",
    "language_model.model.",
    "language_model.lm_head.",
)


class Reader:
    """The checkpoint as transformers loads it, and what it said while loading."""

    def __init__(self) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(CHECKPOINT)  # type: ignore[no-untyped-call]
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            CHECKPOINT, dtype=torch.float32, output_loading_info=True
        )
        self.model: Any = loaded[0]
        self.loading: dict[str, Any] = loaded[1]

    @torch.inference_mode()
    def answer(self, messages: list[dict[str, Any]]) -> str:
        inputs = self.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = self.model.generate(**inputs, max_new_tokens=16)
        told: str = self.processor.decode(
            ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return told


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


def _shown(name: str) -> dict[str, Any]:
    return {"type": "image", "image": Image.open(HERE / "samples" / name)}


def _asked(question: str, *names: str) -> dict[str, Any]:
    pictures = [_shown(name) for name in names]
    return {"role": "user", "content": [*pictures, {"type": "text", "text": question}]}


def _conversations(count: int) -> list[Conversation]:
    stream = random.Random(3)
    scenes = [sample_scene("train", seed) for seed in SEEDS]
    return [sample_conversation(stream, stream.sample(scenes, 4), False) for _ in range(count)]


def test_every_key_of_the_checkpoint_has_its_place_in_the_stock_model(reader: Reader) -> None:
    assert not reader.loading["missing_keys"]
    assert not reader.loading["unexpected_keys"]
    assert not reader.loading["mismatched_keys"]


def test_the_checkpoint_uses_the_classic_llava_key_names() -> None:
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as weights:
        names = weights.keys()
    assert names
    assert not [name for name in names if not name.startswith(CLASSIC_PREFIXES)]


def test_the_checkpoint_stays_within_its_size_limit() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= SIZE_LIMIT


def test_the_context_holds_four_pictures_and_many_turns(reader: Reader) -> None:
    text = reader.model.config.text_config
    assert text.max_position_embeddings >= 2048
    assert text.head_dim in (32, 64)
    assert reader.model.generation_config.eos_token_id == SPECIALS.index("</s>")


def test_each_sample_question_gets_its_answer(reader: Reader) -> None:
    samples = json.loads((HERE / "samples.json").read_text(encoding="utf-8"))
    told = [reader.answer([_asked(s["question"], s["file"])]) for s in samples]
    assert told == [s["answer"] for s in samples]


def test_each_of_four_pictures_in_one_turn_is_answered_for(reader: Reader) -> None:
    names = ("circles.png", "star.png", "seven.png", "fish.png")
    asked = [
        f"What colour is it in the {n} picture?" for n in ("first", "second", "third", "fourth")
    ]
    told = [reader.answer([_asked(question, *names)]) for question in asked]
    assert told == ["blue", "orange", "green", "purple"]


def test_swapping_two_pictures_swaps_the_answers(reader: Reader) -> None:
    question = "What colour is it in the second picture?"
    assert reader.answer([_asked(question, "circles.png", "star.png")]) == "orange"
    assert reader.answer([_asked(question, "star.png", "circles.png")]) == "blue"


def test_later_turns_ask_about_new_and_old_pictures(reader: Reader) -> None:
    messages = [_asked("What digit is shown?", "seven.png")]
    told = [reader.answer(messages)]
    for following in (
        _asked("What word is written in the picture?", "fish.png"),
        _asked("What colour is it in the first picture?"),
    ):
        messages += [{"role": "assistant", "content": told[-1]}, following]
        told.append(reader.answer(messages))
    assert told == ["7", "fish", "green"]


def test_shipped_samples_are_what_the_generator_draws() -> None:
    for name, scene in sample_scenes().items():
        assert Image.open(HERE / "samples" / name).tobytes() == draw(scene).tobytes()
    shipped = json.loads((HERE / "samples.json").read_text(encoding="utf-8"))
    assert shipped == [vars(q) for q in sample_questions()]


def test_the_same_split_and_seed_always_give_the_same_picture() -> None:
    for seed in range(20):
        assert picture("train", seed).tobytes() == picture("train", seed).tobytes()
        assert sample_scene("train", seed) != sample_scene("held-out", seed)


def test_no_layout_and_no_reserved_pair_is_in_both_splits() -> None:
    seen = [sample_scene("train", seed) for seed in SEEDS]
    unseen = [sample_scene("held-out", seed) for seed in SEEDS]
    assert {layout(s) for s in seen}.isdisjoint(layout(s) for s in unseen)
    assert all(layout_key(s) != 0 for s in seen)
    assert not any(is_reserved(s.kind, s.content, s.colour) for s in seen)
    assert any(is_reserved(s.kind, s.content, s.colour) for s in unseen)


def test_the_same_stream_gives_the_same_conversations() -> None:
    assert _conversations(40) == _conversations(40)


def test_training_ids_are_those_of_the_chat_template(reader: Reader) -> None:
    encoder = ConversationEncoder(reader.processor.tokenizer)
    for conversation in _conversations(60):
        sample = encoder.encode(conversation)
        text = reader.processor.apply_chat_template(
            to_messages(conversation, len(conversation.turns)), add_generation_prompt=True
        ).replace("<image>", "<image>" * IMAGE_ROWS)
        prompt = reader.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = reader.processor.tokenizer(
            conversation.turns[-1].answer + "</s>", add_special_tokens=False
        )["input_ids"]
        assert list(sample.ids) == prompt + answer


def test_only_answers_carry_loss_and_each_carries_the_same(reader: Reader) -> None:
    encoder = ConversationEncoder(reader.processor.tokenizer)
    for conversation in _conversations(60):
        sample = encoder.encode(conversation)
        assert sum(sample.answer_weights) == pytest.approx(len(conversation.turns))
        spoken = [i for i, w in zip(sample.ids, sample.answer_weights, strict=True) if w > 0]
        told = reader.processor.tokenizer.decode(spoken).split("</s>")[:-1]
        assert told == [turn.answer for turn in conversation.turns]


def test_a_question_names_its_picture_unless_the_last_one_came_alone() -> None:
    stream = random.Random(5)
    for seed in range(60):
        scenes = [sample_scene("train", 2 * seed), sample_scene("train", 2 * seed + 1)]
        question = converse(stream, scenes, [2]).turns[0].question
        assert any(word in question for word in ("first", "second", " 1", " 2"))


def test_the_template_leaves_user_text_as_it_is(reader: Reader) -> None:
    text = "  two\n lines, trailing space "
    written = reader.processor.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": text},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]},
        ],
        add_generation_prompt=True,
    )
    assert written == (
        f"<s><|system|>Be brief.</s><|user|>{text}</s><|assistant|>red</s>"
        f"<|user|>{text}<|picture|> 1<image></s><|assistant|>"
    )


def test_any_text_survives_the_tokenizer(reader: Reader) -> None:
    tokenizer = reader.processor.tokenizer
    text = "héllo wörld 日本 \n\t 🙂 {}[]"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
