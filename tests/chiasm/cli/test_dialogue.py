from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
import torch
from safetensors.torch import load

from chiasm import tensors, torch_tensors
from chiasm.cli.cases import cases
from chiasm.cli.dialogue import (
    EMBEDDING,
    EMBEDDING_FIRST,
    RAW,
    RAW_FIRST,
    Dialogue,
    Form,
    Line,
    Picture,
    grpc_messages,
    http_messages,
    picture_count,
    safetensors_file,
)
from chiasm.conversation import Embedding
from chiasm.v1 import encoder_service_pb2, image_pb2, llm_service_pb2

FILE = b"a picture file"


def picture(directory: Path, name: str = "cat.png") -> Picture:
    path = directory / name
    path.write_bytes(FILE)
    features = tensors.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))
    timings = encoder_service_pb2.EncodeTimings()
    return Picture(
        path, Embedding(features, image_pb2.ImageEmbedding(), "computed", "encoder", timings)
    )


def two_pictures(directory: Path) -> Dialogue:
    shown = picture(directory)
    return (
        Line((shown, "What is it?")),
        Line(("A cat.",), by_model=True),
        Line(("And this:", shown)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_written_file_is_what_safetensors_reads(dtype: torch.dtype) -> None:
    tensor = torch.arange(10, dtype=torch.float32).reshape(2, 5).to(dtype)
    read = load(safetensors_file(torch_tensors.from_torch(tensor)))
    assert list(read) == ["image_embeds"]
    assert read["image_embeds"].dtype == dtype
    assert torch.equal(read["image_embeds"], tensor)


@pytest.mark.parametrize(
    ("form", "kinds"),
    [
        (RAW, ["image_url", "image_url"]),
        (EMBEDDING, ["image_embeds", "image_embeds"]),
        (RAW_FIRST, ["image_url", "image_embeds"]),
        (EMBEDDING_FIRST, ["image_embeds", "image_url"]),
    ],
)
def test_both_protocols_send_each_picture_as_its_form_says(
    form: Form, kinds: list[str], tmp_path: Path
) -> None:
    dialogue = two_pictures(tmp_path)
    over_http = http_messages(dialogue, form)
    parts = [part for m in over_http if m["role"] == "user" for part in m["content"]]
    assert [part["type"] for part in parts if part["type"] != "text"] == kinds
    over_grpc = grpc_messages(dialogue, form)
    pictures = [
        part for message in over_grpc for part in message.parts if not isinstance(part, str)
    ]
    assert [isinstance(part, Embedding) for part in pictures] == [
        kind == "image_embeds" for kind in kinds
    ]


def test_order_roles_and_bytes_are_kept(tmp_path: Path) -> None:
    dialogue = two_pictures(tmp_path)
    first, answer, last = http_messages(dialogue, RAW)
    assert answer == {"role": "assistant", "content": "A cat."}
    assert [part["type"] for part in last["content"]] == ["text", "image_url"]
    url: Any = first["content"][0]["image_url"]["url"]
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    assert pybase64.b64decode(data) == FILE
    roles = [message.role for message in grpc_messages(dialogue, RAW)]
    assert roles == [
        llm_service_pb2.ROLE_USER,
        llm_service_pb2.ROLE_ASSISTANT,
        llm_service_pb2.ROLE_USER,
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_the_cases_hold_one_to_four_pictures_and_several_turns(count: int, tmp_path: Path) -> None:
    pictures = [picture(tmp_path, f"{number}.png") for number in range(count)]
    held = cases(pictures, ["What is it?"])
    turns = [tuple(Line(turn.items) for turn in case.turns) for case in held]
    assert {picture_count(dialogue) for dialogue in turns} == {1, 2, 3, 4}
    assert {len(dialogue) for dialogue in turns} == {1, 2, 3, 4}
    assert len({case.name for case in held}) == len(held)
