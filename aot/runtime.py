"""From a store to callable artifacts, without a compiler and without trusting a byte.

`resolve` finds the artifact that was built from equal inputs and that the run's lock names; `prepare`
verifies every artifact of a run (path, owner, mode, signature, size, digests, archive members), writes
private digest-named copies and tries each new one in a child process; `PreparedArtifact.load` makes a
`LoadedArtifact`, which belongs to one thread and checks every input of every call. Nothing here imports
torch's compilers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aot.archive import MODEL_NAME, check_archive
from aot.calls import CallCheck, InputMismatch
from aot.canary import CHECK_INPUTS_VARIABLE, Trial, try_packages
from aot.console import warn
from aot.errors import CorruptArtifact, MissingArtifact, StaleArtifact, TrialCrashed, UserError
from aot.fingerprint import Fingerprint
from aot.lockfile import LockedArtifact, LockMismatch
from aot.policy import Policy, check_trust
from aot.private import PRIVATE_VARIABLE, private_folder, process_folder, unpacking_in
from aot.store import Store, default_store_root
from aot.trace import key_inputs
from aot.trust import open_trusted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from aot.buckets import Bucket
    from aot.lockfile import Lock
    from aot.manifest import Difference, Manifest
    from aot.program import CallSpec, Program

MAX_SHOWN_DIFFERENCES = 6

Need = tuple["Program", "Bucket"]


def build_command(run: str, buckets: Sequence[Bucket], store: Store) -> str:
    """The command that builds what is missing; without buckets, the whole run. `run` is as typed."""
    where = "" if store.root == Store(default_store_root()).root else f" --store {store.root}"
    which = f" --buckets {','.join(map(str, sorted(set(buckets))))}" if buckets else ""
    return f"dflash-aot build {run}{which}{where}"


def resolve(
    store: Store,
    program: Program,
    bucket: Bucket,
    fingerprint: Fingerprint,
    run: str = "RUN",
    lock: Lock | None = None,
) -> Manifest:
    """Return the manifest of the artifact whose inputs equal the program's here and now.

    With a lock, that artifact and no other of equal inputs. A damaged manifest is passed over with a warning
    if another one will do. Raises MissingArtifact if the store has none for the program and bucket,
    StaleArtifact naming each field that differs from the nearest one, LockMismatch naming what differs from
    the locked one, CorruptArtifact instead if it may be a damaged one that the run needs.
    """
    candidates, damaged = store.readable_manifests(program.name, bucket)
    try:
        found = _fitting(store, candidates, program, bucket, fingerprint, run, lock)
    except (MissingArtifact, StaleArtifact, LockMismatch) as error:
        locked = (lock or {}).get((program.name, bucket))
        for path, corrupt in damaged.items():
            if not isinstance(error, LockMismatch) or (locked is not None and path.stem == locked.key):
                raise CorruptArtifact(corrupt.message, error.hint) from None
        raise
    for corrupt in damaged.values():
        warn(f"{corrupt.message}; passed over, for another artifact will do")
    return found


def _fitting(
    store: Store,
    candidates: Sequence[Manifest],
    program: Program,
    bucket: Bucket,
    fingerprint: Fingerprint,
    run: str,
    lock: Lock | None,
) -> Manifest:
    hint = f"`{build_command(run, [bucket], store)}`"
    if not candidates:
        raise MissingArtifact(f"{program.name} {bucket}: no artifact in '{store.root}'", hint)
    wanted = key_inputs(program, bucket, fingerprint)
    ranked = sorted(
        ((wanted.differences(manifest.key_inputs), manifest) for manifest in candidates),
        key=lambda pair: rank(*pair),
    )
    differences, nearest = ranked[0]
    if differences:
        raise StaleArtifact(f"{program.name} {bucket}: the artifact is stale: {shown(differences)}", hint)
    if lock is None:
        return nearest
    return _locked([manifest for found, manifest in ranked if not found], lock, hint)


def rank(
    differences: Sequence[Difference], manifest: Manifest, locked: LockedArtifact | None = None
) -> tuple[int, bool, int, str]:
    """Sorts first what a run takes: the fewest differences; of those the locked one, else the one that uses
    most of this machine's instructions.
    """
    instructions = manifest.key_inputs.fingerprint.cpu_isa.split()
    other = locked is None or manifest.key != locked.key
    return len(differences), other, -len(instructions), manifest.key


def _locked(usable: Sequence[Manifest], lock: Lock, hint: str) -> Manifest:
    """Return the one that the lock names among artifacts of one program and bucket, or raise LockMismatch."""
    name = f"{usable[0].program} {usable[0].bucket}"
    entry = lock.get((usable[0].program, usable[0].bucket))
    if entry is None:
        raise LockMismatch(f"{name}: the lock file does not name it", hint)
    nearest = min(usable, key=lambda manifest: manifest.key != entry.key)
    differences = entry.differences(LockedArtifact.of(nearest))
    if differences:
        raise LockMismatch(f"{name}: not the artifact that the lock file names: {shown(differences)}", hint)
    return nearest


@contextlib.contextmanager
def _rebuilt_by(command: str) -> Iterator[None]:
    """Give a corrupt artifact the command that builds this run's again."""
    try:
        yield
    except CorruptArtifact as error:
        raise CorruptArtifact(error.message, command) from None


