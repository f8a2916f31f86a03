"""The whole system with the demo model, which logs as JSON."""

from collections.abc import Iterator

import pytest

from tests.system.processes import DEMO_MODEL
from tests.system.three import Three, three

JSON = ("--log-format", "json")


@pytest.fixture(scope="session")
def logged() -> Iterator[Three]:
    with three(DEMO_MODEL, encoder_flags=JSON, llm_flags=JSON, gateway_flags=JSON) as system:
        yield system
