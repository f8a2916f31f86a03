"""One system a module: starting one takes longer than most rules do to check."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.gateway_system import MIB, System, whole_system
from tests.scripted_llm import Script


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_system() -> AsyncIterator[System]:
    async with whole_system(max_body_bytes=4 * MIB, max_image_bytes=MIB) as running:
        yield running


@pytest.fixture
def system(running_system: System) -> System:
    """A gateway that takes bodies of up to 4 MiB, before an LLM service with the plain script."""
    running_system.llm.script = Script()
    running_system.llm.received.clear()
    return running_system
