import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from chiasm.models.identity import checkpoint_identity
from chiasm.models.language import LanguageHalf
from chiasm.models.vision import VisionHalf
from chiasm.models.wire import identity_from_wire, identity_to_wire
from tests.chiasm.models.variants import Tensors, copy_of, edit_json, edit_weights
from tests.tiny_llava import build_tiny_llava

PATCHES = "vision_tower.vision_model.embeddings.patch_embedding.weight"
PROJECTOR_BIAS = "multi_modal_projector.linear_2.bias"
LM_HEAD = "language_model.lm_head.weight"


def test_both_halves_and_the_files_give_one_identity(clip_llava: Path) -> None:
    from_files = checkpoint_identity(clip_llava, "float32", "tiny")
    assert VisionHalf.load(clip_llava, model_id="tiny").identity == from_files
    assert LanguageHalf.load(clip_llava, model_id="tiny").contract.expected_identity == from_files
    assert (from_files.width, from_files.dtype, from_files.model_id) == (64, "float32", "tiny")
    assert len(from_files.weights_digest) == len(from_files.processor_digest) == 64


def test_the_encoders_type_is_part_of_the_identity(clip_llava: Path) -> None:
    half = LanguageHalf.load(clip_llava, model_id="tiny", encoder_dtype=torch.bfloat16)
    assert half.contract.expected_identity == checkpoint_identity(clip_llava, "bfloat16", "tiny")
    assert half.contract.expected_identity != checkpoint_identity(clip_llava, "float32", "tiny")


def test_the_background_is_part_of_the_identity_however_it_is_written(clip_llava: Path) -> None:
    white = checkpoint_identity(clip_llava, "float32", "tiny")
    black = checkpoint_identity(clip_llava, "float32", "tiny", "Black")
    half = VisionHalf.load(clip_llava, model_id="tiny", background="#000000")
    language = LanguageHalf.load(clip_llava, model_id="tiny", background="black")
    assert half.identity == language.contract.expected_identity == black != white
    assert "background #ffffff" in white.describe()
    assert "background #000000" in black.describe()
    sent = identity_to_wire(black)
    assert identity_from_wire(sent) == black
    sent.ClearField("background")
    assert identity_from_wire(sent) == white


def flip_one_bit(name: str) -> Callable[[Tensors], Tensors]:
    def flip(tensors: Tensors) -> Tensors:
        tensors[name].view(torch.int32).view(-1)[-1] ^= 1
        return tensors

    return flip


@pytest.mark.parametrize("name", [PATCHES, PROJECTOR_BIAS])
def test_one_changed_bit_of_a_vision_weight_changes_the_weights_digest(
    clip_llava: Path, tmp_path: Path, name: str
) -> None:
    changed = copy_of(clip_llava, tmp_path / "changed")
    edit_weights(changed, flip_one_bit(name))
    before, after = (checkpoint_identity(path, "float32", "x") for path in (clip_llava, changed))
    assert before.weights_digest != after.weights_digest
    assert before.processor_digest == after.processor_digest


def test_two_swapped_tensors_of_equal_shape_change_the_weights_digest(
    clip_llava: Path, tmp_path: Path
) -> None:
    first, second = (
        f"vision_tower.vision_model.encoder.layers.{layer}.mlp.fc1.weight" for layer in (0, 1)
    )
    changed = copy_of(clip_llava, tmp_path / "changed")
    edit_weights(changed, lambda t: t | {first: t[second], second: t[first]})
    before, after = (checkpoint_identity(path, "float32", "x") for path in (clip_llava, changed))
    assert before.weights_digest != after.weights_digest


