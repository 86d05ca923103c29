"""`verify` level by level, each fault on a copy of the toy store."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from aot import trace
from aot.policy import Policy
from aot.runtime import Fingerprints
from aot.source import source_files
from aot.verify import DEFAULT_LEVELS, Check, OutputError, RunSource, exit_code, verify_run, verify_store
from tests.support import twins
from tests.support.toy import FACTORY, LARGE, SMALL, ToyStep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aot.fingerprint import Fingerprint
    from aot.store import Store

PROGRAM = ToyStep()
SOURCE = RunSource(FACTORY, "toy", ())


def of_run(
    store: Store,
    *levels: str,
    program: ToyStep = PROGRAM,
    here: Callable[[str], Fingerprint] | None = None,
    source: RunSource = SOURCE,
) -> dict[str, Check]:
    """Verify the SMALL artifact of a run: {level: check}."""
    checks = verify_run(
        store, [(program, SMALL)], levels or DEFAULT_LEVELS, here or Fingerprints(), source, run="run.toml"
    )
    return {check.level: check for check in checks}


def of_store(store: Store, here: Callable[[str], Fingerprint] | None = None) -> dict[str, Check]:
    """Verify a whole store: {level: check of the SMALL artifact}."""
    checks = verify_store(store, DEFAULT_LEVELS, here or Fingerprints())
    return {check.level: check for check in checks if "128x8" in check.artifact}


def test_good_artifacts_are_ok(toy_store: Store) -> None:
    needs = [(PROGRAM, SMALL), (PROGRAM, LARGE)]
    checks = verify_run(toy_store, needs, DEFAULT_LEVELS, Fingerprints(), SOURCE)
    assert [check.status for check in checks] == ["ok"] * 8
    assert exit_code(checks) == 0
    checks = verify_store(toy_store, DEFAULT_LEVELS, Fingerprints())
    assert [check.status for check in checks] == ["ok"] * 8


def test_numerics_gives_the_error_of_every_output(toy_store: Store) -> None:
    check = of_run(toy_store, "numerics")["numerics"]
    assert check.status == "ok", check.detail
    assert [output.name for output in check.outputs] == ["loss", "grad.w1", "grad.w2"]
    for output in check.outputs:
        assert 0 < output.error <= output.tolerance == max(1e-5, 1.5 * output.twin_error)


@pytest.mark.parametrize(
    ("twin", "error"), [("OffByATenThousandth", "grad.w1: 1.0e-04"), ("WrongTwin", "grad.w1: 5.0e-01")]
)
def test_numerics_names_the_one_output_that_is_off(toy_store: Store, twin: str, error: str) -> None:
    check = of_run(toy_store, "numerics", source=RunSource(twins.FACTORY, twin, ()))["numerics"]
    assert check.status == "corrupt"
    assert [output.name for output in check.outputs if not output.ok] == ["grad.w1"]
    assert error in check.detail


def test_an_error_that_is_no_number_is_not_ok() -> None:
    assert not OutputError("loss", math.nan, 0.0, 1e-5).ok
    assert OutputError("loss", 1e-5, 0.0, 1e-5).ok


def test_numerics_without_a_run_or_with_a_failing_child_is_not_checked(toy_store: Store) -> None:
    checks = verify_store(toy_store, ["numerics"], Fingerprints())
    assert {check.status for check in checks} == {"unchecked"}
    broken = of_run(toy_store, "numerics", source=RunSource("tests.support.absent:f", "toy", ()))["numerics"]
    assert broken.status == "unchecked"
    assert "absent" in broken.detail


@pytest.mark.parametrize("verify", [of_run, of_store])
@pytest.mark.parametrize(
    "damage",
    [
        lambda blob: bytes([blob[0] ^ 1]) + blob[1:],
        lambda blob: blob[:-1],
        lambda blob: blob + b"x",
        lambda blob: b"",
    ],
    ids=["flipped bit", "truncated", "longer", "empty"],
)
def test_damaged_bytes_are_corrupt_and_named(
    own_store: Store, damage: Callable[[bytes], bytes], verify: Callable[[Store], dict[str, Check]]
) -> None:
    (manifest,) = own_store.manifests("toy_step", SMALL)
    path = own_store.blob_path(manifest)
    path.write_bytes(damage(path.read_bytes()))
    checks = verify(own_store)
    assert {level: check.status for level, check in checks.items()} == {
        "bytes": "corrupt",
        "trust": "ok",
        "env": "ok",
        "source": "ok",
    }
    assert str(path) in checks["bytes"].detail
    assert "dflash-aot build" in (checks["bytes"].command or "")
    assert exit_code(list(checks.values())) == 1


@pytest.mark.parametrize("verify", [of_run, of_store])
def test_an_edited_manifest_is_corrupt_and_named(
    own_store: Store, verify: Callable[[Store], dict[str, Check]]
) -> None:
    (path,) = own_store.manifest_paths("toy_step", SMALL)
    path.write_bytes(path.read_bytes().replace(b'"inner":16', b'"inner":17'))
    check = verify(own_store)["bytes"]
    assert check.status == "corrupt"
    assert path.name in check.detail
    assert "dflash-aot build" in (check.command or "")


@pytest.mark.parametrize("verify", [of_run, of_store])
def test_a_blob_that_others_may_write_is_untrusted(
    own_store: Store, verify: Callable[[Store], dict[str, Check]]
) -> None:
    (manifest,) = own_store.manifests("toy_step", SMALL)
    own_store.blob_path(manifest).chmod(0o666)
    checks = verify(own_store)
    assert checks["bytes"].status == "untrusted"
    assert exit_code(list(checks.values())) == 2


@pytest.mark.parametrize("verify", [of_run, of_store])
def test_another_torch_commit_is_stale_and_named(
    toy_store: Store, verify: Callable[..., dict[str, Check]]
) -> None:
    there = replace(Fingerprints()("cpu"), torch_git="0" * 40)
    checks = verify(toy_store, here=lambda device_type: there)
    assert checks["env"].status == "stale"
    assert "fingerprint.torch_git: expected 0000" in checks["env"].detail
    assert "dflash-aot build" in (checks["env"].command or "")
    assert checks["source"].status == "ok"
    assert exit_code(list(checks.values())) == 8


@pytest.mark.parametrize("verify", [of_run, of_store])
def test_a_changed_module_is_stale_and_named(
    toy_store: Store, verify: Callable[[Store], dict[str, Check]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def edited(modules: list[str]) -> dict[str, str]:
        return {**source_files(modules), "tests/support/toy.py": "f" * 64}

    monkeypatch.setattr("aot.verify.source_files", edited)
    monkeypatch.setattr(trace, "source_files", edited)
    checks = verify(toy_store)
    assert checks["source"].status == "stale"
    assert "source.tests/support/toy.py: expected ffff" in checks["source"].detail
    assert "dflash-aot build" in (checks["source"].command or "")
    assert checks["env"].status == "ok"


def test_other_shapes_are_stale_and_not_run(toy_store: Store) -> None:
    checks = of_run(toy_store, *DEFAULT_LEVELS, "numerics", program=ToyStep(inner=32))
    assert {level: check.status for level, check in checks.items()} == {
        "bytes": "ok",
        "trust": "ok",
        "env": "ok",
        "source": "stale",
        "numerics": "unchecked",
    }
    assert "identity.network.inner: expected 32, found 16" in checks["source"].detail
    assert exit_code(list(checks.values())) == 4 + 8


def test_graph_traces_again_without_compiling_and_compares_hashes(toy_store: Store, tmp_path: Path) -> None:
    """Fails if the recorded hash is compared with itself, or if the trace needs a compiler."""
    environment = {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        assert of_run(toy_store, "graph")["graph"].status == "ok"
        other = of_run(toy_store, "graph", source=RunSource(twins.FACTORY, "OffByATenThousandth", ()))[
            "graph"
        ]
    (manifest,) = toy_store.manifests("toy_step", SMALL)
    assert other.status == "stale"
    assert other.differences[0].found == manifest.graph_hash[:12] != other.differences[0].expected
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".cpp", ".o", ".so")]


def test_numerics_executes_nothing_that_the_policy_refuses(
    toy_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails without `check_trust` in `numerics_check`: looking at an artifact would be running it."""
    monkeypatch.setattr("aot.verify.ask_child", lambda request: pytest.fail("it was executed"))
    policy = Policy("signed", keys=tmp_path / "none")
    needs, levels = [(PROGRAM, SMALL)], ("trust", "numerics")
    checks = verify_run(toy_store, needs, levels, Fingerprints(), SOURCE, policy=policy)
    assert [check.status for check in checks] == ["untrusted"] * 2
    assert exit_code(checks) == 2


def test_a_missing_artifact_is_not_checked_and_names_the_command(tmp_path: Path, toy_store: Store) -> None:
    empty = type(toy_store)(tmp_path)
    check = of_run(empty)["bytes"]
    assert (check.status, check.detail) == ("unchecked", "no artifact")
    assert check.command == f"`dflash-aot build run.toml --buckets 128x8 --store {tmp_path}`"


def test_exit_code_is_a_bit_sum() -> None:
    def check(status: str) -> Check:
        return Check("a", "bytes", status)

    assert exit_code([]) == 0
    assert exit_code([check("corrupt"), check("corrupt"), check("ok")]) == 1
    assert exit_code([check("corrupt"), check("untrusted"), check("unchecked"), check("stale")]) == 15
