"""The toy program's artifacts, built once per test session."""

from pathlib import Path

import pytest

from aot.store import Store
from tests.support.toy import copied, session_store


@pytest.fixture(scope="session")
def toy_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with the toy's SMALL and LARGE artifacts. Shared: read only."""
    return session_store(tmp_path_factory.getbasetemp())


@pytest.fixture
def own_store(toy_store: Store, tmp_path: Path) -> Store:
    """A copy of the toy store that a test may damage."""
    return copied(toy_store, tmp_path / "store")
