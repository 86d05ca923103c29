"""`push`, `pull` and `build --remote`, on the toy program's real artifacts."""

import json
import subprocess
import sys

import pytest

from aot import compile as compile_module
from aot import console
from aot.canary import child_environment
from aot.cli import cli
from aot.signing import ORIGIN_SUFFIX
from aot.store import Store
from tests.support.remotes import new_keyring, sign_in
from tests.support.toy import FACTORY, SMALL


@pytest.fixture
def tool(monkeypatch, capsys, tmp_path):
    """Run a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("DFLASH_AOT_PROGRAMS", FACTORY)
    monkeypatch.setenv("DFLASH_AOT_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("DFLASH_AOT_LOCK", str(tmp_path / "artifacts.lock"))
    monkeypatch.setenv("DFLASH_AOT_REMOTE", f"file://{tmp_path}/shared")
    monkeypatch.setenv("DFLASH_AOT_STORE", str(tmp_path / "mine"))

    def run(*arguments: object) -> tuple[int, str, str]:
        code = console.run(cli, "dflash-aot", [str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def signed_store(own_store, tmp_path):
    keyring = new_keyring(tmp_path / "keys", "me")
    for manifest in own_store.manifests():
        sign_in(own_store, manifest, keyring)
    return own_store


@pytest.fixture
def no_compiler(monkeypatch):
    """Fail the test when something is compiled."""

    def start(worker):
        raise AssertionError(f"compiles {worker.request}")

    monkeypatch.setattr(compile_module._Worker, "start", start)


@pytest.mark.parametrize("command", ["push", "pull"])
def test_help_imports_nothing_heavy(command):
    program = (
        "import sys; from aot.console import run; from aot.cli import cli\n"
        f"run(cli, 'dflash-aot', [{command!r}, '--help'])\n"
        "print([n for n in ('torch', 'fsspec', 's3fs', 'zstandard') if n in sys.modules], file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=child_environment()
    )
    assert result.stderr.strip() == "[]"
    assert "DFLASH_AOT_REMOTE" in result.stdout
    assert "Examples:" in result.stdout


def test_pushed_artifacts_are_pulled_and_built_from(tool, signed_store, tmp_path, no_compiler):
    code, out, err = tool("push", "--store", signed_store.root, "--json")
    assert (code, "[2/2]" in err) == (0, True)
    assert [row["outcome"] for row in json.loads(out)["artifacts"]] == ["pushed", "pushed"]
    code, out, _ = tool("push", f"toy_step/{SMALL}", "--store", signed_store.root)
    assert (code, out.splitlines()[1].split(maxsplit=2)[2]) == (0, "is there")

    code, out, err = tool("pull", f"toy_step/{SMALL}")
    assert (code, out.splitlines()[1].split(maxsplit=2)[2]) == (0, "pulled")
    mine = Store(tmp_path / "mine")
    assert mine.manifests() == signed_store.manifests("toy_step", SMALL)
    assert tool("pull", f"toy_step/{SMALL}")[1].endswith("is there\n")

    code, out, err = tool("build", "toy", "--json")
    assert (code, len(json.loads(out)["artifacts"])) == (0, 2)
    assert "pulled from the remote" in err
    assert "is there" in err
    for path in mine.manifest_paths():
        assert path.with_suffix(ORIGIN_SUFFIX).exists()


def test_what_is_refused_does_not_keep_the_rest(tool, signed_store, tmp_path):
    tool("push", "--store", signed_store.root)
    unsigned = next((tmp_path / "shared").glob(f"manifests/toy_step/{SMALL}/*.sig"))
    unsigned.unlink()
    code, out, err = tool("pull")
    assert code == 1
    assert "error: " in err
    assert "is not signed" in err
    assert "hint: " in err
    assert sorted(line.split()[-1] for line in out.splitlines() if "pulled" in line) == ["pulled"]
    assert len(Store(tmp_path / "mine").manifests()) == 1


def test_an_unsigned_store_is_not_pushed(tool, own_store, tmp_path):
    code, _, err = tool("push", "--store", own_store.root)
    assert code == 1
    assert "hint: `dflash-aot sign " in err
    assert not (tmp_path / "shared").exists()


def test_mistakes_are_usage_errors(tool, signed_store, monkeypatch, tmp_path):
    """Fails, with exit code 0, if an address where nothing lies passes for a remote without artifacts."""
    code, _, err = tool("pull", "--remote", "ftp://host/a")
    assert (code, "s3://" in err) == (64, True)
    for command in ("push", "pull"):
        code, _, err = tool(command, "--remote", "memory://x", "--store", signed_store.root)
        assert (code, "ends with this command" in err) == (64, True)
    code, _, err = tool("pull")
    assert (code, f"there are no artifacts at 'file://{tmp_path}/shared'" in err) == (64, True)
    code, _, err = tool("push", "--remote", "file:///proc/x", "--store", signed_store.root)
    assert (code, "no folder can be made there" in err) == (69, True)
    tool("push", "--store", signed_store.root)
    code, _, err = tool("pull", "abc")
    assert (code, "no artifact 'abc'" in err) == (64, True)
    monkeypatch.delenv("DFLASH_AOT_REMOTE")
    code, _, err = tool("pull")
    assert (code, "--remote" in err) == (64, True)