def shown(differences: Sequence[Difference]) -> str:
    """The first few differences on one line."""
    more = len(differences) - MAX_SHOWN_DIFFERENCES
    listed = "; ".join(map(str, differences[:MAX_SHOWN_DIFFERENCES]))
    return listed + (f"; and {more} more" if more > 0 else "")


def resolve_all(
    store: Store,
    needs: Sequence[Need],
    fingerprints: Callable[[str], Fingerprint],
    run: str = "RUN",
    lock: Lock | None = None,
) -> dict[tuple[str, Bucket], Manifest]:
    """Resolve every need, or raise one error that names what is missing, stale or not as locked, and the
    command to run.
    """
    found: dict[tuple[str, Bucket], Manifest] = {}
    failures: list[tuple[Bucket, UserError]] = []
    for program, bucket in needs:
        try:
            found[program.name, bucket] = resolve(
                store, program, bucket, fingerprints(program.device_type), run, lock
            )
        except (MissingArtifact, StaleArtifact, LockMismatch) as error:
            failures.append((bucket, error))
    if len(failures) == 1:
        raise failures[0][1]
    if failures:
        kinds = {type(error) for _, error in failures}
        raise (kinds.pop() if len(kinds) == 1 else MissingArtifact)(
            f"{len(failures)} of {len(needs)} artifacts cannot be used: "
            + "; ".join(error.message for _, error in failures),
            f"`{build_command(run, [bucket for bucket, _ in failures], store)}`",
        )
    return found


class Fingerprints:
    """This machine's fingerprint by device type, probed once each and without running a compiler."""

    def __init__(self) -> None:
        self._known: dict[str, Fingerprint] = {}

    def __call__(self, device_type: str) -> Fingerprint:
        if device_type not in self._known:
            self._known[device_type] = Fingerprint.probe(device_type, with_compiler=False)
        return self._known[device_type]


def prepare(
    store: Store,
    needs: Sequence[Need],
    *,
    run: str = "RUN",
    device: str | None = None,
    folder: Path | None = None,
    policy: Policy | None = None,
    lock: Lock | None = None,
) -> dict[tuple[str, Bucket], PreparedArtifact]:
    """Verify every artifact that a run needs and return them by (program name, bucket), ready to load.

    `device` is where CUDA packages are tried (default: the current device); each package is tried once per
    machine. `policy` is by default the environment's; without a lock any artifact of equal inputs will do.
    Raises MissingArtifact, StaleArtifact or LockMismatch for what is not there, CorruptArtifact or
    UntrustedArtifact for what is not as published; nothing has been loaded into this process by then.
    """
    os.environ[CHECK_INPUTS_VARIABLE] = "1"
    fingerprints = Fingerprints()
    policy = policy or Policy.of()
    manifests = resolve_all(store, needs, fingerprints, run, lock)
    for manifest in manifests.values():
        check_trust(store, manifest, policy)
    private = private_folder(folder)
    own = process_folder(private)
    prepared: dict[tuple[str, Bucket], PreparedArtifact] = {}
    untried: dict[Path, Trial] = {}
    for program, bucket in needs:
        manifest = manifests[program.name, bucket]
        with _rebuilt_by(f"`{build_command(run, [bucket], store)}`"):
            path = private_copy(store, manifest, own)
        artifact = PreparedArtifact(program.name, bucket, program.call_spec(bucket), manifest, path)
        prepared[program.name, bucket] = artifact
        marker = private / _marker(manifest, fingerprints(program.device_type))
        if not marker.exists():
            where = device if device and device.startswith(program.device_type) else program.device_type
            untried[marker] = Trial(artifact.name, str(artifact.path), artifact.call_spec, where)
    if untried:
        try:
            try_packages(list(untried.values()), folder=own)
        except TrialCrashed as crash:
            raise _quarantined(store, crash, prepared.values()) from None
        for marker in untried:
            marker.touch(mode=0o600)
    return prepared


