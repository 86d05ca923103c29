"""`dflash-aot`: look at the machine, plan, build, verify and list artifacts.

Modules that import torch are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aot import cli_share, console
from aot.cli_share import remote_option
from aot.console import (
    CONTEXT,
    emit,
    emit_json,
    examples,
    json_option,
    run_argument,
    set_option,
    store_option,
)
from aot.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK, ConfigError
from aot.plan import Run, plan_rows

if TYPE_CHECKING:
    from aot.compile import BuildEvent
    from aot.manifest import Manifest

SCHEMA = 1
LEVEL_NAMES = ("bytes", "env", "source", "numerics")

programs_option = click.option(
    "--programs", "factory_name", envvar="DFLASH_AOT_PROGRAMS", show_envvar=True, metavar="NAME",
    help="Entry point of group aot.programs, or module:function; not needed when only one is installed.",
)  # fmt: skip
buckets_option = click.option(
    "--buckets", "buckets_text", metavar="LIST|auto",
    help="TOKENSxANCHORS, comma-separated, or `auto`: quantiles of the data's micro-batches and the largest. "
    "Without it, the run file's.",
)  # fmt: skip


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
@remote_option(help="Look here before compiling.")
@click.option("--dry-run", is_flag=True, help="Show what would be built, and build nothing.")
@json_option
def build(
    run_file: str,
    overrides: tuple[str, ...],
    buckets_text: str | None,
    store_root: Path,
    factory_name: str | None,
    jobs: int | None,
    remote_url: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Compile what the store lacks for RUN.

    Each artifact in a process of its own. What is there already is checked, not compiled again.
    """
    from aot.compile import build as build_all
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
    requests = run.requests()
    with console.Steps(len(requests), "build") as steps:
        results = build_all(
            requests,
            store,
            jobs or _default_jobs(),
            progress=lambda event: _show(steps, event),
            lookup=cli_share.lookup(remote_url, store),
        )
    if as_json:
        built = [
            {**_summary(result.manifest), "seconds": round(result.seconds, 2), "cached": result.cached}
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


@cli.command(
    epilog=examples("dflash-aot verify", "dflash-aot verify smollm2-cpu --level bytes,env,source,numerics")
)
@click.argument("run_file", metavar="[RUN]", required=False)
@set_option
@click.option(
    "--level", "levels", default="bytes,env,source", help="Comma-separated: bytes, env, source, numerics."
)
@click.option("--seed", default=0, help="Draws the inputs of `numerics`.")
@buckets_option
@store_option
@programs_option
@json_option
def verify(
    run_file: str | None,
    overrides: tuple[str, ...],
    levels: str,
    seed: int,
    buckets_text: str | None,
    store_root: Path,
    factory_name: str | None,
    as_json: bool,
) -> int:
    """Check the artifacts of RUN, or of a store.

    Exits with the sum of 1 corrupt + 2 untrusted + 4 could not check + 8 stale.
    """
    from aot.runtime import Fingerprints
    from aot.store import Store
    from aot.verify import RunSource, exit_code, verify_run, verify_store

    chosen = _levels(levels)
    store = Store(store_root)
    if run_file is None:
        if overrides or buckets_text:
            raise ConfigError("`--set` and `--buckets` need a run", "e.g. `dflash-aot verify smollm2-cpu`")
        checks = verify_store(store, chosen, Fingerprints())
    else:
        run = Run.load(run_file, overrides, factory_name, buckets_text)
        source = RunSource(run.factory, run.run_file, run.overrides)
        checks = verify_run(store, run.needs(), chosen, Fingerprints(), source, run=run.typed, seed=seed)
    code = exit_code(checks)
    if as_json:
        emit_json({"schema": SCHEMA, "exit_code": code, "checks": [asdict(check) for check in checks]})
        return code
    if checks:
        rows = [(check.artifact, check.level, check.status, check.detail) for check in checks]
        emit(console.table(("artifact", "level", "status", "detail"), rows))
    else:
        console.note(f"'{store.root}' holds no artifacts")
    for command in dict.fromkeys(check.command for check in checks if check.command and check.status != "ok"):
        console.note(f"hint: {command}")
    return code


def _levels(text: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [level for level in chosen if level not in LEVEL_NAMES]
    if unknown or not chosen:
        raise ConfigError(
            f"unknown level '{unknown[0]}'" if unknown else "no level named",
            f"levels: {', '.join(LEVEL_NAMES)}",
        )
    return chosen


@cli.command(name="ls", epilog=examples("dflash-aot ls", "dflash-aot ls --json"))
@store_option
@json_option
def list_artifacts(store_root: Path, as_json: bool) -> int:
    """List the artifacts of a store."""
    from aot.store import Store

    manifests = Store(store_root).manifests()
    if as_json:
        emit_json({"schema": SCHEMA, "artifacts": [_summary(manifest) for manifest in manifests]})
        return EXIT_OK
    rows = [
        (
            manifest.program,
            manifest.bucket,
            manifest.key[:12],
            console.size_text(manifest.package_size),
            manifest.key_inputs.fingerprint.torch_version,
            manifest.key_inputs.fingerprint.device_arch,
        )
        for manifest in manifests
    ]
    if rows:
        emit(console.table(("program", "bucket", "key", "size", "torch", "arch"), rows))
    else:
        console.note(f"'{store_root}' holds no artifacts")
    return EXIT_OK


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "program": manifest.program,
        "bucket": str(manifest.bucket),
        "key": manifest.key,
        "package_digest": manifest.package_digest,
        "package_size": manifest.package_size,
        "graph_hash": manifest.graph_hash,
        "fingerprint": asdict(manifest.key_inputs.fingerprint),
    }


@cli.command(epilog=examples("dflash-aot show 1a2b3c", "dflash-aot show train_step/512x32"))
@click.argument("artifact", metavar="ARTIFACT")
@store_option
@json_option
def show(artifact: str, store_root: Path, as_json: bool) -> int:
    """Show one artifact whole. ARTIFACT is the beginning of its key, or program/bucket."""
    import json

    from aot.store import Store

    manifests = Store(store_root).manifests()
    found = [
        manifest
        for manifest in manifests
        if manifest.key.startswith(artifact) or f"{manifest.program}/{manifest.bucket}" == artifact
    ]
    if not found:
        raise ConfigError(f"no artifact '{artifact}' in '{store_root}'", "`dflash-aot ls` lists them")
    if len(found) > 1:
        keys = ", ".join(manifest.key[:12] for manifest in found)
        raise ConfigError(f"'{artifact}' names several artifacts: {keys}", "name one by its key")
    document = json.loads(found[0].to_bytes())
    if as_json:
        emit_json({"schema": SCHEMA, **document})
        return EXIT_OK
    inputs = document["key_inputs"]
    spec = inputs.pop("call_spec")
    for name, value in {**document, **inputs}.items():
        if name == "key_inputs":
            continue
        if isinstance(value, dict):
            emit(f"{name}:")
            for key, item in value.items():
                emit(f"  {key}: {item}")
        else:
            emit(f"{name}: {value}")
    for side in ("inputs", "outputs"):
        emit(f"{side} on {spec['device_type']}:")
        rows = [(f"  {tensor['name']}", tensor["dtype"], tensor["shape"]) for tensor in spec[side]]
        emit(console.table(("  name", "dtype", "shape"), rows))
    return EXIT_OK


cli.add_command(cli_share.push)
cli.add_command(cli_share.pull)


def main() -> None:
    sys.exit(console.run(cli, "dflash-aot"))


if __name__ == "__main__":
    main()
