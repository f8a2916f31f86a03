"""Every script in `examples/` against real processes of the demo model."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.processes import DEMO_MODEL, ROOT, SAMPLES, service_environment
from tests.system.three import Three

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PICTURE = SAMPLES / "star.png"


def flags(name: str, system: Three) -> list[str]:
    """Where the script finds what it speaks to."""
    if name.startswith("grpc"):
        return ["--llm", system.llm.target, "--encoder", system.encoder.target]
    model = ["--model", str(DEMO_MODEL)] if name.startswith("openai") else []
    return ["--gateway", system.gateway.url, *model]


def test_there_is_an_example_for_each_way_in() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "binary_upload",
        "grpc_encode_then_generate",
        "openai_image_embeds",
        "reference_across_turns",
    }


@pytest.mark.parametrize("script", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_runs_and_the_model_sees_the_star(demo: Three, script: Path) -> None:
    command = [sys.executable, str(script), *flags(script.name, demo), str(PICTURE)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        env=service_environment({}),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "star" in done.stdout.lower(), done.stdout
