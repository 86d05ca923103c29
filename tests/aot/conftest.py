"""The toy program's artifacts, built once per test session."""

import os
import shutil
from pathlib import Path

import pytest

from aot.store import Store
from tests.support.toy import built_store


@pytest.fixture(scope="session")
def toy_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with the toy's SMALL and LARGE artifacts. Shared: read only."""
    base = tmp_path_factory.getbasetemp()
    # The processes of one parallel session have their base folders side by side.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return built_store(shared / "toy")


@pytest.fixture
def own_store(toy_store: Store, tmp_path: Path) -> Store:
    """A copy of the toy store that a test may damage."""
    shutil.copytree(toy_store.root, tmp_path / "store", ignore=shutil.ignore_patterns("build"))
    return Store(tmp_path / "store")
