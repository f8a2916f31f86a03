"""Tiny random models whose decoders need more than rows in plain order, and the whole models' own
answers over given rows."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from llm_service.engine.values import DecoderParts, ImageSpan, Prompt
from tests.llm_service.engine.rig import CONTEXT, EOS, FIRST_BYTE, VOCABULARY

IMAGE = 3
WIDTH = 64
# Ids of the byte tokenizer's that no test text has.
_START, _END = FIRST_BYTE + 1, FIRST_BYTE + 2
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": WIDTH,
}
_QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "vision_start_token_id": _START,
    "vision_end_token_id": _END,
    "video_token_id": FIRST_BYTE,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def qwen2_vl() -> Any:
    text = _TEXT | {"rope_parameters": _MROPE}
    vision = _QWEN_VISION | {"embed_dim": 16, "hidden_size": WIDTH}
    return _random(
        Qwen2VLForConditionalGeneration,
        Qwen2VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS),
    )


def qwen3_vl() -> Any:
    """With two deepstack levels."""
    text = _TEXT | {"rope_parameters": _MROPE | {"mrope_interleaved": True}}
    vision = _QWEN_VISION | {
        "depth": 2, "hidden_size": 16, "intermediate_size": 16, "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 16,
    }  # fmt: skip
    return _random(
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS),
    )


def qwen3_5() -> Any:
    """Two layers of four have recurrent state."""
    linear = {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "rope_parameters": _MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
    }  # fmt: skip
    vision = _QWEN_VISION | {
        "hidden_size": 16, "intermediate_size": 16, "num_position_embeddings": 16,
    }  # fmt: skip
    return _random(
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(text_config=_TEXT | linear, vision_config=vision, **_QWEN_IDS),
    )


def gemma3() -> Any:
    """Pictures see themselves wholly; every other layer has a window of 24 tokens."""
    layers = ["sliding_attention", "full_attention"] * 2
    text = _TEXT | {"sliding_window": 24, "layer_types": layers, "query_pre_attn_scalar": 16}
    return _random(
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config=text, vision_config=_SIGLIP, image_token_index=IMAGE,
            mm_tokens_per_image=4, boi_token_index=_START, eoi_token_index=_END,
        ),
    )  # fmt: skip


def gemma4() -> Any:
    """As gemma3, with embeddings of its own for each layer."""
    text = _TEXT | {
        "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 16,
        "final_logit_softcapping": 30.0, "num_kv_shared_layers": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
    }  # fmt: skip
    return _random(
        Gemma4ForConditionalGeneration,
        Gemma4Config(
            text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE,
            video_token_id=FIRST_BYTE, audio_token_id=FIRST_BYTE + 3,
            boi_token_id=_START, eoi_token_id=_END,
        ),
    )  # fmt: skip


def paligemma() -> Any:
    """The whole prompt sees itself wholly."""
    text = {"model_type": "gemma", **_TEXT}
    return _random(
        PaliGemmaForConditionalGeneration,
        PaliGemmaConfig(
            text_config=text, vision_config={"model_type": "siglip_vision_model", **_SIGLIP},
            image_token_index=IMAGE, projection_dim=WIDTH, hidden_size=WIDTH,
        ),
    )  # fmt: skip


def paligemma2() -> Any:
    """As paligemma, over windows of 24 tokens in every other layer and capped logits."""
    text = {"model_type": "gemma2", **_TEXT, "sliding_window": 24, "query_pre_attn_scalar": 16}
    return _random(
        PaliGemmaForConditionalGeneration,
        PaliGemmaConfig(
            text_config=text, vision_config={"model_type": "siglip_vision_model", **_SIGLIP},
            image_token_index=IMAGE, projection_dim=WIDTH, hidden_size=WIDTH,
        ),
    )  # fmt: skip


def lfm2_vl() -> Any:
    """Every other layer is a short convolution over the last tokens."""
    text = {"model_type": "lfm2", **_TEXT, "layer_types": ["conv", "full_attention"] * 2}
    text |= {"block_multiple_of": 16}
    vision = {
        "model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_patches": 16,
    }  # fmt: skip
    return _random(
        Lfm2VlForConditionalGeneration,
        Lfm2VlConfig(text_config=text, vision_config=vision, image_token_id=IMAGE),
    )


def _random(kind: Callable[[Any], Any], config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = kind(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                # Norms of nought and gates of one would hide that they are left out.
                if weight.ndim == 1 and "norm" in name:
                    weight.copy_(torch.rand(weight.shape) * 0.5 + 0.5)
        model.generation_config.eos_token_id = EOS
        model.generation_config.pad_token_id = 0
        return model


def parts_of(model: Any, *, stateful: bool, context_length: int = CONTEXT) -> DecoderParts:
    """A copy as the engine takes it, for the paged engine replaces the model's attention."""
    model = copy.deepcopy(model)
    text = model.config.get_text_config(decoder=True)
    vision = model.config.vision_config
    return DecoderParts(
        model=model.get_decoder(),
        embed_tokens=model.get_input_embeddings(),
        lm_head=model.get_output_embeddings(),
        layer_count=text.num_hidden_layers,
        kv_head_count=text.num_key_value_heads,
        head_dim=16,
        eos_ids=(EOS,),
        context_length=context_length,
        dtype=model.dtype,
        device="cpu",
        position_axes=3 if _has_axes(model) else 1,
        level_count=len(getattr(vision, "deepstack_visual_indexes", ())),
        stateful=model if stateful else None,
    )


