"""Writes the shipped sample pictures and questions: `python -m demo_model.samples`.

The pictures come from the held-out split, at seeds that `evaluate` does not reach by default.
`samples.json` is a list of `{"file", "question", "answer"}`, `file` inside `samples/`.
"""

import json
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from demo_model.pictures import Scene, draw, sample_scene
from demo_model.questions import answer_of, describe

HERE = Path(__file__).parent
FIRST_SEED = 900_000_000
WANTED = {
    "circles.png": "three blue circles",
    "star.png": "one orange star",
    "seven.png": "the digit 7 in green",
    "fish.png": "the word fish in purple",
}
QUESTIONS = (
    ("circles.png", "What colour are the shapes?", "colour"),
    ("circles.png", "How many shapes are there?", "count"),
    ("circles.png", "What shape is it?", "shape"),
    ("star.png", "What shape is it?", "shape"),
    ("star.png", "Where is the star?", "position"),
    ("seven.png", "What digit is shown?", "digit"),
    ("seven.png", "What colour is the digit?", "colour"),
    ("fish.png", "What word is written in the picture?", "word"),
    ("fish.png", "Describe the picture.", "describe"),
)


@dataclass(frozen=True)
class SampleQuestion:
    file: str
    question: str
    answer: str


def wanted_scene(description: str) -> Scene:
    """The first held-out scene from FIRST_SEED on that is described so, on a light ground."""
    for seed in count(FIRST_SEED):
        scene = sample_scene("held-out", seed)
        if describe(scene) == description and min(scene.background) > 200:
            return scene
    raise AssertionError("count() does not end")


def sample_scenes() -> dict[str, Scene]:
    return {name: wanted_scene(description) for name, description in WANTED.items()}


def sample_questions() -> list[SampleQuestion]:
    scenes = sample_scenes()
    return [SampleQuestion(f, q, answer_of(scenes[f], kind)) for f, q, kind in QUESTIONS]


def main() -> None:
    directory = HERE / "samples"
    directory.mkdir(exist_ok=True)
    for name, scene in sample_scenes().items():
        draw(scene).save(directory / name, optimize=True)
    text = json.dumps([asdict(q) for q in sample_questions()], indent=2) + "\n"
    (HERE / "samples.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
