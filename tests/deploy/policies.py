"""What must hold of any rendering: each policy yields a sentence for everything that is wrong."""

import re
import tomllib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, Final

from starlette.routing import Route

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.deploy.manifests import (
    PARTS,
    ROOT,
    Cluster,
    Manifest,
    container_of,
    includes,
    label,
    part_of,
    pod_of,
    quantity,
)
from tests.deploy.pod_settings import WrongVariablesError, secret_folders, settings_of, variables

Policy = Callable[[Cluster], Iterator[str]]

VERSION: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# Made by the operator; their components say how.
_SECRETS_FROM_OUTSIDE: Final = frozenset({"chiasm-gateway-keys", "chiasm-reference-store"})
_CLUSTER_WIDE: Final = frozenset({"Namespace"})
# What a process needs beside what its settings bound: interpreter, torch, buffers of gRPC.
_RUNTIME_BYTES: Final = {
    "gateway": Fraction(256 << 20),
    "llm": Fraction(768 << 20),
    "encoder": Fraction(768 << 20),
}
_DECODER_BYTES: Final = 600_000_000


def one_namespace(cluster: Cluster) -> Iterator[str]:
    """All of it is in one namespace."""
    found = {
        one["metadata"].get("namespace")
        for one in cluster.manifests
        if one["kind"] not in _CLUSTER_WIDE
    }
    if len(found) != 1:
        yield f"several namespaces: {found}"


def selectors_match(cluster: Cluster) -> Iterator[str]:
    """Who selects pods finds those of one part, and a deployment its own."""
    for deployment in cluster.of("Deployment"):
        own = deployment["spec"]["template"]["metadata"]["labels"]
        if not includes(own, deployment["spec"]["selector"]):
            yield f"{label(deployment)} does not select its own pods"
        for spread in pod_of(deployment)["topologySpreadConstraints"]:
            if not includes(own, spread["labelSelector"]):
                yield f"{label(deployment)} spreads pods that are not its own"
    for one in cluster.manifests:
        selector = _pod_selector(one)
        if selector is None:
            continue
        found = [part_of(each) for each in _selected(cluster, selector)]
        wanted = list(PARTS) if _is_for_all(one) else [part_of(one)] if _has_part(one) else None
        if wanted is None:
            wanted = [one["metadata"]["name"].removeprefix("chiasm-")]
        if sorted(found) != sorted(wanted):
            yield f"{label(one)} selects {found}, not {wanted}"


def services_reach_ports(cluster: Cluster) -> Iterator[str]:
    """A service's port is one that its pods declare, under the same number."""
    for service in cluster.of("Service"):
        ports = _ports(cluster.deployment(part_of(service)))
        for port in service["spec"]["ports"]:
            if ports.get(port["targetPort"]) != port["port"]:
                yield f"{label(service)}: port {port['port']} is no {port['targetPort']} there"


def resources_are_bounded(cluster: Cluster) -> Iterator[str]:
    """Requests and limits of both kinds, limits not below requests."""
    for deployment in cluster.of("Deployment"):
        resources = container_of(deployment)["resources"]
        for name in ("cpu", "memory"):
            if not all(name in resources.get(kind, {}) for kind in ("requests", "limits")):
                yield f"{label(deployment)} has no request or no limit of {name}"
            elif quantity(resources["limits"][name]) < quantity(resources["requests"][name]):
                yield f"{label(deployment)}: the limit of {name} is below the request"


def memory_holds_what_settings_allow(cluster: Cluster) -> Iterator[str]:
    """The memory limit has room for every bound of bytes that the settings state."""
    for deployment in cluster.of("Deployment"):
        try:
            settings = settings_of(cluster, deployment)
        except WrongVariablesError:
            continue  # said by `variables_are_settings`
        part = part_of(deployment)
        needed = _RUNTIME_BYTES[part] + _held_bytes(part, settings)
        limit = quantity(container_of(deployment)["resources"]["limits"]["memory"])
        if limit < needed:
            yield f"{label(deployment)}: memory {int(limit)} is less than {int(needed)}"


