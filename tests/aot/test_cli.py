"""`dflash-aot` as its user sees it, on the toy program and its store."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aot import compile as compile_module
from aot import console, verify
from aot.canary import child_environment
from aot.cli import cli
from aot.cli_verify import DEFAULT_LEVELS, LEVEL_NAMES
from aot.compile import BuildEvent, BuildRequest, BuildResult
from aot.doctor import Finding
from aot.environment import FILE_NAME, snapshot
from aot.errors import EnvironmentFault
from aot.fingerprint import Fingerprint
from aot.lockfile import FILE_NAME as LOCK_NAME
from aot.lockfile import lock_of, read_lock, write_lock
from aot.policy import NAMES
from aot.runtime import Fingerprints
from aot.store import DEFAULT_STORE, Store
from tests.support.toy import FACTORY, LARGE, SMALL

BUILD = [str(SMALL), str(LARGE)]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run a command line in this process: (exit code, stdout, stderr); lock files go to tmp_path."""
    monkeypatch.setenv("DFLASH_AOT_LOCK", str(tmp_path / LOCK_NAME))
    monkeypatch.setenv("DFLASH_AOT_PROGRAMS", FACTORY)
    monkeypatch.delenv("DFLASH_AOT_STORE", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = console.run(cli, "dflash-aot", [str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


COMMANDS = (
    "doctor",
    "plan",
    "build",
    "verify",
    "ls",
    "show",
    "diff",
    "du",
    "gc",
    "keys",
    "keys new",
    "keys list",
    "keys trust",
    "keys revoke",
    "sign",
    "push",
    "pull",
)
HEAVY = ("torch", "transformers", "datasets", "wandb")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_nothing_heavy(command: str) -> None:
    program = (
        "import sys; from aot.console import run; from aot.cli import cli\n"
        f"code = run(cli, 'dflash-aot', [*{command.split()!r}, '--help'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=child_environment()
    )
    assert result.returncode == 0
    assert result.stderr.strip() == "[]"
    assert result.stdout.startswith(f"Usage: dflash-aot {command}".rstrip())
    assert not command or "Examples:" in result.stdout


def test_help_answers_in_less_than_300_ms() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "aot.cli", "--help"],
            check=True,
            capture_output=True,
            env=child_environment(),
        )
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.3


def test_the_light_command_module_agrees_with_the_heavy_ones() -> None:
    """Defaults are repeated in the command module because their homes import torch or a compressor."""
    options = {parameter.name: parameter for parameter in cli.commands["ls"].params}
    assert Path(options["store_root"].default) == DEFAULT_STORE
    assert LEVEL_NAMES == verify.LEVELS
    assert ",".join(verify.DEFAULT_LEVELS) == DEFAULT_LEVELS
    options = {parameter.name: parameter for parameter in cli.commands["build"].params}
    assert str(options["lock_path"].default) == LOCK_NAME
    options = {parameter.name: parameter for parameter in cli.commands["verify"].params}
    assert options["policy_name"].default == NAMES[0]


def test_no_command_shows_the_help_and_is_a_usage_error(tool) -> None:
    code, out, err = tool()
    assert (code, out) == (64, "")
    assert "Usage: dflash-aot" in err


def test_plan_counts_micro_batches_padding_and_artifacts(tool, toy_store: Store, tmp_path: Path) -> None:
    code, out, _ = tool("plan", "toy", "--store", toy_store.root)
    keys = [manifest.key[:12] for manifest in toy_store.manifests()]
    assert code == 0
    assert out == (
        "program   bucket  micro-batches  padding  artifact\n"
        f"toy_step  128x8               3    0.0 %  present {keys[0]}\n"
        f"toy_step  256x16              3    0.0 %  present {keys[1]}\n"
    )


def test_plan_shows_what_a_coarser_list_of_buckets_costs(tool, tmp_path: Path) -> None:
    code, out, _ = tool("plan", "toy", "--store", tmp_path, "--buckets", "256x16", "--json")
    (row,) = json.loads(out)["rows"]
    assert code == 0
    # Three micro-batches of 128 tokens and three of 256, all in 256.
    assert row == {
        "program": "toy_step",
        "bucket": "256x16",
        "micro_batches": 6,
        "padding": 0.25,
        "artifact": "missing",
    }


def test_plan_warns_of_micro_batches_that_fit_no_bucket(tool, tmp_path: Path) -> None:
    code, out, err = tool("plan", "toy", "--store", tmp_path, "--buckets", "128x8")
    assert code == 0
    assert "toy_step  none                3" in out
    assert "warning: some micro-batches fit no bucket" in err


def test_plan_names_why_an_artifact_is_stale(tool, toy_store: Store) -> None:
    _, out, _ = tool("plan", "toy", "--store", toy_store.root, "--set", "inner=32")
    assert "stale (identity.network.inner: expected 32, found 16" in out


def test_plan_names_what_is_damaged_and_shows_the_rest(tool, tmp_path: Path) -> None:
    """Fails when the error of one damaged manifest ends the whole plan."""
    path = tmp_path / "store" / "manifests" / "toy_step" / str(SMALL) / f"{'a' * 64}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{}")
    code, out, _ = tool("plan", "toy", "--store", tmp_path / "store")
    assert code == 0
    assert f"damaged ({path}: " in out
    assert "missing" in out


