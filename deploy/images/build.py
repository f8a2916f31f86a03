"""Builds the images: bases, wheels, then the four targets of the Containerfile."""

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from deploy.images import debian, inventory, licences, notices, python_locks, sbom

REPOSITORY: Final = Path(__file__).parents[2]
CONTAINERFILE: Final = Path(__file__).parent / "Containerfile"
WORK: Final = REPOSITORY / "build" / "images"
SERVICES: Final = ("gateway", "encoder", "llm")
TARGETS: Final = (*SERVICES, "demo-model")


@dataclass(frozen=True)
class Plan:
    """What is built, and from what."""

    accelerator: str = "cpu"
    heif: bool = False
    build_base: str = ""
    runtime_base: str = ""
    tag: str = ""
    targets: tuple[str, ...] = TARGETS

    def locks(self) -> list[str]:
        services = [f"{name}-{self.accelerator}" for name in ("encoder", "llm")]
        return ["build", "gateway", *services, *(["heif"] if self.heif else [])]


def version() -> str:
    project = tomllib.loads(python_locks.PROJECT.read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def image(target: str, tag: str = "") -> str:
    return f"localhost/chiasm-{target}:{tag or version()}"


def build(plan: Plan) -> None:
    """Builds the plan's targets; prints the size of each.

    Raises debian.LockError, or CalledProcessError of a program that failed.
    """
    for name in plan.locks():
        python_locks.fetch_wheels(name, WORK / "wheels")
    plan = with_bases(plan)
    for target in plan.targets:
        started = time.monotonic()
        _build_target(plan, target)
        seconds = time.monotonic() - started
        name = image(target, plan.tag)
        if target in SERVICES:
            write_bill(name, bill_path(target, plan.accelerator))
        print(f"{name}: {size(name) / 1e6:,.0f} MB, {seconds:.0f} s", flush=True)


def bill_path(target: str, accelerator: str) -> Path:
    """Where the image's bill of materials lies."""
    return WORK / f"{target}-{accelerator}.cdx.json"


def write_bill(name: str, path: Path) -> None:
    """Raises licences.UnknownLicenceError or sbom.SchemaError."""
    digest = _digest(name)
    with mounted(name) as root:
        parts = inventory.read(root)
    path.write_text(sbom.write(name, digest, parts, source_epoch()), encoding="utf-8")


@contextmanager
def mounted(name: str) -> Iterator[Path]:
    """The file system of an image."""
    container = _buildah("from", "--pull-never", name).strip()
    try:
        yield Path(_buildah("mount", container).strip())
    finally:
        _buildah("rm", container)


def with_bases(plan: Plan) -> Plan:
    """The plan with both bases named; those that are not given are made from the locks."""
    return replace(
        plan,
        build_base=plan.build_base or _base("build"),
        runtime_base=plan.runtime_base or _base("runtime"),
    )


def _base(root: debian.Root) -> str:
    lock = debian.read_lock(debian.lock_path(root))
    # A change in how a root is made is another root too.
    code = debian.digest_of_code()
    name = f"localhost/chiasm-debian-{root}:12-{lock.digest()}-{code}"
    if _exists(name):
        return name
    print(f"{name}: from {len(lock.packages)} locked packages", flush=True)
    archive = WORK / f"{root}.tar"
    debian.make_root(root, debian.fetch(lock, WORK / "debs"), archive, debian.moment(lock))
    _commit_root(archive, name, debian.moment(lock))
    archive.unlink()
    return name


def _commit_root(archive: Path, name: str, epoch: int) -> None:
    container = _buildah("from", "scratch").strip()
    try:
        _buildah("add", "--quiet", container, str(archive), "/")
        _buildah(
            "commit", "--quiet", "--format", "docker", "--timestamp", str(epoch), container, name
        )
    finally:
        _buildah("rm", container)


def _build_target(plan: Plan, target: str) -> None:
    epoch = source_epoch()
    created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    arguments = {
        "BUILD_BASE": plan.build_base,
        "RUNTIME_BASE": plan.runtime_base,
        "ACCELERATOR": plan.accelerator,
        "HEIF": "1" if plan.heif else "0",
        "VERSION": version(),
        "REVISION": _revision(),
        "CREATED": created,
        "SOURCE_DATE_EPOCH": str(epoch),
        "BASE_NAME": plan.runtime_base,
        "BASE_DIGEST": _digest(plan.runtime_base),
    }
    words = [
        "build", "--layers", "--force-rm", "--format", "docker", "--timestamp", str(epoch),
        "--pull-never", "--file", str(CONTAINERFILE), "--target", target,
        "--tag", image(target, plan.tag),
    ]  # fmt: skip
    for key, value in arguments.items():
        words += ["--build-arg", f"{key}={value}"]
    _logged(["buildah", *words, str(REPOSITORY)], WORK / f"{target}.log")


def _logged(command: Sequence[str], log: Path) -> None:
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, check=False, stdout=file, stderr=subprocess.STDOUT)  # noqa: S603
    if done.returncode:
        print("\n".join(log.read_text(encoding="utf-8").splitlines()[-30:]), file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)


