"""The private folder: what it must be."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from aot.errors import ConfigError, EnvironmentFault
from aot.private import PRIVATE_VARIABLE, private_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_is_no_private_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails, with the error of `mkdir`, unless it is told what the variable must name."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(PRIVATE_VARIABLE, str(tmp_path / name))
    with pytest.raises(ConfigError, match="is no folder") as caught:
        private_folder()
    assert PRIVATE_VARIABLE in (caught.value.hint or "")


def test_a_folder_that_runs_no_library_is_refused_before_anything_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails without the look at the mount: a good package is then blamed for not loading."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(EnvironmentFault, match="noexec") as caught:
        private_folder(tmp_path / "private")
    assert PRIVATE_VARIABLE in (caught.value.hint or "")
