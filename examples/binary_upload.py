"""Fetch a picture's features as one binary body, send such a body back, and ask about it.

    .venv/bin/python examples/binary_upload.py --gateway http://127.0.0.1:8000 picture.png

No base64 on the way of the tensors. Needs the package safetensors.
"""

import argparse
import base64
from pathlib import Path

import httpx
from safetensors.numpy import load

SAFETENSORS = "application/x-safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateway", default="http://127.0.0.1:8000")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    with httpx.Client(base_url=arguments.gateway, timeout=120) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        file = features(http, arguments.picture)
        for name, rows in load(file).items():
            print(f"tensor {name}: {rows.shape[0]} rows of {rows.shape[1]} {rows.dtype}")
        print(ask(http, model, upload(http, file)))


def features(http: httpx.Client, picture: Path) -> bytes:
    """A safetensors file of the picture's features; keep it as long as you like."""
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    body = {"input": [url]}
    answer = http.post("/v1/image_embeddings", json=body, headers={"accept": SAFETENSORS})
    return answer.raise_for_status().content


def upload(http: httpx.Client, file: bytes) -> str:
    """The reference of the first tensor of a safetensors file."""
    answer = http.post("/v1/image_embeddings", content=file, headers={"content-type": SAFETENSORS})
    reference: str = answer.raise_for_status().json()["data"][0]["reference"]
    return reference


def ask(http: httpx.Client, model: str, reference: str) -> str:
    content = [
        {"type": "image_embeds", "image_embeds": {"ref": reference}},
        {"type": "text", "text": "What shape is this?"},
    ]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body | {"max_tokens": 16}).raise_for_status()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


if __name__ == "__main__":
    main()
