"""`dflash-aot push` and `pull`: artifacts to and from a remote, and the look-up of `build --remote`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from aot import console
from aot.cli_store import readable
from aot.console import emit, emit_json, examples, json_option, store_option
from aot.errors import EXIT_FAILED, EXIT_OK, ConfigError, CorruptArtifact, UntrustedArtifact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from aot.manifest import KeyInputs, Manifest
    from aot.remote import Place, Remote
    from aot.runtime import Fingerprints
    from aot.store import Store

SCHEMA = 1


def remote_option(**options: Any) -> Callable[[Any], Any]:
    return click.option(
        "--remote", "remote_url", envvar="DFLASH_AOT_REMOTE", show_envvar=True, metavar="URL", **options
    )


artifacts_argument = click.argument("artifacts", nargs=-1, metavar="[ARTIFACT]...")


def _open(url: str) -> Remote:
    from aot.remote import Remote
    from aot.signing import Keyring

    if url.startswith("memory:"):
        raise ConfigError(f"'{url}' ends with this command", "e.g. `file:///shared`, `s3://bucket/artifacts`")
    return Remote(url, Keyring.load())


def lookup(url: str | None, store: Store) -> Callable[[KeyInputs], Manifest | None] | None:
    """What `build` asks before it compiles."""
    if url is None:
        return None
    from aot.remote import lookup

    return lookup(_open(url), store, console.warn)


@click.command(
    epilog=examples(
        "dflash-aot push --remote s3://bucket/artifacts",
        "dflash-aot push train_step/512x32 --remote file:///shared",
    )
)
@artifacts_argument
@remote_option(required=True, help="Where to push: file:// or s3://.")
@store_option
@json_option
def push(artifacts: tuple[str, ...], remote_url: str, store_root: Path, as_json: bool) -> int:
    """Add signed artifacts of a store to a remote.

    ARTIFACT is the beginning of a key, or program/bucket; without one, the whole store. Nothing at the
    remote is overwritten: what is there is verified, and the first good artifact of a key stays.
    """
    from aot.remote import Place
    from aot.store import Store

    store, remote = Store(store_root), _open(remote_url)
    manifests = {Place.of(manifest): manifest for manifest in readable(store)}
    chosen = _choose(artifacts, manifests, f"'{store_root}'")
    meaning = {
        "pushed": "pushed",
        "present": "is there",
        "kept": "another build of this key is there and is kept",
    }
    return _each("push", chosen, as_json, lambda place, steps: meaning[remote.push(manifests[place], store)])


@click.command(
    epilog=examples(
        "dflash-aot pull --remote s3://bucket/artifacts", "dflash-aot pull 1a2b3c --remote file:///shared"
    )
)
@artifacts_argument
@remote_option(required=True, help="Where to pull from: file:// or s3://.")
@store_option
@json_option
def pull(artifacts: tuple[str, ...], remote_url: str, store_root: Path, as_json: bool) -> int:
    """Add artifacts of a remote to a store.

    ARTIFACT is the beginning of a key, or program/bucket; without one, all that fit this machine. Each must
    carry the signature of a key you trust, and is verified and tried before it is installed.
    """
    from aot.runtime import Fingerprints
    from aot.store import Store

    store, remote, fingerprints = Store(store_root), _open(remote_url), Fingerprints()
    places = remote.places()
    if not places:
        hint = "check the address; `dflash-aot push` adds artifacts to it"
        raise ConfigError(f"there are no artifacts at '{remote.url}'", hint)
    chosen = _choose(artifacts, places, f"'{remote.url}'")
    return _each(
        "pull", chosen, as_json, lambda place, steps: _pull_one(remote, store, place, fingerprints, steps)
    )


def _pull_one(
    remote: Remote, store: Store, place: Place, fingerprints: Fingerprints, steps: console.Steps
) -> str:
    from aot.remote import misfit

    if store.intact(place.program, place.bucket, place.key) is not None:
        return "is there"
    found = remote.find(place)
    if found is None:
        return "skipped: no longer at the remote"
    if problem := misfit(found.manifest, fingerprints):
        return f"skipped, not for this machine: {problem}"
    whole = console.size_text(found.manifest.blob_size)

    def show(size: int) -> None:
        steps.say(f"{place}: {console.size_text(size)} of {whole}")

    remote.fetch(found, store, console.at_intervals(show))
    return "pulled"


def _choose(artifacts: tuple[str, ...], places: Iterable[Place], where: str) -> list[Place]:
    places = sorted(places)
    if not artifacts:
        return places
    chosen = []
    for name in artifacts:
        found = [p for p in places if p.key.startswith(name) or f"{p.program}/{p.bucket}" == name]
        if not found:
            raise ConfigError(f"no artifact '{name}' in {where}", "leave it out to take all that there is")
        chosen += found
    return list(dict.fromkeys(chosen))


def _each(title: str, places: list[Place], as_json: bool, work: Callable[[Place, console.Steps], str]) -> int:
    """Work on every artifact; one that is refused does not keep the others, a remote that fails does."""
    rows: list[dict[str, str]] = []
    refused = 0
    with console.Steps(len(places), title) as steps:
        for place in places:
            try:
                outcome = work(place, steps)
                steps.advance(f"{place} {outcome}")
            except (CorruptArtifact, UntrustedArtifact) as error:
                refused += 1
                outcome = f"refused: {error.message}"
                steps.advance(f"{place} refused")
                console.report_error(error.message, error.hint)
            rows.append({"artifact": f"{place.program}/{place.bucket}", "key": place.key, "outcome": outcome})
    if as_json:
        emit_json({"schema": SCHEMA, "artifacts": rows})
    elif rows:
        cells = [(row["artifact"], row["key"][:12], row["outcome"]) for row in rows]
        emit(console.table(("artifact", "key", "outcome"), cells))
    else:
        console.note("no artifacts")
    return EXIT_FAILED if refused else EXIT_OK