def volumes_exist(cluster: Cluster) -> Iterator[str]:
    """What is mounted is a volume, what is a volume is mounted, and its source is there."""
    for deployment in cluster.of("Deployment"):
        volumes = {one["name"]: one for one in pod_of(deployment)["volumes"]}
        mounted = {one["name"] for one in container_of(deployment)["volumeMounts"]}
        for name in mounted ^ set(volumes):
            yield f"{label(deployment)}: {name} is a mount or a volume, not both"
        for volume in volumes.values():
            yield from _source_faults(cluster, label(deployment), volume)


def mounts_are_safe(cluster: Cluster) -> Iterator[str]:
    """Only a bounded /tmp is writable; secrets are whole folders that only the group reads."""
    for deployment in cluster.of("Deployment"):
        volumes = {one["name"]: one for one in pod_of(deployment)["volumes"]}
        for mount in container_of(deployment)["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            if "emptyDir" in volume:
                if mount["mountPath"] != "/tmp" or "sizeLimit" not in volume["emptyDir"]:
                    yield f"{label(deployment)}: {mount['name']} is writable beyond a bounded /tmp"
            elif not mount.get("readOnly"):
                yield f"{label(deployment)}: {mount['name']} is mounted writable"
            if "secret" in volume and "subPath" in mount:
                yield f"{label(deployment)}: {mount['name']} by subPath would never change"
            if "secret" in volume and volume["secret"].get("defaultMode") != 0o440:
                yield f"{label(deployment)}: {mount['name']} can be read by others"


def variables_are_settings(cluster: Cluster) -> Iterator[str]:
    """The process would start with these variables, and reads secrets where they are mounted."""
    for deployment in cluster.of("Deployment"):
        try:
            settings_of(cluster, deployment)
        except WrongVariablesError as error:
            yield str(error)
            continue
        folders = secret_folders(deployment)
        values = variables(cluster, deployment).values()
        for folder in folders:
            if not any(value.startswith(f"{folder}/") for value in values):
                yield f"{label(deployment)}: nothing is read from {folder}"
        for value in values:
            if value.startswith("/etc/") and value.rpartition("/")[0] not in folders:
                yield f"{label(deployment)}: {value} is in no mounted secret"


def threads_follow_limits(cluster: Cluster) -> Iterator[str]:
    """Thread counts are those of the CPU limit, not of the node."""
    for deployment in cluster.of("Deployment"):
        part, found = part_of(deployment), variables(cluster, deployment)
        names = {
            "gateway": (),
            "llm": ("CHIASM_LLM_TORCH_THREADS", "OMP_NUM_THREADS"),
            "encoder": (
                "CHIASM_ENCODER_TORCH_THREADS",
                "CHIASM_ENCODER_DECODE_WORKERS",
                "OMP_NUM_THREADS",
            ),
        }[part]
        limit = quantity(container_of(deployment)["resources"]["limits"]["cpu"])
        for name in names:
            if not limit <= Fraction(found.get(name, "0")) < limit + 1:
                yield f"{label(deployment)}: {name} does not follow the CPU limit"


def ports_are_opened(cluster: Cluster) -> Iterator[str]:
    """A container declares the ports that its process opens, and no others."""
    for deployment in cluster.of("Deployment"):
        try:
            settings = settings_of(cluster, deployment)
        except WrongVariablesError:
            continue
        opened = {"http": settings.port} if part_of(deployment) == "gateway" else {
            "grpc": settings.port,
            "health": settings.health_port,
            "metrics": settings.metrics_port,
        }  # fmt: skip
        if _ports(deployment) != opened:
            yield f"{label(deployment)} declares {_ports(deployment)}, the process opens {opened}"
        if settings.host != "0.0.0.0":
            yield f"{label(deployment)} listens on {settings.host} alone"


def probes_hit(cluster: Cluster) -> Iterator[str]:
    """Three probes, each of a port and a name that the process answers."""
    for deployment in cluster.of("Deployment"):
        container, ports = container_of(deployment), _ports(deployment)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind)
            if probe is None:
                yield f"{label(deployment)} has no {kind}"
            elif part_of(deployment) == "gateway":
                wanted = "/ready" if kind == "readinessProbe" else "/health"
                if ports.get(probe.get("httpGet", {}).get("port")) is None:
                    yield f"{label(deployment)}: {kind} asks a port that is not there"
                elif probe["httpGet"]["path"] != wanted:
                    yield f"{label(deployment)}: {kind} asks {probe['httpGet']['path']}"
            else:
                name = "live" if kind == "livenessProbe" else ""
                if probe.get("grpc", {}).get("port") != ports.get("health"):
                    yield f"{label(deployment)}: {kind} does not ask the health port"
                elif probe["grpc"].get("service", "") != name:
                    yield f"{label(deployment)}: {kind} asks for {probe['grpc'].get('service')}"


