"""`python -m chiasm.rpc.probe HOST:PORT [SERVICE]`: asks a service whether it is well.

For containers without a shell. `HOST:PORT` is asked by gRPC's health service in plaintext (the
`--health-port` of a service) about SERVICE: nothing for readiness, `live` for liveness. An URL
(`http://HOST:PORT/ready`) is well when it answers with a status of 2xx; a certificate is not
checked on the machine's own addresses, for they seldom stand in it.

Exits with 0 if it is well, 1 with a line on standard error if not or after five seconds, and 2 for
arguments that cannot be.
"""

import http.client
import ipaddress
import re
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import SplitResult, urlsplit

LIMIT_SECONDS: Final = 5.0
_USAGE: Final = "python -m chiasm.rpc.probe HOST:PORT [SERVICE] | http(s)://HOST:PORT/PATH"
_ADDRESS: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    check = _check_of(words)
    if check is None:
        print(f"usage: {_USAGE}", file=sys.stderr)
        return 2
    fault = _within_limit(check)
    if fault:
        print(f"{words[0]}: {fault}", file=sys.stderr)
    return 1 if fault else 0


def _check_of(words: list[str]) -> Callable[[], str] | None:
    """What finds the fault, an empty text for none; None where the arguments make no sense."""
    if len(words) == 1 and words[0].startswith(("http://", "https://")):
        try:
            url = urlsplit(words[0])
            known = bool(url.hostname) and url.port != 0
        except ValueError:
            return None
        return (lambda: fault_of_url(url)) if known else None
    if len(words) in (1, 2) and _ADDRESS.fullmatch(words[0]):
        service = words[1] if len(words) == 2 else ""
        return lambda: fault_of_service(words[0], service)
    return None


def _within_limit(check: Callable[[], str]) -> str:
    """The fault that `check` finds; looking up a name, and a peer that drips, are bounded too."""
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(check()), daemon=True)
    asking.start()
    asking.join(LIMIT_SECONDS)
    return found[0] if found else f"no answer within {LIMIT_SECONDS:g} seconds"


def fault_of_service(address: str, service: str) -> str:
    """Why `service` at `address` is not SERVING; empty if it is."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    request = health_pb2.HealthCheckRequest(service=service)
    # A proxy is for what lies outside.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=LIMIT_SECONDS)
        except grpc.RpcError as error:
            return f"the health check failed with {error.code().name}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"it says {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def fault_of_url(url: SplitResult) -> str:
    """Why `url` does not answer with 2xx; empty if it does."""
    connection = _connection(url)
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    try:
        connection.request("GET", path, headers={"User-Agent": "chiasm-probe"})
        status = connection.getresponse().status
    except ssl.SSLError as error:
        return f"TLS failed: {error.reason or 'unknown'}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"no answer: {getattr(error, 'strerror', None) or type(error).__name__}"
    finally:
        connection.close()
    return "" if 200 <= status < 300 else f"it answers with status {status}"


def _connection(url: SplitResult) -> http.client.HTTPConnection:
    host = url.hostname or ""
    if url.scheme == "http":
        return http.client.HTTPConnection(host, url.port, timeout=LIMIT_SECONDS)
    context = ssl.create_default_context()
    if _is_loopback(host):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, url.port, timeout=LIMIT_SECONDS, context=context)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    raise SystemExit(main())
