"""Asks of each artifact, level by level: may it be used here, and if not, what differs and what to run.

    bytes     path, owner, mode, sizes, digests, archive members
    env       the machine and torch build it was made for, against this one
    source    the modules, shapes and compile options it was made from, against those of now
    numerics  its outputs on fresh inputs against the program's float64 twin, in a child process

Exit code: the sum of 1 corrupt + 2 untrusted + 4 could not check + 8 stale.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from aot.archive import MODEL_NAME, check_archive
from aot.buckets import Bucket
from aot.canary import child_environment
from aot.errors import CorruptArtifact, EnvironmentFault, UntrustedArtifact, UserError
from aot.manifest import Difference
from aot.runtime import build_command, private_copy, private_folder, shown
from aot.source import source_files
from aot.trace import key_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from aot.fingerprint import Fingerprint
    from aot.manifest import Manifest
    from aot.program import Program
    from aot.runtime import Need
    from aot.store import Store

LEVELS = ("bytes", "env", "source", "numerics")
DEFAULT_LEVELS = ("bytes", "env", "source")
Status = Literal["ok", "corrupt", "untrusted", "unchecked", "stale"]
EXIT_BITS: dict[Status, int] = {"ok": 0, "corrupt": 1, "untrusted": 2, "unchecked": 4, "stale": 8}

#: Relative error allowed of each output, by the lowest precision among a program's inputs: TWIN_FACTOR times
#: what the eager twin itself is off from float64, but no less than the first number, no more than the second.
#: Discrete outputs are held to the second.
TOLERANCE = {
    "float64": (1e-12, 1e-9),
    "float32": (1e-5, 1e-2),
    "float16": (1e-2, 1e-1),
    "bfloat16": (3e-2, 3e-1),
}
TWIN_FACTOR = 1.5


@dataclass(frozen=True)
class OutputError:
    """Relative errors `|a-b|/|b|` of one output against float64: the package's, and its eager twin's."""

    name: str
    error: float
    twin_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        # Written so that NaN fails.
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Check:
    """One level of one artifact. `command` mends it; `outputs` are the errors that `numerics` measured."""

    artifact: str
    level: str
    status: Status
    detail: str = ""
    command: str | None = None
    outputs: tuple[OutputError, ...] = ()


@dataclass(frozen=True)
class RunSource:
    """Where programs come from, so that a child process can make them again."""

    factory: str
    run_file: str
    overrides: tuple[str, ...]


def exit_code(checks: Sequence[Check]) -> int:
    """The bit sum over all checks."""
    code = 0
    for check in checks:
        code |= EXIT_BITS[check.status]
    return code


def verify_store(
    store: Store, levels: Sequence[str], fingerprints: Callable[[str], Fingerprint]
) -> list[Check]:
    """Check every artifact of a store. `numerics` cannot be checked without a run that makes the program."""
    checks = []
    for path in store.manifest_paths():
        manifest, bad = _manifest(store, path)
        if manifest is None:
            checks.append(bad)
            continue
        session = _Session(store, manifest, f"`{build_command('RUN', [manifest.bucket], store)}`")
        for level in levels:
            if level == "bytes":
                checks.append(session.bytes_check())
            elif level == "env":
                checks.append(session.stale_check("env", _environment(manifest, fingerprints)))
            elif level == "source":
                checks.append(session.stale_check("source", lambda m=manifest: _changed_sources(m)))
            else:
                checks.append(session.check(level, "unchecked", "needs a run: `dflash-aot verify RUN`"))
    return checks


def verify_run(
    store: Store,
    needs: Sequence[Need],
    levels: Sequence[str],
    fingerprints: Callable[[str], Fingerprint],
    source: RunSource,
    *,
    run: str = "RUN",
    seed: int = 0,
) -> list[Check]:
    """Check the artifacts that a run would use: for each program and bucket the nearest one in the store.

    A missing artifact counts as not checked. `seed` draws the inputs of `numerics`.
    """
    checks = []
    command = f"`{build_command(run, [bucket for _, bucket in needs], store)}`"
    for program, bucket in needs:
        try:
            wanted = key_inputs(program, bucket, fingerprints(program.device_type))
        except EnvironmentFault as fault:
            checks.append(Check(f"{program.name} {bucket}", "env", "unchecked", fault.message))
            continue
        candidates, unreadable = [], []
        for path in store.manifest_paths(program.name, bucket):
            manifest, bad = _manifest(store, path, command)
            if manifest is None:
                unreadable.append(bad)
            else:
                candidates.append((wanted.differences(manifest.key_inputs), manifest))
        checks += unreadable
        if not candidates:
            if not unreadable:
                checks.append(Check(f"{program.name} {bucket}", "bytes", "unchecked", "no artifact", command))
            continue
        differences, manifest = min(candidates, key=lambda pair: (len(pair[0]), pair[1].key))
        session = _Session(store, manifest, command)
        environment = [item for item in differences if item.field.startswith("fingerprint.")]
        for level in levels:
            if level == "bytes":
                checks.append(session.bytes_check())
            elif level == "env":
                checks.append(session.stale_check("env", lambda found=environment: found))
            elif level == "source":
                rest = [item for item in differences if item not in environment]
                checks.append(session.stale_check("source", lambda found=rest: found))
            elif differences:
                checks.append(session.check(level, "unchecked", "stale artifacts are not run"))
            else:
                checks.append(session.numerics_check(program, source, seed))
    return checks


def _manifest(store: Store, path: Path, command: str | None = None) -> tuple[Manifest | None, Check]:
    """Read a manifest, or say in a check why that failed."""
    name = str(path.relative_to(store.manifest_root).with_suffix(""))
    try:
        return store.read_manifest(path), Check(name, "bytes", "ok")
    except (UserError, OSError) as error:
        hint = error.hint if isinstance(error, UserError) else None
        return None, Check(name, "bytes", _status(error), _message(error), command or hint)


def _status(error: Exception) -> Status:
    if isinstance(error, CorruptArtifact):
        return "corrupt"
    return "untrusted" if isinstance(error, UntrustedArtifact) else "unchecked"


def _message(error: Exception) -> str:
    return error.message if isinstance(error, UserError) else str(error)


def _environment(
    manifest: Manifest, fingerprints: Callable[[str], Fingerprint]
) -> Callable[[], list[Difference]]:
    inputs = manifest.key_inputs

    def differences() -> list[Difference]:
        here = fingerprints(inputs.call_spec.device_type)
        found = here.differences(inputs.fingerprint, at_load=True)
        return [Difference(f"fingerprint.{name}", *values) for name, values in found.items()]

    return differences


def _changed_sources(manifest: Manifest) -> list[Difference]:
    """Compare the recorded source files with those that their modules lead to now."""
    recorded = manifest.key_inputs.sources
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in recorded]
    now: dict[str, str] = {}
    for module in modules:
        try:
            now.update(source_files([module]))
        except EnvironmentFault:
            # The file is gone: it is absent from `now`, which is the difference.
            continue
    return [
        Difference(f"source.{name}", now.get(name, "(absent)")[:12], recorded.get(name, "(absent)")[:12])
        for name in sorted({*recorded, *now})
        if now.get(name) != recorded.get(name)
    ]


@dataclass(frozen=True)
class _Session:
    """The checks of one artifact."""

    store: Store
    manifest: Manifest
    command: str

    def check(
        self, level: str, status: Status, detail: str = "", outputs: tuple[OutputError, ...] = ()
    ) -> Check:
        command = self.command if status in ("corrupt", "stale") else None
        return Check(str(self.manifest), level, status, detail, command, outputs)

    def bytes_check(self) -> Check:
        try:
            check_archive(self.store.read_package(self.manifest), str(self.manifest))
        except (UserError, OSError) as error:
            return self.check("bytes", _status(error), _message(error))
        return self.check("bytes", "ok")

    def stale_check(self, level: str, differences: Callable[[], list[Difference]]) -> Check:
        try:
            found = differences()
        except UserError as error:
            return self.check(level, "unchecked", error.message)
        return self.check(level, "stale" if found else "ok", shown(found))

    def numerics_check(self, program: Program, source: RunSource, seed: int) -> Check:
        try:
            path = private_copy(self.store, self.manifest, private_folder())
        except (UserError, OSError) as error:
            return self.check("numerics", _status(error), _message(error))
        request = NumericsRequest(source, program.name, str(self.manifest.bucket), str(path), seed)
        outputs, failure = measure_in_child(request)
        if failure:
            return self.check("numerics", "unchecked", failure)
        wrong = [output for output in outputs if not output.ok]
        detail = "; ".join(f"{output.name}: {output.error:.1e} > {output.tolerance:.1e}" for output in wrong)
        if not wrong:
            worst = max(outputs, key=lambda output: output.error / output.tolerance)
            detail = f"worst {worst.name}: {worst.error:.1e} (eager {worst.twin_error:.1e})"
        return self.check("numerics", "corrupt" if wrong else "ok", detail, tuple(outputs))


@dataclass(frozen=True)
class NumericsRequest:
    """What the child needs: the program, the verified package, the seed of the inputs."""

    source: RunSource
    program: str
    bucket: str
    package: str
    seed: int
    environment: Mapping[str, str] = field(default_factory=dict)


def measure_in_child(
    request: NumericsRequest, timeout_s: float = 3600.0
) -> tuple[list[OutputError], str | None]:
    """Return the errors of every output by name, or why they could not be measured."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "aot.verify"],
            input=json.dumps(asdict(request)),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=child_environment(request.environment),
        )
    except subprocess.TimeoutExpired:
        return [], f"no answer within {timeout_s:.0f} s"
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:] or ["no message"]
        return [], f"the child process ended with code {child.returncode}: {last[0]}"
    return [OutputError(**record) for record in json.loads(child.stdout.splitlines()[-1])], None