def images_are_pinned(cluster: Cluster) -> Iterator[str]:
    """Every image, those of volumes too, has this project's version or a digest."""
    for deployment in cluster.of("Deployment"):
        found = [container_of(deployment)["image"]]
        found += [
            one["image"]["reference"] for one in pod_of(deployment)["volumes"] if "image" in one
        ]
        for image in found:
            tag = image.rpartition("/")[2].partition(":")[2]
            if "@sha256:" not in image and tag not in (VERSION, f"{VERSION}-cuda"):
                yield f"{label(deployment)}: {image} is not of version {VERSION}"


def pods_are_hardened(cluster: Cluster) -> Iterator[str]:
    """The restricted level of the pod security standards, and more than that."""
    for deployment in cluster.of("Deployment"):
        pod, container = pod_of(deployment), container_of(deployment)
        whole, own = pod.get("securityContext", {}), container.get("securityContext", {})
        rules = {
            "runs as root": whole.get("runAsNonRoot") is True and whole.get("runAsUser") == 10001
            and whole.get("runAsGroup") == 10001 and "runAsUser" not in own,
            "has no seccomp profile": whole.get("seccompProfile") == {"type": "RuntimeDefault"},
            "may gain privileges": own.get("allowPrivilegeEscalation") is False,
            "is privileged": own.get("privileged", False) is False,
            "keeps capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "has a writable root": own.get("readOnlyRootFilesystem") is True,
            "shares the host": not any(pod.get(f"host{one}") for one in ("Network", "PID", "IPC")),
            "mounts a token": pod.get("automountServiceAccountToken") is False,
            "has service links": pod.get("enableServiceLinks") is False,
            "has a second container": "initContainers" not in pod,
        }  # fmt: skip
        yield from (f"{label(deployment)} {fault}" for fault, kept in rules.items() if not kept)


def accounts_have_no_rights(cluster: Cluster) -> Iterator[str]:
    """An account for each part, without a token, and no role anywhere."""
    for deployment in cluster.of("Deployment"):
        name = pod_of(deployment).get("serviceAccountName")
        accounts = [one for one in cluster.of("ServiceAccount") if one["metadata"]["name"] == name]
        if name != deployment["metadata"]["name"] or len(accounts) != 1:
            yield f"{label(deployment)} has no account of its own"
        elif accounts[0].get("automountServiceAccountToken") is not False:
            yield f"{label(accounts[0])} gives its token to pods"
    for one in cluster.manifests:
        if "Role" in one["kind"]:
            yield f"{label(one)} gives rights"


