"""The demo model's shape, and its checkpoint: stock LLaVA, written under the classic key names."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from demo_model.text import BOS, CONTEXT_LENGTH, EOS, IMAGE, IMAGE_SIZE, PAD, PATCH_SIZE, SPECIALS

WIDTH = 192
HEADS = 3
POSITION_SCALE = 0.25
MODEL_CARD = Path(__file__).with_name("model_card.md")


def build_config(vocabulary: int) -> LlavaConfig:
    """16 image rows a picture, attention heads of 64, about 3 M parameters."""
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    text = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
        pad_token_id=SPECIALS.index(PAD),
        tie_word_embeddings=False,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=SPECIALS.index(IMAGE),
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        architectures=["LlavaForConditionalGeneration"],
        dtype="float32",
    )


def build_model(vocabulary: int) -> LlavaForConditionalGeneration:
    """A fresh model. CLIP's own initial positions drown in the patches, so these begin larger."""
    model = LlavaForConditionalGeneration(build_config(vocabulary))
    embeddings = model.model.vision_tower.embeddings
    torch.nn.init.normal_(embeddings.position_embedding.weight, std=POSITION_SCALE)
    return model


def classic_key(name: str) -> str:
    """The key that LLaVA checkpoints have always used, which vLLM reads, for a module's own key."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    part, rest = name.removeprefix("model.").split(".", 1)
    inner = {"vision_tower": "vision_model.", "language_model": "model."}.get(part, "")
    return f"{part}.{inner}{rest}"


def save_checkpoint(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, directory: Path
) -> None:
    """Writes a whole checkpoint directory beside `directory`, then puts it in its place."""
    fresh = directory.with_name(directory.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    processor.save_pretrained(fresh)
    _write_weights(model, fresh / "model.safetensors")
    model.config.save_pretrained(fresh)
    _generation_config().save_pretrained(fresh)
    _write_preprocessor_config(fresh)
    shutil.copyfile(MODEL_CARD, fresh / "README.md")
    _replace(fresh, directory)


def _write_weights(model: LlavaForConditionalGeneration, path: Path) -> None:
    weights: dict[str, torch.Tensor] = {
        classic_key(name): value.detach().to(torch.float32).contiguous().clone()
        for name, value in model.state_dict().items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _generation_config() -> GenerationConfig:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
        pad_token_id=SPECIALS.index(PAD),
    )


def _write_preprocessor_config(directory: Path) -> None:
    """The image settings under the file name that older readers look for."""
    settings = json.loads((directory / "processor_config.json").read_text(encoding="utf-8"))
    image = settings["image_processor"] | {"processor_class": settings["processor_class"]}
    text = json.dumps(image, indent=2, sort_keys=True) + "\n"
    (directory / "preprocessor_config.json").write_text(text, encoding="utf-8")


def _replace(fresh: Path, directory: Path) -> None:
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.rename(directory, old)
    os.rename(fresh, directory)
    shutil.rmtree(old, ignore_errors=True)
