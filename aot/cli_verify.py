"""`dflash-aot verify`: may these artifacts be used here, and if not, what differs and what to run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from aot import console
from aot.console import (
    allow_unsigned_option,
    buckets_option,
    emit,
    emit_json,
    examples,
    json_option,
    policy_option,
    programs_option,
    set_option,
    store_option,
)
from aot.errors import ConfigError
from aot.plan import Run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from aot.verify import Check

SCHEMA = 1
LEVEL_NAMES = ("bytes", "trust", "env", "source", "graph", "numerics")
DEFAULT_LEVELS = "bytes,trust,env,source"


@click.command(
    epilog=examples(
        "dflash-aot verify --all --level bytes",
        "dflash-aot verify smollm2-cpu --lock artifacts.lock --explain",
        "dflash-aot verify run.toml --level graph,numerics",
    )
)
@click.argument("run_file", metavar="[RUN]", required=False)
@set_option
@click.option("--all", "everything", is_flag=True, help="Every artifact of the store.  [default without RUN]")
@click.option(
    "--lock",
    "lock_path",
    type=console.FILE,
    metavar="PATH",
    help="The artifacts that a lock file names; with RUN, whether it names those of RUN.",
)
@click.option("--level", "levels", default=DEFAULT_LEVELS, help=f"Comma-separated: {', '.join(LEVEL_NAMES)}.")
@click.option("--explain", is_flag=True, help="Say of each fault all that differs, and what to run.")
@click.option("--seed", default=0, help="Draws the inputs of `numerics`.")
@buckets_option
@store_option
@policy_option
@allow_unsigned_option
@programs_option
@json_option
def verify(
    run_file: str | None,
    overrides: tuple[str, ...],
    everything: bool,
    lock_path: Path | None,
    levels: str,
    explain: bool,
    seed: int,
    buckets_text: str | None,
    store_root: Path,
    policy_name: str,
    allow_unsigned: tuple[str, ...],
    factory_name: str | None,
    as_json: bool,
) -> int:
    """Check the artifacts of RUN, of a lock file, or of a store.

    Exits with the sum of 1 corrupt + 2 untrusted + 4 could not check + 8 stale.
    """
    chosen = _levels(levels)
    if run_file is None and (overrides or buckets_text):
        raise ConfigError("`--set` and `--buckets` need a run", "e.g. `dflash-aot verify smollm2-cpu`")
    if everything and (run_file or lock_path):
        raise ConfigError("`--all` is the whole store", "leave out RUN and `--lock`, or `--all`")
    from aot.lockfile import read_lock
    from aot.policy import Policy
    from aot.runtime import Fingerprints
    from aot.store import Store
    from aot.verify import RunSource, exit_code, verify_lock, verify_run, verify_store

    store, policy, here = Store(store_root), Policy(policy_name, allow_unsigned), Fingerprints()
    lock = read_lock(lock_path) if lock_path is not None else None
    if run_file is None and lock is None and not store_root.is_dir():
        raise ConfigError(f"there is no store '{store_root}'", "name one with `--store`")
    if run_file is None and lock is not None and not lock:
        raise ConfigError(f"'{lock_path}' names no artifacts", "`dflash-aot build RUN` writes it anew")
    if run_file is not None:
        run = Run.load(run_file, overrides, factory_name, buckets_text)
        source = RunSource(run.factory, run.run_file, run.overrides)
        checks = verify_run(
            store, run.needs(), chosen, here, source, run=run.typed, seed=seed, policy=policy, lock=lock
        )
    elif lock is not None:
        checks = verify_lock(store, lock, chosen, here, policy)
    else:
        checks = verify_store(store, chosen, here, policy)
    code = exit_code(checks)
    if as_json:
        emit_json({"schema": SCHEMA, "exit_code": code, "checks": [asdict(check) for check in checks]})
        return code
    _show(checks, explain, f"'{store.root}' holds no artifacts")
    return code


def _show(checks: Sequence[Check], explain: bool, nothing: str) -> None:
    if not checks:
        console.note(nothing)
        return
    rows = [(check.artifact, check.level, check.status, check.detail) for check in checks]
    emit(console.table(("artifact", "level", "status", "detail"), rows))
    faults = [check for check in checks if check.status != "ok"]
    if explain:
        for check in faults:
            emit(f"\n{check.artifact}: {check.level} is {check.status}")
            for difference in check.differences:
                emit(f"  {difference}")
            if not check.differences:
                emit(f"  {check.detail}")
            emit(f"  to run: {check.command or 'nothing mends this'}")
        return
    for command in dict.fromkeys(check.command for check in faults if check.command):
        console.note(f"hint: {command}")


def _levels(text: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [level for level in chosen if level not in LEVEL_NAMES]
    if unknown or not chosen:
        raise ConfigError(
            f"unknown level '{unknown[0]}'" if unknown else "no level named",
            f"levels: {', '.join(LEVEL_NAMES)}",
        )
    return chosen
