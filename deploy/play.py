"""Plays an overlay with podman on one machine, where there is no Kubernetes.

    python -m deploy.play up                  # the local overlay with the demo model
    python -m deploy.play scale encoder 3     # adds or removes pods of one part
    python -m deploy.play down
    python -m deploy.play show                # what podman is given, as YAML

`podman kube play` knows pods, but neither services, probes by gRPC nor volumes that are images.
`rewritten` makes of a rendering what podman can play: a pod for each replica; a network alias in
place of each service, so that its name has the address of every pod; probes as commands in the
container; the model from a folder of this machine. All else stays as the cluster would have it.
"""

import argparse
import copy
import math
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import yaml

Manifest = dict[str, Any]

_ROOT: Final = Path(__file__).parents[1]
_PROBE: Final = ("python", "-m", "chiasm.rpc.probe")
# Of a pod's spec, what says something to a cluster only.
_CLUSTER_ONLY: Final = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "topologySpreadConstraints",
    "nodeSelector",
    "tolerations",
)
_READY_SECONDS: Final = 300.0
# Of one part; `down` looks for so many.
_MOST_REPLICAS: Final = 64


class PlayError(Exception):
    """What stands in the way, for a person to read."""


@dataclass(frozen=True)
class PlayedPod:
    """One pod as podman plays it.

    Attributes:
        name: the pod's; its container is called `NAME-PART`.
        alias: name in the network that all replicas share.
        part: gateway, llm or encoder.
        grace_seconds: how long its process may take to stop.
        ready: command in the container that ends with 0 once it is ready.
        documents: its ConfigMaps and the pod.
    """

    name: str
    alias: str
    part: str
    grace_seconds: int
    ready: tuple[str, ...]
    documents: tuple[Manifest, ...]

    @property
    def container(self) -> str:
        return f"{self.name}-{self.part}"

    @property
    def yaml(self) -> str:
        return yaml.safe_dump_all(self.documents, sort_keys=False)


@dataclass(frozen=True)
class Place:
    """What of this machine the pods use.

    Attributes:
        model: folder of the checkpoint, mounted read-only.
        port: port of this machine that leads to the gateway.
        limits: whether to keep the limits of CPU and memory.
        replicas: pods of each part, where not as the manifests say.
    """

    model: Path
    port: int = 8000
    limits: bool = True
    replicas: tuple[tuple[str, int], ...] = ()


def rewritten(manifests: Iterable[Manifest], place: Place) -> tuple[PlayedPod, ...]:
    """The pods of a rendering, callees before callers. Pure; raises PlayError.

    Services, accounts, budgets and namespaces are left out: podman has none.
    """
    documents = list(manifests)
    configs = {one["metadata"]["name"]: one for one in documents if one["kind"] == "ConfigMap"}
    services = {one["metadata"]["name"] for one in documents if one["kind"] == "Service"}
    deployments = [one for one in documents if one["kind"] == "Deployment"]
    if not deployments:
        raise PlayError("nothing to play: no Deployment was rendered")
    order = {"encoder": 0, "llm": 1, "gateway": 2}
    deployments.sort(key=lambda one: order.get(_part(one), 3))
    return tuple(
        _pod(deployment, number, configs, services, place)
        for deployment in deployments
        for number in range(_replicas(deployment, place))
    )


def _pod(
    deployment: Manifest,
    number: int,
    configs: dict[str, Manifest],
    services: set[str],
    place: Place,
) -> PlayedPod:
    name = deployment["metadata"]["name"]
    if name not in services:
        raise PlayError(f"no Service is called {name}, so nobody would find its pods")
    spec = copy.deepcopy(deployment["spec"]["template"]["spec"])
    (container,) = spec["containers"]
    ready = _command(container, container["readinessProbe"])
    needed = [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
    _localise(spec, container, place)
    _name_volumes(spec, container, f"{name}-{number}")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{number}",
            "labels": deployment["spec"]["template"]["metadata"]["labels"],
        },
        "spec": spec,
    }
    return PlayedPod(
        name=f"{name}-{number}",
        alias=name,
        part=_part(deployment),
        grace_seconds=spec["terminationGracePeriodSeconds"],
        ready=ready,
        documents=(*(_without_namespace(configs[each]) for each in needed), pod),
    )


