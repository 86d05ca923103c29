"""Packages hold no paths of the machine; two builds are compared member by member."""

import io
import platform
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from aot import compile as aot_compile
from aot.canary import child_environment
from aot.compile import check
from aot.package import blanked, canonical_package, differing_members, machine_paths
from aot.store import Store
from tests.support.toy import SMALL, requests

MODEL = "model/data/aotinductor/model/"


def package(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_a_path_is_blanked_at_its_length_and_the_longest_first():
    """Fails when a shorter path goes first: the rest of a longer one stays."""
    paths = [b"/home/ada/store/build", b"/home/ada"]
    assert blanked(b"x/home/ada/store/build/k.so\0/home/ada/y", paths) == (
        b"x/____________________/k.so\0/________/y"
    )


def test_machine_paths_come_longest_first_and_without_what_every_machine_has(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(sys, "prefix", "/usr")
    found = machine_paths(Path("/home/ada/store"))
    assert b"/home/ada/store" in found
    assert not {b"/", b"/usr"} & set(found)
    assert [len(path) for path in found] == sorted((len(path) for path in found), reverse=True)


def test_a_canonical_package_has_no_sources_and_one_spelling():
    """Fails when members keep their dates or order."""
    wrapper = {"d.wrapper.cpp": b"// /home/ada/x"}
    one = canonical_package(
        package(b=b"1", **{"a.kernel.cpp": b"2", "c.json": b"/home/ada/x"}, **wrapper), [b"/home/ada"]
    )
    other = canonical_package(package(**wrapper, **{"c.json": b"/home/bob/x"}, b=b"1"), [b"/home/bob"])
    assert one == other
    with zipfile.ZipFile(io.BytesIO(one)) as archive:
        assert archive.namelist() == ["b", "c.json", "d.wrapper.cpp"]
        assert archive.read("d.wrapper.cpp") == b""
        assert archive.testzip() is None


def test_what_differs_is_named():
    one = package(a=b"1", b=b"2", c=b"3")
    assert differing_members(one, one) == []
    assert differing_members(one, package(a=b"1", b=b"x", d=b"4")) == [
        "b",
        "c (in one of them only)",
        "d (in one of them only)",
    ]
    assert differing_members(one, package(b=b"2", a=b"1", c=b"3")) == ["the archive around equal members"]


BUILD = """
import sys
from aot.compile import build
from aot.store import Store
from tests.support.toy import SMALL, requests
build(requests(SMALL), Store(sys.argv[1]))
"""


@pytest.mark.xdist_group("toy-build")
def test_a_package_says_nothing_of_who_built_it_and_where(tmp_path):
    """Every byte of the package, the manifest and what lies in the store is searched for the user's name, the
    home, the folders of the build, of the project and of torch, and the host's name. Fails without `blanked`
    (the library names its source and torch's headers) and when sources are kept (they hold commands)."""
    user = f"ada{random.randrange(10**9)}"
    home = tmp_path / user
    home.mkdir()
    store = Store(home / "store")
    environment = {**child_environment(), "HOME": str(home), "USER": user, "LOGNAME": user}
    subprocess.run(
        [sys.executable, "-c", BUILD, str(store.root)], env=environment, cwd=Path.cwd(), check=True
    )
    (manifest,) = store.manifests()
    content = store.read_package(manifest)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        texts = [archive.read(name) for name in archive.namelist()]
        sources = [member for member in archive.infolist() if member.filename.endswith((".cpp", ".h"))]
        assert [member.file_size for member in sources] == [0]
    texts += [content, manifest.to_bytes()]
    told = {user, str(home), str(tmp_path), sys.prefix, str(Path(torch.__file__).parents[1]), str(Path.cwd())}
    if len(platform.node()) > 4:
        told.add(platform.node())
    for text in texts:
        assert not [word for word in told if word.encode() in text]
    assert manifest.environment["pythonhashseed"] == "0"


@pytest.mark.xdist_group("toy-build")
def test_two_builds_in_clean_processes_are_compared(tmp_path, monkeypatch):
    """Real builds come out the same; made-up ones that differ are told apart. Fails when `check` compares a
    build with itself."""
    store, log = Store(tmp_path / "store"), []
    (result,) = check(requests(SMALL), store, progress=log.append)
    assert result.differing == ()
    assert [event.kind for event in log] == ["started", "finished"] * 2
    assert store.manifests() == []
    assert {path.suffix for path in (store.root / "build").iterdir()} == {".lock"}
    # A build that differs, without compiling: the workers' packages are replaced.
    made = iter([package(a=b"1", b=b"1"), package(a=b"1", b=b"2")])

    def pretend(workers, jobs, report):
        for worker in workers:
            worker.output.write_bytes(next(made))
        return workers

    monkeypatch.setattr(aot_compile, "_run_all", pretend)
    (result,) = check(requests(SMALL), store)
    assert result.differing == ("b",)
