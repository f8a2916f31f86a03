"""Every family through real services: an encoder and an LLM service on ports, and the client.

What the wire must carry differs: grids, sizes, levels. Each conversation goes as raw pictures, as
embeddings that the encoder gave, and mixed, and is answered as the whole model answers.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

import encoder_service.app
import llm_service.app
from chiasm.client import AsyncClient
from chiasm.conversation import Message, Part, Sampling, assistant, user
from chiasm.models.language import LanguageHalf
from chiasm.models.vision import VisionHalf
from encoder_service.settings import EncoderSettings
from llm_service.settings import LlmSettings
from tests.families import zoo
from tests.families.conversations import conversations
from tests.families.oracle import Said, Whole

pytestmark = [
    pytest.mark.families,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

TOKENS = 8
SAID = conversations(3, seed=1)
SHARED: dict[str, Any] = {"model_id": "tiny", "port": 0, "torch_threads": 1}


@pytest.fixture(params=sorted(zoo.BUILDERS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    zoo.BUILDERS[request.param](tmp_path)
    return tmp_path


async def test_every_way_over_grpc_gives_the_whole_models_answer(directory: Path) -> None:
    expected = [Whole(directory).expected(turns, TOKENS).answer for turns in SAID]
    settings = EncoderSettings(model=directory, **SHARED)
    async with encoder_service.app.running(settings) as encoder:
        target = f"127.0.0.1:{encoder.port}"
        served = LlmSettings(
            model=directory, vision="remote", encoders=target, kv_bytes=32 << 20, **SHARED
        )
        async with (
            llm_service.app.running(served) as service,
            AsyncClient(llm=f"127.0.0.1:{service.port}", encoder=target, timeout=60) as client,
        ):
            for way in ((False,), (True,), (False, True)):
                for turns, answer in zip(SAID, expected, strict=True):
                    said = await _written(turns, way, client)
                    found = await client.generate(said, Sampling(temperature=0, max_tokens=TOKENS))
                    assert list(found.token_ids) == answer, way


def test_each_half_lacks_the_other_and_both_name_the_same_encoder(directory: Path) -> None:
    vision = VisionHalf.load(directory, model_id="tiny")
    language = LanguageHalf.load(directory, model_id="tiny")
    whole = set(dict(Whole(directory).model.named_parameters()))
    eye = set(dict(vision.model.named_parameters()))
    brain = set(dict(language.model.named_parameters()))
    assert eye | brain == whole
    # What lies in no module, as LLaVA-NeXT's row for a newline, may be in both.
    assert {name.count(".") for name in eye & brain} <= {1}
    assert vision.identity == language.contract.expected_identity


async def _written(
    turns: Sequence[Said], way: Sequence[bool], client: AsyncClient
) -> list[Message]:
    messages: list[Message] = []
    number = 0
    for role, parts in turns:
        written: list[Part] = []
        for part in parts:
            if isinstance(part, str):
                written.append(part)
                continue
            file = _png(part)
            written.append(await client.encode(file) if way[number % len(way)] else file)
            number += 1
        messages.append(user(*written) if role == "user" else assistant(*written))
    return messages


def _png(picture: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
