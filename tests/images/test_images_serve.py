"""The images, started together: they answer, tell their health and stop as they should."""

import base64
import io
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pillow_heif
import pytest
from PIL import Image

from tests.images.containers import (
    CHECKPOINT,
    MODEL,
    Container,
    network,
    once,
    root_of,
    started,
    wait_healthy,
)

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
]

SAMPLES = Path(__file__).parents[2] / "demo_model" / "samples"
DRAIN_SECONDS = 2.0
MEMORY = ("--memory", "2g", "--pids-limit", "512")


@dataclass(frozen=True)
class System:
    encoder: Container
    llm: Container
    gateway: Container
    url: str

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def wait_ready(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        with self.client() as client:
            while True:
                try:
                    if client.get("/ready").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                assert time.monotonic() < deadline, self.llm.log()[-3000:]
                time.sleep(0.2)


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """Three containers that no test stops."""
    with running() as three:
        yield three


@pytest.fixture
def own_system() -> Iterator[System]:
    """Three containers for a test that ends some of them."""
    with running() as three:
        yield three


def wait_answered(three: System, seconds: float) -> None:
    """Until a picture is answered."""
    deadline = time.monotonic() + seconds
    body = question("What shape is it?", "star.png")
    with three.client() as client:
        while (status := client.post("/v1/chat/completions", json=body).status_code) == 503:
            assert time.monotonic() < deadline, "no encoder was found"
            time.sleep(0.5)
        assert status == 200


@contextmanager
def running() -> Iterator[System]:
    model = [*MEMORY, "--volume", MODEL]
    name = ["--model-id", "chiasm-demo"]
    listens = ["--publish", "127.0.0.1::8000"]
    with ExitStack() as stack:
        on = stack.enter_context(network())
        encoder = stack.enter_context(started("encoder", *name, name="encoder", on=on, flags=model))
        words = ["--encoders", "dns:///encoder:50061", *name]
        llm = stack.enter_context(started("llm", *words, name="llm", on=on, flags=model))
        words = ["--llm", "dns:///llm:50051"]
        gateway = stack.enter_context(
            started("gateway", *words, name="gateway", on=on, flags=listens)
        )
        for container in (encoder, llm, gateway):
            wait_healthy(container, 120)
        three = System(encoder, llm, gateway, f"http://{gateway.port(8000)}")
        three.wait_ready(120)
        # /ready speaks of the LLM service; that has yet to find its encoder.
        wait_answered(three, 60)
        yield three


def question(text: str, picture: str | None = None, **options: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if picture:
        data = base64.b64encode((SAMPLES / picture).read_bytes()).decode()
        url = {"url": f"data:image/png;base64,{data}"}
        parts.insert(0, {"type": "image_url", "image_url": url})
    messages = [{"role": "user", "content": parts}]
    return {"model": "chiasm-demo", "messages": messages, "temperature": 0, **options}


def answer(client: httpx.Client, body: dict[str, Any]) -> str:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_three_containers_answer_a_question_about_a_picture(system: System) -> None:
    with system.client() as client:
        assert answer(client, question("What shape is it?", "star.png")) == "star"
        assert answer(client, question("What digit is shown?", "seven.png")) == "7"
    # The layers in C were compiled in the build stage, and their proof at start held.
    assert "native layers" not in system.llm.log()
    # The encoder computed, not a fallback.
    metrics = system.encoder.inside(
        "python", "-c",
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics').read().decode())",
    )  # fmt: skip
    assert "chiasm_encoder_" in metrics.stdout


def test_heic_is_refused_by_name_as_its_decoder_is_left_out(system: System) -> None:
    pillow_heif.register_heif_opener()  # of this machine, to make the file
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, format="HEIF")
    data = base64.b64encode(file.getvalue()).decode()
    body = question("What shape is it?")
    url = {"url": f"data:image/heic;base64,{data}"}
    body["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": url})
    with system.client() as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "HEIC" in response.json()["error"]["message"]


def test_a_grammar_is_compiled_in_a_child_that_the_container_allows(system: System) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": {
        "type": "object", "properties": {"shape": {"enum": ["star", "circle"]}},
        "required": ["shape"], "additionalProperties": False,
    }}}  # fmt: skip
    with system.client() as client:
        body = question("What shape is it?", "star.png", response_format=form, max_tokens=40)
        assert json.loads(answer(client, body))["shape"] in {"star", "circle"}
    # Nothing is left of the child: PID 1 has no zombie.
    states = system.llm.inside(
        "python", "-c",
        "import psutil; print([process.status() for process in psutil.process_iter()])",
    )  # fmt: skip
    assert states.returncode == 0, states.stderr
    assert "zombie" not in states.stdout


