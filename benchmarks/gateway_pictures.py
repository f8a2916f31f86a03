"""`python -m benchmarks.gateway_pictures PORT PICTURES EMBEDDINGS`: large requests, all at once.

Prints a line when the bodies are made and sending begins, and a last one with the statuses.
"""

import asyncio
import base64
import io
import json
import sys
from collections import Counter
from functools import cache
from typing import Any, Final

import numpy as np
import PIL.Image
import uvloop

from benchmarks.gateway_drive import CHAT, Http
from benchmarks.gateway_llm import WIDTH, Plan

PICTURES: Final = 64
EMBEDDINGS: Final = 16
PICTURE_SIDE: Final = 1850  # of noise: a PNG file of 10 MB
EMBEDDING_ROWS: Final = 1024  # of 4,096 float32: 16 MiB
_SMALL_SIDE: Final = 64  # a file of 12 kB


@cache
def picture(side: int, seed: int = 0) -> dict[str, Any]:
    """A part with a PNG file of noise as a data URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def small_picture() -> dict[str, Any]:
    return picture(_SMALL_SIDE)


def embedding() -> dict[str, Any]:
    """A part with the file that `numpy.save` writes."""
    rows = np.random.default_rng(0).standard_normal((EMBEDDING_ROWS, WIDTH), dtype=np.float32)
    file = io.BytesIO()
    np.save(file, rows)
    return {"type": "image_embeds", "image_embeds": base64.b64encode(file.getvalue()).decode()}


async def _send_all(port: int, pictures: int, embeddings: int) -> None:
    drawn = [Plan(8).body(picture(PICTURE_SIDE, seed)) for seed in range(4)]
    made = Plan(8).body(embedding()) if embeddings else b""
    bodies = [drawn[number % 4] for number in range(pictures)] + [made] * embeddings
    connections = [await Http.open(port) for _ in bodies]
    print(json.dumps({"port": port}), flush=True)
    await asyncio.gather(
        *(one.send("POST", CHAT, body) for one, body in zip(connections, bodies, strict=True))
    )
    print(json.dumps(Counter(str(one.status) for one in connections)), flush=True)


if __name__ == "__main__":
    uvloop.run(_send_all(*map(int, sys.argv[1:])))
