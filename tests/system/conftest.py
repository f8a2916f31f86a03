"""One system of the tiny random model and one of the demo model, for all tests of the run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import DEMO_MODEL
from tests.system.three import Three, three
from tests.tiny_llava import build_tiny_llava


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: answers mean nothing, but follow every picture and its place."""
    return build_tiny_llava(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_checkpoint: Path) -> Iterator[Three]:
    with three(tiny_checkpoint) as system:
        yield system


@pytest.fixture(scope="session")
def demo() -> Iterator[Three]:
    with three(DEMO_MODEL) as system:
        yield system