def _localise(spec: Manifest, container: Manifest, place: Place) -> None:
    """Changes a pod's spec in place into one that podman plays."""
    for field in _CLUSTER_ONLY:
        spec.pop(field, None)
    spec["securityContext"].pop("fsGroup", None)
    spec["securityContext"].pop("fsGroupChangePolicy", None)
    # Podman has no hook that sleeps; it needs none, for its name server forgets a stopped pod.
    container.pop("lifecycle", None)
    live = _command(container, container["livenessProbe"])
    container["livenessProbe"] = container["livenessProbe"] | {"exec": {"command": list(live)}}
    for kind in ("grpc", "httpGet"):
        container["livenessProbe"].pop(kind, None)
    # `up` waits for readiness by itself; podman of these versions knows no such probes.
    container.pop("readinessProbe")
    container.pop("startupProbe")
    container["env"] = [_resolved(container, one) for one in container.get("env", [])]
    if not place.limits:
        container.pop("resources")
    # Podman would publish every declared port on this machine.
    http = [one | {"hostPort": place.port} for one in container["ports"] if one["name"] == "http"]
    container["ports"] = http
    _mount_folder(spec, container, place.model)


def _mount_folder(spec: Manifest, container: Manifest, model: Path) -> None:
    for volume in spec["volumes"]:
        if volume.keys() & {"image", "persistentVolumeClaim"}:
            volume.pop("image", None)
            volume.pop("persistentVolumeClaim", None)
            volume["hostPath"] = {"path": str(model), "type": "Directory"}
            for mount in container["volumeMounts"]:
                if mount["name"] == volume["name"]:
                    mount.pop("subPath", None)
        elif "emptyDir" not in volume:
            raise PlayError(f"the volume {volume['name']} cannot be played: neither model nor /tmp")


def _name_volumes(spec: Manifest, container: Manifest, pod: str) -> None:
    """Names volumes apart: podman 4 makes an emptyDir a volume that all pods share by its name."""
    for one in (*spec["volumes"], *container["volumeMounts"]):
        one["name"] = f"{pod}-{one['name']}"


def _command(container: Manifest, probe: Manifest) -> tuple[str, ...]:
    """The probe as a command in the container."""
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    if "grpc" in probe:
        name = probe["grpc"].get("service")
        return (*_PROBE, f"127.0.0.1:{probe['grpc']['port']}", *([name] if name else []))
    asked = probe["httpGet"]
    port = ports.get(asked["port"], asked["port"])
    return (*_PROBE, f"http://127.0.0.1:{port}{asked['path']}")


def _resolved(container: Manifest, variable: Manifest) -> Manifest:
    """The variable with its value, which podman may not know once the limits are gone."""
    if "valueFrom" not in variable:
        return variable
    field = variable["valueFrom"].get("resourceFieldRef", {})
    if field.get("resource") != "limits.cpu":
        raise PlayError(f"{variable['name']} comes from something that is not the CPU limit")
    return {
        "name": variable["name"],
        "value": str(_cores(container["resources"]["limits"]["cpu"])),
    }


def _cores(quantity: object) -> int:
    """A CPU limit in whole cores, rounded up as the kubelet does."""
    text = str(quantity)
    scale = Decimal("0.001") if text.endswith("m") else Decimal(1)
    return math.ceil(Decimal(text.removesuffix("m")) * scale)


def _part(deployment: Manifest) -> str:
    return str(deployment["metadata"]["labels"]["app.kubernetes.io/component"])


def _replicas(deployment: Manifest, place: Place) -> int:
    count = dict(place.replicas).get(_part(deployment), deployment["spec"].get("replicas", 1))
    return int(count)


def _without_namespace(one: Manifest) -> Manifest:
    metadata = {name: value for name, value in one["metadata"].items() if name != "namespace"}
    return one | {"metadata": metadata}


# --- effects ---------------------------------------------------------------------------------


