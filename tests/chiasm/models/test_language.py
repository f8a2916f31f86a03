import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

from chiasm.models.language import GenerationDefaults, LanguageHalf
from chiasm.models.vision import VisionHalf
from tests.chiasm.models.variants import copy_of, edit_json, picture
from tests.tiny_llava import build_tiny_llava

QUESTION = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is red?"}]},
    {"role": "assistant", "content": "The star."},
    {"role": "user", "content": [{"type": "text", "text": "And here:"}, {"type": "image"}]},
]


def prompt_ids(half: LanguageHalf, placeholder_count: int) -> torch.Tensor:
    """The question's ids, each placeholder repeated as the model wants it; `[1, token_count]`."""
    tokenizer: Any = half.tokenizer
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids.count(half.image_token_id) == 2
    spread = [
        token
        for token in ids
        for _ in range(placeholder_count if token == half.image_token_id else 1)
    ]
    return torch.tensor([spread])


def embeddings(half: LanguageHalf, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    embedded: torch.Tensor = half.embed_tokens(ids)
    embedded[ids == half.image_token_id] = rows
    return embedded


def logits_of(half: LanguageHalf, ids: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    encoded: Any = BaseModelOutputWithPooling
    output = half.model(input_ids=ids, mm_encoder_outputs={"image": encoded(pooler_output=rows)})
    logits: torch.Tensor = output.logits
    return logits


def check_split(directory: Path) -> None:
    vision = VisionHalf.load(directory, model_id="x")
    half = LanguageHalf.load(directory, model_id="x")
    whole: Any = LlavaForConditionalGeneration.from_pretrained(directory)
    prepared = [vision.preprocess(picture(seed)) for seed in (1, 2)]
    rows = [features.rows for features in vision.encode(prepared)]
    ids = prompt_ids(half, rows[0].shape[0])
    pixels = torch.cat([image.tensors["pixel_values"] for image in prepared])
    with torch.no_grad():
        expected = whole(input_ids=ids, pixel_values=pixels).logits
        by_features = logits_of(half, ids, rows)
        embedded = embeddings(half, ids, torch.cat(rows))
        by_embeddings = half.lm_head(half.decoder(inputs_embeds=embedded).last_hidden_state)
        swapped = logits_of(half, ids, rows[::-1])
    torch.testing.assert_close(by_features, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(by_embeddings, expected, rtol=0, atol=1e-5)
    assert (swapped - expected).abs().max() > 0.1


def test_language_half_with_features_gives_the_whole_models_logits(clip_llava: Path) -> None:
    check_split(clip_llava)


def test_a_siglip_tower_and_a_qwen2_decoder_split_as_exactly(siglip_llava: Path) -> None:
    check_split(siglip_llava)


def test_a_head_tied_to_the_embeddings_splits_as_exactly(tmp_path: Path) -> None:
    directory = build_tiny_llava(tmp_path, tie_word_embeddings=True)
    half = LanguageHalf.load(directory, model_id="x")
    assert half.lm_head.weight is half.embed_tokens.weight
    check_split(directory)


def test_a_checkpoint_in_shards_splits_as_exactly(tmp_path: Path) -> None:
    check_split(build_tiny_llava(tmp_path, shard_count=3))


def test_no_parameter_of_the_vision_half_exists(clip_llava: Path) -> None:
    model = LanguageHalf.load(clip_llava, model_id="x").model
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert names
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)
    with pytest.raises(RuntimeError, match=r"model\.vision_tower belongs to the half"):
        model.get_submodule("model.vision_tower")(torch.zeros(1))


def test_the_half_states_the_shape_of_its_decoder(siglip_llava: Path) -> None:
    half = LanguageHalf.load(siglip_llava, model_id="x", dtype=torch.bfloat16)
    weights = {parameter.dtype for parameter in half.model.parameters()}
    assert weights == {torch.bfloat16}
    shape = (half.width, half.layer_count, half.head_count, half.kv_head_count, half.head_dim)
    assert shape == (64, 2, 2, 1, 32)
    assert half.decoder.layers[0].self_attn.k_proj.weight.shape == (  # type: ignore[union-attr, index]
        half.kv_head_count * half.head_dim,
        half.width,
    )
    assert half.lm_head.weight.shape == (half.vocab_size, half.width)
    assert (half.context_length, half.family) == (2048, "llava")
    assert (half.contract.width, half.contract.level_count) == (64, 0)


def test_the_image_token_and_the_ends_come_from_the_checkpoint(clip_llava: Path) -> None:
    half = LanguageHalf.load(clip_llava, model_id="x")
    assert half.image_token == "<image>"
    assert half.tokenizer.convert_tokens_to_ids("<image>") == half.image_token_id
    ends = [half.tokenizer.convert_ids_to_tokens(token) for token in half.eos_ids]
    assert ends == ["</s>", "<|im_end|>"]


def test_sampling_defaults_are_those_the_checkpoint_suggests(
    clip_llava: Path, tmp_path: Path
) -> None:
    suggesting = copy_of(clip_llava, tmp_path / "suggesting")
    edit_json(
        suggesting / "generation_config.json",
        {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 4},
    )
    half = LanguageHalf.load(suggesting, model_id="x")
    assert half.generation == GenerationDefaults(do_sample=True, temperature=0.6, top_k=20)
    assert half.eos_ids == (4,)
    plain = LanguageHalf.load(clip_llava, model_id="x").generation
    assert plain == GenerationDefaults()


def test_without_generation_settings_the_decoders_own_end_counts(
    clip_llava: Path, tmp_path: Path
) -> None:
    bare = copy_of(clip_llava, tmp_path / "bare")
    (bare / "generation_config.json").unlink()
    assert LanguageHalf.load(bare, model_id="x").eos_ids == (2,)


def test_a_template_in_the_older_file_is_found(clip_llava: Path, tmp_path: Path) -> None:
    older = copy_of(clip_llava, tmp_path / "older")
    template = (older / "chat_template.jinja").read_text()
    (older / "chat_template.jinja").unlink()
    (older / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert LanguageHalf.load(older, model_id="x").chat_template == template