def ends_are_long_enough(cluster: Cluster) -> Iterator[str]:
    """A pod has time for preStop, drain and the longest call, and a rollout for a load."""
    for deployment in cluster.of("Deployment"):
        part, pod, container = part_of(deployment), pod_of(deployment), container_of(deployment)
        try:
            settings = settings_of(cluster, deployment)
            llm = settings_of(cluster, cluster.deployment("llm"))
        except WrongVariablesError:
            continue
        stop = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if stop < (0 if part == "gateway" else 7):
            yield f"{label(deployment)}: preStop is shorter than DNS and a look take"
        needed = stop + settings.drain_seconds + settings.grace_seconds
        if pod["terminationGracePeriodSeconds"] <= needed:
            yield f"{label(deployment)} is killed before {needed} s are over"
        longest = (
            llm.encoder_attempt_seconds if part == "encoder" else settings.request_timeout_seconds
        )
        if settings.grace_seconds < longest:
            yield f"{label(deployment)}: its grace is shorter than the longest call, {longest} s"
        startup = container["startupProbe"]
        load = startup["periodSeconds"] * startup["failureThreshold"]
        surge = deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
        rollout = load + (0 if surge else pod["terminationGracePeriodSeconds"])
        if deployment["spec"]["progressDeadlineSeconds"] <= rollout:
            yield f"{label(deployment)}: a rollout fails before {rollout} s are over"


def disruptions_are_allowed(cluster: Cluster) -> Iterator[str]:
    """One budget a part, which lets a node be drained and never takes all of several pods."""
    for deployment in cluster.of("Deployment"):
        budgets = [
            one for one in cluster.of("PodDisruptionBudget") if part_of(one) == part_of(deployment)
        ]
        if len(budgets) != 1:
            yield f"{label(deployment)} has {len(budgets)} disruption budgets"
            continue
        spec, least = budgets[0]["spec"], _least_replicas(cluster, deployment)
        if "minAvailable" in spec or spec.get("maxUnavailable", 0) < 1:
            yield f"{label(budgets[0])} keeps nodes from being drained"
        elif least > 1 and spec["maxUnavailable"] >= least:
            yield f"{label(budgets[0])} lets all {least} pods go at once"