class Podman:
    """The podman of this machine, called as `command`."""

    def __init__(self, command: Sequence[str], network: str) -> None:
        self._command = tuple(command)
        self._network = network

    def start(self, pod: PlayedPod) -> None:
        """Raises PlayError with what podman says."""
        if self._call("network", "exists", self._network, check=False).returncode != 0:
            self._call("network", "create", self._network)
        place = f"{self._network}:alias={pod.alias}"
        try:
            self._call("kube", "play", "--network", place, "-", given=pod.yaml)
        except PlayError:
            # What was made before it failed would be in the way of the next try.
            self._call("pod", "rm", "--force", pod.name, check=False)
            raise

    def wait(self, pod: PlayedPod, seconds: float = _READY_SECONDS) -> None:
        """Until it is ready. Raises PlayError if it is not within `seconds`."""
        end = time.monotonic() + seconds
        while self._call("exec", pod.container, *pod.ready, check=False).returncode != 0:
            if time.monotonic() > end:
                raise PlayError(f"{pod.name} is not ready; see: podman logs {pod.container}")
            time.sleep(0.5)

    def stop(self, pod: PlayedPod) -> None:
        """Lets it drain, then removes it."""
        # The container first: with the whole pod its network would go while it still drains.
        self._call("stop", "--time", str(pod.grace_seconds), pod.container, check=False)
        self._call("pod", "rm", "--force", pod.name)

    def running(self) -> set[str]:
        """Names of all pods that there are."""
        return set(self._call("pod", "ps", "--format", "{{.Name}}").stdout.split())

    def remove_network(self) -> None:
        self._call("network", "rm", self._network, check=False)

    def _call(
        self, *words: str, given: str | None = None, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        try:
            done = subprocess.run(  # noqa: S603 - the operator's own podman
                [*self._command, *words], input=given, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise PlayError(f"there is no {self._command[0]} here (--podman)") from None
        if check and done.returncode != 0:
            raise PlayError(f"podman {words[0]} {words[1]}: {done.stderr.strip()}")
        return done


def _up(podman: Podman, pods: Sequence[PlayedPod], place: Place) -> None:
    if not place.model.is_dir():
        raise PlayError(f"--model: no folder {place.model}")
    there = podman.running()
    if not any(pod.part == "gateway" and pod.name in there for pod in pods):
        _check_free(place.port)
    for pod in pods:
        if pod.name not in there:
            podman.start(pod)
    for pod in pods:
        podman.wait(pod)
        print(f"{pod.name} is ready", flush=True)
    print(f"http://127.0.0.1:{place.port}")


def _check_free(port: int) -> None:
    """Raises PlayError, before anything is started, if the port is not to be had."""
    try:
        with socket.create_server(("0.0.0.0", port)):
            pass
    except (OSError, OverflowError):
        raise PlayError(f"--port: {port} is taken or no port") from None


def _scale(podman: Podman, overlay: Path, place: Place, part: str, count: int) -> None:
    if not 0 <= count <= _MOST_REPLICAS:
        raise PlayError(f"count is from 0 to {_MOST_REPLICAS}")
    most = ((part, _MOST_REPLICAS),)
    found = rewritten(render(overlay), Place(place.model, place.port, place.limits, most))
    pods, there = [pod for pod in found if pod.part == part], podman.running()
    for pod in pods[:count]:
        if pod.name not in there:
            podman.start(pod)
            podman.wait(pod)
            print(f"{pod.name} is ready", flush=True)
    for pod in reversed(pods[count:]):
        if pod.name in there:
            podman.stop(pod)
            print(f"{pod.name} is gone", flush=True)


def _down(podman: Podman, overlay: Path, place: Place) -> None:
    many = tuple((part, _MOST_REPLICAS) for part in ("gateway", "llm", "encoder"))
    there = podman.running()
    # Callers before callees, so that no answer under way loses its encoder.
    for pod in reversed(rewritten(render(overlay), Place(place.model, replicas=many))):
        if pod.name in there:
            podman.stop(pod)
    podman.remove_network()


def render(overlay: Path) -> list[Manifest]:
    """What kubectl makes of an overlay. Raises PlayError."""
    try:
        done = subprocess.run(  # noqa: S603
            ["kubectl", "kustomize", str(overlay)],  # noqa: S607 - as the operator has it
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise PlayError("kubectl renders the manifests, and there is none here") from None
    if done.returncode != 0:
        raise PlayError(done.stderr.strip())
    return list(yaml.safe_load_all(done.stdout))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.play", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--overlay", type=Path, default=_ROOT / "deploy/overlays/local")
    parser.add_argument("--model", type=Path, default=_ROOT / "demo_model/checkpoint")
    parser.add_argument("--port", type=int, default=8000, help="Of this machine, to the gateway.")
    parser.add_argument("--network", default="chiasm")
    parser.add_argument("--podman", default="podman", help="How podman is called, with its flags.")
    parser.add_argument(
        "--no-limits", action="store_true", help="Where control groups cannot be written."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("up", "down", "show"):
        commands.add_parser(name)
    scale = commands.add_parser("scale")
    scale.add_argument("part", choices=("gateway", "llm", "encoder"))
    scale.add_argument("count", type=int)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Does one command; returns the exit code."""
    given = _arguments(words)
    place = Place(given.model.resolve(), given.port, not given.no_limits)
    podman = Podman(shlex.split(given.podman), given.network)
    try:
        if given.command == "down":
            _down(podman, given.overlay, place)
        elif given.command == "scale":
            _scale(podman, given.overlay, place, given.part, given.count)
        else:
            pods = rewritten(render(given.overlay), place)
            if given.command == "up":
                _up(podman, pods, place)
            else:
                print("---\n".join(pod.yaml for pod in pods), end="")
    except PlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
