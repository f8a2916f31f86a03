"""The local overlay, played by podman with the real images: it answers, and encoders come and go.

`make images` first. PLAY_PODMAN says how podman is called, PLAY_CONTAINERS_CONF names a
containers.conf where this machine needs one of its own.
"""

import base64
import io
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import PIL.Image
import pytest

from tests.deploy.manifests import ROOT, needs_kubectl

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(900),
    needs_kubectl,
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
    pytest.mark.skipif(shutil.which("catatonit") is None, reason="podman's pods need catatonit"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a network of podman's own needs root"),
]

STAR: Final = ROOT / "demo_model/samples/star.png"
NETWORK: Final = "chiasm-play-test"
# A container runtime and limits that small machines allow.
CONF: Final = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
runtime = "runc"
"""


class Played:
    """A played overlay."""

    def __init__(self, port: int, conf: Path) -> None:
        self.port = port
        self._env = os.environ | {"CONTAINERS_CONF": str(conf)}

    def play(self, *words: str) -> str:
        flags = ["--network", NETWORK, "--port", str(self.port)]
        flags += ["--podman", os.environ.get("PLAY_PODMAN", "podman")]
        return self._run(sys.executable, "-m", "deploy.play", *flags, *words)

    def python(self, container: str, program: str) -> Any:
        """What a Python program in a container prints, as JSON."""
        return json.loads(self._run("podman", "exec", container, "python", "-c", program))

    def ask(self, picture: bytes, question: str) -> tuple[str, str]:
        """The answer, and the encoder that the picture went to. Raises URLError, HTTPError."""
        data = base64.b64encode(picture).decode()
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
            {"type": "text", "text": question},
        ]
        body = {
            "model": "chiasm-demo",
            "temperature": 0,
            "messages": [{"role": "user", "content": parts}],
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        image = answer["chiasm"]["images"][0]
        return answer["choices"][0]["message"]["content"], image.get("encoder", image["source"])

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=ROOT, env=self._env, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    conf = tmp_path_factory.mktemp("conf") / "containers.conf"
    conf.write_text(CONF)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = Played(port, Path(os.environ.get("PLAY_CONTAINERS_CONF", conf)))
    try:
        found.play("up")
        yield found
    finally:
        found.play("down")


def test_a_question_about_a_picture_is_answered(played: Played) -> None:
    answer, encoder = played.ask(STAR.read_bytes(), "What shape is it?")
    assert answer == "star"
    assert encoder.startswith("chiasm-encoder-")


@pytest.mark.parametrize(
    "container", ["chiasm-gateway-0-gateway", "chiasm-llm-0-llm", "chiasm-encoder-1-encoder"]
)
def test_a_container_is_as_hardened_as_the_manifests_say(played: Played, container: str) -> None:
    found = played.python(
        container,
        "import json, os\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "writable = [at for at in ('/', '/opt/chiasm', '/models/model', '/tmp')\n"
        "            if os.path.exists(at) and os.access(at, os.W_OK)]\n"
        "print(json.dumps({'user': [os.getuid(), os.getgid()], 'writable': writable,\n"
        "    'capabilities': int(status['CapBnd'], 16), 'locked': int(status['NoNewPrivs'])}))",
    )
    expected = {"user": [10001, 10001], "writable": ["/tmp"], "capabilities": 0, "locked": 1}
    assert found == expected


def test_no_request_fails_while_an_encoder_leaves_and_comes_back(played: Played) -> None:
    load = Load(played)
    with load:
        _until(lambda: len(load.encoders) == 2)
        played.play("scale", "encoder", "1")
        # What it still answered while it drained may have come after it was gone.
        time.sleep(1)
        load.encoders.clear()
        before = load.answered
        _until(lambda: load.answered > before + 100)
        assert load.encoders == {"chiasm-encoder-0:50061"}
        played.play("scale", "encoder", "2")
        _until(lambda: "chiasm-encoder-1:50061" in load.encoders)
    print(f"\n{load.answered} questions answered, {len(load.faults)} failed")
    assert load.faults == []


class Load:
    """Questions without end from four callers, each about a picture that is new to the caches."""

    def __init__(self, played: Played) -> None:
        self._played = played
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]
        self._numbers = itertools.count()
        self.answered = 0
        self.encoders: set[str] = set()
        self.faults: list[str] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                answer, encoder = self._played.ask(self._star(), "What shape is it?")
            except OSError as error:
                self.faults.append(str(error))
                continue
            self.answered += 1
            self.encoders.add(encoder)
            if answer != "star":
                self.faults.append(answer)

    def _star(self) -> bytes:
        # One pixel differs, and so does the digest that caches go by.
        picture, file = PIL.Image.open(STAR).convert("RGB"), io.BytesIO()
        number = next(self._numbers)
        picture.putpixel((0, 0), (number >> 16 & 255, number >> 8 & 255, number & 255))
        picture.save(file, "png")
        return file.getvalue()


def _until(holds: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.2)
