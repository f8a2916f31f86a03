"""`python -m encoder_service --model DIRECTORY`."""

import sys

from chiasm import memory

memory.tune()  # before anything large is allocated

import uvloop  # noqa: E402

from chiasm import settings as settings_reader  # noqa: E402
from chiasm import telemetry  # noqa: E402
from chiasm.models.checkpoint import CheckpointError, open_checkpoint  # noqa: E402
from chiasm.rpc.certificates import MtlsFileError, certificates_of  # noqa: E402
from chiasm.tracing.process import traced  # noqa: E402
from encoder_service.settings import EncoderSettings  # noqa: E402


def main() -> int:
    """Reads the settings, then serves; returns the exit code."""
    settings = settings_reader.read(EncoderSettings, program="python -m encoder_service")
    telemetry.start_logging("encoder", settings.log_format, settings.log_level)
    try:
        open_checkpoint(settings.model)
        certificates_of(settings.mtls_files)
        # torch takes seconds to import: not for --help, nor for a mistyped flag or directory.
        with memory.lasting():
            from encoder_service import app

        with traced(settings.tracing, "encoder"):
            return uvloop.run(app.run(settings))
    except CheckpointError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    except MtlsFileError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while it loads; later `serve` takes the signal
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