def _quarantined(store: Store, crash: TrialCrashed, prepared: Iterable[PreparedArtifact]) -> TrialCrashed:
    """Put the artifact of a crash aside, if this process may write the store: then a build replaces it."""
    artifact = next(artifact for artifact in prepared if artifact.name == crash.trial)
    aside = store.quarantine(artifact.manifest, crash.message)
    if aside is None:
        return crash
    return TrialCrashed(f"{crash.message}; its manifest now lies in '{aside}'", crash.hint, crash.trial)


def _marker(manifest: Manifest, fingerprint: Fingerprint) -> str:
    """The name of the file that says: this package has run on this machine, in this environment."""
    machine = hashlib.sha256(f"{platform.node()} {fingerprint}".encode()).hexdigest()[:16]
    return f"{manifest.package_digest}.{machine}.tried"


def private_copy(store: Store, manifest: Manifest, folder: Path) -> Path:
    """Verify the stored package and return a copy of the verified bytes in `folder`, named by their digest.

    A copy that is there already is used if its bytes are right, and replaced otherwise. The store is
    verified each time: a run never starts from a store that has gone bad.
    """
    package = store.read_package(manifest)
    check_archive(package, str(manifest))
    path = folder / f"{manifest.package_digest}.pt2"
    if path.exists():
        with open_trusted(path) as file:
            if file.read() == package:
                return path
    # Aside first: a copy that is mapped into this process must never change in place.
    temporary = path.with_suffix(".new")
    temporary.write_bytes(package)
    temporary.replace(path)
    return path


@dataclass(frozen=True)
class PreparedArtifact:
    """A verified, tried package on this machine. `path` lies in a folder of this process alone."""

    program: str
    bucket: Bucket
    call_spec: CallSpec
    manifest: Manifest
    path: Path

    @property
    def name(self) -> str:
        return str(self.manifest)

    def load(self, device: torch.device) -> LoadedArtifact:
        """Load onto `device` for the calling thread; a CUDA device needs its index. Each call is a loader of
        its own.
        """
        return LoadedArtifact(self, device)


class LoadedArtifact:
    """One loader of one package on one device, owned by the thread that made it."""

    def __init__(self, prepared: PreparedArtifact, device: torch.device):
        import torch

        spec = prepared.call_spec
        if device.type != spec.device_type or (device.type == "cuda" and device.index is None):
            raise InputMismatch(
                f"{prepared.name} runs on {spec.device_type}, not on '{device}'",
                "name the device with its index, e.g. `cuda:0`" if device.type == "cuda" else None,
            )
        self.name, self.call_spec, self.device = prepared.name, spec, device
        self._owner = threading.current_thread()
        self._check = CallCheck(prepared.name, spec, device)
        self._guard = (lambda: torch.cuda.device(device)) if device.type == "cuda" else contextlib.nullcontext
        # Each package's library reads the variable once, at its first call.
        os.environ[CHECK_INPUTS_VARIABLE] = "1"
        try:
            # The constructor sets the current device and leaves it set; the guard puts it back.
            with self._guard(), unpacking_in(prepared.path.parent):
                self._loader = torch._C._aoti.AOTIModelPackageLoader(
                    str(prepared.path), MODEL_NAME, True, 1, device.index if device.type == "cuda" else -1
                )
        except RuntimeError as error:
            raise CorruptArtifact(
                f"{prepared.name} does not load: {str(error).strip().splitlines()[0]}",
                f"it was unpacked in '{prepared.path.parent}', which needs space and must allow execution: "
                f"`export {PRIVATE_VARIABLE}=FOLDER` names another place, `dflash-aot doctor` looks further",
            ) from error

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run once on the current stream of the artifact's device; return the outputs by name.

        Every input is checked first (presence, type, device, dtype, shape, strides; about 1 microsecond
        each). Raises InputMismatch naming the first wrong input, without making the call; RuntimeError in
        another thread.
        """
        if threading.current_thread() is not self._owner:
            raise RuntimeError(
                f"{self.name} was loaded by thread '{self._owner.name}' and called by "
                f"'{threading.current_thread().name}': each worker loads its own"
            )
        tensors = self._check(inputs)
        with self._guard():
            outputs = self._loader.run(tensors)
        return dict(zip(self.call_spec.output_names, outputs, strict=True))
