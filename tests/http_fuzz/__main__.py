"""`python -m tests.http_fuzz --requests 10000`: schemathesis against a real gateway.

Every answer must have a status, a content type, headers and a body as the document says, and no
status of 500 or more. What the document refuses must be refused. Exits with 1 if it is not so.
"""

import argparse
import asyncio
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from chiasm.telemetry import start_logging
from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System, whole_system
from tests.scripted_llm import Script, finished

_CHECKS: Final = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance", "response_schema_conformance", "negative_data_rejection",
    "unsupported_method", "allow_header_conformance", "missing_required_header",
)  # fmt: skip
_COUNTED: Final = re.compile(
    r'^chiasm_gateway_requests_total\{.*status="(\d+)".*\} (\S+)$', re.MULTILINE
)
_MOST_CHOICES: Final = 128
_PHASES: Final = "examples,coverage,fuzzing"
_ROOT: Final = Path(__file__).parents[2]
_STOP: Final = llm_service_pb2.FINISH_REASON_STOP


async def fuzz(requests: int, examples: int, first_seed: int) -> bool:
    """Runs with one seed after the other until so many requests were answered; True if all well."""
    async with whole_system() as system:
        system.llm.script = Script(end=finished(*[_STOP] * _MOST_CHOICES))
        system.llm.card.tool_format = "hermes"
        seed, phases, counts = first_seed, _PHASES, Counter[str]()
        while counts.total() < requests:
            good = await _run(system.port, examples, seed, phases)
            system.llm.received.clear()
            counts = await _answered(system)
            print(f"seed {seed}: {'good' if good else 'NOT GOOD'}; requests so far by status:")
            print(f"{dict(counts)}, {counts.total()} in all", flush=True)
            if not good:
                return False
            # The others do the same whatever the seed.
            seed, phases = seed + 1, "fuzzing"
    return True


async def _run(port: int, examples: int, seed: int, phases: str) -> bool:
    arguments = [
        "run", f"http://127.0.0.1:{port}/openapi.json", "--checks", ",".join(_CHECKS),
        "--phases", phases, "--max-examples", str(examples),
        "--seed", str(seed), "--continue-on-failure", "--suppress-health-check", "all",
        "--generation-database", "none", "--no-color", "--warnings", "off",
    ]  # fmt: skip
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "tests.http_fuzz.hooks", "PYTHONPATH": str(_ROOT),
    }  # fmt: skip
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    # It leaves a cache where it runs.
    with tempfile.TemporaryDirectory() as place:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, *arguments, cwd=place, env=environment
        )
        return await process.wait() == 0


async def _answered(system: System) -> Counter[str]:
    """Requests that the gateway counted, by status."""
    text = (await system.http.get("/metrics")).text
    counts = Counter[str]()
    for status, count in _COUNTED.findall(text):
        counts[status] += int(float(count))
    return counts


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.http_fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="At least so many.")
    parser.add_argument("--examples", type=int, default=200, help="Of each operation and seed.")
    parser.add_argument("--seed", type=int, default=0, help="The first.")
    given = parser.parse_args()
    start_logging("gateway", "console", "error")
    good = asyncio.run(fuzz(given.requests, given.examples, given.seed))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