def measure(program: Program, bucket: Bucket, package: str, seed: int) -> list[OutputError]:
    """Run the package, the program's own function eagerly, and the float64 twin on the same fresh inputs.

    Inputs are drawn again for each of them, because a program may add into its accumulators.
    """
    import torch

    device = torch.device(program.device_type, 0) if program.device_type == "cuda" else torch.device("cpu")

    def inputs() -> tuple[torch.Tensor, ...]:
        return program.example_inputs(bucket, seed, device)

    loader = torch._C._aoti.AOTIModelPackageLoader(
        package, MODEL_NAME, True, 1, 0 if device.index == 0 else -1
    )
    with torch.no_grad():
        compiled = [tensor.double().cpu() for tensor in loader.run(list(inputs()))]
    twin = [tensor.double().cpu() for tensor in program.function(bucket)(*inputs())]
    exact = [tensor.double().cpu() for tensor in program.reference(bucket, inputs())]
    spec = program.call_spec(bucket)
    floor, ceiling = max(TOLERANCE.get(tensor.dtype, (0.0, 0.0)) for tensor in spec.inputs)
    errors = []
    for name, ours, eager, reference in zip(spec.output_names, compiled, twin, exact, strict=True):
        twin_error = relative_error(eager, reference)
        tolerance = min(max(floor, TWIN_FACTOR * twin_error), ceiling)
        if name in program.discrete_outputs:
            tolerance = ceiling
        errors.append(OutputError(name, relative_error(ours, reference), twin_error, tolerance))
    return errors


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """`|a-b|/|b|` over all elements; the absolute error where the reference is all zero."""
    return float((ours - reference).norm()) / (float(reference.norm()) or 1.0)


def main() -> None:
    """Answer one NumericsRequest from stdin with one line of JSON."""
    from aot.compile import BuildRequest, load_program

    record: dict[str, Any] = json.load(sys.stdin)
    source = record["source"]
    request = BuildRequest(
        source["factory"], source["run_file"], tuple(source["overrides"]), record["program"], record["bucket"]
    )
    errors = measure(load_program(request), Bucket.parse(record["bucket"]), record["package"], record["seed"])
    print(json.dumps([asdict(error) for error in errors]))


if __name__ == "__main__":
    main()
