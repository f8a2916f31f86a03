"""Checkpoints of the encoder's tests, built once a run."""

from pathlib import Path

import pytest
import torch

from chiasm.models.vision import VisionHalf
from tests.tiny_llava import build_tiny_llava


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llava(tmp_path_factory.mktemp("encoder"), seed=7)


@pytest.fixture(scope="session")
def half(checkpoint: Path) -> VisionHalf:
    torch.set_num_threads(1)
    return VisionHalf.load(checkpoint, model_id="tiny")


@pytest.fixture(scope="session")
def slow_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,024 rows of 640 elements: more than one chunk, and some tenths of a second a picture."""
    return build_tiny_llava(
        tmp_path_factory.mktemp("slow"),
        image_size=448,
        hidden_size=640,
        layer_count=1,
        vision_hidden_size=192,
        vision_layer_count=8,
    )
