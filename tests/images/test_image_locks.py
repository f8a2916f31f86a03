"""The locks pin everything, and what they pin is what pyproject.toml asks for."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.images import debian, python_locks
from deploy.images.debian import LockError

PROJECT = tomllib.loads(python_locks.PROJECT.read_text(encoding="utf-8"))["project"]
SERVICE_LOCKS = [name for name in python_locks.lock_names() if name not in {"build", "heif"}]
ENVIRONMENT = {"python_version": "3.11", "sys_platform": "linux", "extra": ""}


def locked(name: str) -> dict[str, Version]:
    lock = python_locks.read_lock(python_locks.lock_path(name))
    return {canonicalize_name(one.name): Version(one.version) for one in lock}


def asked(name: str) -> list[Requirement]:
    """What pyproject.toml asks for in an image, less what the image leaves out on purpose."""
    image = name.partition("-")[0]
    texts = list(PROJECT["dependencies"])
    for extra in python_locks.wanted_extras(image):
        texts += PROJECT["optional-dependencies"][extra]
    left_out = {python_locks.HEIF, *(python_locks.ONLY_LLM if image == "encoder" else ())}
    return [one for one in map(Requirement, texts) if one.name not in left_out]


@pytest.mark.parametrize("name", python_locks.lock_names())
def test_every_requirement_is_pinned_and_has_digests(name: str) -> None:
    assert python_locks.read_lock(python_locks.lock_path(name))


@pytest.mark.parametrize("name", SERVICE_LOCKS)
def test_a_lock_satisfies_pyproject(name: str) -> None:
    """If this fails, pyproject.toml has changed: run `make images-lock`, then `make images`."""
    pins = locked(name)
    for one in asked(name):
        if one.marker is None or one.marker.evaluate(ENVIRONMENT):
            pin = pins.get(canonicalize_name(one.name))
            assert pin is not None, f"{one.name} is not in the lock"
            assert one.specifier.contains(pin), f"{one}: locked is {pin}"


def test_the_lock_of_the_build_satisfies_pyproject() -> None:
    system = tomllib.loads(python_locks.PROJECT.read_text(encoding="utf-8"))["build-system"]
    pins = locked("build")
    for one in map(Requirement, system["requires"]):
        assert one.specifier.contains(pins[canonicalize_name(one.name)])


@pytest.mark.parametrize("kind", python_locks.ACCELERATORS)
def test_the_llm_image_only_adds_to_the_encoder_s(kind: str) -> None:
    """The Containerfile installs the second lock over the first, as a layer beside it."""
    encoder, llm = locked(f"encoder-{kind}"), locked(f"llm-{kind}")
    assert encoder.items() <= llm.items()
    assert {"llguidance", "redis"} <= llm.keys() - encoder.keys()


@pytest.mark.parametrize("name", ["gateway", "heif"])
def test_the_images_have_one_version_of_each_package(name: str) -> None:
    llm = locked("llm-cpu")
    for package, version in locked(name).items():
        assert llm.get(package, version) == version, package


def test_the_gateway_locks_no_torch() -> None:
    assert not locked("gateway").keys() & {"torch", "transformers", "safetensors"}


def test_torch_is_the_same_version_for_both_kinds() -> None:
    cpu, cuda = locked("llm-cpu")["torch"], locked("llm-cuda")["torch"]
    assert (cpu.public, cpu.local) == (cuda.public, "cpu")
    assert cuda.local is None
    assert not any(name.startswith("nvidia-") for name in locked("llm-cpu"))


@pytest.mark.parametrize("name", [name for name in SERVICE_LOCKS if name != "heif"])
def test_no_lock_of_a_service_holds_the_codec_under_the_gpl(name: str) -> None:
    assert python_locks.HEIF not in locked(name)


@pytest.mark.parametrize("path", sorted(debian.LOCKS.iterdir()), ids=lambda path: path.name)
def test_locks_name_no_place_to_fetch_from(path: Path) -> None:
    assert not re.search(r"[a-z]+://|--(extra-)?index|--find-links", path.read_text("utf-8"))


@pytest.mark.parametrize(
    "text",
    ["numpy>=2 --hash=sha256:" + "0" * 64, "numpy==2.4.6", "numpy==2.4.6 --hash=md5:00", "-e ."],
)
def test_a_lock_that_pins_too_little_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "loose.txt"
    path.write_text(f"# Of nothing.\n{text}\n", encoding="utf-8")
    with pytest.raises(LockError, match=re.escape("loose.txt")):
        python_locks.read_lock(path)


@pytest.mark.parametrize("root", ["runtime", "build"])
def test_debian_locks_hold_what_is_wanted(root: debian.Root) -> None:
    lock = debian.read_lock(debian.lock_path(root))
    names = [one.name for one in lock.packages]
    assert names == sorted(set(names))
    assert set(debian.wanted(root)) <= set(names)
    if root == "runtime":
        assert set(debian.wanted(root)) == set(names)
    assert debian.moment(lock) > 1_700_000_000


def test_both_roots_have_the_same_python_and_c_library() -> None:
    """What is compiled in the one runs in the other."""
    build, runtime = (
        {one.name: one.version for one in debian.read_lock(debian.lock_path(root)).packages}
        for root in ("build", "runtime")
    )
    for name in runtime.keys() & build.keys():
        assert build[name] == runtime[name], name
    assert {"libc6", "python3.11-minimal"} <= runtime.keys() & build.keys()


@pytest.mark.parametrize(
    "line", ["libc6 2.36 amd64", "libc6 2.36 amd64 sha256:12", "libc6 2.36 amd64 " + "0" * 64]
)
def test_a_debian_lock_that_pins_too_little_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "debian-loose.txt"
    path.write_text(f"# snapshot: 20261203T000000Z\n{line}\n", encoding="utf-8")
    with pytest.raises(LockError, match=r"debian-loose\.txt:2"):
        debian.read_lock(path)


def test_a_debian_lock_is_written_as_it_is_read(tmp_path: Path) -> None:
    lock = debian.read_lock(debian.lock_path("runtime"))
    debian.write_lock(tmp_path / "debian-again.txt", lock)
    assert debian.read_lock(tmp_path / "debian-again.txt") == lock
