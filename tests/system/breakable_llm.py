"""`python -m tests.system.breakable_llm FLAGS`: the LLM service, whose model breaks on a signal.

From SIGUSR1 on every step raises, as when a device is lost; from SIGUSR2 on none ends, as when one
hangs. All else is the service's own.
"""

import signal
import sys
import threading
from typing import Any

from llm_service.__main__ import main
from llm_service.engine.runner import Runner

told: list[int] = []


def _break() -> None:
    computed = Runner.run

    def run(self: Runner, *step: Any) -> Any:
        if signal.SIGUSR1 in told:
            raise RuntimeError("the device at address 0x7f00 is lost")
        if signal.SIGUSR2 in told:
            threading.Event().wait()
        return computed(self, *step)

    Runner.run = run  # type: ignore[method-assign, assignment]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: told.append(number))


if __name__ == "__main__":
    _break()
    sys.exit(main())
