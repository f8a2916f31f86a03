"""Manifests as kustomize renders them, and small readers of their fields."""

import copy
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

Manifest = dict[str, Any]

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
OVERLAYS: Final = tuple(sorted(path.name for path in (DEPLOY / "overlays").iterdir()))
COMPONENTS: Final = tuple(sorted(path.name for path in (DEPLOY / "components").iterdir()))
PARTS: Final = ("gateway", "llm", "encoder")
# What brings a model, without which the base is not whole; and what others add an edge to.
MODELS: Final = ("model-image", "model-pvc")
NEED_NETWORKPOLICY: Final = ("picture-egress", "reference-store", "tracing")

KUBECTL: Final = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl renders the manifests, and there is none on this machine"
)

_SCALES: Final = {
    "": Fraction(1), "m": Fraction(1, 1000), "k": Fraction(1000), "M": Fraction(10**6),
    "G": Fraction(10**9), "Ki": Fraction(1 << 10), "Mi": Fraction(1 << 20), "Gi": Fraction(1 << 30),
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """What one rendering would put into a cluster."""

    manifests: tuple[Manifest, ...]

    def of(self, kind: str) -> Iterator[Manifest]:
        """All of one kind."""
        return (one for one in self.manifests if one["kind"] == kind)

    def named(self, kind: str, name: str) -> Manifest:
        """The one of this kind and name. Raises KeyError."""
        for one in self.of(kind):
            if one["metadata"]["name"] == name:
                return one
        raise KeyError(f"no {kind} {name}")

    def deployment(self, part: str) -> Manifest:
        return self.named("Deployment", f"chiasm-{part}")

    def changed(self) -> "Cluster":
        """A copy that may be written to."""
        return Cluster(copy.deepcopy(self.manifests))


def label(one: Manifest) -> str:
    """How a complaint names it."""
    return f"{one['kind']}/{one['metadata']['name']}"


def pod_of(deployment: Manifest) -> Manifest:
    """The pod's spec."""
    spec: Manifest = deployment["spec"]["template"]["spec"]
    return spec


def container_of(deployment: Manifest) -> Manifest:
    """The pod's only container."""
    (container,) = pod_of(deployment)["containers"]
    assert isinstance(container, dict)
    return container


def part_of(one: Manifest) -> str:
    return str(one["metadata"]["labels"]["app.kubernetes.io/component"])


def quantity(written: object) -> Fraction:
    """A quantity of Kubernetes (`500m`, `2Gi`) in cores or bytes. Raises ValueError."""
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(written))
    if found is None or found[2] not in _SCALES:
        raise ValueError(f"{written!r} is no quantity")
    return Fraction(found[1]) * _SCALES[found[2]]


def includes(labels: Manifest, selector: Manifest) -> bool:
    """Whether `matchLabels` select who has these labels."""
    assert set(selector) == {"matchLabels"}, "a form of selector that these tests do not read"
    return bool(selector["matchLabels"].items() <= labels.items())


@functools.cache
def rendered(folder: Path) -> Cluster:
    """What `kubectl kustomize` makes of a folder. Raises AssertionError with what it says."""
    assert KUBECTL is not None
    done = subprocess.run(
        [KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return Cluster(tuple(yaml.safe_load_all(done.stdout)))


def overlay(name: str) -> Cluster:
    return rendered(DEPLOY / "overlays" / name)


def alone(component: str, folder: Path) -> Cluster:
    """The base with one component and what that cannot do without, written into `folder`."""
    model = () if component in MODELS else ("model-pvc",)
    fence = ("networkpolicy",) if component in NEED_NETWORKPOLICY else ()
    return composed((*model, *fence, component), folder)


def composed(components: Sequence[str], folder: Path) -> Cluster:
    """The base with these components in this order."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "chiasm",
        "resources": [_reach(DEPLOY / "base", folder)],
        "components": [_reach(DEPLOY / "components" / name, folder) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return rendered(folder)


def _reach(target: Path, folder: Path) -> str:
    # Kustomize takes no absolute path.
    return os.path.relpath(target.resolve(), folder.resolve())
