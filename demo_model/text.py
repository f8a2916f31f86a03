"""The demo model's tokenizer and processor, and conversations as token ids, answers marked."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from demo_model.pictures import sample_scene
from demo_model.questions import (
    NO_PICTURE,
    PICTURE_KINDS,
    Conversation,
    Turn,
    ask,
    counting,
    describe,
)

PAD, BOS, EOS, IMAGE = "<pad>", "<s>", "</s>", "<image>"
SYSTEM, USER, ASSISTANT, PICTURE = "<|system|>", "<|user|>", "<|assistant|>", "<|picture|>"
SPECIALS = (PAD, BOS, EOS, IMAGE, SYSTEM, USER, ASSISTANT, PICTURE)
VOCABULARY = 640
CONTEXT_LENGTH = 2048
IMAGE_SIZE = 56
PATCH_SIZE = 14
IMAGE_ROWS = (IMAGE_SIZE // PATCH_SIZE) ** 2
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
CORPUS_SCENES = 4000


@dataclass(frozen=True)
class Sample:
    """Token ids with one `<image>` id for each image row; `answer_weights` sum to 1 an answer.

    `answer_weights[i]` is the loss weight of predicting `ids[i]`, 0 outside answers. `turn_starts`
    are the indices at which a user turn begins. `row_pictures[i]` is the picture that row `i`
    belongs to, and `asked_pictures[i]` the picture that an answer beginning after `i` is about,
    NO_PICTURE elsewhere.
    """

    ids: tuple[int, ...]
    answer_weights: tuple[float, ...]
    turn_starts: tuple[int, ...]
    row_pictures: tuple[int, ...]
    asked_pictures: tuple[int, ...]


def _corpus() -> Iterator[str]:
    stream = random.Random("chiasm demo tokenizer")
    for seed in range(CORPUS_SCENES):
        scene = sample_scene("train", seed)
        for kind in PICTURE_KINDS:
            yield ask(stream, scene, kind, stream.choice((None, 1, 2, 3, 4)))
        yield describe(scene)
        yield scene.kind
        yield scene.content
        yield scene.colour
        yield scene.position or scene.count
    for limit in range(1, 101):
        yield counting(limit)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the question corpus: any text encodes, and decodes to itself."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens={
            "image_token": IMAGE,
            "system_token": SYSTEM,
            "user_token": USER,
            "assistant_token": ASSISTANT,
            "picture_token": PICTURE,
        },
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_image_processor() -> CLIPImageProcessorPil:
    """Resizes any picture to a square of IMAGE_SIZE, values to [-1, 1]."""
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    half = [0.5, 0.5, 0.5]
    return CLIPImageProcessorPil(
        size=square, crop_size=square, do_center_crop=False, image_mean=half, image_std=half
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    return LlavaProcessor(  # type: ignore[no-untyped-call]
        image_processor=build_image_processor(),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


class ConversationEncoder:
    """Encodes a conversation as the chat template does, only faster, and marks its answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._core = tokenizer.backend_tokenizer
        self._special = {token: index for index, token in enumerate(SPECIALS)}
        self._text = cache(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return tuple(ids)

    def encode(self, conversation: Conversation) -> Sample:
        ids = [self._special[BOS]]
        if conversation.system:
            ids += [self._special[SYSTEM], *self._text(conversation.system), self._special[EOS]]
        weights = [0.0] * len(ids)
        asked = [NO_PICTURE] * len(ids)
        starts = []
        for turn in conversation.turns:
            starts.append(len(ids))
            question = self._question(turn)
            answer = [*self._text(turn.answer), self._special[EOS]]
            ids += question + answer
            weights += [0.0] * len(question) + [1 / len(answer)] * len(answer)
            asked += [NO_PICTURE] * (len(question) - 1) + [turn.target]
            asked += [NO_PICTURE] * len(answer)
        return Sample(tuple(ids), tuple(weights), tuple(starts), self._rows(ids), tuple(asked))

    def _rows(self, ids: Sequence[int]) -> tuple[int, ...]:
        is_row = [token == self._special[IMAGE] for token in ids]
        seen = accumulate(is_row)
        return tuple(
            (n - 1) // IMAGE_ROWS if row else NO_PICTURE
            for n, row in zip(seen, is_row, strict=True)
        )

    def _question(self, turn: Turn) -> list[int]:
        pictures: list[int] = []
        for index in turn.pictures:
            pictures += [self._special[PICTURE], *self._text(f" {index + 1}")]
            pictures += [self._special[IMAGE]] * IMAGE_ROWS
        text = list(self._text(turn.question))
        body = pictures + text if turn.picture_first else text + pictures
        return [self._special[USER], *body, self._special[EOS], self._special[ASSISTANT]]
