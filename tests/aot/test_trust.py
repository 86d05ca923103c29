import os
import subprocess
from pathlib import Path

import pytest

from aot.errors import CorruptArtifact, UntrustedArtifact
from aot.trust import check_trusted_folder, open_trusted


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "outer" / "inner" / "file"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"content")
    return path


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` foreign: root changes its owner, anybody else poses as a third user."""
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)


def test_a_file_of_my_own_under_my_own_folders_opens(file):
    with open_trusted(file) as opened:
        assert opened.read() == b"content"


def test_a_relative_path_and_one_with_dots_open(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    for path in (Path("file"), Path("../inner/file")):
        with open_trusted(path) as opened:
            assert opened.read() == b"content"


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("part", ["outer/inner/file", "outer/inner", "outer"])
def test_whatever_others_may_write_is_refused_with_the_command_that_mends_it(file, tmp_path, part, mode):
    path = tmp_path / part
    path.chmod(0o755 | mode)
    with pytest.raises(UntrustedArtifact, match=f"{path} may be written by") as caught:
        open_trusted(file)
    assert caught.value.hint == f"`chmod go-w '{path}'`"


@pytest.mark.parametrize("part", ["outer/inner/file", "outer/inner", "outer"])
def test_whatever_belongs_to_somebody_else_is_refused(file, tmp_path, part, monkeypatch):
    give_away(tmp_path / part, monkeypatch)
    with pytest.raises(UntrustedArtifact, match="belongs to user"):
        open_trusted(file)


@pytest.mark.parametrize("part", ["outer/inner/file", "outer/inner", "outer"])
def test_a_symbolic_link_anywhere_on_the_path_is_refused_and_the_real_path_named(file, tmp_path, part):
    path = tmp_path / part
    real = path.rename(tmp_path / "real")
    path.symlink_to(real)
    with pytest.raises(UntrustedArtifact, match="symbolic link") as caught:
        open_trusted(file)
    assert str(real) in caught.value.hint


def test_a_sticky_folder_is_fine_above_but_not_as_the_store_itself(file, tmp_path):
    (tmp_path / "outer").chmod(0o1777)
    open_trusted(file).close()
    check_trusted_folder(file.parent)
    with pytest.raises(UntrustedArtifact, match="may be written by everybody"):
        check_trusted_folder(tmp_path / "outer")


def test_a_sticky_file_is_not_fine(file):
    file.chmod(0o1666)
    with pytest.raises(UntrustedArtifact, match="may be written by everybody"):
        open_trusted(file)


@pytest.mark.timeout(5)
def test_a_fifo_is_refused_without_waiting_for_a_writer(file):
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(UntrustedArtifact, match="not a regular file"):
        open_trusted(file)


def test_a_folder_in_place_of_a_file_is_refused(file):
    with pytest.raises(UntrustedArtifact, match="not a regular file"):
        open_trusted(file.parent)


@pytest.mark.parametrize("part", ["outer/inner/none", "outer/none/file"])
def test_a_missing_file_is_reported_as_missing(file, tmp_path, part):
    with pytest.raises(CorruptArtifact, match=f"{tmp_path / part}|{(tmp_path / part).parent}"):
        open_trusted(tmp_path / part)


def test_refusals_leave_no_descriptor_open(file, tmp_path):
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    file.chmod(0o666)
    for path in (file, file.parent, tmp_path / "none" / "file"):
        with pytest.raises((UntrustedArtifact, CorruptArtifact)):
            open_trusted(path)
    assert len(list(descriptors.iterdir())) == before


def test_the_hint_for_a_link_inside_a_store_mends_it(file):
    """Fails with a hint that takes what the link points to for a store."""
    link = file.parent
    real = link.rename(link.parent / "real")
    link.symlink_to(real)
    with pytest.raises(UntrustedArtifact) as caught:
        open_trusted(file)
    assert "--store" not in caught.value.hint
    command = caught.value.hint.split("`")[1]
    subprocess.run(command, shell=True, check=True)
    open_trusted(file).close()
