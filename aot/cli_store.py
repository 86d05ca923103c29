"""`dflash-aot ls | show | diff | du | gc`: what a store holds, and what may go.

Modules that load torch or a compressor are imported inside the commands.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aot import console
from aot.console import emit, emit_json, examples, json_option, store_option
from aot.errors import EXIT_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aot.compile import CheckResult
    from aot.manifest import Manifest
    from aot.store import Store

SCHEMA = 1


@click.command(name="ls", epilog=examples("dflash-aot ls", "dflash-aot ls --json"))
@store_option
@json_option
def list_artifacts(store_root: Path, as_json: bool) -> int:
    """List the artifacts of a store."""
    from aot.store import Store

    manifests = readable(Store(store_root))
    if as_json:
        emit_json({"schema": SCHEMA, "artifacts": [summary(manifest) for manifest in manifests]})
        return EXIT_OK
    rows = [
        (
            manifest.program,
            manifest.bucket,
            manifest.key[:12],
            console.size_text(manifest.package_size),
            manifest.key_inputs.fingerprint.torch_version,
            manifest.key_inputs.compile_options.get("cpp.march", manifest.key_inputs.fingerprint.device_arch),
        )
        for manifest in manifests
    ]
    if rows:
        emit(console.table(("program", "bucket", "key", "size", "torch", "arch"), rows))
    else:
        console.note(f"'{store_root}' holds no artifacts")
    return EXIT_OK


def readable(store: Store) -> list[Manifest]:
    """The artifacts of a store; a damaged manifest is warned of and hides no other."""
    found, damaged = store.readable_manifests()
    for path, error in damaged.items():
        console.warn(f"{error.message}; build it again, or `rm '{path}'`")
    return found


def summary(manifest: Manifest) -> dict[str, Any]:
    """The fields of an artifact that `ls` and `build` write as JSON."""
    return {
        "program": manifest.program,
        "bucket": str(manifest.bucket),
        "key": manifest.key,
        "package_digest": manifest.package_digest,
        "package_size": manifest.package_size,
        "graph_hash": manifest.graph_hash,
        "fingerprint": asdict(manifest.key_inputs.fingerprint),
    }


def find_artifact(store: Store, artifact: str) -> Manifest:
    """Return the one artifact that the beginning of a key, or program/bucket, names. Raises ConfigError."""
    found = [
        manifest
        for manifest in readable(store)
        if manifest.key.startswith(artifact) or f"{manifest.program}/{manifest.bucket}" == artifact
    ]
    if not found:
        raise ConfigError(f"no artifact '{artifact}' in '{store.root}'", "`dflash-aot ls` lists them")
    if len(found) > 1:
        keys = ", ".join(manifest.key[:12] for manifest in found)
        raise ConfigError(f"'{artifact}' names several artifacts: {keys}", "name one by its key")
    return found[0]


@click.command(epilog=examples("dflash-aot show 1a2b3c", "dflash-aot show train_step/512x32"))
@click.argument("artifact", metavar="ARTIFACT")
@store_option
@json_option
def show(artifact: str, store_root: Path, as_json: bool) -> int:
    """Show one artifact whole. ARTIFACT is the beginning of its key, or program/bucket."""
    from aot.store import Store

    document = json.loads(find_artifact(Store(store_root), artifact).to_bytes())
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


@click.command(epilog=examples("dflash-aot diff 1a2b3c 4d5e6f", "dflash-aot diff 1a2b3c 4d5e6f --json"))
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@store_option
@json_option
def diff(first: str, second: str, store_root: Path, as_json: bool) -> int:
    """Name each field in which artifacts A and B differ.

    A and B as in `show`. Exits with 1 if they differ.
    """
    from aot.store import Store

    store = Store(store_root)
    one, other = find_artifact(store, first), find_artifact(store, second)
    found = [
        (difference.field, difference.expected, difference.found)
        for difference in one.key_inputs.differences(other.key_inputs, at_load=False)
    ]
    for name in ("graph_hash", "package_digest", "package_size"):
        if getattr(one, name) != getattr(other, name):
            found.append((name, str(getattr(one, name)), str(getattr(other, name))))
    if as_json:
        rows = [{"field": field, "a": mine, "b": theirs} for field, mine, theirs in found]
        emit_json({"schema": SCHEMA, "a": one.key, "b": other.key, "differences": rows})
    elif found:
        emit(console.table(("field", one.key[:12], other.key[:12]), found))
    else:
        console.note("they do not differ")
    return EXIT_FAILED if found else EXIT_OK


@click.command(epilog=examples("dflash-aot du", "dflash-aot du --json"))
@store_option
@json_option
def du(store_root: Path, as_json: bool) -> int:
    """Show what takes how much room in a store."""
    from aot.collect import usage
    from aot.store import Store

    found = usage(Store(store_root))
    if as_json:
        emit_json({"schema": SCHEMA, "store": str(store_root), **asdict(found)})
        return EXIT_OK
    rows = [
        (name, str(number), console.size_text(size))
        for name, (number, size) in sorted(found.programs.items())
    ]
    for label, size in (
        ("manifests", found.manifests),
        ("unnamed blobs", found.unnamed),
        ("quarantine", found.quarantine),
        ("builds and leftovers", found.scratch),
    ):
        rows.append((label, "-", console.size_text(size)))
    emit(console.table(("what", "artifacts", "on disk"), rows))
    return EXIT_OK


@click.command(
    epilog=examples(
        "dflash-aot gc --keep artifacts.lock --keep runs", "dflash-aot gc --keep runs/smollm2-cpu --delete"
    )
)
@click.option(
    "--keep",
    "roots",
    multiple=True,
    metavar="PATH",
    type=click.Path(exists=True, path_type=Path),
    help="A lock file, a checkpoint, or a folder of such: what they name stays. May be repeated.",
)
@click.option("--all", "nothing_kept", is_flag=True, help="Nothing is to be kept.")
@click.option("--delete", is_flag=True, help="Remove it; without this, only list it.")
@store_option
@json_option
def gc(roots: tuple[Path, ...], nothing_kept: bool, delete: bool, store_root: Path, as_json: bool) -> int:
    """List, and with --delete remove, what no lock file names.

    Running processes are not disturbed: they run copies, and files are only unlinked.
    """
    from aot.collect import collect, garbage, named_keys
    from aot.store import STORE_VARIABLE, Store

    if nothing_kept == bool(roots):
        raise ConfigError(
            "say what to keep, or that all may go", "e.g. `--keep artifacts.lock --keep runs`, or `--all`"
        )
    store = Store(store_root)
    if not store.root.is_dir():
        raise ConfigError(f"there is no store '{store_root}'", f"name it: `--store DIR` or ${STORE_VARIABLE}")
    store.check_ours()
    keep = named_keys(roots)
    found = collect(store, keep) if delete else garbage(store, keep)
    if as_json:
        emit_json({"schema": SCHEMA, "deleted": delete, **asdict(found)})
        return EXIT_OK
    for path in found.manifests:
        emit(f"{path.parents[1].name} {path.parent.name} {path.stem[:12]}")
    for path in (*found.beside, *found.blobs, *found.aside, *found.left):
        emit(str(path.relative_to(store.root)))
    what = f"{len(found.manifests)} artifacts and {len(found.blobs)} blobs, {console.size_text(found.size)}"
    console.note(f"removed {what}" if delete else f"would remove {what}: `--delete` does")
    return EXIT_OK


def show_checks(results: Sequence[CheckResult], as_json: bool) -> int:
    """Show which builds came out the same twice; the exit code is 1 if one did not."""
    if as_json:
        rows = [
            {
                "program": result.request.program,
                "bucket": result.request.bucket,
                "differing": result.differing,
            }
            for result in results
        ]
        emit_json({"schema": SCHEMA, "checks": rows})
    else:
        shown = [
            (
                result.request.program,
                result.request.bucket,
                ", ".join(result.differing) or "none: the same bytes",
            )
            for result in results
        ]
        emit(console.table(("program", "bucket", "differing members"), shown))
    return EXIT_FAILED if any(result.differing for result in results) else EXIT_OK


STORE_COMMANDS = (list_artifacts, show, diff, du, gc)
