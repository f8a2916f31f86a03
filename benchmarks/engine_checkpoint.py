"""A LLaVA-shaped checkpoint of random weights, large enough that speed means something.

The shape is published models': CLIP's base tower with patches of 14 at 336 pixels (Radford et al.
2021; 576 rows a picture as LLaVA 1.5 takes them), SmolLM-135M's decoder with its tied embeddings,
about 221 million parameters in bfloat16. Equal shapes give equal bytes.
"""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks.engine_load import WORDS
from demo_model.model import classic_key
from demo_model.text import BOS, EOS, IMAGE, PAD, SPECIALS, TEMPLATE

_SEED = 0
# Against the other rows' embeddings, so that a greedy answer never holds a token without text.
_MUTED = 0.01
_ONSETS = [*"bcdfghjklmnprstvwz", "br", "cr", "dr", "fl", "gr", "pl", "sh", "st", "th", "tr"]
_VOWELS = [*"aeiou", "ai", "ea", "ou"]
_CODAS = ["", "n", "r", "s", "t", "l", "nd", "st"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the two halves; `vocabulary` counts the special tokens too."""

    image_size: int = 336
    patch_size: int = 14
    vision_width: int = 768
    vision_layers: int = 12
    width: int = 576
    intermediate: int = 1536
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    vocabulary: int = 49_152
    context_length: int = 8192

    @property
    def image_rows(self) -> int:
        return (self.image_size // self.patch_size) ** 2


FULL = Shape()
SMALL = Shape(
    image_size=56, vision_width=128, vision_layers=2, width=192, intermediate=384, layers=2,
    heads=3, kv_heads=1, vocabulary=2048, context_length=2048,
)  # fmt: skip


def build(directory: Path, shape: Shape = FULL) -> int:
    """Writes the checkpoint into `directory`, made if need be; returns its count of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(shape)
    model = build_model(shape, tokenizer)
    _save_processor(shape, tokenizer, directory)
    model.config.save_pretrained(directory)
    _generation_config(tokenizer).save_pretrained(directory)
    _save_weights(model, directory / "model.safetensors")
    return sum(parameter.numel() for parameter in model.parameters())


def build_tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `shape.vocabulary` tokens; all but single bytes are ASCII text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(shape.vocabulary), trainer)
    if core.get_vocab_size() != shape.vocabulary:
        raise ValueError(f"the corpus gives {core.get_vocab_size()} tokens of {shape.vocabulary}")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        model_max_length=shape.context_length,
        clean_up_tokenization_spaces=False,
    )


def build_model(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Random weights in bfloat16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model: Any = LlavaForConditionalGeneration(_config(shape))
    with torch.no_grad():
        model.get_input_embeddings().weight[_textless(tokenizer)] *= _MUTED
    model.to(torch.bfloat16)
    return cast(LlavaForConditionalGeneration, model)


def _config(shape: Shape) -> LlavaConfig:
    vision = CLIPVisionConfig(
        hidden_size=shape.vision_width,
        intermediate_size=4 * shape.vision_width,
        num_hidden_layers=shape.vision_layers,
        num_attention_heads=shape.vision_width // 64,
        image_size=shape.image_size,
        patch_size=shape.patch_size,
    )
    text = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        max_position_embeddings=shape.context_length,
        rms_norm_eps=1e-5,
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
        pad_token_id=SPECIALS.index(PAD),
        tie_word_embeddings=True,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=SPECIALS.index(IMAGE),
        image_seq_length=shape.image_rows,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        architectures=["LlavaForConditionalGeneration"],
        dtype="bfloat16",
    )


def _textless(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Special tokens, and bytes that are no whole character."""
    ids = list(range(len(tokenizer)))
    texts = tokenizer.batch_decode([[one] for one in ids], skip_special_tokens=True)
    return [one for one, text in zip(ids, texts, strict=True) if not text or "�" in text]


def _corpus(vocabulary: int) -> Iterator[str]:
    """Made-up words, likelier first, and the words of the prompts: one token each."""
    stream = random.Random(_SEED)
    for _ in range(200):
        yield "".join(f" {word}" for word in WORDS)
    for rank in range(1, 3 * vocabulary):
        syllables = range(1 + stream.randrange(3))
        word = "".join(
            stream.choice(_ONSETS) + stream.choice(_VOWELS) + stream.choice(_CODAS)
            for _ in syllables
        )
        yield f" {word}" * (2 + 4 * vocabulary // (rank + vocabulary // 4))


def _save_processor(shape: Shape, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    square = {"height": shape.image_size, "width": shape.image_size}
    LlavaProcessor(  # type: ignore[no-untyped-call]
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": shape.image_size}, crop_size=square
        ),
        tokenizer=tokenizer,
        patch_size=shape.patch_size,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        image_token=IMAGE,
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
    shutil.copyfile(TEMPLATE, directory / "chat_template.jinja")
    _save_old_image_settings(directory)


def _save_old_image_settings(directory: Path) -> None:
    """The image settings under the file name that older readers look for."""
    settings = json.loads((directory / "processor_config.json").read_text(encoding="utf-8"))
    image = settings["image_processor"] | {"processor_class": settings["processor_class"]}
    text = json.dumps(image, indent=2, sort_keys=True) + "\n"
    (directory / "preprocessor_config.json").write_text(text, encoding="utf-8")


def _generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _save_weights(model: LlavaForConditionalGeneration, path: Path) -> None:
    """Under LLaVA's classic keys; the head is the embeddings and has none of its own."""
    weights = {
        classic_key(name): value.detach().contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
