"""`dflash-aot`: look at the machine, plan, build, verify and list artifacts.

Modules that import torch are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aot import cli_keys, cli_share, cli_verify, console
from aot.cli_share import remote_option
from aot.cli_store import STORE_COMMANDS, show_checks, summary
from aot.console import (
    CONTEXT,
    buckets_option,
    emit,
    emit_json,
    examples,
    json_option,
    lock_option,
    programs_option,
    run_argument,
    set_option,
    store_option,
)
from aot.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK, ConfigError
from aot.plan import Run, plan_rows

if TYPE_CHECKING:
    from aot.compile import BuildEvent

SCHEMA = 1


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="dflash-aot", prog_name="dflash-aot")
def cli() -> None:
    """Compiled training steps as artifacts: build once, verify, load without a compiler."""


@cli.command(
    epilog=examples("dflash-aot doctor", "dflash-aot doctor --against runs/smollm2-cpu/checkpoints/step-100")
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="CHECKPOINT",
    help="List what differs from the environment that a checkpoint was written in.",
)
@json_option
def doctor(against: Path | None, as_json: bool) -> int:
    """Say what will go wrong on this machine.

    Exits with 69 if a finding is an error, and with 1 if --against finds a difference that makes artifacts
    stale.
    """
    if against is not None:
        return _against(against, as_json)
    from aot.doctor import diagnose
    from aot.probe import gather

    findings = diagnose(gather())
    if as_json:
        emit_json({"schema": SCHEMA, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            emit(f"{finding.level:<8}{finding.check}: {finding.title}")
            if finding.hint:
                emit(f"{'':<8}hint: {finding.hint}")
    return EXIT_ENVIRONMENT if any(finding.level == "error" for finding in findings) else EXIT_OK


def _against(path: Path, as_json: bool) -> int:
    from aot.environment import changes, read_snapshot, snapshot

    found = changes(read_snapshot(path), snapshot())
    if as_json:
        emit_json({"schema": SCHEMA, "against": str(path), "changes": [asdict(change) for change in found]})
    elif not found:
        emit(f"this environment is that of '{path}'")
    else:
        rows = [
            (
                change.field,
                change.then or "(absent)",
                change.now or "(absent)",
                "yes" if change.enters_key else "no",
            )
            for change in found
        ]
        emit(console.table(("field", "then", "now", "in the key"), rows))
    return EXIT_FAILED if any(change.enters_key for change in found) else EXIT_OK


@cli.command(epilog=examples("dflash-aot plan smollm2-cpu", "dflash-aot plan run.toml --buckets auto --json"))
@run_argument
@set_option
@buckets_option
@store_option
@programs_option
@json_option
def plan(
    run_file: str,
    overrides: tuple[str, ...],
    buckets_text: str | None,
    store_root: Path,
    factory_name: str | None,
    as_json: bool,
) -> int:
    """Show buckets, padding and artifacts of RUN."""
    from aot.store import Store

    run = Run.load(run_file, overrides, factory_name, buckets_text)
    rows = plan_rows(run, Store(store_root))
    if as_json:
        emit_json({"schema": SCHEMA, "run": run_file, "buckets": list(map(str, run.buckets)), "rows": rows})
        return EXIT_OK
    shown = [
        (
            row["program"],
            row["bucket"],
            *(_or_dash(row[name]) for name in ("micro_batches", "padding")),
            row["artifact"],
        )
        for row in rows
    ]
    emit(console.table(("program", "bucket", "micro-batches", "padding", "artifact"), shown))
    if run.programs.histogram is None:
        console.note("the data is not there yet: no micro-batches to count")
    if any(row["bucket"] == "none" for row in rows):
        console.warn("some micro-batches fit no bucket: `--buckets` must contain the run file's largest")
    return EXIT_OK


def _or_dash(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}".replace("%", " %") if isinstance(value, float) else str(value)


@cli.command(
    epilog=examples(
        "dflash-aot build smollm2-cpu",
        "dflash-aot build run.toml --buckets 512x32,1024x64 --jobs 2",
        "dflash-aot build run.toml --dry-run",
        "dflash-aot build run.toml --target cpu:x86-64-v3",
        "dflash-aot build run.toml --remote s3://bucket/artifacts",
    )
)
@run_argument
@set_option
@buckets_option
@store_option
@programs_option
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=None,
    help="Builds at a time. [default: half the cores, at most 4]",
)
@click.option(
    "--target",
    metavar="cpu:LEVEL",
    default="",
    help="Build for every CPU of a level, e.g. cpu:x86-64-v3, not for this machine's.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Build everything twice in clean processes, publish nothing, and compare the bytes.",
)
@remote_option(help="Look here before compiling.")
@click.option("--dry-run", is_flag=True, help="Show what would be built, and build nothing.")
@lock_option
@json_option
def build(
    run_file: str,
    overrides: tuple[str, ...],
    buckets_text: str | None,
    store_root: Path,
    factory_name: str | None,
    jobs: int | None,
    target: str,
    check: bool,
    remote_url: str | None,
    dry_run: bool,
    lock_path: Path,
    as_json: bool,
) -> int:
    """Compile what the store lacks for RUN, and write its lock file.

    Each artifact in a process of its own. What is there already is checked, not compiled again. The lock file
    then names exactly the artifacts of RUN; with --buckets, entries of other buckets are kept.
    """
    if dry_run and (target or check):
        raise ConfigError("`--dry-run` lists what this machine lacks", "leave out `--target` and `--check`")
    from aot.compile import build as build_all
    from aot.compile import check as check_all
    from aot.lockfile import check_place, update_lock
    from aot.store import Store

    run = Run.load(run_file, overrides, factory_name, buckets_text)
    store = Store(store_root)
    if dry_run:
        rows = plan_rows(run, store)
        todo = [row for row in rows if not row["artifact"].startswith(("present", "-"))]
        if as_json:
            emit_json({"schema": SCHEMA, "run": run_file, "would_build": todo})
        else:
            for row in todo:
                emit(f"{row['program']} {row['bucket']}")
            console.note(f"{len(todo)} of {len(rows)} artifacts to build")
        return EXIT_OK
    requests = [replace(request, target=target) for request in run.requests()]
    if check:
        with console.Steps(2 * len(requests), "check") as steps:
            checked = check_all(requests, store, jobs or _default_jobs(), progress=lambda e: _show(steps, e))
        return show_checks(checked, as_json)
    check_place(lock_path)
    with console.Steps(len(requests), "build") as steps:
        results = build_all(
            requests,
            store,
            jobs or _default_jobs(),
            progress=lambda event: _show(steps, event),
            lookup=cli_share.lookup(remote_url, store),
        )
    update_lock(lock_path, [result.manifest for result in results], whole=buckets_text is None)
    if as_json:
        built = [
            {**summary(result.manifest), "seconds": round(result.seconds, 2), "cached": result.cached}
            for result in results
        ]
        emit_json({"schema": SCHEMA, "run": run_file, "store": str(store.root), "artifacts": built})
    if buckets_text == "auto":
        listed = ", ".join(f'"{bucket}"' for bucket in run.buckets)
        console.note(f"for the run file: `buckets = [{listed}]` under [data]")
    return EXIT_OK


def _default_jobs() -> int:
    """A build keeps about one core busy and takes about 2 GiB."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def _show(steps: console.Steps, event: BuildEvent) -> None:
    took = console.duration_text(event.seconds)
    if event.kind == "started":
        steps.say(f"building {event.request}")
    elif event.kind == "cached":
        steps.advance(f"{event.request} is there")
    elif event.kind == "pulled":
        steps.advance(f"{event.request} pulled from the remote")
    elif event.kind == "finished":
        steps.advance(f"{event.request} built in {took}")
    else:
        steps.advance(f"{event.request} failed after {took}")


for command in (
    *STORE_COMMANDS,
    cli_keys.keys,
    cli_keys.sign,
    cli_verify.verify,
    cli_share.push,
    cli_share.pull,
):
    cli.add_command(command)


def main() -> None:
    sys.exit(console.run(cli, "dflash-aot"))


if __name__ == "__main__":
    main()