def test_a_run_for_another_machine_can_be_planned_and_is_not_verified(
    tool, toy_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu(self: Fingerprints, device_type: str) -> Fingerprint:
        raise EnvironmentFault("no CUDA device")

    monkeypatch.setattr(Fingerprints, "__call__", no_gpu)
    code, out, _ = tool("plan", "toy", "--store", toy_store.root)
    assert code == 0
    assert out.count("unknown (no CUDA device)") == 2
    code, out, _ = tool("verify", "toy", "--store", toy_store.root)
    assert code == 4
    assert out.count("unchecked") == 2


def test_build_of_what_is_there_compiles_nothing_within_five_seconds(tool, toy_store: Store) -> None:
    start = time.monotonic()
    code, out, err = tool("build", "toy", "--store", toy_store.root, "--json")
    assert time.monotonic() - start < 5
    built = json.loads(out)["artifacts"]
    assert code == 0
    assert [(item["bucket"], item["cached"]) for item in built] == [(bucket, True) for bucket in BUILD]
    assert err.startswith("[1/2] toy_step 128x8 is there, eta ")
    assert err.endswith("[2/2] toy_step 256x16 is there\n")


def test_build_shows_each_step_with_an_eta(
    tool, toy_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def build(requests: list[BuildRequest], store: Store, jobs: int, progress, lookup) -> list[BuildResult]:
        seen.update(requests=requests, store=store.root, jobs=jobs)
        manifests = toy_store.manifests()
        for request in requests:
            progress(BuildEvent("started", request))
            progress(BuildEvent("finished", request, 61.0))
        return [BuildResult(r, m, 61.0, cached=False) for r, m in zip(requests, manifests, strict=True)]

    monkeypatch.setattr(compile_module, "build", build)
    code, out, err = tool("build", "toy", "--store", tmp_path, "--jobs", "3", "--set", "inner=16")
    assert (code, out) == (0, "")
    assert seen["jobs"] == 3
    assert seen["store"] == tmp_path
    assert seen["requests"] == [
        BuildRequest(FACTORY, "toy", ("inner=16",), "toy_step", name) for name in BUILD
    ]
    lines = err.splitlines()
    assert lines[0] == "building toy_step 128x8"
    assert lines[1].startswith("[1/2] toy_step 128x8 built in 1:01, eta ")
    assert lines[3] == "[2/2] toy_step 256x16 built in 1:01"


def test_build_writes_the_lock_file_and_a_part_of_the_run_keeps_the_rest(
    tool, toy_store: Store, tmp_path: Path
) -> None:
    """Fails if a build of one bucket drops the others: each hint of `train` would undo the one before."""
    small, large = toy_store.manifests()
    lock = tmp_path / "elsewhere" / "my.lock"
    build = ("build", "toy", "--store", toy_store.root, "--lock", lock)
    assert tool(*build, "--buckets", "128x8")[0] == 0
    assert read_lock(lock) == lock_of([small])
    assert tool(*build, "--buckets", "256x16")[0] == 0
    assert read_lock(lock) == lock_of([small, large])
    assert tool(*build, "--set", "buckets=128x8")[0] == 0
    assert read_lock(lock) == lock_of([small])


def test_verify_explains_every_difference_and_what_to_run(tool, toy_store: Store) -> None:
    code, out, err = tool("verify", "toy", "--store", toy_store.root, "--set", "inner=32", "--explain")
    assert code == 8
    assert "is stale\n  identity.network.inner: expected 32, found 16\n" in out
    assert (
        f"  to run: `dflash-aot build toy --set inner=32 --buckets 128x8,256x16 --store {toy_store.root}`"
        in out
    )
    assert err == ""


def test_verify_of_a_lock_file_names_what_is_absent_and_what_is_another(
    tool, own_store: Store, tmp_path: Path
) -> None:
    """Fails if `--lock` only counts artifacts, or looks at the nearest one instead of the locked one."""
    small, large = own_store.manifests()
    lock = tmp_path / "artifacts.lock"
    write_lock(lock, lock_of([small, large]))
    verify_lock = ("verify", "--lock", lock, "--store", own_store.root, "--level", "bytes")
    code, out, _ = tool(*verify_lock)
    assert (code, out.count("lock   ok")) == (0, 2)
    write_lock(lock, lock_of([small, replace(large, package_digest="0" * 64)]))
    code, out, _ = tool(*verify_lock, "--explain")
    assert code == 8
    assert f"  package_digest: expected 000000000000, found {large.package_digest[:12]}\n" in out
    code, out, _ = tool("verify", "toy", *verify_lock[1:])
    assert code == 8
    own_store.manifest_path(large.program, large.bucket, large.key).unlink()
    code, out, err = tool(*verify_lock)
    assert code == 4
    assert "the store does not have it" in out
    assert "dflash-aot build RUN --buckets 256x16" in err


def test_dry_run_builds_nothing(tool, tmp_path: Path) -> None:
    code, out, err = tool("build", "toy", "--store", tmp_path / "store", "--dry-run")
    assert (code, out) == (0, "toy_step 128x8\ntoy_step 256x16\n")
    assert err == "2 of 2 artifacts to build\n"
    assert not (tmp_path / "store").exists()


def test_auto_buckets_need_data_and_are_printed_for_the_run_file(tool, toy_store: Store) -> None:
    code, _, err = tool("build", "toy", "--store", toy_store.root, "--buckets", "auto")
    assert code == 0
    assert err.endswith('for the run file: `buckets = ["128x8", "256x16"]` under [data]\n')


def test_verify_shows_a_line_per_artifact_and_level(tool, toy_store: Store) -> None:
    code, out, _ = tool("verify", "--store", toy_store.root)
    assert code == 0
    assert out.splitlines()[0].split() == ["artifact", "level", "status", "detail"]
    assert [line.split()[3:5] for line in out.splitlines()[1:]] == [
        [level, "ok"] for level in 2 * ("bytes", "trust", "env", "source")
    ]


def test_verify_exits_with_the_bit_sum_and_names_the_command(tool, own_store: Store) -> None:
    (manifest,) = own_store.manifests("toy_step", SMALL)
    own_store.blob_path(manifest).write_bytes(b"")
    code, out, err = tool("verify", "toy", "--store", own_store.root, "--set", "inner=16")
    assert code == 1
    assert "corrupt" in out
    command = f"dflash-aot build toy --set inner=16 --buckets 128x8,256x16 --store {own_store.root}"
    assert err == f"hint: `{command}`\n"
    code, out, _ = tool("verify", "toy", "--store", own_store.root, "--json", "--set", "inner=32")
    report = json.loads(out)
    assert code == report["exit_code"] == 1 + 8
    assert {check["level"] for check in report["checks"]} == {"bytes", "trust", "env", "source"}


@pytest.mark.parametrize("levels", ["bytes,nonsense", ""])
def test_an_unknown_level_is_a_usage_error(tool, levels: str) -> None:
    code, _, err = tool("verify", "--level", levels)
    assert code == 64
    assert "hint: levels: bytes, trust, env, source, graph, numerics" in err


def test_ls_lists_and_show_tells_all(tool, toy_store: Store, tmp_path: Path) -> None:
    (small, large) = toy_store.manifests()
    code, out, _ = tool("ls", "--store", toy_store.root)
    assert code == 0
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        ["toy_step", "128x8", small.key[:12]],
        ["toy_step", "256x16", large.key[:12]],
    ]
    code, out, _ = tool("ls", "--store", toy_store.root, "--json")
    assert [item["key"] for item in json.loads(out)["artifacts"]] == [small.key, large.key]
    for name in (small.key[:8], "toy_step/128x8"):
        code, out, _ = tool("show", name, "--store", toy_store.root)
        assert code == 0
        assert f"key: {small.key}" in out
        assert "  param.w1  float32  [8, 16]" in out
    code, out, _ = tool("show", small.key, "--store", toy_store.root, "--json")
    assert json.loads(out)["package_digest"] == small.package_digest


def test_show_names_what_it_cannot_find(tool, toy_store: Store) -> None:
    code, _, err = tool("show", "absent", "--store", toy_store.root)
    assert code == 64
    assert err.startswith(f"error: no artifact 'absent' in '{toy_store.root}'\n\nhint: `dflash-aot ls`")
    code, _, err = tool("show", "", "--store", toy_store.root)
    assert "names several artifacts" in err


def test_an_empty_store_is_said_so(tool, tmp_path: Path) -> None:
    for command in ("ls", "verify"):
        assert tool(command, "--store", tmp_path) == (0, "", f"'{tmp_path}' holds no artifacts\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["plan", "toy", "--buckets", "512"], "error: bucket '512' is not TOKENSxANCHORS"),
        (["plan", "toy", "--programs", "absent"], "error: no programs are registered as 'absent'"),
        (["plan", "toy", "--programs", "absent:f"], "error: there is no module 'absent'"),
        (
            ["plan", "toy", "--programs", "tests.support.toy:f"],
            "error: module 'tests.support.toy' has no function 'f'",
        ),
        (["verify", "--set", "a=1"], "error: `--set` and `--buckets` need a run"),
        (["verify", "toy", "--all"], "error: `--all` is the whole store"),
        (["verify", "--lock", "/nonexistent"], "error: the lock file '/nonexistent' does not exist"),
        (["verify", "--policy", "none"], "error: unknown policy 'none'"),
        (["verify", "--allow-unsigned", "ab"], "error: 'ab' is not the beginning of a key"),
        (["sign"], "error: name the artifacts to sign, or `--all`"),
        (["keys", "new", "../x"], "error: '../x' is no name for a key"),
        (["keys", "new", "x", "--expires", "2027"], "error: '2027' is no date"),
        (["keys", "trust", "/nonexistent"], "error: cannot read '/nonexistent'"),
        (["keys", "revoke", "nobody"], "error: 'nobody' names no trusted key"),
        (["build"], "error: missing argument 'RUN'"),
        (["bild"], "error: no such command 'bild'"),
        (["doctor", "--against", "/nonexistent"], "error: cannot read '/nonexistent'"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_a_way_out(tool, arguments: list[str], error: str) -> None:
    code, out, err = tool(*arguments)
    assert (code, out) == (64, "")
    assert err.startswith(error)
    assert "Traceback" not in err


def test_doctor_prints_findings_and_fails_on_errors(tool, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("ok", "torch", "fine"), Finding("error", "compiler", "none", "`apt-get install g++`")]
    monkeypatch.setattr("aot.probe.gather", lambda: None)
    monkeypatch.setattr("aot.doctor.diagnose", lambda facts: findings)
    code, out, _ = tool("doctor")
    assert code == 69
    assert out == "ok      torch: fine\nerror   compiler: none\n        hint: `apt-get install g++`\n"
    code, out, _ = tool("doctor", "--json")
    assert json.loads(out)["findings"][1]["hint"] == "`apt-get install g++`"
    del findings[1]
    assert tool("doctor")[0] == 0


def test_doctor_against_a_checkpoint_lists_what_differs(tool, tmp_path: Path) -> None:
    then = snapshot()
    (tmp_path / FILE_NAME).write_text(json.dumps(then))
    assert tool("doctor", "--against", tmp_path)[:2] == (0, f"this environment is that of '{tmp_path}'\n")
    then["packages"]["torch"]["record"] = "f" * 64
    (tmp_path / FILE_NAME).write_text(json.dumps(then))
    code, out, _ = tool("doctor", "--against", tmp_path)
    assert code == 0
    assert out.splitlines()[1].startswith("packages.torch")
    then["key"]["torch_git"] = "0" * 40
    (tmp_path / FILE_NAME).write_text(json.dumps(then))
    code, out, _ = tool("doctor", "--against", tmp_path)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["key.torch_git", "packages.torch"]
