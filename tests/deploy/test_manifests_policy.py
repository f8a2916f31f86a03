"""Our own rules hold of every overlay and of every component, and each rule can fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy import policies
from tests.deploy.manifests import (
    COMPONENTS,
    OVERLAYS,
    Cluster,
    alone,
    composed,
    container_of,
    needs_kubectl,
    overlay,
    pod_of,
)
from tests.deploy.policies import POLICIES, Policy

pytestmark = needs_kubectl

# An order in which all components but one of the two models fit together.
ALL: Final = (
    "model-pvc", "llm-gpu", "encoder-gpu", "tls", "networkpolicy", "picture-egress",
    "reference-store", "tracing", "monitoring", "autoscale-hpa", "gateway-api", "gateway-keys",
)  # fmt: skip


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_keeps_the_policies(name: str) -> None:
    assert _faults(overlay(name)) == []


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_alone_keeps_the_policies(name: str, tmp_path: Path) -> None:
    assert _faults(alone(name, tmp_path)) == []


def test_all_components_together_keep_the_policies(tmp_path: Path) -> None:
    assert set(ALL) == set(COMPONENTS) - {"model-image"}
    assert _faults(composed(ALL, tmp_path)) == []


def _faults(cluster: Cluster) -> list[str]:
    return [fault for policy in POLICIES for fault in policy(cluster)]


# --- each policy can fail --------------------------------------------------------------------

Change = Callable[[Cluster], object]


def _pod(part: str, change: Callable[[Any], object]) -> Change:
    return lambda cluster: change(pod_of(cluster.deployment(part)))


def _container(part: str, change: Callable[[Any], object]) -> Change:
    return lambda cluster: change(container_of(cluster.deployment(part)))


def _spec(kind: str, name: str, change: Callable[[Any], object]) -> Change:
    return lambda cluster: change(cluster.named(kind, name)["spec"])


def _setting(part: str, name: str, value: str) -> Change:
    def change(cluster: Cluster) -> None:
        for one in cluster.of("ConfigMap"):
            if one["metadata"]["name"].startswith(f"chiasm-{part}-"):
                one["data"][f"CHIASM_{part.upper()}_{name}"] = value

    return change


def _replace(container: Any, name: str, value: str) -> None:
    for one in container["env"]:
        if one["name"] == name:
            one.pop("valueFrom", None)
            one["value"] = value


def _limit(resource: str, value: str) -> Callable[[Any], object]:
    return lambda container: container["resources"]["limits"].update({resource: value})


def _route_path(kind: str, value: str) -> Change:
    path = {"path": {"type": kind, "value": value}}
    return _spec(
        "HTTPRoute", "chiasm-gateway", lambda spec: spec["rules"][0]["matches"].append(path)
    )


BREAKS: Final[tuple[tuple[Policy, str, Change], ...]] = (
    (policies.one_namespace, "several namespaces",
     lambda cluster: cluster.deployment("llm")["metadata"].update(namespace="other")),
    (policies.selectors_match, "does not select its own pods",
     _spec("Deployment", "chiasm-llm",
           lambda spec: spec["selector"]["matchLabels"].update({"app.kubernetes.io/name": "x"}))),
    (policies.selectors_match, "Service/chiasm-encoder selects []",
     _spec("Service", "chiasm-encoder",
           lambda spec: spec["selector"].update({"app.kubernetes.io/component": "encoders"}))),
    (policies.selectors_match, "PodMonitor/chiasm-llm selects ['encoder']",
     _spec("PodMonitor", "chiasm-llm",
           lambda spec: spec["selector"]["matchLabels"].update(
               {"app.kubernetes.io/component": "encoder"}))),
    (policies.selectors_match, "spreads pods that are not its own",
     _pod("llm", lambda pod: pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]
          .update({"app.kubernetes.io/component": "encoder"}))),
    (policies.services_reach_ports, "port 50062 is no grpc",
     _spec("Service", "chiasm-encoder", lambda spec: spec["ports"][0].update(port=50062))),
    (policies.services_reach_ports, "port 8000 is no web",
     _spec("Service", "chiasm-gateway", lambda spec: spec["ports"][0].update(targetPort="web"))),
    (policies.resources_are_bounded, "the limit of cpu is below",
     _container("llm", _limit("cpu", "10m"))),
    (policies.resources_are_bounded, "no limit of memory",
     _container("llm", lambda one: one["resources"]["limits"].pop("memory"))),
    (policies.memory_holds_what_settings_allow, "Deployment/chiasm-encoder: memory",
     _setting("encoder", "CACHE_BYTES", str(8 << 30))),
    (policies.memory_holds_what_settings_allow, "Deployment/chiasm-encoder: memory",
     _container("encoder", _limit("cpu", "16"))),
    (policies.memory_holds_what_settings_allow, "Deployment/chiasm-gateway: memory",
     _setting("gateway", "MAX_HELD_BODY_BYTES", str(1 << 30))),
    (policies.volumes_exist, "model is a mount or a volume, not both",
     _pod("llm", lambda pod: pod.update(volumes=[]))),
    (policies.volumes_exist, "nobody claims",
     _pod("llm", lambda pod: [one["persistentVolumeClaim"].update(claimName="x")
                              for one in pod["volumes"] if one["name"] == "model"])),
    (policies.volumes_exist, "nobody makes the secret",
     _spec("Certificate", "chiasm-llm", lambda spec: spec.update(secretName="other"))),
    (policies.mounts_are_safe, "model is mounted writable",
     _container("llm", lambda one: [each.update(readOnly=False) for each in one["volumeMounts"]
                                    if each["name"] == "model"])),
    (policies.mounts_are_safe, "can be read by others",
     _pod("gateway", lambda pod: [one["secret"].pop("defaultMode") for one in pod["volumes"]
                                  if "secret" in one])),
    (policies.mounts_are_safe, "would never change",
     _container("gateway", lambda one: one["volumeMounts"][0].update(subPath="keys.toml"))),
    (policies.mounts_are_safe, "writable beyond a bounded /tmp",
     _pod("gateway", lambda pod: [one["emptyDir"].clear() for one in pod["volumes"]
                                  if "emptyDir" in one])),
    (policies.variables_are_settings, "unknown environment variable CHIASM_LLM_KV_BITES",
     _setting("llm", "KV_BITES", "1")),
    (policies.variables_are_settings, "--kv-bytes",
     _setting("llm", "KV_BYTES", "16Gi")),
    (policies.variables_are_settings, "CHIASM_GATEWAY_PORT is no variable",
     _container("llm", lambda one: one["env"].append(
         {"name": "CHIASM_GATEWAY_PORT", "value": "1"}))),
    (policies.variables_are_settings, "no ConfigMap",
     _container("llm", lambda one: one["envFrom"][0]["configMapRef"].update(name="gone"))),
    (policies.variables_are_settings, "is in no mounted secret",
     _setting("gateway", "KEYS_FILE", "/etc/chiasm/elsewhere/keys.toml")),
    (policies.variables_are_settings, "nothing is read from /etc/chiasm/keys",
     _setting("gateway", "KEYS_FILE", "keys.toml")),
    (policies.threads_follow_limits, "OMP_NUM_THREADS does not follow",
     _container("llm", lambda one: _replace(one, "OMP_NUM_THREADS", "64"))),
    (policies.threads_follow_limits, "CHIASM_ENCODER_DECODE_WORKERS does not follow",
     _container("encoder", lambda one: one["env"].pop(1))),
    (policies.ports_are_opened, "Deployment/chiasm-llm declares",
     _setting("llm", "METRICS_PORT", "9465")),
    (policies.ports_are_opened, "listens on 127.0.0.1 alone",
     _setting("encoder", "HOST", "127.0.0.1")),
    (policies.probes_hit, "has no startupProbe",
     _container("llm", lambda one: one.pop("startupProbe"))),
    (policies.probes_hit, "does not ask the health port",
     _container("llm", lambda one: one["readinessProbe"]["grpc"].update(port=50051))),
    (policies.probes_hit, "livenessProbe asks for None",
     _container("encoder", lambda one: one["livenessProbe"]["grpc"].pop("service"))),
    (policies.probes_hit, "livenessProbe asks /ready",
     _container("gateway", lambda one: one["livenessProbe"]["httpGet"].update(path="/ready"))),
    (policies.probes_hit, "asks a port that is not there",
     _container("gateway", lambda one: one["readinessProbe"]["httpGet"].update(port="web"))),
    (policies.images_are_pinned, "chiasm-llm:latest",
     _container("llm", lambda one: one.update(image="chiasm-llm:latest"))),
    (policies.images_are_pinned, "localhost:5000/chiasm-llm",
     _container("llm", lambda one: one.update(image="localhost:5000/chiasm-llm"))),
    (policies.pods_are_hardened, "runs as root",
     _pod("llm", lambda pod: pod["securityContext"].update(runAsUser=0))),
    (policies.pods_are_hardened, "has no seccomp profile",
     _pod("llm", lambda pod: pod["securityContext"].pop("seccompProfile"))),
    (policies.pods_are_hardened, "may gain privileges",
     _container("llm", lambda one: one["securityContext"].pop("allowPrivilegeEscalation"))),
    (policies.pods_are_hardened, "keeps capabilities",
     _container("llm", lambda one: one["securityContext"].pop("capabilities"))),
    (policies.pods_are_hardened, "is privileged",
     _container("llm", lambda one: one["securityContext"].update(privileged=True))),
    (policies.pods_are_hardened, "has a writable root",
     _container("llm", lambda one: one["securityContext"].update(readOnlyRootFilesystem=False))),
    (policies.pods_are_hardened, "shares the host",
     _pod("llm", lambda pod: pod.update(hostNetwork=True))),
    (policies.pods_are_hardened, "mounts a token",
     _pod("llm", lambda pod: pod.pop("automountServiceAccountToken"))),
    (policies.pods_are_hardened, "has service links",
     _pod("llm", lambda pod: pod.pop("enableServiceLinks"))),
    (policies.pods_are_hardened, "has a second container",
     _pod("llm", lambda pod: pod.update(initContainers=[{"name": "x"}]))),
    (policies.accounts_have_no_rights, "has no account of its own",
     _pod("llm", lambda pod: pod.pop("serviceAccountName"))),
    (policies.accounts_have_no_rights, "gives its token",
     lambda cluster: cluster.named("ServiceAccount", "chiasm-llm").pop(
         "automountServiceAccountToken")),
    (policies.accounts_have_no_rights, "gives rights",
     lambda cluster: cluster.named("ServiceAccount", "chiasm-llm").update(kind="RoleBinding")),
    (policies.ends_are_long_enough, "is killed before",
     _pod("llm", lambda pod: pod.update(terminationGracePeriodSeconds=30))),
    (policies.ends_are_long_enough, "shorter than the longest call",
     _setting("gateway", "REQUEST_TIMEOUT_SECONDS", "3600")),
    (policies.ends_are_long_enough, "Deployment/chiasm-encoder: its grace is shorter",
     _setting("llm", "ENCODER_ATTEMPT_SECONDS", "300")),
    (policies.ends_are_long_enough, "preStop is shorter",
     _container("encoder", lambda one: one.pop("lifecycle"))),
    (policies.ends_are_long_enough, "a rollout fails before",
     _spec("Deployment", "chiasm-llm", lambda spec: spec.update(progressDeadlineSeconds=1200))),
    (policies.disruptions_are_allowed, "has 0 disruption budgets",
     lambda cluster: cluster.named("PodDisruptionBudget", "chiasm-llm").update(kind="Gone")),
    (policies.disruptions_are_allowed, "keeps nodes from being drained",
     _spec("PodDisruptionBudget", "chiasm-llm", lambda spec: spec.update(maxUnavailable=0))),
    (policies.disruptions_are_allowed, "lets all 2 pods go at once",
     _spec("PodDisruptionBudget", "chiasm-encoder", lambda spec: spec.update(maxUnavailable=2))),
    (policies.autoscalers_fit, "no Deployment chiasm-tower",
     _spec("HorizontalPodAutoscaler", "chiasm-encoder",
           lambda spec: spec["scaleTargetRef"].update(name="chiasm-tower"))),
    (policies.autoscalers_fit, "says a number",
     _spec("Deployment", "chiasm-encoder", lambda spec: spec.update(replicas=2))),
    (policies.autoscalers_fit, "no room to scale",
     _spec("HorizontalPodAutoscaler", "chiasm-encoder", lambda spec: spec.update(maxReplicas=2))),
    (policies.parts_find_each_other, "is not the service of encoder",
     _setting("llm", "ENCODERS", "dns:///chiasm-encoders:50061")),
    (policies.parts_find_each_other, "is not the service of llm",
     _setting("gateway", "LLM", "chiasm-llm:50051")),
    (policies.parts_find_each_other, "does not name each ready pod",
     _spec("Service", "chiasm-encoder", lambda spec: spec.pop("clusterIP"))),
    (policies.parts_find_each_other, "the encoders compute in float16",
     _setting("encoder", "DTYPE", "float16")),
    (policies.parts_find_each_other, "served_name differs",
     _setting("encoder", "MODEL_ID", "another")),
    (policies.parts_find_each_other, "image_background differs",
     _setting("encoder", "IMAGE_BACKGROUND", "black")),
    (policies.certificates_name_each_other, "which encoder's certificate does not prove",
     _setting("llm", "MTLS_ENCODERS", "chiasm-gateway")),
    (policies.certificates_name_each_other, "which gateway's certificate does not prove",
     _spec("Certificate", "chiasm-gateway", lambda spec: spec.update(usages=["server auth"]))),
    (policies.gpus_are_asked_for, "chiasm-llm is half on a GPU",
     _setting("llm", "DEVICE", "cpu")),
    (policies.gpus_are_asked_for, "chiasm-encoder is half on a GPU",
     _container("encoder", lambda one: one["resources"]["limits"].pop("nvidia.com/gpu"))),
    (policies.gpus_are_asked_for, "chiasm-encoder is half on a GPU",
     _spec("Deployment", "chiasm-encoder",
           lambda spec: spec["strategy"]["rollingUpdate"].update(maxSurge=1))),
    (policies.edges_are_the_walk, "this edge is missing: ('llm', 'to', 'encoder'",
     _spec("NetworkPolicy", "chiasm-llm", lambda spec: spec.pop("egress"))),
    (policies.edges_are_the_walk, "this edge is not needed: ('encoder', 'from', 'anybody'",
     _spec("NetworkPolicy", "chiasm-encoder", lambda spec: spec["ingress"][0].pop("from"))),
    (policies.edges_are_the_walk, "this edge is not needed: ('gateway', 'to', 'llm', ('any/any',))",
     _spec("NetworkPolicy", "chiasm-gateway", lambda spec: spec["egress"][0].pop("ports"))),
    (policies.edges_are_the_walk, "this edge is missing: ('gateway', 'to', 'public IPv4'",
     _setting("gateway", "URL_PICTURES", "true")),
    (policies.edges_are_the_walk, "only [] are closed by default",
     lambda cluster: cluster.named("NetworkPolicy", "chiasm-default-deny").update(kind="Gone")),
    (policies.routes_are_the_public_ones, "/metrics should not be routed",
     _route_path("PathPrefix", "/")),
    (policies.routes_are_the_public_ones, "/v1/models should be routed",
     _spec("HTTPRoute", "chiasm-gateway", lambda spec: spec["rules"][0]["matches"].pop(0))),
    (policies.routes_are_the_public_ones, "ends answers before the gateway does",
     _spec("HTTPRoute", "chiasm-gateway",
           lambda spec: spec["rules"][0]["timeouts"].update(request="60s"))),
    (policies.routes_are_the_public_ones, "a port that is not there",
     _spec("HTTPRoute", "chiasm-gateway",
           lambda spec: spec["rules"][0]["backendRefs"][0].update(port=80))),
)  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "words", "change"),
    BREAKS,
    ids=[f"{one[0].__name__}-{i}" for i, one in enumerate(BREAKS)],
)
def test_a_broken_manifest_is_complained_about(policy: Policy, words: str, change: Change) -> None:
    cluster = overlay("prod").changed()
    change(cluster)
    faults = list(policy(cluster))
    assert any(words in fault for fault in faults), faults


def test_every_policy_is_broken_by_a_case() -> None:
    assert {policy for policy, _, _ in BREAKS} == set(POLICIES)
