"""The authority of these tests, and the files of one server and one client."""

from pathlib import Path

import pytest

from tests.rpc_tls.authority import Authority, Files
from tests.rpc_tls.tiny_service import CLIENT, SERVER


@pytest.fixture(scope="module")
def ca() -> Authority:
    return Authority()


@pytest.fixture
def server_files(ca: Authority, tmp_path: Path) -> Files:
    return ca.files(tmp_path / "server", SERVER)


@pytest.fixture
def client_files(ca: Authority, tmp_path: Path) -> Files:
    return ca.files(tmp_path / "client", CLIENT)
