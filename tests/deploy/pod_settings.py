"""The settings that a pod's process would read: its variables as the kubelet would set them."""

import contextlib
import io
import math
import os
import tempfile
from pathlib import Path
from typing import Any, Final
from unittest import mock

from chiasm import settings
from chiasm.settings import Settings
from encoder_service.settings import EncoderSettings
from gateway.settings import GatewaySettings
from llm_service.settings import LlmSettings
from tests.deploy.manifests import (
    Cluster,
    Manifest,
    container_of,
    label,
    part_of,
    pod_of,
    quantity,
)

KINDS: Final[dict[str, type[Settings]]] = {
    "gateway": GatewaySettings,
    "llm": LlmSettings,
    "encoder": EncoderSettings,
}
# Variables of others: of OpenMP, and of NVIDIA's container runtime.
FOREIGN: Final = frozenset({"OMP_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES"})


class WrongVariablesError(ValueError):
    """The variables of a pod are not those of its process."""


def variables(cluster: Cluster, deployment: Manifest) -> dict[str, str]:
    """The environment of the pod's container. Raises WrongVariablesError."""
    found: dict[str, str] = {}
    container = container_of(deployment)
    for source in container.get("envFrom", []):
        found |= _config(cluster, source["configMapRef"]["name"])["data"]
    for variable in container.get("env", []):
        found[variable["name"]] = _value(container, variable)
    return found


def settings_of(cluster: Cluster, deployment: Manifest) -> Any:
    """What the process reads at its start. Raises WrongVariablesError with what it would print."""
    kind = KINDS[part_of(deployment)]
    prefix = str(kind.model_config.get("env_prefix"))
    found = variables(cluster, deployment)
    strange = sorted(name for name in found if not name.startswith(prefix) and name not in FOREIGN)
    if strange:
        raise WrongVariablesError(f"{label(deployment)}: {strange[0]} is no variable of {prefix}*")
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, _at_hand(found, deployment, Path(folder)), clear=True),
        contextlib.redirect_stderr(said),
    ):
        try:
            return settings.read(kind, [], program=part_of(deployment))
        except SystemExit:
            raise WrongVariablesError(f"{label(deployment)}: {said.getvalue()}") from None


def secret_folders(deployment: Manifest) -> dict[str, str]:
    """Where secrets are mounted: folder to the secret's name."""
    secrets = {
        volume["name"]: volume["secret"]["secretName"]
        for volume in pod_of(deployment)["volumes"]
        if "secret" in volume
    }
    mounts = container_of(deployment)["volumeMounts"]
    return {one["mountPath"]: secrets[one["name"]] for one in mounts if one["name"] in secrets}


def _config(cluster: Cluster, name: str) -> Manifest:
    try:
        return cluster.named("ConfigMap", name)
    except KeyError as error:
        raise WrongVariablesError(str(error)) from None


def _value(container: Manifest, variable: Manifest) -> str:
    if "value" in variable:
        value = variable["value"]
        if not isinstance(value, str):
            raise WrongVariablesError(f"{variable['name']} is no text")
        return value
    field = variable["valueFrom"]["resourceFieldRef"]
    kind, _, resource = field["resource"].partition(".")
    limit = quantity(container["resources"][kind][resource])
    # The kubelet rounds up.
    return str(math.ceil(limit / quantity(field.get("divisor", "1"))))


def _at_hand(found: dict[str, str], deployment: Manifest, folder: Path) -> dict[str, str]:
    """Our variables, with files of mounted secrets replaced by ones in `folder`."""
    ours = {name: value for name, value in found.items() if name not in FOREIGN}
    for name, value in ours.items():
        if str(Path(value).parent) in secret_folders(deployment):
            file = folder / name
            file.write_text("redis://store:6379/0")
            ours[name] = str(file)
    return ours
