"""`python -m llm_service --model DIR`: serves the language half of a checkpoint."""

import sys

from chiasm import memory, settings, telemetry
from chiasm.rpc.certificates import MtlsFileError, certificates_of
from chiasm.tracing.process import traced
from llm_service.settings import LlmSettings


def main() -> int:
    memory.tune()
    read = settings.read(LlmSettings, program="python -m llm_service")
    telemetry.start_logging("llm", read.log_format, read.log_level)
    try:
        certificates_of(read.mtls_files)
    except MtlsFileError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    # After the settings are read: torch and transformers take seconds to load, a wrong flag none.
    with memory.lasting():
        import uvloop

        from chiasm.models.checkpoint import CheckpointError
        from llm_service.app import run

    try:
        with traced(read.tracing, "llm"):
            return uvloop.run(run(read))
    except CheckpointError as error:
        print(f"error: {error.message}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
