"""What podman is given in place of the manifests. Whether it plays: test_play_containers.py."""

import socket
from pathlib import Path

import pytest
import yaml

from deploy.play import Place, PlayedPod, PlayError, main, rewritten
from tests.deploy.manifests import Cluster, container_of, needs_kubectl, overlay, pod_of

pytestmark = needs_kubectl

MODEL = Path("/somewhere/checkpoint")


@pytest.fixture
def cluster() -> Cluster:
    return overlay("local").changed()


def _played(cluster: Cluster, **more: object) -> dict[str, PlayedPod]:
    place = Place(MODEL, **more)  # type: ignore[arg-type]
    return {pod.name: pod for pod in rewritten(cluster.manifests, place)}


def _pod(played: PlayedPod) -> dict[str, object]:
    (pod,) = [one for one in played.documents if one["kind"] == "Pod"]
    return pod


def _container(played: PlayedPod) -> dict[str, object]:
    return container_of({"spec": {"template": _pod(played)}})


def test_a_pod_for_each_replica_callees_first(cluster: Cluster) -> None:
    assert list(_played(cluster)) == [
        "chiasm-encoder-0",
        "chiasm-encoder-1",
        "chiasm-llm-0",
        "chiasm-gateway-0",
    ]
    more = _played(cluster, replicas=(("encoder", 4),))
    assert sum(name.startswith("chiasm-encoder") for name in more) == 4


def test_replicas_share_the_name_that_callers_look_up(cluster: Cluster) -> None:
    played = _played(cluster)
    assert {pod.alias for pod in played.values() if pod.part == "encoder"} == {"chiasm-encoder"}
    (config,) = [one for one in played["chiasm-llm-0"].documents if one["kind"] == "ConfigMap"]
    assert config["data"]["CHIASM_LLM_ENCODERS"] == "dns:///chiasm-encoder:50061"


def test_probes_become_commands_in_the_container(cluster: Cluster) -> None:
    played = _played(cluster)
    probe = _container(played["chiasm-llm-0"])["livenessProbe"]
    assert isinstance(probe, dict)
    command = ["python", "-m", "chiasm.rpc.probe", "127.0.0.1:50052", "live"]
    assert probe["exec"] == {"command": command}
    assert not probe.keys() & {"grpc", "httpGet"}
    assert played["chiasm-llm-0"].ready == tuple(command[:-1])
    assert played["chiasm-gateway-0"].ready[-1] == "http://127.0.0.1:8000/ready"
    for pod in played.values():
        assert not _container(pod).keys() & {"readinessProbe", "startupProbe", "lifecycle"}


def test_the_model_is_a_folder_and_read_only(cluster: Cluster) -> None:
    pod = _pod(_played(cluster)["chiasm-encoder-1"])
    volumes = {one["name"]: one for one in pod_of({"spec": {"template": pod}})["volumes"]}
    folder = volumes["chiasm-encoder-1-model"]["hostPath"]
    assert folder == {"path": str(MODEL), "type": "Directory"}
    mounts = {one["name"]: one for one in container_of({"spec": {"template": pod}})["volumeMounts"]}
    assert mounts["chiasm-encoder-1-model"] == {
        "name": "chiasm-encoder-1-model",
        "mountPath": "/models/model",
        "readOnly": True,
    }


def test_no_two_pods_share_a_volume(cluster: Cluster) -> None:
    names = [
        one["name"]
        for pod in _played(cluster).values()
        for one in pod_of({"spec": {"template": _pod(pod)}})["volumes"]
    ]
    assert len(set(names)) == len(names)


def test_only_the_gateway_is_reached_from_outside(cluster: Cluster) -> None:
    played = _played(cluster, port=18000)
    ports = {name: _container(pod)["ports"] for name, pod in played.items()}
    assert [one["hostPort"] for one in ports.pop("chiasm-gateway-0")] == [18000]  # type: ignore[attr-defined]
    assert not any(ports.values())


def test_pods_stay_as_hardened_as_they_were(cluster: Cluster) -> None:
    for pod in _played(cluster).values():
        original = cluster.deployment(pod.part)
        assert _container(pod)["securityContext"] == container_of(original)["securityContext"]
        kept = pod_of({"spec": {"template": _pod(pod)}})["securityContext"]
        whole = pod_of(original)["securityContext"]
        assert {name: whole[name] for name in whole if not name.startswith("fsGroup")} == kept


def test_threads_are_those_of_the_limit_even_without_limits(cluster: Cluster) -> None:
    container_of(cluster.deployment("encoder"))["resources"]["limits"]["cpu"] = "2500m"
    container = _container(_played(cluster, limits=False)["chiasm-encoder-0"])
    assert "resources" not in container
    env = {one["name"]: one.get("value") for one in container["env"]}  # type: ignore[attr-defined]
    assert env["CHIASM_ENCODER_TORCH_THREADS"] == "3"


def test_nothing_is_said_of_a_cluster(cluster: Cluster) -> None:
    for pod in _played(cluster).values():
        kinds = [one["kind"] for one in yaml.safe_load_all(pod.yaml)]
        assert kinds == ["ConfigMap", "Pod"]
        assert "namespace" not in pod.yaml
        assert not _pod(pod)["spec"].keys() & {"serviceAccountName", "topologySpreadConstraints"}  # type: ignore[attr-defined]


def test_the_manifests_are_not_changed(cluster: Cluster) -> None:
    _played(cluster)
    assert cluster.manifests == overlay("local").manifests


def test_what_cannot_be_played_is_refused(cluster: Cluster) -> None:
    with pytest.raises(PlayError, match="the volume mtls cannot be played"):
        _played(overlay("prod"))
    with pytest.raises(PlayError, match="nothing to play"):
        rewritten([], Place(MODEL))
    cluster.named("Service", "chiasm-llm")["metadata"]["name"] = "another"
    with pytest.raises(PlayError, match="no Service is called chiasm-llm"):
        _played(cluster)


def test_what_is_wrong_is_told_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--overlay", str(tmp_path), "show"]) == 1
    assert "kustomization" in capsys.readouterr().err
    # A podman that has no pods and would do whatever it is told.
    podman = ["--podman", "true"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([*podman, "--port", str(taken.getsockname()[1]), "up"]) == 1
    assert "is taken" in capsys.readouterr().err
    assert main([*podman, "--model", str(tmp_path / "absent"), "up"]) == 1
    assert "no folder" in capsys.readouterr().err
    assert main(["--podman", str(tmp_path / "podman"), "up"]) == 1
    assert "there is no" in capsys.readouterr().err
    assert main([*podman, "scale", "encoder", "65"]) == 1
    assert "from 0 to 64" in capsys.readouterr().err
