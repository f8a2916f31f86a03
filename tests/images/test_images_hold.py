"""What is in the images, and what is not."""

import shutil
import stat
from pathlib import Path

import pytest

from deploy.images import build, debian, python_locks
from tests.images.containers import config, once, python, root_of

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
]

SERVICES = ("gateway", "encoder", "llm")
SITE = "opt/chiasm/lib/python3.11/site-packages"
OWN = {"gateway": "gateway", "encoder": "encoder_service", "llm": "llm_service"}
# Megabytes, uncompressed. What is measured stands in docs/images.md.
LARGEST = {"gateway": 240, "encoder": 1080, "llm": 1100, "demo-model": 20}


@pytest.mark.parametrize("target", build.TARGETS)
def test_an_image_is_no_larger_than_the_docs_say(target: str) -> None:
    assert build.size(build.image(target)) / 1e6 < LARGEST[target]


@pytest.mark.parametrize("target", SERVICES)
def test_no_shell_no_installer_no_compiler(target: str) -> None:
    with root_of(target) as root:
        programs = {
            path.relative_to(root).as_posix()
            for path in debian.walk(root)
            if not path.is_dir() and path.parent.name in {"bin", "sbin"}
        }
        assert programs == {
            "usr/bin/python3.11", f"{SITE}/torch/bin/torch_shm_manager",
            *(f"opt/chiasm/bin/{name}" for name in ("python", "python3", "python3.11")),
        } - ({f"{SITE}/torch/bin/torch_shm_manager"} if target == "gateway" else set())  # fmt: skip
        assert not list((root / SITE).glob("pip*"))
        assert not (root / "usr/lib/python3.11/ensurepip").exists()
    for shell in ("sh", "/bin/sh", "bash", "busybox", "/usr/bin/apt-get"):
        assert once(target, flags=["--entrypoint", shell]).returncode == 127


@pytest.mark.parametrize("target", SERVICES)
def test_no_file_gives_rights_and_none_is_writable_for_the_service(target: str) -> None:
    with root_of(target) as root:
        for path in debian.walk(root):
            mode = path.lstat()
            if stat.S_ISLNK(mode.st_mode):
                continue
            name = path.relative_to(root).as_posix()
            assert not mode.st_mode & (stat.S_ISUID | stat.S_ISGID), name
            assert mode.st_uid == 0, name
            if name not in {"tmp", "var/tmp"} and path.is_file():
                assert not mode.st_mode & stat.S_IWOTH, name


@pytest.mark.parametrize("target", SERVICES)
def test_every_module_of_the_standard_library_finds_its_libraries(target: str) -> None:
    code = (
        "import importlib, pathlib\n"
        "for path in pathlib.Path('/usr/lib/python3.11/lib-dynload').glob('*.so'):\n"
        "    importlib.import_module(path.name.split('.')[0])\n"
        "import ssl, sqlite3, zoneinfo, ctypes\n"
        "assert zoneinfo.ZoneInfo('Europe/Berlin')\n"
        "assert len(ssl.create_default_context().get_ca_certs()) > 100\n"
    )
    python(target, code)


@pytest.mark.parametrize("target", SERVICES)
def test_an_image_holds_its_own_service_and_no_model(target: str) -> None:
    with root_of(target) as root:
        held = {name for name in ("demo_model", *OWN.values()) if (root / SITE / name).exists()}
        assert held == {OWN[target]}
        assert not list(root.rglob("*.safetensors"))
        native = list((root / SITE / "llm_service/engine/native").glob("_rows_*.so"))
        assert len(native) == (4 if target == "llm" else 0)


def test_the_gateway_has_no_torch() -> None:
    with root_of("gateway") as root:
        for name in ("torch", "transformers", "safetensors", "llguidance"):
            assert not list((root / SITE).glob(f"{name}*"))


def test_the_images_leave_out_the_codec_under_the_gpl() -> None:
    for target in SERVICES:
        with root_of(target) as root:
            assert not list(root.rglob("*x265*"))
            assert not list((root / SITE).glob("pillow_heif*"))


@pytest.mark.parametrize("target", SERVICES)
def test_what_is_installed_is_what_the_lock_says(target: str) -> None:
    lock = python_locks.lock_path(target if target == "gateway" else f"{target}-cpu")
    locked = {_key(one.name): one.version for one in python_locks.read_lock(lock)}
    code = (
        "from importlib.metadata import distributions\n"
        "for one in distributions(): print(one.metadata['Name'], one.version)\n"
    )
    lines = python(target, code).splitlines()
    installed = {_key(line.split()[0]): line.split()[1] for line in lines}
    assert installed.pop("chiasm") == build.version()
    assert installed == locked


@pytest.mark.parametrize("target", SERVICES)
def test_what_is_installed_of_debian_is_what_the_lock_says(target: str) -> None:
    lock = debian.read_lock(debian.lock_path("runtime"))
    with root_of(target) as root:
        held = [_fields(path) for path in (root / "var/lib/dpkg/status.d").iterdir()]
    assert {(one["Package"], one["Version"]) for one in held} == {
        (one.name, one.version) for one in lock.packages
    }


@pytest.mark.parametrize("target", SERVICES)
def test_records_name_only_files_that_are_there(target: str) -> None:
    code = (
        "from importlib.metadata import distributions\n"
        "for one in distributions():\n"
        "    for file in one.files or []:\n"
        "        assert file.locate().exists(), (one.name, file)\n"
    )
    python(target, code)


@pytest.mark.parametrize("target", SERVICES)
def test_modules_are_compiled_already(target: str) -> None:
    with root_of(target) as root:
        for folder in (root / SITE, root / "usr/lib/python3.11"):
            sources = [path for path in folder.rglob("*.py") if path.stat().st_size]
            missing = [path for path in sources if not _compiled(path).exists()]
            assert not missing, missing[:5]
            flags = {_compiled(path).read_bytes()[4] for path in sources[:200]}
            assert flags == {1}  # PEP 552: never compared with the source


@pytest.mark.parametrize("target", SERVICES)
def test_an_image_says_what_it_is(target: str) -> None:
    read = config(target)
    settings, labels = read["Config"], read["Labels"]
    prefix = "org.opencontainers.image."
    assert settings["User"] == "10001:10001"
    assert settings["Entrypoint"] == ["python", "-m", OWN[target]]
    assert settings["StopSignal"] in {"SIGTERM", "15"}
    assert settings["WorkingDir"] == "/opt/chiasm"
    assert labels[f"{prefix}title"] == f"chiasm-{target}"
    assert labels[f"{prefix}version"] == build.version()
    assert labels[f"{prefix}licenses"] == "Apache-2.0"
    assert len(labels[f"{prefix}revision"].removesuffix("-dirty")) == 40
    assert labels[f"{prefix}base.digest"].startswith("sha256:")
    assert labels[f"{prefix}created"].endswith("Z")
    assert read["Healthcheck"]["Test"][:4] == ["CMD", "python", "-m", "chiasm.rpc.probe"]


def _key(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _fields(path: Path) -> dict[str, str]:
    pairs = [line.partition(": ") for line in path.read_text(encoding="utf-8").splitlines()]
    return {key: value for key, separator, value in pairs if separator}


def _compiled(path: Path) -> Path:
    return path.parent / "__pycache__" / f"{path.stem}.cpython-311.pyc"