def source_epoch() -> int:
    """Seconds: SOURCE_DATE_EPOCH if it is set, else when the revision was committed."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given) if given else int(_git("log", "-1", "--format=%ct") or 0)


def _revision() -> str:
    revision = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{revision}-dirty" if revision and changed else revision or "unknown"


def _git(*words: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else ""


def _exists(name: str) -> bool:
    command = ["buildah", "inspect", "--type", "image", name]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0  # noqa: S603


def inspect(name: str) -> dict[str, object]:
    """What buildah knows of an image."""
    read: dict[str, object] = json.loads(_buildah("inspect", "--type", "image", name))
    return read


def _digest(name: str) -> str:
    return str(inspect(name)["FromImageDigest"])


def size(name: str) -> int:
    """Bytes of an image's layers, uncompressed."""
    rows = json.loads(_buildah("images", "--json", name))
    return int(rows[0]["sizeRaw"]) if "sizeRaw" in rows[0] else _parsed(rows[0]["size"])


def _parsed(text: str) -> int:
    number, unit = text.split()
    return int(float(number) * {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit.upper()])


def write_notices() -> None:
    """Writes docs/licences.md from the images that are there."""
    held = {}
    for target in SERVICES:
        with mounted(image(target)) as root:
            held[target] = inventory.read(root)
    notices.PAGE.write_text(notices.page(held), encoding="utf-8")


def _buildah(*words: str) -> str:
    return debian.run(["buildah", *words])


def main(words: Sequence[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m deploy.images")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lock", help="Write all locks anew, with the newest versions.")
    commands.add_parser("licences", help="Write docs/licences.md from the images.")
    builds = commands.add_parser("build", help="Build the images from the locks.")
    builds.add_argument("--accelerator", choices=python_locks.ACCELERATORS, default="cpu")
    builds.add_argument(
        "--heif", action="store_true", help="Add pillow-heif (GPL: docs/licences.md)."
    )
    builds.add_argument(
        "--build-base", default="", help="An image with Python 3.11, gcc and a shell."
    )
    builds.add_argument(
        "--runtime-base", default="", help="An image with Python 3.11 as /usr/bin/python3.11."
    )
    builds.add_argument("--tag", default="", help="Default: the project's version.")
    builds.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="Default: all.")
    given = parser.parse_args(words)
    try:
        if given.command == "lock":
            debian.refresh_locks()
            python_locks.refresh_locks()
        elif given.command == "licences":
            write_notices()
        else:
            build(
                Plan(
                    given.accelerator, given.heif, given.build_base, given.runtime_base, given.tag,
                    tuple(given.targets) or TARGETS,
                )
            )  # fmt: skip
    except (debian.LockError, licences.UnknownLicenceError, sbom.SchemaError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: {error.cmd[0]} failed with {error.returncode}", file=sys.stderr)
        return 1
    return 0
