"""Debian roots from locked packages: the one that builds, and the one that the images run in.

Needs apt, dpkg, mmdebstrap and root (or a machine where mmdebstrap may unshare).
"""

import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

Root = Literal["runtime", "build"]

LOCKS: Final = Path(__file__).parent / "locks"
ARCHITECTURE: Final = "amd64"
SUITE: Final = "bookworm"
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
ARCHIVE: Final = "http://deb.debian.org"
# Keeps every version that ever was; the archive itself only the newest.
SNAPSHOT: Final = "http://snapshot.debian.org/archive"

UID: Final = 10001
PYTHON: Final = "usr/bin/python3.11"
LIBRARY: Final = "usr/lib/python3.11"

# Of the runtime root: what no service reads. Licences (doc/*/copyright) stay.
DROPPED: Final = (
    "etc/apt", "etc/cron.daily", "etc/default", "etc/dpkg", "etc/init.d", "etc/kernel",
    "etc/profile.d", "etc/python3.11", "etc/skel", "etc/update-motd.d",
    "usr/games", "usr/include", "usr/lib/mime", "usr/lib/valgrind",
    "usr/lib/x86_64-linux-gnu/gconv", "usr/lib/x86_64-linux-gnu/audit",
    "usr/share/applications", "usr/share/apps", "usr/share/base-files", "usr/share/binfmts",
    "usr/share/bug", "usr/share/debianutils",
    "usr/share/doc-base", "usr/share/gcc", "usr/share/gdb", "usr/share/info",
    "usr/share/lintian", "usr/share/locale", "usr/share/man", "usr/share/menu",
    "usr/share/perl5", "usr/share/pixmaps", "usr/share/python3", "usr/share/ca-certificates",
    "usr/src", "var/backups", "var/cache", "var/lib/apt", "var/lib/dpkg", "var/log", "var/mail",
    f"{LIBRARY}/lib2to3", f"{LIBRARY}/pydoc_data", f"{LIBRARY}/sitecustomize.py",
)  # fmt: skip
# Extension modules whose libraries are left out: terminals, old databases, NIS.
DROPPED_MODULES: Final = ("_curses", "_curses_panel", "_dbm", "_gdbm", "nis", "readline")

PASSWD: Final = (
    f"root:x:0:0:root:/nonexistent:/nonexistent\nchiasm:x:{UID}:{UID}:chiasm:/tmp:/nonexistent\n"
)
GROUP: Final = f"root:x:0:\nchiasm:x:{UID}:\n"


class LockError(Exception):
    """A lock file, or a package, is not what it should be; the text says which and what to do."""


@dataclass(frozen=True)
class Package:
    """One .deb, pinned."""

    name: str
    version: str
    architecture: str
    sha256: str

    def line(self) -> str:
        return f"{self.name} {self.version} {self.architecture} sha256:{self.sha256}"


@dataclass(frozen=True)
class Lock:
    """The packages of one root, and the moment at which they were the newest."""

    snapshot: str  # as snapshot.debian.org names moments: 20261203T120000Z
    packages: tuple[Package, ...]

    def digest(self) -> str:
        """Names the root in its image's tag: 12 hexadecimal digits."""
        lines = "\n".join(package.line() for package in self.packages)
        return hashlib.sha256(lines.encode()).hexdigest()[:12]


def lock_path(root: Root) -> Path:
    return LOCKS / f"debian-{root}.txt"


def wanted(root: Root) -> list[str]:
    """The names in `debian-ROOT.in`."""
    text = (LOCKS / f"debian-{root}.in").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def read_lock(path: Path) -> Lock:
    """Raises LockError for a line that pins nothing."""
    snapshot, packages = "", []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("# snapshot: "):
            snapshot = line.removeprefix("# snapshot: ")
        if not line or line.startswith("#"):
            continue
        words = line.split(" ")
        digest = words[-1].removeprefix("sha256:")
        if len(words) != 4 or len(digest) != 64 or digest == words[-1]:
            raise LockError(f"{path.name}:{number}: not `name version architecture sha256:…`")
        packages.append(Package(words[0], words[1], words[2], digest))
    if not snapshot or not packages:
        raise LockError(f"{path.name}: no snapshot or no package; run make images-lock")
    return Lock(snapshot, tuple(packages))


