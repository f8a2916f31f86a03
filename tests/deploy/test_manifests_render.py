"""Every overlay, and every component alone, renders to what Kubernetes knows."""

import functools
import json
from pathlib import Path
from typing import Final

import jsonschema
import kubernetes_validate
import pytest

from tests.deploy.custom_resources import SCHEMAS
from tests.deploy.manifests import (
    COMPONENTS,
    OVERLAYS,
    Cluster,
    Manifest,
    alone,
    needs_kubectl,
    overlay,
    pod_of,
)

pytestmark = needs_kubectl

# The oldest that the manifests are for, by what they use, and the newest that there are schemas of.
OLDEST: Final = "1.30"
# Volumes that are images.
OLDEST_WITH_IMAGES: Final = "1.33"
NEWEST: Final = "1.37"


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_valid(name: str) -> None:
    _validate(overlay(name))


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_alone_is_valid(name: str, tmp_path: Path) -> None:
    _validate(alone(name, tmp_path))


def test_an_unknown_field_is_found() -> None:
    cluster = overlay("local").changed()
    cluster.deployment("llm")["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        _validate(cluster)


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_an_unknown_field_of_a_custom_resource_is_found(kind: str) -> None:
    cluster = overlay("prod").changed()
    next(cluster.of(kind))["spec"]["invented"] = 5
    with pytest.raises(jsonschema.ValidationError, match="invented"):
        _validate(cluster)


def _validate(cluster: Cluster) -> None:
    images = any("image" in volume for one in cluster.of("Deployment") for volume in _volumes(one))
    for one in cluster.manifests:
        for version in (OLDEST_WITH_IMAGES if images else OLDEST, NEWEST):
            _validate_one(json.dumps(one), version)


@functools.cache
def _validate_one(written: str, version: str) -> None:
    # Most of what a component renders is what the others render too, and schemas load slowly.
    one = json.loads(written)
    if one["kind"] in SCHEMAS:
        jsonschema.validate(one, SCHEMAS[one["kind"]])
    else:
        kubernetes_validate.validate(one, version, strict=True)


def _volumes(deployment: Manifest) -> list[Manifest]:
    return list(pod_of(deployment)["volumes"])
