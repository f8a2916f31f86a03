"""Each way a directory can be unusable is refused at load, with the fault and its mend."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chiasm.models.checkpoint import CheckpointError
from chiasm.models.language import LanguageHalf
from chiasm.models.vision import VisionHalf
from tests.chiasm.models.variants import Tensors, copy_of, edit_json, edit_weights
from tests.tiny_llava import build_tiny_llava

Load = Callable[[Path], Any]
PATCHES = "vision_tower.vision_model.embeddings.patch_embedding.weight"
NORM = "language_model.model.norm.weight"


def load_vision(directory: Path) -> VisionHalf:
    return VisionHalf.load(directory, model_id="x")


def load_language(directory: Path) -> LanguageHalf:
    return LanguageHalf.load(directory, model_id="x")


BOTH = pytest.mark.parametrize("load", [load_vision, load_language])


def refusal(load: Load, directory: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(directory)
    assert str(refused.value) == refused.value.message
    return refused.value.message


@pytest.fixture
def broken(clip_llava: Path, tmp_path: Path) -> Path:
    return copy_of(clip_llava, tmp_path / "broken")


@BOTH
def test_no_such_directory(load: Load, tmp_path: Path) -> None:
    assert "is not a directory" in refusal(load, tmp_path / "nothing")


@BOTH
def test_config_missing(load: Load, broken: Path) -> None:
    (broken / "config.json").unlink()
    assert "has no config.json" in refusal(load, broken)


@BOTH
@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_config_malformed(load: Load, broken: Path, content: str) -> None:
    (broken / "config.json").write_text(content)
    assert "config.json" in refusal(load, broken)


@BOTH
def test_preprocessor_missing(load: Load, broken: Path) -> None:
    (broken / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in refusal(load, broken)


@BOTH
@pytest.mark.parametrize("model_type", ["bert", "mllama", ""])
def test_model_type_that_is_not_served(load: Load, broken: Path, model_type: str) -> None:
    edit_json(broken / "config.json", {"model_type": model_type})
    message = refusal(load, broken)
    assert repr(model_type) in message
    assert "llava" in message


@BOTH
@pytest.mark.parametrize(
    ("part", "model_type"),
    [("vision_config", "dinov2")],
)
def test_tower_that_is_not_tested(load: Load, broken: Path, part: str, model_type: str) -> None:
    edit_json(broken / "config.json", {part: {"model_type": model_type}})
    assert model_type in refusal(load, broken)


@BOTH
def test_weights_only_as_pickle_are_never_read(load: Load, broken: Path) -> None:
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    message = refusal(load, broken)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


@BOTH
def test_weights_missing(load: Load, broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(load, broken)


@BOTH
@pytest.mark.parametrize("kept", [0, 7, 8, 500, -1])
def test_weights_truncated(load: Load, broken: Path, kept: int) -> None:
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "truncated" in refusal(load, broken)


@BOTH
@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        [],
    ],
)
def test_header_that_contradicts_itself(load: Load, broken: Path, entry: object) -> None:
    header = json.dumps({"w": entry}).encode()
    path = broken / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "tensor w" in refusal(load, broken)


@BOTH
def test_shard_missing(load: Load, tmp_path: Path) -> None:
    directory = build_tiny_llava(tmp_path, shard_count=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "lacks model-00002-of-00003.safetensors" in refusal(load, directory)


@BOTH
@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 3])
def test_index_that_points_outside_its_directory(load: Load, tmp_path: Path, shard: object) -> None:
    directory = build_tiny_llava(tmp_path, shard_count=2)
    edit_json(directory / "model.safetensors.index.json", {"weight_map": {"w": shard}})
    assert "outside its directory" in refusal(load, directory)


@pytest.mark.parametrize(
    ("load", "name", "shown"),
    [(load_vision, PATCHES, "patch_embedding"), (load_language, NORM, "language_model.norm")],
)
def test_tensor_of_the_own_half_missing_is_named(
    load: Load, broken: Path, name: str, shown: str
) -> None:
    edit_weights(broken, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    message = refusal(load, broken)
    assert "lacks" in message
    assert shown in message


def test_tensor_of_the_other_half_missing_does_not_stop_the_encoder(broken: Path) -> None:
    edit_weights(broken, lambda tensors: {k: v for k, v in tensors.items() if k != NORM})
    load_vision(broken)


@pytest.mark.parametrize(
    ("load", "prefix"),
    [(load_vision, "vision_tower.vision_model."), (load_language, "language_model.model.")],
)
def test_tensor_of_the_own_half_without_a_place_is_named(
    load: Load, broken: Path, prefix: str
) -> None:
    edit_weights(broken, lambda tensors: tensors | {f"{prefix}adapter.weight": torch.zeros(3)})
    message = refusal(load, broken)
    assert "no place" in message
    assert "adapter.weight" in message


@pytest.mark.parametrize(("load", "name"), [(load_vision, PATCHES), (load_language, NORM)])
def test_tensor_of_another_shape_is_refused(load: Load, broken: Path, name: str) -> None:
    def widen(tensors: Tensors) -> Tensors:
        return tensors | {name: torch.cat([tensors[name], tensors[name]])}

    edit_weights(broken, widen)
    message = refusal(load, broken)
    assert "another shape" in message
    assert name.rpartition(".")[0].split(".")[-1] in message


def test_projector_and_decoder_of_different_widths_do_not_fit(broken: Path) -> None:
    edit_weights(
        broken,
        lambda t: t | {"multi_modal_projector.linear_2.weight": torch.zeros(32, 64)},
    )
    message = refusal(load_language, broken)
    assert "32" in message
    assert "64" in message


@pytest.mark.parametrize("size", [14, 56])
def test_processor_that_does_not_fit_the_tower_is_refused_at_load(broken: Path, size: int) -> None:
    square = {"height": size, "width": size}
    edit_json(broken / "preprocessor_config.json", {"crop_size": square})
    assert "does not fit the vision tower" in refusal(load_vision, broken)


@BOTH
def test_processor_without_a_class_is_refused(load: Load, broken: Path) -> None:
    edit_json(broken / "preprocessor_config.json", {"image_processor_type": None})
    assert "image_processor_type" in refusal(load, broken)


def test_processor_class_that_transformers_lacks_is_refused(broken: Path) -> None:
    edit_json(broken / "preprocessor_config.json", {"image_processor_type": "NoSuchImageProcessor"})
    assert "NoSuchImageProcessor" in refusal(load_vision, broken)


def test_tokenizer_missing(broken: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    assert "tokenizer" in refusal(load_language, broken)


def test_chat_template_missing(broken: Path) -> None:
    (broken / "chat_template.jinja").unlink()
    assert "chat template" in refusal(load_language, broken)


@pytest.mark.parametrize("token_id", [300, 5000, -1])
def test_image_token_that_the_tokenizer_does_not_hold(broken: Path, token_id: int) -> None:
    edit_json(broken / "config.json", {"image_token_index": token_id})
    message = refusal(load_language, broken)
    assert str(token_id) in message
    assert "image token" in message