def test_health_follows_the_model(own_system: System) -> None:
    assert own_system.gateway.health() == 0
    assert own_system.llm.health() == 0
    assert own_system.encoder.health() == 0
    probe = ("python", "-m", "chiasm.rpc.probe")
    assert own_system.llm.inside(*probe, "127.0.0.1:50052").returncode == 0
    assert own_system.gateway.inside(*probe, "http://127.0.0.1:8000/ready").returncode == 0
    # Alive without an LLM service, and not ready: nobody would mend it by a restart.
    own_system.llm.send("KILL")
    own_system.llm.ended(10)
    deadline = time.monotonic() + 20
    while own_system.gateway.inside(*probe, "http://127.0.0.1:8000/ready").returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert own_system.gateway.health() == 0


def test_sigterm_lets_a_stream_end_and_then_exits_with_0(own_system: System) -> None:
    body = question("Count to 50.", stream=True, max_tokens=1500, ignore_eos=True)
    with (
        own_system.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as events,
    ):
        lines = events.iter_lines()
        assert next(lines).startswith("data: ")
        for container in (own_system.gateway, own_system.llm, own_system.encoder):
            container.send("TERM")
        told = time.monotonic()
        read = list(lines)
        ended = time.monotonic()
    assert ended - told > 0.5, "the stream was over before anything was told to stop"
    assert "data: [DONE]" in read
    for container in (own_system.gateway, own_system.llm, own_system.encoder):
        assert container.ended(DRAIN_SECONDS + 8) == 0, container.log()[-3000:]


def test_an_idle_service_stops_within_its_drain_time(own_system: System) -> None:
    for container in (own_system.gateway, own_system.llm, own_system.encoder):
        told = time.monotonic()
        container.send("TERM")
        assert container.ended(DRAIN_SECONDS + 5) == 0, container.log()[-3000:]
        assert time.monotonic() - told < DRAIN_SECONDS + 5


def test_the_root_is_read_only_and_the_process_has_no_rights(system: System) -> None:
    code = (
        "import errno, os, pathlib\n"
        "folders = ['/', '/opt/chiasm/', '/usr/lib/', '/etc/', '/var/tmp/']\n"
        "folders += ['/models/model/'] if os.path.isdir('/models/model') else []\n"
        "for path in [folder + 'x' for folder in folders]:\n"
        "    try: open(path, 'w')\n"
        "    except OSError as e: assert e.errno in (errno.EROFS, errno.EACCES), (path, e)\n"
        "    else: raise SystemExit(f'{path} was written')\n"
        "open('/tmp/x', 'w').close()\n"
        "status = pathlib.Path('/proc/1/status').read_text()\n"
        "fields = dict(line.split(':', 1) for line in status.splitlines())\n"
        "print(fields['Uid'].split(), fields['CapEff'].strip(), fields['NoNewPrivs'].strip())\n"
    )
    for container in (system.gateway, system.llm, system.encoder):
        done = container.inside("python", "-c", code)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{['10001'] * 4} {'0' * 16} 1"


def test_logs_are_json_lines(system: System) -> None:
    with system.client() as client:
        answer(client, question("What shape is it?", "star.png"))
    for container in (system.gateway, system.llm, system.encoder):
        for line in container.log().splitlines():
            assert isinstance(json.loads(line), dict), line


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("gateway", ("--llm", "llm:50051", "--ports", "1")),
        ("encoder", ("--dtype", "float8")),
        ("llm", ("--max-imagse", "2")),
    ],
)
def test_a_wrong_flag_ends_with_2_and_is_named(target: str, words: tuple[str, ...]) -> None:
    done = once(target, *words)
    assert done.returncode == 2
    assert words[-2] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("target", ["encoder", "llm"])
def test_without_a_model_it_ends_with_2_and_says_where_it_looked(target: str) -> None:
    done = once(target)
    assert done.returncode == 2
    assert "/models/model" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_model_image_holds_the_checkpoint_alone() -> None:
    with root_of("demo-model") as root:
        assert {
            path.name for path in root.iterdir() if path.name not in {"dev", "proc", "sys"}
        } == {"model"}
        held = {path.name: path.read_bytes() for path in (root / "model").iterdir()}
    assert held == {path.name: path.read_bytes() for path in CHECKPOINT.iterdir()}
