"""`python -m tests.system.breakable_llm FLAGS`: the LLM service, whose model breaks on SIGUSR1.

From then on every step raises, as when a device is lost. All else is the service's own.
"""

import signal
import sys
from typing import Any

from llm_service.__main__ import main
from llm_service.engine.runner import Runner

broken: list[int] = []


def _break() -> None:
    computed = Runner.run

    def run(self: Runner, *step: Any) -> Any:
        if broken:
            raise RuntimeError("the device at address 0x7f00 is lost")
        return computed(self, *step)

    Runner.run = run  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGUSR1, lambda number, _: broken.append(number))


if __name__ == "__main__":
    _break()
    sys.exit(main())
