"""What a run ran in, whole: every package with the hash of its RECORD, torch's build, driver, variables.

A version does not name a build: two wheels of one version have different RECORDs, and so have two states of
one installation. A snapshot goes into each checkpoint; `changes` names what differs since, fields that enter
an artifact's key first.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aot.console import note
from aot.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA = 1
FILE_NAME = "environment.json"
#: Sections that `snapshot` writes; callers may add others (hashes of a model, of a tokenizer).
KEY_SECTION = "key"
SECTIONS = (KEY_SECTION, "machine", "variables", "packages")

_VARIABLE = re.compile(
    r"(AOTI|CUBLAS|CUDA|CUDNN|DFLASH|GOMP|HF|KMP|MKL|NCCL|NVIDIA|OMP|OPENBLAS|PYTORCH|TORCH|TORCHINDUCTOR"
    r"|TRANSFORMERS|TRITON|WANDB)_\w+|CC|CXX|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|PYTHONPATH|PYTHONHASHSEED|TMPDIR"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|AUTH")


def normalized(name: str) -> str:
    """A distribution's name as indexes spell it: lower case, runs of `-_.` as one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages() -> dict[str, dict[str, str]]:
    """{name: {version, record}} of every installed distribution; `record` is the SHA-256 of its RECORD file.

    The first distribution of a name on the path wins, as in an import.
    """
    found: dict[str, dict[str, str]] = {}
    for distribution in metadata.distributions():
        name = normalized(distribution.metadata["Name"] or "")
        record = distribution.read_text("RECORD")
        digest = hashlib.sha256(record.encode()).hexdigest() if record is not None else "none"
        found.setdefault(name, {"version": distribution.version, "record": digest})
    return dict(sorted(found.items()))


def driver_version(root: Path = Path("/")) -> str | None:
    """The NVIDIA kernel driver's version, read from the kernel, or None where there is none."""
    for source in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        try:
            text = (root / source).read_text()
        except OSError:
            continue
        match = re.search(r"\d{3}\.\d+(\.\d+)*", text)
        if match:
            return match[0]
    return None


def variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that change what torch, a compiler or the run does; none that looks like a secret."""
    environ = os.environ if environ is None else environ
    return {
        name: value
        for name, value in sorted(environ.items())
        if _VARIABLE.fullmatch(name) and not _SECRET.search(name)
    }


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor()


def snapshot() -> dict[str, Any]:
    """The environment as JSON, in the sections of SECTIONS. Runs no program and no compiler."""
    import torch

    from aot.fingerprint import Fingerprint

    cuda = torch.cuda.is_available()
    fingerprint = asdict(Fingerprint.probe("cuda" if cuda else "cpu", with_compiler=False))
    unkeyed = {*Fingerprint.EXCLUDED_FROM_KEY, *Fingerprint.BUILD_ONLY}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
    return {
        "schema": SCHEMA,
        KEY_SECTION: {field: value for field, value in fingerprint.items() if field not in unkeyed},
        "machine": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cpu": _cpu_model(),
            "cores": str(os.cpu_count()),
            "driver": driver_version() or "none",
            "gpus": ", ".join(gpus) or "none",
        },
        "variables": variables(),
        "packages": packages(),
    }


@dataclass(frozen=True)
class Change:
    """One field that differs; None where a side lacks it. `enters_key`: artifacts of one side are stale on
    the other.
    """

    field: str
    then: str | None
    now: str | None
    enters_key: bool


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs between two snapshots, section by section: the fields of an artifact's key come first."""
    found = []
    for section in SECTIONS:
        before, after = then.get(section, {}), now.get(section, {})
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                texts = (_text(before.get(name)), _text(after.get(name)))
                found.append(Change(f"{section}.{name}", *texts, enters_key=section == KEY_SECTION))
    return found


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        return f"{value.get('version')} (record {str(value.get('record'))[:12]})"
    return None if value is None else str(value)


def read_snapshot(path: Path) -> dict[str, Any]:
    """Read the snapshot of a checkpoint folder, of the newest checkpoint in a run's folder (told on stderr),
    or of a JSON file.

    Raises ConfigError if there is none or if it is not a snapshot.
    """
    file = path
    if path.is_dir():
        file = path / FILE_NAME
        if not file.exists():
            checkpoints = path if path.name == "checkpoints" else path / "checkpoints"
            found = list(checkpoints.glob(f"*/{FILE_NAME}"))
            if not found:
                raise ConfigError(f"'{path}' holds no {FILE_NAME}", "name a checkpoint's folder, or a run's")
            file = max(found, key=_numbers)
            note(f"the newest checkpoint: '{file}'")
    try:
        value = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read '{file}': {error.strerror}", "name a checkpoint's folder") from None
    except ValueError:
        value = None
    if not isinstance(value, dict) or not isinstance(value.get(KEY_SECTION), dict):
        raise ConfigError(
            f"'{file}' is not an environment snapshot", f"name a checkpoint's folder or its {FILE_NAME}"
        )
    return value


def _numbers(path: Path) -> tuple[tuple[int, ...], str]:
    """Sort `step-900` before `step-1000`."""
    return tuple(int(number) for number in re.findall(r"\d+", path.parent.name)), str(path)
