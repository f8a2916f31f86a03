"""Where the demo model and its sample pictures lie, and the questions that go with them."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

DEMO_MODEL_ID = "chiasm-demo"


@dataclass(frozen=True)
class Sample:
    """A shipped picture, a question about it and the right answer."""

    picture: Path
    question: str
    answer: str


def demo_directory() -> Path:
    """The directory of the package `demo_model`. Raises FileNotFoundError."""
    spec = find_spec("demo_model")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package demo_model is not installed")
    return Path(spec.origin).parent


def demo_checkpoint() -> Path:
    """The demo model's checkpoint directory."""
    return demo_directory() / "checkpoint"


def sample_pictures() -> list[Path]:
    """The shipped pictures, by name."""
    return sorted((demo_directory() / "samples").glob("*.png"))


def sample_questions() -> list[Sample]:
    """The shipped questions, in their order."""
    home = demo_directory()
    read = json.loads((home / "samples.json").read_text(encoding="utf-8"))
    return [
        Sample(home / "samples" / item["file"], item["question"], item["answer"]) for item in read
    ]
