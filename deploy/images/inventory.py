"""What an image holds, read from its file system: Python distributions and Debian packages."""

import email
import email.message
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from deploy.images import licences

SITE: Final = "opt/chiasm/lib/python3.11/site-packages"
STATUS: Final = "var/lib/dpkg/status.d"

Kind = Literal["python", "debian", "bundled"]


@dataclass(frozen=True)
class Part:
    """One thing in an image.

    `bundled` are libraries that lie in a distribution's wheel: what its own SBOM (PEP 770) names,
    and else the files in its folder of libraries.
    """

    kind: Kind
    name: str
    version: str
    licence: str  # an SPDX expression; empty for bundled parts that say nothing
    purl: str = ""
    sha256: str = ""
    parts: tuple["Part", ...] = field(default=())


def read(root: Path) -> tuple[Part, ...]:
    """All parts of the image whose file system lies at `root`, in order of kind and name.

    Raises licences.UnknownLicenceError for a package whose licence is not told.
    """
    debian = [_debian(path) for path in sorted((root / STATUS).iterdir())]
    site = root / SITE
    python = [_python(path, site) for path in sorted(site.glob("*.dist-info"))]
    return tuple(sorted([*debian, *python], key=lambda part: (part.kind, part.name)))


def _debian(path: Path) -> Part:
    fields = email.message_from_string(path.read_text(encoding="utf-8"))
    name, version = fields["Package"], fields["Version"]
    purl = (
        f"pkg:deb/debian/{name}@{_quoted(version)}?arch={fields['Architecture']}&distro=debian-12"
    )
    return Part("debian", name, version, licences.of_debian(name), purl)


def _python(folder: Path, site: Path) -> Part:
    metadata = email.message_from_bytes((folder / "METADATA").read_bytes())
    name, version = metadata["Name"].lower().replace("_", "-"), metadata["Version"]
    return Part(
        "python", name, version, licences.of_python(metadata),
        f"pkg:pypi/{name}@{_quoted(version)}", parts=tuple(_bundled(folder, site)),
    )  # fmt: skip


def _bundled(folder: Path, site: Path) -> Iterator[Part]:
    """What a wheel holds beside its own code, each once."""
    seen: set[tuple[str, str]] = set()
    own = folder.name.partition("-")[0].lower()
    for path in sorted(folder.glob("sboms/*.json")):
        for one in json.loads(path.read_bytes()).get("components", []):
            part = _named(one)
            key = (part.name, part.version)
            if key not in seen and part.name.replace("-", "_").lower() != own:
                seen.add(key)
                yield part
    libraries = site / f"{folder.name.partition('-')[0]}.libs"
    for path in sorted(libraries.glob("*.so*")) if libraries.is_dir() else []:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        yield Part("bundled", path.name, "", "", sha256=digest)


def _named(one: dict[str, Any]) -> Part:
    said = [
        entry.get("expression") or entry.get("license", {}).get("id", "")
        for entry in one.get("licenses", [])
    ]
    licence = " AND ".join(sorted({licences.known_or_empty(text) for text in said} - {""}))
    return Part("bundled", one["name"], one.get("version", ""), licence, one.get("purl", ""))


def _quoted(version: str) -> str:
    return version.replace("+", "%2B").replace(":", "%3A").replace("~", "%7E")
