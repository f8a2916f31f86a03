"""Tiny checkpoints, built once a run and never written to by a test."""

from pathlib import Path

import pytest

from tests.tiny_llava import build_tiny_llava


@pytest.fixture(scope="session")
def clip_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llava(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def siglip_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llava(tmp_path_factory.mktemp("siglip"), tower="siglip", decoder="qwen2")
