"""Encode a picture once, then ask about it in turn after turn for a few bytes each.

.venv/bin/python examples/reference_across_turns.py --gateway http://127.0.0.1:8000 picture.png
"""

import argparse
import base64
from pathlib import Path
from typing import Any

import httpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateway", default="http://127.0.0.1:8000")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    with httpx.Client(base_url=arguments.gateway, timeout=120) as http:
        talk(http, arguments.picture)


def talk(http: httpx.Client, picture: Path) -> None:
    model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    body = {"model": model, "input": [{"type": "image_url", "image_url": {"url": url}}]}
    held = http.post("/v1/image_embeddings", json=body).raise_for_status().json()["data"][0]
    print(f"held {held['row_count']} rows of {held['dtype']} until {held['expires_at']}")

    by_name = {"type": "image_embeds", "image_embeds": {"ref": held["reference"]}}
    messages: list[dict[str, Any]] = []
    for question in ("What shape is this?", "What color is it?"):
        content: Any = [{"type": "text", "text": question}]
        messages.append({"role": "user", "content": content if messages else [by_name, *content]})
        request = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 16}
        response = http.post("/v1/chat/completions", json=request).raise_for_status()
        answer = response.json()["choices"][0]["message"]["content"]
        sent = len(response.request.content)
        print(f"{question} {answer}  ({sent} bytes sent)")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