def write_lock(path: Path, lock: Lock) -> None:
    lines = [
        f"# From {path.with_suffix('.in').name} by `make images-lock`.",
        f"# snapshot: {lock.snapshot}",
        *(package.line() for package in lock.packages),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def moment(lock: Lock) -> int:
    """The lock's moment in seconds since 1970: no file of its root is newer."""
    read = datetime.strptime(lock.snapshot, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return int(read.timestamp())


def digest_of_code() -> str:
    """Names the way in which roots are made: 8 hexadecimal digits."""
    return _sha256(Path(__file__))[:8]


@dataclass(frozen=True)
class Apt:
    """apt with lists, cache and status of its own: it sees no package of this machine."""

    folder: Path

    def run(self, program: str, *words: str, within: Path | None = None) -> str:
        options = {
            "Dir::State": "state",
            "Dir::State::lists": "lists",
            "Dir::State::status": "state/status",
            "Dir::Cache": "cache",
            "Dir::Etc::sourcelist": "sources.list",
            "Dir::Etc::sourceparts": "none",
            "Dir::Etc::preferences": "none",
            "Dir::Etc::preferencesparts": "none",
        }
        command = [program, "-q"]
        for key, value in options.items():
            command += ["-o", f"{key}={self.folder / value}"]
        # apt's own user may not read a private folder; the packages are checked by digest.
        command += ["-o", "APT::Sandbox::User=root", "-o", f"APT::Architecture={ARCHITECTURE}"]
        return run([*command, *words], within=within)


@contextmanager
def private_apt(sources: Sequence[str]) -> Iterator[Apt]:
    """An apt whose only sources are these lines, up to date."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for part in ("state", "lists/partial", "cache/archives/partial", "none"):
            (folder / part).mkdir(parents=True)
        (folder / "state" / "status").touch()
        (folder / "sources.list").write_text("\n".join(sources) + "\n", encoding="utf-8")
        apt = Apt(folder)
        apt.run("apt-get", "update")
        yield apt


def archive_sources() -> list[str]:
    return [
        f"deb [signed-by={KEYRING}] {ARCHIVE}/debian {SUITE} main",
        f"deb [signed-by={KEYRING}] {ARCHIVE}/debian {SUITE}-updates main",
        f"deb [signed-by={KEYRING}] {ARCHIVE}/debian-security {SUITE}-security main",
    ]


def snapshot_sources(moment: str) -> list[str]:
    options = f"[signed-by={KEYRING} check-valid-until=no]"
    return [
        f"deb {options} {SNAPSHOT}/debian/{moment} {SUITE} main",
        f"deb {options} {SNAPSHOT}/debian/{moment} {SUITE}-updates main",
        f"deb {options} {SNAPSHOT}/debian-security/{moment} {SUITE}-security main",
    ]


def refresh_locks() -> None:
    """Writes both locks anew, with the newest packages of the archive."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    with private_apt(archive_sources()) as apt:
        closure = _closure(apt, ["?essential", *wanted("build")])
        for root, names in (("runtime", wanted("runtime")), ("build", closure)):
            lock = Lock(moment, _newest(apt, names))
            write_lock(LOCKS / f"debian-{root}.txt", lock)


def _closure(apt: Apt, names: Sequence[str]) -> list[str]:
    words = ["install", "--no-install-recommends", "--simulate", *names]
    lines = apt.run("apt-get", *words).splitlines()
    return [line.split(" ")[1] for line in lines if line.startswith("Inst ")]


def _newest(apt: Apt, names: Sequence[str]) -> tuple[Package, ...]:
    stanzas = apt.run("apt-cache", "show", "--no-all-versions", *names).strip().split("\n\n")
    packages = [_package(stanza) for stanza in stanzas]
    return tuple(sorted(packages, key=lambda package: package.name))


def _package(stanza: str) -> Package:
    fields: dict[str, str] = {}
    for line in stanza.splitlines():
        key, separator, value = line.partition(": ")
        if separator and not key.startswith(" "):
            fields.setdefault(key, value)
    return Package(fields["Package"], fields["Version"], fields["Architecture"], fields["SHA256"])


def fetch(lock: Lock, folder: Path) -> list[Path]:
    """The locked .deb files in `folder`, checked; raises LockError for one that cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    for sources in (archive_sources(), snapshot_sources(lock.snapshot)):
        missing = [package for package in lock.packages if _held(package, folder) is None]
        if missing:
            _download(missing, folder, sources)
    paths = []
    for package in lock.packages:
        path = _held(package, folder)
        if path is None:
            raise LockError(
                f"{package.name} {package.version}: neither the archive nor its snapshot "
                f"{lock.snapshot} gave a file with the locked sha256; run make images-lock"
            )
        paths.append(path)
    return paths


def _held(package: Package, folder: Path) -> Path | None:
    # apt writes the colon of an epoch as %3a.
    version = package.version.replace(":", "%3a")
    path = folder / f"{package.name}_{version}_{package.architecture}.deb"
    return path if path.is_file() and _sha256(path) == package.sha256 else None


def _download(packages: Sequence[Package], folder: Path, sources: Sequence[str]) -> None:
    names = [f"{package.name}={package.version}" for package in packages]
    where = sources[0].split("]")[1].split()[0]
    try:
        with private_apt(sources) as apt:
            try:
                apt.run("apt-get", "download", *names, within=folder)
            except subprocess.CalledProcessError:
                # One version that is gone refuses all: what is left comes one by one.
                for name in names:
                    _download_one(apt, name, folder)
    except subprocess.CalledProcessError:
        print(f"{where} does not answer")


def _download_one(apt: Apt, name: str, folder: Path) -> None:
    try:
        apt.run("apt-get", "download", name, within=folder)
    except subprocess.CalledProcessError:
        print(f"{name} is not there any more")


def make_root(root: Root, debs: Sequence[Path], target: Path, epoch: int) -> None:
    """Writes the root as a tar, equal in every byte for equal packages and `epoch` (seconds)."""
    with tempfile.TemporaryDirectory() as made:
        repository, tree = Path(made, "repository"), Path(made, "root")
        _write_repository(repository, debs, dependencies=root == "build")
        variant = "essential" if root == "build" else "extract"
        run(
            [
                "mmdebstrap", f"--variant={variant}", f"--architectures={ARCHITECTURE}",
                f"--include={','.join(_names(debs))}", "--skip=cleanup/apt/lists",
                SUITE, str(tree), f"deb [trusted=yes] copy://{repository} ./",
            ],
            environment={"SOURCE_DATE_EPOCH": str(epoch)},
        )  # fmt: skip
        if root == "runtime":
            _prune(tree, debs)
        _forget_machine(tree)
        write_tar(tree, target, epoch)


def _write_repository(folder: Path, debs: Sequence[Path], *, dependencies: bool) -> None:
    folder.mkdir()
    stanzas = []
    for deb in debs:
        shutil.copyfile(deb, folder / deb.name)
        control = run(["dpkg-deb", "--field", str(deb)]).rstrip("\n")
        if not dependencies:
            control = _without_dependencies(control)
        stanzas.append(
            f"{control}\nFilename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {_sha256(deb)}"
        )
    packages = folder / "Packages"
    packages.write_text("\n\n".join(stanzas) + "\n", encoding="utf-8")
    # mmdebstrap finds the essential packages by the suite's name, which stands here.
    (folder / "Release").write_text(
        f"Suite: {SUITE}\nCodename: {SUITE}\nArchitectures: {ARCHITECTURE}\nSHA256:\n"
        f" {_sha256(packages)} {packages.stat().st_size} Packages\n",
        encoding="utf-8",
    )


def _without_dependencies(control: str) -> str:
    kept, keep = [], True
    for line in control.splitlines():
        if not line.startswith((" ", "\t")):
            keep = line.partition(":")[0] not in {
                "Pre-Depends", "Depends", "Recommends", "Suggests", "Breaks", "Conflicts",
                "Replaces", "Essential", "Protected", "Important",
            }  # fmt: skip
        if keep:
            kept.append(line)
    return "\n".join(kept)


def _names(debs: Sequence[Path]) -> list[str]:
    return [deb.name.partition("_")[0] for deb in debs]


def _prune(tree: Path, debs: Sequence[Path]) -> None:
    _write_certificates(tree)
    _drop(tree)
    _record_packages(tree, debs)
    (tree / "etc/passwd").write_text(PASSWD, encoding="utf-8")
    (tree / "etc/group").write_text(GROUP, encoding="utf-8")
    (tree / "etc/nsswitch.conf").write_text("hosts: files dns\n", encoding="utf-8")
    (tree / "tmp").chmod(0o1777)
    for path in walk(tree):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
            path.chmod(stat.S_IMODE(mode) & ~(stat.S_ISUID | stat.S_ISGID))
    compile_python(tree, LIBRARY)


def _write_certificates(tree: Path) -> None:
    # What update-ca-certificates would write; that script needs a shell and openssl.
    authorities = sorted((tree / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    bundle = tree / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_bytes(b"".join(path.read_bytes() for path in authorities))
    # Where Debian's OpenSSL looks by default.
    default = tree / "usr/lib/ssl/cert.pem"
    default.parent.mkdir(parents=True, exist_ok=True)
    default.unlink(missing_ok=True)
    default.symlink_to("/etc/ssl/certs/ca-certificates.crt")


def _drop(tree: Path) -> None:
    for name in DROPPED:
        path = tree / name
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    for folder in ("usr/bin", "usr/sbin"):
        for path in (tree / folder).iterdir():
            if path != tree / PYTHON:
                path.unlink()
    for path in (tree / LIBRARY).glob("config-3.11*"):
        shutil.rmtree(path)
    for module in DROPPED_MODULES:
        for path in (tree / LIBRARY / "lib-dynload").glob(f"{module}.cpython-*.so"):
            path.unlink()
    for path in (tree / "usr/share/doc").glob("*/*"):
        if path.name != "copyright" and not path.is_symlink():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _record_packages(tree: Path, debs: Sequence[Path]) -> None:
    # Scanners of images read this folder where there is no dpkg database.
    folder = tree / "var/lib/dpkg/status.d"
    folder.mkdir(parents=True)
    for deb in debs:
        control = run(["dpkg-deb", "--field", str(deb)])
        (folder / deb.name.partition("_")[0]).write_text(control, encoding="utf-8")


def _forget_machine(tree: Path) -> None:
    """Takes out what names the machine on which the root is made, or the moment."""
    for name in ("etc/resolv.conf", "etc/hostname", "etc/machine-id", "etc/apt/sources.list"):
        (tree / name).unlink(missing_ok=True)
    for name in ("var/lib/apt/lists", "var/cache/apt", "var/log", "var/cache/ldconfig"):
        shutil.rmtree(tree / name, ignore_errors=True)
    for path in (tree / "var/cache").glob("debconf/*"):
        path.unlink()


def compile_python(tree: Path, folder: str) -> None:
    """Compiles a folder's modules with the root's own Python; the bytecode is never checked
    against the source, whose time a layer does not keep."""
    run([
        "chroot", str(tree), f"/{PYTHON}", "-m", "compileall", "-q", "-f",
        "--invalidation-mode", "unchecked-hash", f"/{folder}",
    ])  # fmt: skip


def walk(tree: Path) -> Iterator[Path]:
    """All paths below a folder, in an order that depends on their names alone."""
    for folder, folders, files in os.walk(tree):
        folders.sort()
        for name in sorted([*folders, *files]):
            yield Path(folder, name)


def write_tar(tree: Path, target: Path, epoch: int) -> None:
    """A tar of a folder in which order, times and owners depend on nothing but content."""
    partial = target.with_name(target.name + ".new")
    with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in walk(tree):
            if path.is_relative_to(tree / "dev") and path != tree / "dev":
                continue  # whoever runs the image lays its own
            entry = archive.gettarinfo(path, str(path.relative_to(tree)))
            entry.mtime = min(int(entry.mtime), epoch)
            entry.uname = entry.gname = ""
            if entry.isreg():
                with path.open("rb") as file:
                    archive.addfile(entry, file)
            else:
                archive.addfile(entry)
    partial.replace(target)


def run(
    command: Sequence[str],
    *,
    within: Path | None = None,
    environment: dict[str, str] | None = None,
) -> str:
    """What a program prints; raises CalledProcessError, its words are on stderr."""
    done = subprocess.run(  # noqa: S603
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=within,
        env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
    )
    return done.stdout


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
