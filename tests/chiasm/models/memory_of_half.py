"""Load one half, the other or the whole of a checkpoint and print how much memory that took.

Run as a process of its own: `python memory_of_half.py {vision,language,whole} SMALL DIRECTORY`. It
loads the same part of the checkpoint SMALL first, for what the libraries take once. Prints a JSON
object of bytes beyond that: `held` after loading and `peak` until then.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from chiasm.models.language import LanguageHalf
from chiasm.models.vision import VisionHalf


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def load(part: str, directory: Path) -> Any:
    """Load `part` and read each of its weights once: a mapped file takes memory when it is read."""
    model = load_model(part, directory)
    for parameter in model.parameters():
        parameter.sum()
    return model


def load_model(part: str, directory: Path) -> Any:
    match part:
        case "vision":
            return VisionHalf.load(directory, model_id="probe").model
        case "language":
            return LanguageHalf.load(directory, model_id="probe").model
        case "whole":
            return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    raise ValueError(part)


def main(part: str, small: Path, directory: Path) -> None:
    # What the first load imports and allocates once is no part of a checkpoint's memory.
    load(part, small)
    before = resident_bytes("VmRSS")
    kept = load(part, directory)
    held, peak = resident_bytes("VmRSS") - before, resident_bytes("VmHWM") - before
    print(json.dumps({"held": held, "peak": peak}))
    del kept


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
