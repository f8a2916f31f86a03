import socket
from pathlib import Path

import pytest

from chiasm.cli.plan import PlanError, Wanted, planned, reserved, shares

WANTED = Wanted(Path("model"), "name")


def flag(flags: tuple[str, ...], name: str) -> str:
    return flags[flags.index(name) + 1]


@pytest.mark.parametrize(
    ("cores", "encoders", "expected"),
    [
        (1, 1, (1, 1)),
        (2, 1, (1, 1)),
        (8, 1, (4, 4)),
        (8, 2, (4, 2)),
        (8, 9, (4, 1)),
        (8, 0, (8, 1)),
    ],
)
def test_the_cores_are_split_between_the_two_sides(
    cores: int, encoders: int, expected: tuple[int, int]
) -> None:
    assert shares(cores, encoders) == expected


def test_the_gateway_stops_first_and_the_encoders_last() -> None:
    commands = planned(WANTED, 1, 2, [3, 4], cores=4).commands
    assert [(c.module, c.rank) for c in commands] == [
        ("gateway", 0),
        ("llm_service", 1),
        ("encoder_service", 2),
        ("encoder_service", 2),
    ]
    assert [c.name for c in commands] == ["gateway", "LLM service", "encoder 1", "encoder 2"]


def test_all_parts_get_one_model_under_one_name_and_type() -> None:
    wanted = Wanted(Path("model"), "name", dtype="bfloat16")
    _, llm, encoder = planned(wanted, 1, 2, [3], cores=4).commands
    for command in (llm, encoder):
        assert flag(command.flags, "--model-id") == "name"
        assert flag(command.flags, "--dtype") == "bfloat16"
    assert flag(llm.flags, "--encoders") == encoder.target == "127.0.0.1:3"
    assert flag(encoder.flags, "--port") == "3"


@pytest.mark.parametrize("vision", ["local", "none"])
def test_without_remote_vision_no_encoder_is_planned(vision: str) -> None:
    wanted = Wanted(Path("model"), "name", vision=vision)  # type: ignore[arg-type]
    with reserved(wanted) as plan:
        assert [command.module for command in plan.commands] == ["gateway", "llm_service"]
        assert flag(plan.commands[1].flags, "--vision") == vision
        assert plan.encoders == ()


def test_a_reserved_port_is_a_childs_to_listen_on_and_no_one_elses() -> None:
    with reserved(WANTED) as plan:
        ports = [int(command.target.rpartition(":")[2]) for command in plan.commands]
        assert len(set(ports)) == 3
        for port in ports:
            with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
                stranger.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)) as child:
                assert child.getsockname()[1] == port


@pytest.mark.parametrize("name", ["port", "llm_port", "encoder_port"])
def test_a_taken_port_is_refused_with_its_flag(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = Wanted(Path("model"), "name", **{name: port})
        words = f"port {port} on 127.0.0.1 is taken; choose another with --{name.replace('_', '-')}"
        with pytest.raises(PlanError, match=words), reserved(wanted):
            pass


def test_encoders_follow_the_first_ones_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        first = free.getsockname()[1]
    with reserved(Wanted(Path("model"), "name", encoder_port=first, encoders=1)) as plan:
        assert plan.encoders == (f"127.0.0.1:{first}",)
    with (
        pytest.raises(PlanError, match="no room for all encoders"),
        reserved(Wanted(Path("model"), "name", encoder_port=65535, encoders=2)),
    ):
        pass


def test_a_gateway_for_all_addresses_is_reached_over_loopback() -> None:
    plan = planned(Wanted(Path("model"), "name", host="0.0.0.0"), 80, 2, [3], cores=1)
    assert plan.url == "http://127.0.0.1:80"
    assert flag(plan.commands[0].flags, "--host") == "0.0.0.0"
