"""Two versions of a model side by side: neither LLM service takes the other's features."""

import asyncio
import base64
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file, save_file

from chiasm.client import Answer, AsyncClient
from chiasm.conversation import GREEDY, user
from chiasm.errors import ChiasmError, Reason
from tests.system.processes import (
    DEMO_MODEL,
    SAMPLES,
    ServiceProcess,
    start_encoder,
    start_gateway,
    start_llm,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
NAME = ("--model-id", "chiasm-demo")
QUESTION = "What shape is it?"
PICTURES = [SAMPLES / f"{name}.png" for name in ("star", "fish", "seven", "circles")]


@pytest.fixture(scope="module")
def next_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model after a change of its tower: same files, same name, other features."""
    directory = tmp_path_factory.mktemp("models") / "next"
    shutil.copytree(DEMO_MODEL, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, values in tensors.items():
        if "multi_modal_projector" in name and name.endswith("weight"):
            tensors[name] = np.ascontiguousarray(values * np.float32(0.5))
    save_file(tensors, file, {"format": "pt"})
    return directory


@dataclass(frozen=True)
class Both:
    """Encoders and LLM services of the old and of the new model; each LLM service knows both
    encoders, as if one name stood for all of them."""

    old_encoder: ServiceProcess
    new_encoder: ServiceProcess
    old: ServiceProcess
    new: ServiceProcess


@pytest.fixture(scope="module")
def both(next_model: Path) -> Iterator[Both]:
    with ExitStack() as stack:
        enter = stack.enter_context
        old_encoder = enter(start_encoder(DEMO_MODEL, *NAME, "--encoder-name", "old"))
        new_encoder = enter(start_encoder(next_model, *NAME, "--encoder-name", "new"))
        fleet = ("--encoders", f"{old_encoder.target},{new_encoder.target}")
        uncached = (*NAME, *fleet, "--embedding-cache-bytes", "0")
        yield Both(
            old_encoder,
            new_encoder,
            enter(start_llm(DEMO_MODEL, *uncached)),
            enter(start_llm(next_model, *uncached)),
        )


async def ask(client: AsyncClient, picture: Path) -> Answer:
    return await client.generate([user(picture, QUESTION)], GREEDY)


async def test_each_llm_service_asks_its_own_encoder_only_and_no_answer_is_mixed(
    both: Both,
) -> None:
    texts: dict[tuple[str, Path], str] = {}
    async with AsyncClient(both.old.target) as old, AsyncClient(both.new.target) as new:
        for _ in range(5):
            answers = await asyncio.gather(
                *(ask(client, picture) for client in (old, new) for picture in PICTURES)
            )
            for index, answer in enumerate(answers):
                which = "old" if index < len(PICTURES) else "new"
                assert [path.encoder_name for path in answer.image_paths] == [which]
                picture = PICTURES[index % len(PICTURES)]
                assert texts.setdefault((which, picture), answer.text) == answer.text
    assert texts["old", PICTURES[0]] == "star"
    for llm in (both.old, both.new):
        assert fleet_of(llm) == {"ready": 1, "foreign": 1, "ejected": 0, "unknown": 0}


async def test_an_old_embedding_is_refused_by_the_new_model(both: Both) -> None:
    async with AsyncClient(both.new.target, both.old_encoder.target) as client:
        embedding = await client.encode(PICTURES[0])
        with pytest.raises(ChiasmError) as refused:
            await client.generate([user(embedding, QUESTION)], GREEDY)
    assert refused.value.reason is Reason.ENCODER_MISMATCH


def test_a_new_llm_service_before_old_encoders_answers_502_and_tells_both_identities(
    both: Both, next_model: Path
) -> None:
    wrong = ("--encoders", both.old_encoder.target)
    with start_llm(next_model, *NAME, *wrong) as llm, start_gateway(llm.port) as gateway:
        with httpx.Client(base_url=gateway.url, trust_env=False, timeout=60) as client:
            assert client.get("/ready").status_code == 200
            text = {"role": "user", "content": "Count to 3."}
            body = {"model": "chiasm-demo", "messages": [text], "max_tokens": 5}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            reply = client.post("/v1/chat/completions", json=with_picture())
        assert reply.status_code == 502
        assert reply.json()["error"]["code"] == "encoder_mismatch"
        # What the alert ChiasmEncoderMismatch counts.
        assert fleet_of(llm)["foreign"] == 1
        assert "encoder of another model" in llm.log()
        told = next(line for line in llm.log().splitlines() if "encoder of another" in line)
        assert "found=" in told
        assert "expected=" in told


def test_a_gateway_that_is_pointed_at_the_new_pair_takes_over_without_a_failed_request(
    both: Both,
) -> None:
    with ExitStack() as stack:
        before = stack.enter_context(start_gateway(both.old.port))
        after = stack.enter_context(start_gateway(both.new.port))
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=60))
        statuses = []
        for number in range(20):
            url = before.url if number < 10 else after.url
            if number == 10:
                before.terminate()
            reply = client.post(f"{url}/v1/chat/completions", json=with_picture())
            statuses.append(reply.status_code)
        assert statuses == [200] * 20
        assert before.wait() == 0


def with_picture() -> dict[str, object]:
    data = base64.b64encode(PICTURES[0].read_bytes()).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [picture, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    return {"model": "chiasm-demo", "messages": messages, "temperature": 0, "max_tokens": 8}


def fleet_of(llm: ServiceProcess) -> dict[str, int]:
    """Encoders by state."""
    url = f"http://127.0.0.1:{llm.metrics_port}/metrics"
    families = text_string_to_metric_families(httpx.get(url, trust_env=False).text)
    return {
        sample.labels["state"]: int(sample.value)
        for family in families
        if family.name == "chiasm_llm_encoders"
        for sample in family.samples
    }