def test_language_weights_are_no_part_of_the_identity(clip_llava: Path, tmp_path: Path) -> None:
    changed = copy_of(clip_llava, tmp_path / "changed")
    edit_weights(changed, flip_one_bit(LM_HEAD))
    assert checkpoint_identity(changed, "float32", "x") == checkpoint_identity(
        clip_llava, "float32", "x"
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("image_mean", [0.5, 0.5, 0.5]),
        ("resample", 2),
        ("image_processor_type", "ViTImageProcessor"),
    ],
)
def test_a_changed_processor_setting_changes_the_processor_digest(
    clip_llava: Path, tmp_path: Path, setting: str, value: object
) -> None:
    changed = copy_of(clip_llava, tmp_path / "changed")
    edit_json(changed / "preprocessor_config.json", {setting: value})
    before, after = (checkpoint_identity(path, "float32", "x") for path in (clip_llava, changed))
    assert before.weights_digest == after.weights_digest
    assert before.processor_digest != after.processor_digest


@pytest.mark.parametrize(
    ("setting", "value"),
    [("vision_feature_layer", -1), ("vision_config.layer_norm_eps", 1e-6)],
)
def test_a_setting_that_changes_features_changes_the_weights_digest(
    clip_llava: Path, tmp_path: Path, setting: str, value: object
) -> None:
    changed = copy_of(clip_llava, tmp_path / "changed")
    edit_json(changed / "config.json", {setting: value})
    before, after = (checkpoint_identity(path, "float32", "x") for path in (clip_llava, changed))
    assert before.weights_digest != after.weights_digest


def test_notes_that_programs_leave_in_settings_change_nothing(
    clip_llava: Path, tmp_path: Path
) -> None:
    changed = copy_of(clip_llava, tmp_path / "changed")
    edit_json(changed / "preprocessor_config.json", {"processor_class": "LlavaProcessor"})
    edit_json(changed / "config.json", {"transformers_version": "0.0.1", "dtype": None})
    assert checkpoint_identity(changed, "float32", "x") == checkpoint_identity(
        clip_llava, "float32", "x"
    )


def test_settings_nested_in_the_processors_count_as_their_own_file(
    clip_llava: Path, tmp_path: Path
) -> None:
    nested = copy_of(clip_llava, tmp_path / "nested")
    settings = json.loads((nested / "preprocessor_config.json").read_text())
    (nested / "preprocessor_config.json").unlink()
    (nested / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert VisionHalf.load(nested, model_id="x").identity == checkpoint_identity(
        clip_llava, "float32", "x"
    )


def test_shards_and_the_newer_key_layout_keep_the_weights_digest(
    clip_llava: Path, tmp_path: Path
) -> None:
    sharded = build_tiny_llava(tmp_path / "sharded", shard_count=3)
    resaved = copy_of(clip_llava, tmp_path / "resaved")
    model = LlavaForConditionalGeneration.from_pretrained(clip_llava)
    model.save_pretrained(resaved, save_original_format=False)
    edit_json(resaved / "config.json", {"vision_config.dtype": None})
    digests = {
        checkpoint_identity(path, "float32", "x").weights_digest
        for path in (clip_llava, sharded, resaved)
    }
    assert len(digests) == 1
    rows = [
        VisionHalf.load(path, model_id="x").model.get_parameter(
            "model.vision_tower.embeddings.class_embedding"
        )
        for path in (clip_llava, sharded, resaved)
    ]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_describe_tells_encoders_apart_briefly(clip_llava: Path) -> None:
    identity = checkpoint_identity(clip_llava, "float16", "tiny")
    text = identity.describe()
    assert len(text) < 120
    assert "tiny" in text
    assert identity.weights_digest[:12] in text
    assert "float16" in text


def test_an_unknown_feature_type_is_refused(clip_llava: Path) -> None:
    with pytest.raises(ValueError, match="float64"):
        checkpoint_identity(clip_llava, "float64", "x")


def test_identity_and_contract_import_neither_torch_nor_transformers() -> None:
    modules = "checkpoint, contract, families, family, identity"
    program = (
        f"import sys; from chiasm.models import {modules}; "
        "print([name for name in ('torch', 'transformers', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