def autoscalers_fit(cluster: Cluster) -> Iterator[str]:
    """An autoscaler's target is there, has no number of its own, and can be scaled."""
    for scaler in cluster.of("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        try:
            deployment = cluster.named(target["kind"], target["name"])
        except KeyError as error:
            yield f"{label(scaler)}: {error}"
            continue
        if "replicas" in deployment["spec"]:
            yield f"{label(deployment)} says a number that {label(scaler)} would set"
        if not 1 <= scaler["spec"]["minReplicas"] < scaler["spec"]["maxReplicas"]:
            yield f"{label(scaler)} has no room to scale"


def parts_find_each_other(cluster: Cluster) -> Iterator[str]:
    """Each calls the next by the headless service that is there, and all mean the same model."""
    try:
        gateway, llm, encoder = (settings_of(cluster, cluster.deployment(part)) for part in PARTS)
    except WrongVariablesError:
        return
    called = {"llm": gateway.llm, "encoder": llm.encoders}
    for part, target in called.items():
        spec = cluster.named("Service", f"chiasm-{part}")["spec"]
        if target != f"dns:///chiasm-{part}:{spec['ports'][0]['port']}":
            yield f"{target} is not the service of {part}"
        if spec.get("clusterIP") != "None" or spec.get("publishNotReadyAddresses"):
            yield f"the service of {part} does not name each ready pod"
    if encoder.dtype != (llm.encoder_dtype or llm.dtype):
        yield f"the encoders compute in {encoder.dtype}, the LLM service wants {llm.encoder_dtype}"
    for name in ("served_name", "image_background"):
        if getattr(llm, name) != getattr(encoder, name):
            yield f"{name} differs between the LLM service and the encoders"


def certificates_name_each_other(cluster: Cluster) -> Iterator[str]:
    """Mutual TLS is on for all parts or none, and each expects the names that the others have."""
    try:
        found = {part: settings_of(cluster, cluster.deployment(part)) for part in PARTS}
    except WrongVariablesError:
        return
    on = {part for part in PARTS if found[part].mtls_cert is not None}
    if on and on != set(PARTS):
        yield f"mutual TLS is on for {on} alone"
    if on != set(PARTS):
        return
    expected = {
        "gateway's LLM service": (found["gateway"].mtls_llm, "llm", "server auth"),
        "LLM service's encoders": (found["llm"].mtls_encoders, "encoder", "server auth"),
        "LLM service's callers": (found["llm"].mtls_clients, "gateway", "client auth"),
        "encoders' callers": (found["encoder"].mtls_clients, "llm", "client auth"),
    }
    for who, (name, part, usage) in expected.items():
        certificate = cluster.named("Certificate", f"chiasm-{part}")["spec"]
        if certificate["dnsNames"] != [name] or usage not in certificate["usages"]:
            yield f"the {who} must be {name}, which {part}'s certificate does not prove"


def gpus_are_asked_for(cluster: Cluster) -> Iterator[str]:
    """A pod has a GPU, its device, image and an update without a spare one; or none of these."""
    for deployment in cluster.of("Deployment"):
        if part_of(deployment) == "gateway":
            continue
        container, found = container_of(deployment), variables(cluster, deployment)
        rolling = deployment["spec"]["strategy"]["rollingUpdate"]
        prefix = f"CHIASM_{part_of(deployment).upper()}_DEVICE"
        signs = {
            "nvidia.com/gpu" in container["resources"]["limits"],
            found.get(prefix, "cpu") == "cuda",
            found.get("NVIDIA_VISIBLE_DEVICES") != "void",
            container["image"].endswith("-cuda"),
            rolling == {"maxSurge": 0, "maxUnavailable": 1},
        }
        if len(signs) != 1:
            yield f"{label(deployment)} is half on a GPU"


def edges_are_the_walk(cluster: Cluster) -> Iterator[str]:
    """Where there are network policies, they allow the walk of a request and what watches it."""
    if not list(cluster.of("NetworkPolicy")):
        return
    denied = {
        part for one in cluster.of("NetworkPolicy") if _denies_all(one) for part in _policed(one)
    }
    if denied != set(PARTS):
        yield f"only {sorted(denied)} are closed by default"
    found, wanted = edges(cluster), _WALK | _wanted_edges(cluster)
    yield from (f"this edge is not needed: {edge}" for edge in sorted(found - wanted))
    yield from (f"this edge is missing: {edge}" for edge in sorted(wanted - found))


def routes_are_the_public_ones(cluster: Cluster) -> Iterator[str]:
    """The route leads to the gateway for every path of its but what is for the cluster alone."""
    for route in cluster.of("HTTPRoute"):
        gateway = settings_of(cluster, cluster.deployment("gateway"))
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                ports = [
                    one["port"]
                    for one in cluster.named("Service", backend["name"])["spec"]["ports"]
                ]
                if backend["port"] not in ports:
                    yield f"{label(route)} leads to a port that is not there"
            for name in ("request", "backendRequest"):
                seconds = int(rule["timeouts"][name].removesuffix("s"))
                if seconds <= gateway.request_timeout_seconds:
                    yield f"{label(route)} ends answers before the gateway does"
        matches = [match["path"] for rule in route["spec"]["rules"] for match in rule["matches"]]
        for path in _gateway_paths():
            public = path not in ("/metrics", "/ready")
            if any(_routed(match, path) for match in matches) != public:
                yield f"{label(route)}: {path} should {'' if public else 'not '}be routed"


POLICIES: Final[tuple[Policy, ...]] = (
    one_namespace,
    selectors_match,
    services_reach_ports,
    resources_are_bounded,
    memory_holds_what_settings_allow,
    volumes_exist,
    mounts_are_safe,
    variables_are_settings,
    threads_follow_limits,
    ports_are_opened,
    probes_hit,
    images_are_pinned,
    pods_are_hardened,
    accounts_have_no_rights,
    ends_are_long_enough,
    disruptions_are_allowed,
    autoscalers_fit,
    parts_find_each_other,
    certificates_name_each_other,
    gpus_are_asked_for,
    edges_are_the_walk,
    routes_are_the_public_ones,
)

# Who, how, to whom or from whom, ports.
Edge = tuple[str, str, str, tuple[str, ...]]
_DNS: Final = ("TCP/53", "UDP/53")
_INGRESS, _MONITORING = "namespaces chiasm-ingress=true", "namespaces chiasm-monitoring=true"
_WALK: Final[frozenset[Edge]] = frozenset(
    {
        ("gateway", "from", _INGRESS, ("TCP/8000",)),
        ("gateway", "from", _MONITORING, ("TCP/8000",)),
        ("gateway", "to", "llm", ("TCP/50051",)),
        ("llm", "from", "gateway", ("TCP/50051",)),
        ("llm", "from", _MONITORING, ("TCP/9464",)),
        ("llm", "to", "encoder", ("TCP/50061",)),
        ("encoder", "from", "llm", ("TCP/50061",)),
        ("encoder", "from", _MONITORING, ("TCP/9464",)),
        *((part, "to", "DNS", _DNS) for part in PARTS),
    }
)


def edges(cluster: Cluster) -> set[Edge]:
    """All that the network policies of a rendering allow."""
    return {
        (part, way, peer, ports)
        for policy in cluster.of("NetworkPolicy")
        for part in _policed(policy)
        for way, peers, rules in (
            ("from", "from", policy["spec"].get("ingress", [])),
            ("to", "to", policy["spec"].get("egress", [])),
        )
        for rule in rules
        for peer in _peers(cluster, rule, peers)
        for ports in [_allowed_ports(rule)]
    }


def _wanted_edges(cluster: Cluster) -> set[Edge]:
    """Edges that come with what the settings turn on."""
    gateway, llm = (settings_of(cluster, cluster.deployment(part)) for part in ("gateway", "llm"))
    wanted: set[Edge] = set()
    if gateway.url_pictures:
        wanted |= {("gateway", "to", f"public IPv{n}", ("TCP/443", "TCP/80")) for n in (4, 6)}
    if llm.reference_store_file is not None:
        wanted.add(("llm", "to", "pods chiasm-reference-store=true", ("TCP/6379",)))
    for part in PARTS:
        if settings_of(cluster, cluster.deployment(part)).trace_endpoint is not None:
            wanted.add((part, "to", _MONITORING, ("TCP/4317",)))
    return wanted


def _policed(policy: Manifest) -> list[str]:
    selected = policy["spec"]["podSelector"]["matchLabels"]
    if selected == {"app.kubernetes.io/part-of": "chiasm"}:
        return list(PARTS)
    return [selected["app.kubernetes.io/component"]]


def _denies_all(policy: Manifest) -> bool:
    spec = policy["spec"]
    types = sorted(spec.get("policyTypes", []))
    return types == ["Egress", "Ingress"] and not spec.get("ingress") and not spec.get("egress")


def _peers(cluster: Cluster, rule: Manifest, key: str) -> Iterator[str]:
    if not rule.get(key):
        yield "anybody"
    for peer in rule.get(key, []):
        yield _peer(cluster, peer)


def _peer(cluster: Cluster, peer: Manifest) -> str:
    pods = peer.get("podSelector", {}).get("matchLabels")
    namespaces = peer.get("namespaceSelector", {}).get("matchLabels")
    if "ipBlock" in peer:
        return _block(peer["ipBlock"])
    if pods == {"k8s-app": "kube-dns"}:
        inner = namespaces == {"kubernetes.io/metadata.name": "kube-system"}
        return "DNS" if inner else "somebody's DNS"
    if pods is None:
        return "namespaces " + _written(namespaces)
    if namespaces is not None:
        return f"pods {_written(pods)} in namespaces {_written(namespaces)}"
    found = [part_of(one) for one in _selected(cluster, {"matchLabels": pods})]
    return found[0] if len(found) == 1 else "pods " + _written(pods)


def _block(block: Manifest) -> str:
    if block["cidr"] == "0.0.0.0/0" and set(block.get("except", [])) >= _PRIVATE:
        return "public IPv4"
    if block["cidr"] == "2000::/3" and "2002::/16" in block.get("except", []):
        return "public IPv6"
    return f"addresses {block}"


_PRIVATE: Final = {
    "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.168.0.0/16",
}  # fmt: skip


def _written(labels: Manifest | None) -> str:
    return ",".join(f"{name}={value}" for name, value in (labels or {}).items()) or "all"


def _allowed_ports(rule: Manifest) -> tuple[str, ...]:
    ports = rule.get("ports") or [{"protocol": "any", "port": "any"}]
    return tuple(sorted(f"{one['protocol']}/{one['port']}" for one in ports))


def _held_bytes(part: str, settings: Any) -> Fraction:
    if part == "gateway":
        # As received and as sent on.
        return Fraction(2 * settings.max_held_body_bytes)
    if part == "encoder":
        decoding = settings.decode_workers * _DECODER_BYTES
        return Fraction(decoding + settings.max_queue_bytes + settings.cache_bytes)
    on_host = settings.kv_bytes if settings.device == "cpu" else 0
    return Fraction(on_host + settings.embedding_cache_bytes + settings.reference_bytes)


def _source_faults(cluster: Cluster, whose: str, volume: Manifest) -> Iterator[str]:
    if "persistentVolumeClaim" in volume:
        claim = volume["persistentVolumeClaim"]["claimName"]
        if claim not in [one["metadata"]["name"] for one in cluster.of("PersistentVolumeClaim")]:
            yield f"{whose}: nobody claims {claim}"
    elif "secret" in volume:
        issued = {one["spec"]["secretName"] for one in cluster.of("Certificate")}
        if volume["secret"]["secretName"] not in issued | _SECRETS_FROM_OUTSIDE:
            yield f"{whose}: nobody makes the secret {volume['secret']['secretName']}"
    elif not volume.keys() & {"emptyDir", "image"}:
        yield f"{whose}: {volume['name']} has a source that is not known here"


def _ports(deployment: Manifest) -> dict[str, int]:
    return {one["name"]: one["containerPort"] for one in container_of(deployment)["ports"]}


def _least_replicas(cluster: Cluster, deployment: Manifest) -> int:
    for scaler in cluster.of("HorizontalPodAutoscaler"):
        if scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]:
            return int(scaler["spec"]["minReplicas"])
    return int(deployment["spec"].get("replicas", 1))


