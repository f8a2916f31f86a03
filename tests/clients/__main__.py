"""`python -m tests.clients [NAME ...]`: one line for each client and ability; 1 if one failed."""

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.clients.facts import gathered
from tests.clients.load import load_told
from tests.clients.suites import BUILD, HERE, SUITES, Suite, run
from tests.system.processes import Process

READY_SECONDS = 120
STOP_SECONDS = 30


@contextmanager
def system() -> Iterator[tuple[str, str]]:
    """A `chiasm up` of the demo model: the URL of its interface, the address of its LLM service."""
    with Process("-m", "chiasm.cli", "up", "--port", "0") as process:
        deadline = time.monotonic() + READY_SECONDS
        while "With curl" not in process.out():  # stands after the addresses
            if not process.alive or time.monotonic() > deadline:
                sys.exit(f"chiasm up is not ready:\n{process.out()}{process.log()}")
            time.sleep(0.1)
        lines = process.out().splitlines()
        yield _address(lines, "HTTP"), _address(lines, "LLM ")
        process.send_signal(signal.SIGINT)
        process.wait(STOP_SECONDS)
        if "Traceback" in process.log():
            sys.exit(f"a part of the system raised:\n{process.log()[-8000:]}")


def _address(lines: list[str], name: str) -> str:
    return next(line.split()[1] for line in lines if line.startswith(f"{name}  "))


def _environment(url: str, llm: str, load_url: str) -> Mapping[str, str]:
    path = BUILD / "facts.json"
    path.write_text(gathered(url, load_url, llm).to_json(), encoding="utf-8")
    # A proxy of the machine is none of these clients' business, nor are their makers' servers.
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    return {"CHIASM_CLIENTS_FACTS": str(path), "NO_PROXY": "127.0.0.1", **offline}


def _tell(suite: Suite, environment: Mapping[str, str]) -> int:
    """Runs a suite and prints its lines; the number of failures."""
    outcomes, printed = run(suite, environment)
    for one in outcomes:
        verdict = f"FAIL  {one.fault[:200]}" if one.fault else f"pass  {one.seconds:.2f} s"
        print(f"{suite.name:<18}{one.ability:<72}{verdict}", flush=True)
    failures = sum(bool(one.fault) for one in outcomes)
    if failures:
        print(printed, file=sys.stderr, flush=True)
    return failures


def _named(names: list[str]) -> list[Suite]:
    known = {suite.name: suite for suite in SUITES}
    unknown = set(names) - set(known)
    if unknown:
        sys.exit(f"no such client: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return [known[name] for name in names] or list(SUITES)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients; all if left out")
    suites = _named(parser.parse_args().names)
    for script in (HERE / "node").glob("*.mjs"):
        shutil.copy(script, BUILD / "node")
    with system() as (url, llm), load_told(llm) as load_url:
        environment = _environment(url, llm, load_url)
        failures = sum([_tell(suite, environment) for suite in suites])
    print(f"{failures} failed" if failures else "all passed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
