"""The tiny run, with its artifacts, made once per session; tests write their own output folders."""

import pytest

from tests.support.tiny_run import NEEDS, TinyRun, build_artifacts, make_tiny_run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_tiny_run(tmp_path_factory.mktemp("tiny"))
    build_artifacts(run, NEEDS)
    return run