def _pod_selector(one: Manifest) -> Manifest | None:
    paths = {
        "PodDisruptionBudget": "selector",
        "PodMonitor": "selector",
        "NetworkPolicy": "podSelector",
    }
    if one["kind"] == "Service":
        return {"matchLabels": one["spec"]["selector"]}
    return one["spec"][paths[one["kind"]]] if one["kind"] in paths else None


def _selected(cluster: Cluster, selector: Manifest) -> list[Manifest]:
    return [
        one
        for one in cluster.of("Deployment")
        if includes(one["spec"]["template"]["metadata"]["labels"], selector)
    ]


def _is_for_all(one: Manifest) -> bool:
    return one["kind"] == "NetworkPolicy" and one["metadata"]["name"] in (
        "chiasm-default-deny",
        "chiasm-dns",
    )


def _has_part(one: Manifest) -> bool:
    return "app.kubernetes.io/component" in one["metadata"].get("labels", {})


def _gateway_paths() -> list[str]:
    routes = create_app(GatewaySettings()).routes
    found = [route.path for route in routes if isinstance(route, Route)]
    return [re.sub(r"\{[^}]*\}", "something", path) for path in found]


def _routed(match: Manifest, path: str) -> bool:
    value: str = match["value"]
    if match["type"] == "Exact":
        return path == value
    return path == value or path.startswith(f"{value.rstrip('/')}/")
