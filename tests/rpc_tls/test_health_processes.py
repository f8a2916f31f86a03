"""The health port of the two services while they load, serve and drain."""

import time
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.cli.plan import reserved_port
from tests.system.processes import DEMO_MODEL, Process

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

UP, DOWN = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = {"encoder_service": "chiasm.v1.EncoderService", "llm_service": "chiasm.v1.LlmService"}


def command(part: str, port: int) -> list[str]:
    vision = ["--vision", "none"] if part == "llm_service" else []
    return [
        "-m", part, "--model", str(DEMO_MODEL), "--port", "0", "--torch-threads", "1", *vision,
        "--health-port", str(port), "--drain-seconds", "1.5",
    ]  # fmt: skip


class Prober:
    """Asks as a kubelet does, every 50 ms with a limit of one second."""

    def __init__(self, channel: grpc.Channel, part: str) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._names = ("", NAMES[part], "live")
        # How long answers took, from the first on.
        self.took: list[float] = []

    def states(self) -> tuple[int, ...] | None:
        """None where nobody listens yet, or any more."""
        began = time.monotonic()
        try:
            found = tuple(
                self._stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status
                for name in self._names
            )
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return None
        self.took.append(time.monotonic() - began)
        return found

    def until(self, wanted: Callable[[tuple[int, ...] | None], bool], seconds: float) -> list[
        tuple[int, ...] | None
    ]:  # fmt: skip
        """What was answered until `wanted`, the last included."""
        seen, end = [self.states()], time.monotonic() + seconds
        while not wanted(seen[-1]):
            assert time.monotonic() < end, seen[-1]
            time.sleep(0.05)
            seen.append(self.states())
        return seen


@pytest.mark.parametrize("part", NAMES)
def test_probes_are_answered_while_it_loads_and_while_it_drains(part: str) -> None:
    options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
    with (
        reserved_port() as port,
        Process(*command(part, port)) as process,
        grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel,
    ):
        prober = Prober(channel, part)
        loading = prober.until(lambda one: one == (UP, UP, UP), 90)
        answered = [one for one in loading if one is not None]
        assert answered[0] == (DOWN, DOWN, UP)
        # The names are asked one by one: it may have become ready between two.
        assert set(answered[:-1]) <= {(DOWN, DOWN, UP), (DOWN, UP, UP)}
        assert None not in loading[loading.index(answered[0]) :]
        process.terminate()
        draining = prober.until(lambda one: one is None, 30)
        between = {(UP, DOWN, UP), (UP, UP, UP), (DOWN, DOWN, UP)}
        assert {one for one in draining if one is not None} <= between
        assert draining.count((DOWN, DOWN, UP)) > 10
        assert process.wait() == 0
    print(f"{part}: {len(answered)} answers while loading, slowest {max(prober.took):.3f} s")
    assert max(prober.took) < 2
