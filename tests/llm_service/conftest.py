"""A tiny checkpoint, pictures, the whole model to compare with, and a service in this process."""

import io
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from chiasm.client import AsyncClient
from llm_service.app import Running, running
from llm_service.settings import LlmSettings
from tests.tiny_llava import build_tiny_llava

Serve = Callable[..., AbstractAsyncContextManager[tuple[Running, AsyncClient]]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llava(tmp_path_factory.mktemp("llm") / "tiny", context_length=512)


@pytest.fixture(scope="session")
def whole(checkpoint: Path) -> Any:
    auto: Any = AutoModelForImageTextToText
    return auto.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def pictures() -> list[bytes]:
    rng = np.random.default_rng(5)
    return [png(rng.integers(0, 256, (20 + 9 * i, 40 - 5 * i, 3))) for i in range(4)]


def png(pixels: Any) -> bytes:
    """`pixels` `[height, width, 3]` as a file."""
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def serve(checkpoint: Path) -> Serve:
    @asynccontextmanager
    async def served(**more: Any) -> AsyncIterator[tuple[Running, AsyncClient]]:
        settings: dict[str, Any] = {
            "model": checkpoint,
            "model_id": "tiny",
            "port": 0,
            "vision": "local",
            "kv_bytes": 8 << 20,
            "torch_threads": 1,
            "drain_seconds": 0.05,
            "grace_seconds": 5.0,
        }
        async with (
            running(LlmSettings(**(settings | more))) as service,
            AsyncClient(llm=f"127.0.0.1:{service.port}", timeout=60) as client,
        ):
            yield service, client

    return served
