"""The clients, the command that tests each, and what its report says."""

import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
SUITE_SECONDS = 600


@dataclass(frozen=True)
class Suite:
    """One client: its name, the package that is it, and the program that tests it."""

    name: str
    package: str
    command: tuple[str, ...]
    directory: Path


@dataclass(frozen=True)
class Outcome:
    """One ability of a client. `fault` is empty where it passed."""

    ability: str
    seconds: float
    fault: str = ""


def _python(environment: str, name: str, package: str, file: str) -> Suite:
    program = str(BUILD / environment / "bin" / "python")
    command = (program, "-m", "pytest", "-c", "pytest.ini", "--junitxml={report}", file)
    return Suite(name, package, command, HERE / "python")


def _node(name: str, package: str, file: str) -> Suite:
    # Scripts lie beside their packages there, as Node looks for these around the script.
    home = BUILD / "node"
    reports = ("--test-reporter=junit", "--test-reporter-destination={report}")
    command = (str(home / "node_modules/.bin/node"), "--test", *reports, file)
    return Suite(name, package, command, home)


SUITES = (
    _python("newest", "openai-python", "openai", "openai_client.py"),
    # litellm and instructor do not go with the newest openai yet.
    _python("older", "openai-python-2", "openai", "openai_client.py"),
    _python("newest", "langchain-openai", "langchain-openai", "langchain_client.py"),
    _python("newest", "pydantic-ai", "pydantic-ai-slim", "pydantic_ai_client.py"),
    _python("older", "litellm", "litellm", "litellm_client.py"),
    _python("older", "instructor", "instructor", "instructor_client.py"),
    _node("openai-node", "openai", "openai_client.mjs"),
    _node("ai-sdk", "ai", "ai_sdk_client.mjs"),
)


def run(suite: Suite, environment: Mapping[str, str]) -> tuple[list[Outcome], str]:
    """The outcomes, and what the program printed. A suite that told nothing has failed."""
    report = BUILD / f"{suite.name}.xml"
    report.unlink(missing_ok=True)
    done = subprocess.run(
        [word.format(report=report) for word in suite.command],
        cwd=suite.directory,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_SECONDS,
        check=False,
    )
    outcomes = list(_outcomes(report)) if report.exists() else []
    failed = any(one.fault for one in outcomes)
    if not outcomes or (done.returncode != 0) != failed:
        fault = f"the program ended with {done.returncode} and told {len(outcomes)} outcomes"
        outcomes.append(Outcome("runs", 0, fault))
    return outcomes, done.stdout


def _outcomes(report: Path) -> Iterator[Outcome]:
    # A report of our own tests, no text of a stranger's.
    for case in ElementTree.parse(report).iter("testcase"):
        told = [case.find(kind) for kind in ("failure", "error", "skipped")]
        fault = next((one for one in told if one is not None), None)
        ability = (case.get("name") or "").removeprefix("test_").replace("_", " ")
        message = "" if fault is None else _first_line(fault)
        yield Outcome(ability, float(case.get("time") or 0), message)


def _first_line(fault: ElementTree.Element) -> str:
    told = fault.get("message") or fault.text or "failed"
    return next((line.strip() for line in told.splitlines() if line.strip()), "failed")
