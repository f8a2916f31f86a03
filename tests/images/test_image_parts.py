"""The parts of the build that need no container: roots as tars, trimming, inventories."""

import email.message
import os
import tarfile
from pathlib import Path

import pytest

from deploy.images import debian, inventory, licences, sbom, trim


def test_a_tar_depends_on_content_alone(tmp_path: Path) -> None:
    made = []
    for number, order in enumerate((("a", "b"), ("b", "a"))):
        tree = tmp_path / f"tree{number}"
        (tree / "dev").mkdir(parents=True)
        (tree / "dev" / "null").write_text("", encoding="utf-8")
        for name in order:
            (tree / name).write_text(name, encoding="utf-8")
            os.utime(tree / name, (2_000_000_000 + number, 2_000_000_000 + number))
        (tree / "link").symlink_to("a")
        for folder in (tree, tree / "dev"):
            os.utime(folder, (1_900_000_000, 1_900_000_000))
        debian.write_tar(tree, tmp_path / f"{number}.tar", 1_800_000_000)
        made.append((tmp_path / f"{number}.tar").read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "0.tar") as archive:
        assert sorted(archive.getnames()) == ["a", "b", "dev", "link"]
        assert archive.getmember("a").mtime == 1_800_000_000


def test_trimming_leaves_records_true(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.11/site-packages"
    kept, dropped = ("chiasm/wire.py", "numpy/core.py"), (
        "gateway/chat.py", "numpy/linalg/tests/test_all.py", "torch/include/x.h",
    )  # fmt: skip
    for name in (*kept, *dropped):
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.11").touch()
    (tmp_path / "bin" / "torchrun").touch()
    record = site / "all-1.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("".join(f"{name},sha256=x,1\n" for name in (*kept, *dropped)), "utf-8")
    trim.trim(tmp_path, ("chiasm",))
    assert record.read_text("utf-8") == "".join(f"{name},sha256=x,1\n" for name in sorted(kept))
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["python3.11"]


def image_root(folder: Path) -> Path:
    status = folder / inventory.STATUS
    status.mkdir(parents=True)
    (status / "libc6").write_text(
        "Package: libc6\nVersion: 2.36-9+deb12u14\nArchitecture: amd64\n", encoding="utf-8"
    )
    site = folder / inventory.SITE
    info = site / "Some_Package-1.0+cpu.dist-info"
    (info / "sboms").mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: Some_Package\nVersion: 1.0+cpu\nLicense: MIT License\n",
        encoding="utf-8",
    )
    (info / "sboms" / "crates.cdx.json").write_text(
        '{"components": [{"name": "serde", "version": "1", "purl": "pkg:cargo/serde@1",'
        ' "licenses": [{"expression": "MIT OR Apache-2.0"}]}, {"name": "Some_Package"}]}',
        encoding="utf-8",
    )
    (site / "Some_Package.libs").mkdir()
    (site / "Some_Package.libs" / "libgfortran.so.5").write_bytes(b"\x7fELF")
    return folder


def test_an_inventory_finds_packages_distributions_and_what_wheels_hold(tmp_path: Path) -> None:
    libc, package = inventory.read(image_root(tmp_path))
    assert (libc.kind, libc.purl) == (
        "debian", "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64&distro=debian-12"
    )  # fmt: skip
    assert (package.name, package.licence) == ("some-package", "MIT")
    assert [(one.name, one.licence) for one in package.parts] == [
        ("serde", "MIT OR Apache-2.0"),
        ("libgfortran.so.5", ""),
    ]


def test_a_bill_keeps_to_the_schema_and_is_equal_for_equal_images(tmp_path: Path) -> None:
    parts = inventory.read(image_root(tmp_path))
    bills = {sbom.write("localhost/x:1", "sha256:12", parts, 1_800_000_000) for _ in range(2)}
    assert len(bills) == 1
    text = bills.pop()
    assert '"pkg:pypi/some-package@1.0%2Bcpu"' in text
    assert '"specVersion": "1.6"' in text


def test_a_licence_that_nobody_has_read_is_an_error() -> None:
    metadata = email.message.Message()
    metadata["Name"], metadata["License"] = "strange", "Ask me"
    with pytest.raises(licences.UnknownLicenceError, match="strange"):
        licences.of_python(metadata)
    with pytest.raises(licences.UnknownLicenceError, match="libstrange"):
        licences.of_debian("libstrange")
