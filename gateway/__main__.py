"""`python -m gateway --llm HOST:PORT --port 8000`: serves OpenAI's interface over HTTP."""

import sys

from chiasm import memory, settings, telemetry
from chiasm.tracing.process import traced
from gateway.settings import GatewaySettings


def main() -> int:
    memory.tune()
    read = settings.read(GatewaySettings, program="python -m gateway")
    telemetry.start_logging("gateway", read.log_format, read.log_level)
    # After the settings are read: a wrong flag should not wait for these.
    with memory.lasting():
        import uvloop

        from chiasm.rpc.certificates import MtlsFileError
        from gateway.http.tls import TlsFileError
        from gateway.keys.file import KeysFileError
        from gateway.server import run

    telemetry.logger().info("settings", **settings.shown(read))
    try:
        with traced(read.tracing, "gateway"):
            return uvloop.run(run(read))
    except KeysFileError as fault:
        print(f"error: --keys-file: {fault}", file=sys.stderr)
        return 2
    except TlsFileError as fault:
        print(f"error: --tls-cert and --tls-key: {fault}", file=sys.stderr)
        return 2
    except MtlsFileError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    except OSError as error:
        reason = error.strerror or "unknown"
        print(f"error: cannot listen on {read.host}:{read.port}: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
