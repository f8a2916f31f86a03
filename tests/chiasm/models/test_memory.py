import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.tiny_llava import build_tiny_llava

pytestmark = pytest.mark.system

MIB = 1024 * 1024
PROBE = Path(__file__).with_name("memory_of_half.py")
ROOT = Path(__file__).parents[3]


def tensor_bytes(checkpoint: Path) -> tuple[int, int]:
    """Bytes of the vision half's and of the language half's float32 weights."""
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        sizes = {name: weights.get_tensor(name).nbytes for name in weights.keys()}  # noqa: SIM118
    language = sum(size for name, size in sizes.items() if name.startswith("language_model."))
    return sum(sizes.values()) - language, language


def start_probe(part: str, small: Path, checkpoint: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROBE), part, str(small), str(checkpoint)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_each_process_holds_its_half_of_the_weights_and_no_more(
    clip_llava: Path, tmp_path: Path
) -> None:
    checkpoint = build_tiny_llava(
        tmp_path, hidden_size=512, layer_count=8, vision_hidden_size=384, vision_layer_count=16
    )
    vision, language = tensor_bytes(checkpoint)
    assert min(vision, language) > 70 * MIB
    probes = {part: start_probe(part, clip_llava, checkpoint) for part in ("vision", "language")}
    taken = {part: json.loads(probe.communicate()[0]) for part, probe in probes.items()}
    for part, own in (("vision", vision), ("language", language)):
        assert own * 0.9 < taken[part]["held"] < own + 35 * MIB
        assert taken[part]["peak"] < own + 45 * MIB
