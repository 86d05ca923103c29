"""`dflash-aot ls | show | diff | du | gc`, and `build --check`."""

import fcntl
import json
from pathlib import Path

import pytest

from aot import console
from aot.cli import cli
from aot.collect import collect, named_keys
from aot.errors import ConfigError, UserError
from aot.lockfile import FILE_NAME
from aot.manifest import Manifest
from aot.store import MARKER, Store
from tests.support.stores import check_whole, package_bytes, publish
from tests.support.toy import LARGE, SMALL


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.delenv("DFLASH_AOT_STORE", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = console.run(cli, "dflash-aot", [str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    path.write_bytes(package_bytes())
    return path


@pytest.fixture
def store(tmp_path: Path, package: Path) -> Store:
    """Three artifacts; the two of SMALL share a blob."""
    store = Store(tmp_path / "store")
    publish(store, package, SMALL)
    publish(store, package, SMALL, inner=32)
    package.write_bytes(package_bytes(1))
    publish(store, package, LARGE)
    return store


def lock_file(folder: Path, *manifests: Manifest) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        {"program": m.program, "bucket": str(m.bucket), "key": m.key, "package_digest": m.package_digest}
        for m in manifests
    ]
    path = folder / FILE_NAME
    path.write_text(json.dumps({"artifacts": entries}))
    return path


def test_diff_names_each_field_that_differs(tool, store: Store) -> None:
    one, other = store.manifests("toy_step", SMALL)
    wide = next(m for m in (one, other) if m.key_inputs.identity["network"]["inner"] == 32)
    narrow = other if wide is one else one
    code, out, _ = tool("diff", narrow.key[:10], wide.key[:10], "--store", store.root)
    assert code == 1
    lines = out.splitlines()
    assert lines[0].split() == ["field", narrow.key[:12], wide.key[:12]]
    assert any(line.split() == ["identity.network.inner", "16", "32"] for line in lines)
    assert any(line.startswith("call_spec.inputs.param.w1.shape") or "param.w1" in line for line in lines)
    assert not any(line.startswith(("graph_hash", "package_digest", "fingerprint")) for line in lines)
    code, out, _ = tool("diff", narrow.key, "toy_step/256x16", "--store", store.root, "--json")
    fields = {difference["field"] for difference in json.loads(out)["differences"]}
    assert code == 1
    assert {"bucket", "package_digest"} <= fields


def test_an_artifact_does_not_differ_from_itself(tool, store: Store) -> None:
    key = store.manifests()[0].key
    assert tool("diff", key, key, "--store", store.root) == (0, "", "they do not differ\n")


def test_du_counts_a_shared_blob_once_and_what_nobody_names(tool, store: Store) -> None:
    (store.blobs / f"{'0' * 64}.zst").write_bytes(bytes(1000))
    on_disk = sum(path.stat().st_size for path in store.blobs.glob("*.zst"))
    code, out, _ = tool("du", "--store", store.root, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["programs"] == {"toy_step": [3, on_disk - 1000]}
    assert found["unnamed"] == 1000
    code, out, _ = tool("du", "--store", store.root)
    assert out.splitlines()[0].split() == ["what", "artifacts", "on", "disk"]
    assert any(line.split()[:2] == ["toy_step", "3"] for line in out.splitlines())


def test_gc_lists_first_and_removes_only_with_delete(tool, store: Store, tmp_path: Path) -> None:
    """Fails when a shared blob goes with the first of its artifacts, or when listing removes."""
    keep, other = store.manifests("toy_step", SMALL)
    lock = lock_file(tmp_path / "runs" / "a" / "checkpoints" / "step-10", keep)
    store.manifest_path("toy_step", SMALL, other.key).with_suffix(".sig").write_bytes(b"signature")
    code, out, err = tool("gc", "--keep", tmp_path / "runs", "--store", store.root)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()[:2]] == ["128x8", "256x16"]
    gone = store.manifests("toy_step", LARGE)[0]
    signature = f"manifests/toy_step/128x8/{other.key}.sig"
    assert out.splitlines()[2:] == [signature, f"blobs/{gone.blob_digest}.zst"]
    assert err.startswith("would remove 2 artifacts and 1 blobs")
    assert len(check_whole(store)) == 3
    code, _, err = tool("gc", "--keep", lock, "--store", store.root, "--delete")
    assert code == 0
    assert err.startswith("removed 2 artifacts and 1 blobs")
    assert check_whole(store) == [keep]
    left = [path.name for path in store.root.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(["lock", MARKER, f"{keep.key}.json", f"{keep.blob_digest}.zst"])


def test_gc_keeps_what_any_of_several_lock_files_names(tool, store: Store, tmp_path: Path) -> None:
    manifests = store.manifests()
    first, second = lock_file(tmp_path / "a", manifests[0]), lock_file(tmp_path / "b", *manifests[1:])
    assert tool("gc", "--keep", first, "--keep", second, "--store", store.root, "--delete")[0] == 0
    assert check_whole(store) == manifests


def test_gc_must_be_told_what_to_keep(tool, store: Store, tmp_path: Path) -> None:
    """Fails when no root, an empty folder or a broken lock file means "nothing is named"."""
    (tmp_path / "empty").mkdir()
    lock_file(tmp_path / "broken").write_text('{"artifacts": [{"key": "abc"}]}')
    for arguments in (
        [],
        ["--keep", tmp_path / "empty"],
        ["--keep", tmp_path / "broken"],
        ["--all", "--keep", lock_file(tmp_path / "good", *store.manifests())],
    ):
        code, _, err = tool("gc", *arguments, "--store", store.root, "--delete")
        assert code == 64
        assert "hint: " in err
    assert len(check_whole(store)) == 3
    assert tool("gc", "--all", "--store", store.root, "--delete")[0] == 0
    assert store.manifests() == []
    assert list(store.blobs.iterdir()) == []


def test_gc_removes_no_blob_while_a_kept_manifest_cannot_be_read(store: Store) -> None:
    """Its blob cannot be known. Fails when an unreadable manifest is passed over."""
    kept = store.manifests("toy_step", LARGE)[0]
    store.manifest_path("toy_step", LARGE, kept.key).write_bytes(b"{}")
    found = collect(store, {kept.key})
    assert len(found.manifests) == 2
    assert found.blobs == ()
    assert store.blob_path(kept).exists()


def test_gc_waits_for_a_publisher_and_leaves_its_folder(store: Store, package: Path) -> None:
    """A trial runs while gc sweeps: fails when `sweep` ignores the lock of `held`."""
    package.write_bytes(package_bytes(5))
    manifest = publish(store, package, inner=99, trial=lambda path: (collect(store, set()), None)[1])
    assert check_whole(store) == [manifest]


def test_gc_removes_the_folder_of_a_failed_build_and_leaves_that_of_a_running_one(store: Store) -> None:
    """Fails when `_remove_build` does not ask for the build's lock."""
    running, failed = (store.root / "build" / (digit * 64) for digit in "ab")
    for folder in (running, failed):
        (folder / "inductor").mkdir(parents=True)
        Path(f"{folder}.lock").touch()
    with Path(f"{running}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        collect(store, {manifest.key for manifest in store.manifests()})
    assert running.is_dir()
    assert not failed.exists()
    assert len(check_whole(store)) == 3


def test_gc_of_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot remove from"):
        collect(Store(tmp_path / "file" / "store"), set())


def test_gc_touches_only_what_has_a_name_of_a_store(tool, store: Store) -> None:
    """Fails when `garbage` or `left_behind` globs without asking for the form of the name."""
    mine = [
        store.root / name
        for name in (
            "blobs/backup.tar.zst",
            "build/project/main.c",
            "build/project.lock",
            "quarantine/notes.json",
            "manifests/toy_step/128x8/notes.txt",
            "manifests/toy_step/128x8/notes.json",
            "tmp/thesis/a.txt",
            f"tmp/{'a' * 32}/a.txt",
        )
    ]
    left = (f"tmp/{'b' * 32}/held", f"build/{'c' * 64}", f"quarantine/{'d' * 64}.pt2")
    dead, failed, crashed = (store.root / name for name in left)
    failed.mkdir(parents=True)
    for path in (*mine, dead, crashed, failed.with_suffix(".lock")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"precious")
    out = tool("gc", "--all", "--store", store.root)[1]
    listed = {str(path.relative_to(store.root)) for path in (dead.parent, failed, crashed)}
    assert listed <= set(out.splitlines())
    assert not any(str(path.relative_to(store.root)) in out for path in mine)
    assert tool("gc", "--all", "--delete", "--store", store.root)[0] == 0
    assert all(path.read_bytes() == b"precious" for path in mine)
    assert not any(path.exists() for path in (dead.parent, failed, crashed))
    assert list(store.blobs.iterdir()) == [mine[0]]


@pytest.mark.parametrize("flags", [(), ("--delete",)])
def test_gc_of_no_store_is_an_error_and_makes_none(tool, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Fails without the two checks in `gc`: a mistyped store has nothing to remove, and one gets made."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "a.txt").touch()
    for name, message in (("typo", "there is no store"), ("home", "is no store of artifacts")):
        code, _, err = tool("gc", "--all", "--store", tmp_path / name, *flags)
        assert code == 64
        assert message in err
    assert not (tmp_path / "typo").exists()
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["a.txt"]


def test_gc_follows_links_and_refuses_what_it_cannot_read(tmp_path: Path, store: Store) -> None:
    """Fails when `_lock_files` follows no links (or for ever), or passes over a link that leads nowhere, a
    folder of that name, or nesting without end."""
    runs = tmp_path / "runs"
    runs.mkdir()
    lock_file(tmp_path / "elsewhere" / "run1", *store.manifests())
    (runs / "run1").symlink_to(tmp_path / "elsewhere" / "run1")
    (runs / "ring").symlink_to(runs)
    assert named_keys([runs]) == {manifest.key for manifest in store.manifests()}
    lock = runs / "run2" / FILE_NAME
    lock.parent.mkdir()
    lock.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"run2.*no such file"):
        named_keys([runs])
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ConfigError, match=r"run2.*is a directory"):
        named_keys([runs])
    lock.rmdir()
    lock.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="is no lock file"):
        named_keys([runs])


def test_a_damaged_manifest_hides_no_other_from_ls_and_show(tool, store: Store) -> None:
    """Fails when they read with `Store.manifests`."""
    bad, good = store.manifests("toy_step", SMALL)
    path = store.manifest_path("toy_step", SMALL, bad.key)
    path.write_bytes(b"{}")
    code, out, err = tool("ls", "--store", store.root)
    assert (code, out.count("toy_step")) == (0, 2)
    assert f"warning: {path}: " in err
    assert tool("show", good.key, "--store", store.root)[0] == 0


def test_a_lock_file_with_a_foreign_key_is_refused(tmp_path: Path) -> None:
    path = lock_file(tmp_path)
    for content in ("", "[]", "{}", '{"artifacts": [{}]}', '{"artifacts": [{"key": "../x"}]}'):
        path.write_text(content)
        with pytest.raises(ConfigError, match="is no lock file"):
            named_keys([path])


def test_build_refuses_a_dry_run_for_another_target(tool) -> None:
    code, _, err = tool("build", "toy", "--dry-run", "--target", "cpu:x86-64-v3")
    assert code == 64
    assert "`--dry-run` lists what this machine lacks" in err


@pytest.mark.parametrize(("differing", "code"), [((), 0), (("x.wrapper.so",), 1)])
def test_build_check_names_the_member_that_differs(tool, tmp_path, monkeypatch, differing, code) -> None:
    from aot import compile as compile_module

    monkeypatch.setattr(
        compile_module,
        "check",
        lambda requests, *args, **kwargs: [compile_module.CheckResult(r, differing) for r in requests],
    )
    found, out, _ = tool(
        "build", "toy", "--check", "--store", tmp_path, "--programs", "tests.support.toy:program_set"
    )
    assert found == code
    assert out.count("x.wrapper.so" if differing else "none: the same bytes") == 2
