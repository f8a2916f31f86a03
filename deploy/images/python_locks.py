"""Locks of Python packages: what `uv` resolves for each image, with the digest of every file.

The LLM service's lock is resolved first and binds the others, so that the three images have one
version of each package, and so that the LLM image adds to the encoder's instead of differing.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.images.debian import LOCKS, LockError

PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"
ACCELERATORS: Final = ("cpu", "cuda")
PYTHON_VERSION: Final = "3.11"
# One version for both: the CPU build has a local version of its own, `+cpu`.
TORCH: Final = "2.13.0"
# Who has PyTorch's CPU builds.
TORCH_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
# pillow-heif's wheels hold a codec under the GPL: HEIF=1 asks for them.
HEIF: Final = "pillow-heif"
# Constraint decoding is the LLM service's alone.
ONLY_LLM: Final = ("llguidance",)

_PIN: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)")
_HASH: Final = re.compile(r"--hash=sha256:(?P<digest>[0-9a-f]{64})\b")


@dataclass(frozen=True)
class Requirement:
    """One locked package: any of its files that has one of these digests."""

    name: str
    version: str
    sha256: frozenset[str]


def lock_names() -> tuple[str, ...]:
    """All locks of Python packages, without `.txt`."""
    services = [f"{image}-{kind}" for kind in ACCELERATORS for image in ("encoder", "llm")]
    return ("build", "gateway", "heif", *services)


def lock_path(name: str) -> Path:
    return LOCKS / f"{name}.txt"


def read_lock(path: Path) -> tuple[Requirement, ...]:
    """Raises LockError for a requirement that is not pinned, or has no digest."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    requirements = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pin = _PIN.match(line)
        digests = frozenset(_HASH.findall(line))
        if pin is None or not digests:
            raise LockError(f"{path.name}: not `name==version --hash=sha256:…`: {line[:60]}")
        requirements.append(Requirement(pin["name"], pin["version"], digests))
    return tuple(requirements)


def extras() -> dict[str, list[str]]:
    """The optional dependencies that pyproject.toml names."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    return dict(project["optional-dependencies"])


def wanted_extras(image: str) -> list[str]:
    """What an image installs of Chiasm's extras."""
    names = {"gateway": ["gateway"], "encoder": ["model"], "llm": ["model", "redis"]}[image]
    return [*names, *(["tracing"] if "tracing" in extras() else [])]


def refresh_locks() -> None:
    """Writes all locks anew, with the newest versions that pyproject.toml allows."""
    for kind in ACCELERATORS:
        llm = lock_path(f"llm-{kind}")
        _compile(llm, "llm", kind, left_out=[HEIF], bound_by=_newest_first(kind))
        _compile(
            lock_path(f"encoder-{kind}"), "encoder", kind, left_out=[HEIF, *ONLY_LLM],
            bound_by=[llm],
        )  # fmt: skip
    llm = lock_path("llm-cpu")
    _compile(lock_path("gateway"), "gateway", "cuda", left_out=[], bound_by=[llm])
    heif = next(line for line in extras()["model"] if line.startswith(HEIF))
    _compile_text(lock_path("heif"), heif, left_out=["pillow"], bound_by=[llm])
    build = (LOCKS / "build.in").read_text(encoding="utf-8")
    _compile_text(lock_path("build"), build, left_out=[], bound_by=[])


def _newest_first(kind: str) -> list[Path]:
    # The CUDA lock follows the CPU lock, which the tests here run.
    return [] if kind == "cpu" else [lock_path("llm-cpu")]


def _compile(
    target: Path, image: str, kind: str, *, left_out: Sequence[str], bound_by: Sequence[Path]
) -> None:
    words = [str(PROJECT)]
    for extra in wanted_extras(image):
        words += ["--extra", extra]
    _resolve(target, words, kind, left_out, bound_by)


def _compile_text(
    target: Path, text: str, *, left_out: Sequence[str], bound_by: Sequence[Path]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "requirements.in")
        source.write_text(text + "\n", encoding="utf-8")
        _resolve(target, [str(source)], "cuda", left_out, bound_by)


def _resolve(
    target: Path, words: Sequence[str], kind: str, left_out: Sequence[str], bound_by: Sequence[Path]
) -> None:
    torch = f"torch=={TORCH}+cpu" if kind == "cpu" else f"torch=={TORCH}"
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        pins = [f"{one.name}=={one.version}" for path in bound_by for one in read_lock(path)]
        pins = [pin for pin in pins if not pin.startswith("torch==")]
        constraints.write_text("\n".join([torch, *pins]) + "\n", encoding="utf-8")
        command = [
            sys.executable, "-m", "uv", "pip", "compile", *words, "--quiet", "--no-header",
            "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--generate-hashes",
            "--python-version", PYTHON_VERSION, "--python-platform", "x86_64-manylinux_2_28",
            "--constraint", str(constraints), "--upgrade", "--output-file", str(target),
        ]  # fmt: skip
        for name in left_out:
            command += ["--no-emit-package", name]
        if kind == "cpu":
            command += _cpu_builds()
        # No digest of a file that is not on the index that everybody has.
        environment = {key: value for key, value in os.environ.items() if key != "UV_FIND_LINKS"}
        subprocess.run(command, check=True, env=environment)  # noqa: S603
    head = f"# Of {target.stem}, by `make images-lock`.\n"
    target.write_text(head + target.read_text(encoding="utf-8"), encoding="utf-8")


def _cpu_builds() -> list[str]:
    folder = os.environ.get("PIP_FIND_LINKS")
    if folder:
        return ["--find-links", folder]
    return ["--extra-index-url", TORCH_CPU_INDEX, "--index-strategy", "unsafe-best-match"]


def fetch_wheels(name: str, folder: Path) -> None:
    """The files of a lock in `folder`, by pip as this machine has it set up.

    Raises LockError if one cannot be had with a digest of the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = lock_path(name)
    stamp = folder / f".{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    if stamp.exists():
        return
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps",
        "--only-binary", ":all:", "--dest", str(folder), "--requirement", str(path),
        "--python-version", PYTHON_VERSION, "--implementation", "cp", *_tags(),
    ]  # fmt: skip
    done = subprocess.run(command, check=False)  # noqa: S603
    if done.returncode and name.endswith("-cpu"):
        print(f"once more, with {TORCH_CPU_INDEX} beside pip's own index")
        done = subprocess.run([*command, "--extra-index-url", TORCH_CPU_INDEX], check=False)  # noqa: S603
    if done.returncode:
        raise LockError(f"{path.name}: pip could not fetch all of it; its words are above")
    stamp.touch()


def _tags() -> list[str]:
    # pip takes no "manylinux of this glibc or older": each is named, newest first.
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
    words = []
    for platform in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64"):
        words += ["--platform", platform]
    for abi in ("cp311", "abi3", "none"):
        words += ["--abi", abi]
    return words
