"""A bill of materials for each image (CycloneDX 1.6, JSON), of what really lies in it."""

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from deploy.images.inventory import Part

VERSION: Final = SchemaVersion.V1_6
_SPACE: Final = uuid.UUID("6f0c3c0e-5d55-4d49-9a9e-6d2f4b1b7c11")


class SchemaError(Exception):
    """What was made is not what the schema says; the text tells where."""


def write(image: str, digest: str, parts: Sequence[Part], epoch: int) -> str:
    """The bill of `image`, whose manifest has `digest`; equal for equal images.

    Raises SchemaError if the schema does not hold.
    """
    name, _, version = image.rpartition(":")
    bom = Bom(serial_number=uuid.uuid5(_SPACE, f"{image}@{digest}"))
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    bom.metadata.component = Component(
        type=ComponentType.CONTAINER, name=name, version=version, bom_ref=image,
        properties=[Property(name="chiasm:digest", value=digest)],
    )  # fmt: skip
    held = [_component(part, part.kind) for part in parts]
    bom.components.update(held)
    bom.register_dependency(bom.metadata.component, held)
    text = make_outputter(bom, OutputFormat.JSON, VERSION).output_as_string(indent=1)
    fault = JsonStrictValidator(VERSION).validate_str(text)
    if fault is not None:
        raise SchemaError(f"{image}: {str(fault)[:400]}")
    return text + "\n"


def _component(part: Part, within: str) -> Component:
    made = Component(
        type=ComponentType.LIBRARY if part.purl or part.kind != "bundled" else ComponentType.FILE,
        name=part.name,
        version=part.version or None,
        bom_ref=f"{within}/{part.name}@{part.version}",
        properties=[Property(name="chiasm:kind", value=part.kind)],
    )
    if part.purl:
        made.purl = PackageURL.from_string(part.purl)
    if part.sha256:
        made.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=part.sha256))
    if part.licence.startswith("LicenseRef-"):
        made.licenses.add(DisjunctiveLicense(name=part.licence.removeprefix("LicenseRef-")))
    elif part.licence:
        made.licenses.add(LicenseExpression(part.licence))
    for one in part.parts:
        made.components.add(_component(one, f"{within}/{part.name}"))
    return made
