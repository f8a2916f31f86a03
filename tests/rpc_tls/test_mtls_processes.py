"""The three processes under mutual TLS: a question about a picture, and who gets no answer."""

import base64
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from chiasm.cli import main
from chiasm.client import Client, MutualTls
from chiasm.conversation import GREEDY, user
from chiasm.errors import ChiasmError, Reason
from tests.rpc_tls.authority import Authority, Files
from tests.system.processes import DEMO_MODEL, start_gateway
from tests.system.three import Three, three

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

STAR = Path(__file__).parents[2] / "demo_model" / "samples" / "star.png"
QUESTION = "What shape is it?"
NAMES = {"gateway": "chiasm-gateway", "llm": "chiasm-llm", "encoder": "chiasm-encoder"}


@pytest.fixture(scope="module")
def files(ca: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    root = tmp_path_factory.mktemp("mtls")
    wanted = {**NAMES, "tool": "some-tool", "stranger": "stranger"}
    return {part: ca.files(root / part, name) for part, name in wanted.items()}


@pytest.fixture(scope="module")
def system(files: dict[str, Files]) -> Iterator[Three]:
    probes = ["--health-port", "0"]
    with three(
        DEMO_MODEL,
        encoder_flags=[
            *files["encoder"].flags, *probes, "--mtls-clients", "chiasm-llm,some-tool",
        ],
        llm_flags=[
            *files["llm"].flags, *probes, "--mtls-clients", "chiasm-gateway,some-tool",
            "--mtls-encoders", "chiasm-encoder",
        ],
        gateway_flags=[*files["gateway"].flags, "--mtls-llm", "chiasm-llm"],
    ) as running:  # fmt: skip
        yield running


def body(model: str) -> dict[str, object]:
    url = "data:image/png;base64," + base64.b64encode(STAR.read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    return {"model": model, "temperature": 0, "messages": [{"role": "user", "content": content}]}


def mutual(files: Files) -> MutualTls:
    return MutualTls(files.cert, files.key, files.ca, llm="chiasm-llm", encoder="chiasm-encoder")


def test_a_question_about_a_picture_goes_through_all_three(system: Three) -> None:
    answer = httpx.post(
        f"{system.gateway.url}/v1/chat/completions",
        json=body(system.model), timeout=60, trust_env=False,
    )  # fmt: skip
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "star"


def test_a_direct_client_with_a_certificate_is_served(
    system: Three, files: dict[str, Files]
) -> None:
    with Client(system.llm.target, system.encoder.target, tls=mutual(files["tool"])) as client:
        picture = client.encode(STAR)
        assert client.generate([user(picture, QUESTION)], GREEDY).text == "star"


def test_compare_runs_over_mutual_tls(
    system: Three, files: dict[str, Files], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--url", system.gateway.url, "--llm", system.llm.target]
    how = [*files["tool"].flags, "--mtls-llm", "chiasm-llm"]
    words = ["compare", *where, "--encoder", system.encoder.target, *how]
    assert main([*words, "--pictures", str(STAR), "--mtls-encoder", "chiasm-encoder"]) == 0
    assert main(words) == 2
    assert "--mtls-encoder must name" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["plaintext", "stranger"])
def test_others_are_refused_by_both_services(
    system: Three, files: dict[str, Files], how: str
) -> None:
    tls = None if how == "plaintext" else mutual(files["stranger"])
    reason = Reason.NOT_READY if tls is None else Reason.CALLER_NOT_ALLOWED
    with Client(system.llm.target, system.encoder.target, timeout=10, tls=tls) as client:
        with pytest.raises(ChiasmError) as caught:
            client.get_model()
        assert caught.value.reason is reason
        with pytest.raises(ChiasmError) as caught:
            client.encode(STAR)
        assert caught.value.reason is reason


def test_a_gateway_of_another_name_is_refused(system: Three, files: dict[str, Files]) -> None:
    flags = [*files["stranger"].flags, "--mtls-llm", "chiasm-llm"]
    with start_gateway(system.llm.port, *flags) as gateway:
        answer = httpx.post(
            f"{gateway.url}/v1/chat/completions",
            json=body(system.model), timeout=60, trust_env=False,
        )  # fmt: skip
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "caller_not_allowed"
    assert "caller not allowed" in system.llm.log()
    assert "stranger" in system.llm.log()


def test_the_health_ports_are_open_to_probes_without_a_certificate(system: Three) -> None:
    for part in (system.llm, system.encoder):
        for service in ([], ["live"]):
            probe = [sys.executable, "-m", "chiasm.rpc.probe", f"127.0.0.1:{part.health_port}"]
            assert subprocess.run([*probe, *service], timeout=30).returncode == 0


def test_every_part_takes_a_new_certificate_under_questions(
    system: Three, ca: Authority, files: dict[str, Files]
) -> None:
    url = f"{system.gateway.url}/v1/chat/completions"
    with httpx.Client(timeout=60, trust_env=False) as http:
        for part, name in NAMES.items():
            files[part].write(ca.issue(name), ca.pem)
            process = getattr(system, part)
            end, line = time.monotonic() + 20, 'chiasm_mtls_reloads_total{outcome="taken"} 1.0'
            figures = ""
            while line not in figures:
                assert time.monotonic() < end
                answer = http.post(url, json=body(system.model))
                assert answer.json()["choices"][0]["message"]["content"] == "star"
                figures = http.get(f"http://127.0.0.1:{process.metrics_port}/metrics").text
        for _ in range(5):
            answer = http.post(url, json=body(system.model))
            assert answer.json()["choices"][0]["message"]["content"] == "star"
    for process in system.processes:
        assert "PRIVATE KEY" not in process.log()
