"""A tiny random LLaVA checkpoint with all the parts of a real one, for tests.

`build_tiny_llava(directory)` writes weights (classic key layout), a byte-level BPE tokenizer, a
chat template with roles and parts, an image processor and generation settings. Equal arguments
write equal bytes. The weights are random, so only logits and shapes mean something: compare those,
not sentences.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

IMAGE_TOKEN = "<image>"
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", IMAGE_TOKEN)
CLASSIC_PREFIXES = {
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Tower = Literal["clip", "siglip"]
Decoder = Literal["llama", "qwen2"]
Strategy = Literal["default", "full"]


def build_tiny_llava(
    directory: Path,
    seed: int = 0,
    image_size: int = 28,
    patch: int = 14,
    *,
    tower: Tower = "clip",
    decoder: Decoder = "llama",
    hidden_size: int = 64,
    layer_count: int = 2,
    vision_hidden_size: int = 48,
    vision_layer_count: int = 3,
    vision_feature_layer: int | list[int] = -2,
    vision_feature_select_strategy: Strategy | None = None,
    context_length: int = 2048,
    tie_word_embeddings: bool = False,
    dtype: torch.dtype = torch.float32,
    shard_count: int = 1,
) -> Path:
    """Write the checkpoint into `directory` (made if need be) and return it.

    An image gives `(image_size // patch) ** 2` rows of `hidden_size`. The SigLIP tower has no class
    token, so its strategy defaults to "full"; CLIP's defaults to "default", which drops that token.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _build_tokenizer(context_length)
    strategy = vision_feature_select_strategy or ("default" if tower == "clip" else "full")
    vision_class = CLIPVisionConfig if tower == "clip" else SiglipVisionConfig
    config = LlavaConfig(
        vision_config=vision_class(
            hidden_size=vision_hidden_size,
            intermediate_size=2 * vision_hidden_size,
            num_hidden_layers=vision_layer_count,
            num_attention_heads=max(1, vision_hidden_size // 24),
            image_size=image_size,
            patch_size=patch,
        ),
        text_config=_text_config(decoder, tokenizer, hidden_size, layer_count, context_length),
        image_token_index=_token_id(tokenizer, IMAGE_TOKEN),
        image_seq_length=(image_size // patch) ** 2,
        vision_feature_layer=vision_feature_layer,
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=tie_word_embeddings,
    )
    _save_model(directory, config, tokenizer, seed, dtype, shard_count)
    tokenizer.save_pretrained(directory)
    _save_image_processor(directory, tower, image_size)
    return directory


def _text_config(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerFast,
    hidden_size: int,
    layer_count: int,
    context_length: int,
) -> PreTrainedConfig:
    config_class: Any = LlamaConfig if decoder == "llama" else Qwen2Config
    config: PreTrainedConfig = config_class(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layer_count,
        num_attention_heads=max(1, hidden_size // 32),
        num_key_value_heads=max(1, hidden_size // 64),
        head_dim=32,
        max_position_embeddings=context_length,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return config


def _save_model(
    directory: Path,
    config: LlavaConfig,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    dtype: torch.dtype,
    shard_count: int,
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlavaForConditionalGeneration(config)
    model.to(dtype)
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(directory)
    generation: Any = GenerationConfig
    generation(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, _token_id(tokenizer, "<|im_end|>")],
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(directory)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _save_shards(
        directory,
        {
            _classic_name(name): tensor.contiguous()
            for name, tensor in sorted(model.state_dict().items())
            if name not in tied
        },
        shard_count,
    )


def _save_shards(directory: Path, tensors: dict[str, torch.Tensor], shard_count: int) -> None:
    if shard_count == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shard_count):
        file_name = f"model-{shard + 1:05d}-of-{shard_count:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shard_count]}
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, sort_keys=True))


def _classic_name(name: str) -> str:
    """The key layout that checkpoints of LLaVA 1.5 were published in."""
    for prefix, classic in CLASSIC_PREFIXES.items():
        if name.startswith(prefix):
            return classic + name.removeprefix(prefix)
    raise ValueError(f"no classic name for {name}")


def _save_image_processor(directory: Path, tower: Tower, image_size: int) -> None:
    square = {"height": image_size, "width": image_size}
    if tower == "clip":
        CLIPImageProcessorPil(size={"shortest_edge": image_size}, crop_size=square).save_pretrained(
            directory
        )
    else:
        SiglipImageProcessorPil(size=square).save_pretrained(directory)


def _build_tokenizer(context_length: int) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_sentences(), trainer)
    fast: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = fast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", IMAGE_TOKEN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


def _sentences() -> Iterator[str]:
    for colour in ("red", "green", "blue", "yellow", "white", "black"):
        for shape in ("circle", "square", "triangle", "star", "cross"):
            yield f"What colour is the {shape} in the picture? The {shape} is {colour}."
            yield f"user\nHow many {colour} shapes are there?\nassistant\nTwo {shape}s.\n"
