"""Encode a picture here, with transformers, and ask about its features with OpenAI's own client.

    .venv/bin/python examples/openai_image_embeds.py --model CHECKPOINT --gateway URL picture.png

The picture never leaves this machine. Needs the packages torch, transformers and openai.
"""

import argparse
import base64
import io
from pathlib import Path
from typing import Any

import openai
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateway", default="http://127.0.0.1:8000")
    parser.add_argument("--model", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    rows = features(arguments.model, arguments.picture)
    print(f"{rows.shape[0]} rows of {rows.shape[1]}")
    client = openai.OpenAI(base_url=f"{arguments.gateway}/v1", api_key="none")
    model = client.models.list().data[0].id
    content: Any = [
        {"type": "image_embeds", "image_embeds": saved(rows)},
        {"type": "text", "text": "What shape is this?"},
    ]
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=16
    )
    print(answer.choices[0].message.content)


def features(checkpoint: Path, picture: Path) -> torch.Tensor:
    """What the model's tower and projector make of a picture: `[rows, width]`."""
    processors: Any = AutoImageProcessor
    models: Any = AutoModelForImageTextToText
    processor = processors.from_pretrained(checkpoint, backend="pil")
    model = models.from_pretrained(checkpoint, dtype=torch.float32)
    with Image.open(picture) as image, torch.inference_mode():
        pixels = processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"]
        found = model.model.get_image_features(pixel_values=pixels, return_dict=True)
    rows: torch.Tensor = found.pooler_output[0]
    return rows


def saved(rows: torch.Tensor) -> str:
    """The base64 of a file of `torch.save`, as vLLM's clients send it."""
    file = io.BytesIO()
    torch.save(rows.clone(), file)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main()
