"""docs/licences.md tells of every locked package, and each licence goes with Apache-2.0."""

import re

import pytest

from deploy.images import debian, licences, notices, python_locks

ROWS = {
    name: (version, licence)
    for name, version, licence, _ in re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$",
        notices.PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    if name not in {"package", "---"}
}


@pytest.mark.parametrize("lock", ["gateway", "encoder-cpu", "llm-cpu"])
def test_every_locked_python_package_is_listed(lock: str) -> None:
    """If this fails, the locks have changed: `make images`, `python -m deploy.images licences`."""
    for one in python_locks.read_lock(python_locks.lock_path(lock)):
        assert one.name.replace("_", "-").replace(".", "-") in ROWS, one.name
        assert ROWS[one.name][0] == one.version, one.name


def test_every_locked_package_of_debian_is_listed() -> None:
    for one in debian.read_lock(debian.lock_path("runtime")).packages:
        assert ROWS[one.name] == (one.version, licences.DEBIAN[one.name])


@pytest.mark.parametrize("name", sorted(ROWS))
def test_each_licence_goes_with_apache(name: str) -> None:
    assert not licences.refused(ROWS[name][1], apart=name in licences.DEBIAN)


@pytest.mark.parametrize(
    ("expression", "refused"),
    [
        ("MIT", ""),
        ("MIT AND Apache-2.0 WITH LLVM-exception", ""),
        ("GPL-3.0-only OR MIT", ""),
        ("GPL-2.0-only", "GPL-2.0-only"),
        ("MIT AND (BSD-3-Clause AND AGPL-3.0-only)", "AGPL-3.0-only"),
        ("LGPL-2.1-or-later", "LGPL-2.1-or-later"),
        ("GPL-3.0-or-later WITH GCC-exception-3.1", "GPL-3.0-or-later WITH GCC-exception-3.1"),
        (licences.NVIDIA, licences.NVIDIA),
        (licences.PYTHON["pillow-heif"], "LGPL-3.0-or-later"),
    ],
)
def test_what_is_refused_among_python_packages(expression: str, refused: str) -> None:
    assert licences.refused(expression, apart=False) == refused


def test_works_apart_may_be_under_the_lgpl_and_not_under_the_agpl() -> None:
    assert not licences.refused("LGPL-2.1-or-later", apart=True)
    assert licences.refused("AGPL-3.0-only", apart=True) == "AGPL-3.0-only"
