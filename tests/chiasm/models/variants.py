"""Copies of a checkpoint with one thing changed, and pictures to encode."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def copy_of(checkpoint: Path, directory: Path) -> Path:
    shutil.copytree(checkpoint, directory)
    return directory


def edit_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Set names of a JSON object; a name with dots reaches into nested objects, None deletes it."""
    content = json.loads(path.read_text())
    for name, value in changes.items():
        *parents, leaf = name.split(".")
        target = content
        for parent in parents:
            target = target[parent]
        target.pop(leaf, None)
        if value is not None:
            target[leaf] = value
    path.write_text(json.dumps(content))


def edit_weights(checkpoint: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = checkpoint / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def picture(seed: int, width: int = 40, height: int = 30) -> PIL.Image.Image:
    generator = np.random.default_rng(seed)
    return PIL.Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
