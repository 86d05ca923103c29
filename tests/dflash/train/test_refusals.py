"""What a run refuses before it looks for artifacts; runs with artifacts are in tests/e2e."""

import os

import pytest

from aot.errors import ConfigError
from aot.store import Store
from dflash.train.run import locked
from dflash.train.session import Invocation, dry_run_report
from tests.support.tiny_run import make_tiny_run
from tests.support.training import tiny_config


@pytest.mark.parametrize("name", ["file", "file/below", "read-only/below"])
def test_an_output_that_is_no_folder_of_ours_is_told_with_its_flag(name, tmp_path):
    """Uncaught it is a traceback, or a hint that names --store."""
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir(mode=0o555)
    if name.startswith("read-only") and os.access(tmp_path / "read-only", os.W_OK):
        pytest.skip("root may write anywhere")
    with pytest.raises(ConfigError, match=str(tmp_path / name)) as caught, locked(tmp_path / name):
        pass
    assert "--output" in caught.value.hint


def test_a_dry_run_refuses_a_target_that_is_not_there(tmp_path):
    """Without the look at its configuration the dry run goes on to the artifacts, and may pass."""
    run = make_tiny_run(tmp_path / "run", tmp_path / "store")
    config = tiny_config(run, tmp_path / "out", 'target.model="/nowhere"')
    with pytest.raises(ConfigError, match=r"target\.model '/nowhere' cannot be loaded"):
        dry_run_report(config, Store(run.store), Invocation(run.run_file, ("dflash",), run.lock))