def _has_axes(model: Any) -> bool:
    return hasattr(model.base_model, "get_rope_index")


@dataclass(frozen=True)
class Picture:
    """A picture's place in `conversation`: `height * width` rows, as a grid where there is one."""

    height: int
    width: int


def conversation(model: Any, seed: int, *pieces: int | Picture) -> Prompt:
    """Random text of so many tokens, and pictures of random rows between marks."""
    numbers = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    images: list[ImageSpan] = []
    grids: list[tuple[int, int, int]] = []
    levels = len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    for piece in pieces:
        if isinstance(piece, int):
            drawn = torch.randint(FIRST_BYTE + 10, VOCABULARY, (piece,), generator=numbers)
            ids += drawn.tolist()
            continue
        count = piece.height * piece.width
        rows = [torch.randn(count, WIDTH, generator=numbers) for _ in range(1 + levels)]
        digest = seed.to_bytes(8, "little") + len(ids).to_bytes(8, "little")
        images.append(ImageSpan(len(ids) + 1, count, rows[0], digest, tuple(rows[1:])))
        ids += [_START, *[IMAGE] * count, _END]
        # In patches, four of which make a row.
        grids.append((1, piece.height * 2, piece.width * 2))
    placed, delta = _placed(model, ids, grids)
    return Prompt(tuple(ids), tuple(images), b"", placed, delta)


def _placed(
    model: Any, ids: Sequence[int], grids: Sequence[tuple[int, int, int]]
) -> tuple[torch.Tensor | None, int]:
    if not grids or not _has_axes(model):
        return None, 0
    row = torch.tensor([ids])
    placed, delta = model.base_model.get_rope_index(
        row, mm_token_type_ids=(row == IMAGE).int(), image_grid_thw=torch.tensor(grids)
    )
    return placed[:, 0], int(delta)


@dataclass(frozen=True, eq=False)
class Case:
    """A prompt and what the whole model's `generate` answers to it."""

    prompt: Prompt
    tokens: list[int]
    logits: torch.Tensor


def case(model: Any, seed: int, *pieces: int | Picture, count: int) -> Case:
    prompt = conversation(model, seed, *pieces)
    pictures = [piece for piece in pieces if isinstance(piece, Picture)]
    return Case(prompt, *whole_answer(model, prompt, pictures, count))


def cases(model: Any, many: int, count: int) -> list[Case]:
    """Different prompts: of two pictures, of one, and of none."""
    wide, tall = Picture(2, 4), Picture(4, 2)
    texts: list[list[int | Picture]] = [[9, wide, 17, tall, 5], [30, tall, 3], [12], [wide, 21]]
    return [
        case(model, seed, *texts[seed % len(texts)], seed + 1, count=count) for seed in range(many)
    ]


def whole_answer(
    model: Any, prompt: Prompt, grids: Sequence[Picture], count: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of `generate` and their logits; the token that ends answers never comes."""
    ids = torch.tensor([prompt.token_ids])
    kind = model.config.model_type
    extras: dict[str, Any] = {}
    if kind == "gemma3":
        extras["token_type_ids"] = (ids == IMAGE).int()
    elif kind == "paligemma":
        extras["token_type_ids"] = torch.zeros_like(ids)
    elif kind != "lfm2_vl":
        extras["mm_token_type_ids"] = (ids == IMAGE).int()
    if grids and _has_axes(model):
        extras["image_grid_thw"] = torch.tensor([(1, g.height * 2, g.width * 2) for g in grids])
    if prompt.images:
        extras["mm_encoder_outputs"] = {"image": _encoded(kind, prompt)}
    answer = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **extras,
    )
    return answer.sequences[0, ids.shape[1] :].tolist(), torch.cat(answer.logits)


def _encoded(kind: str, prompt: Prompt) -> Any:
    rows = [image.rows for image in prompt.images]
    stacked = kind in ("gemma3", "paligemma")
    levels = [list(level) for level in zip(*(one.levels for one in prompt.images), strict=True)]
    encoded: Any = BaseModelOutputWithPooling()
    encoded.pooler_output = torch.stack(rows) if stacked else rows
    encoded.deepstack_features = levels
    return encoded
