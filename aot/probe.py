"""Facts about a machine and an installation, for the doctor to judge.

Torch is imported in a child process, so that a broken one cannot take the doctor along.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aot.canary import child_environment
from aot.environment import driver_version, normalized
from aot.errors import EnvironmentFault
from aot.fingerprint import compiler_command, compiler_version, libstdcxx_linkage

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Library:
    """A shared library that torch maps when imported, and the package that brings it (None: the system)."""

    path: str
    package: str | None


@dataclass(frozen=True)
class Facts:
    """What the checks look at. `torch_error` is set when torch cannot be imported; then torch's fields are
    empty.
    """

    python: tuple[int, int] = (3, 11)
    packages: Mapping[str, str] = field(default_factory=dict)
    compiler_command: str = "g++"
    compiler: str | None = None
    compiler_error: str | None = None
    libstdcxx: str = "unknown"
    torch_version: str | None = None
    torch_error: str | None = None
    torch_cuda: str | None = None
    cuda_available: bool = False
    cuda_error: str | None = None
    arches: tuple[str, ...] = ()
    devices: tuple[tuple[str, str], ...] = ()
    global_tracing_flag: bool = False
    libraries: tuple[Library, ...] = ()
    required: tuple[str, ...] = ()
    missing_requirements: tuple[str, ...] = ()
    missing_files: tuple[str, ...] = ()
    driver: str | None = None
    temporary: str = "/tmp"
    temporary_noexec: bool = False
    temporary_free: int = 1 << 40


def gather() -> Facts:
    """Look at this machine: run the C++ compiler, and import torch in a child process (a few seconds)."""
    return Facts(
        python=sys.version_info[:2],
        packages={normalized(d.metadata["Name"] or ""): d.version for d in metadata.distributions()},
        driver=driver_version(),
        **compiler_facts(),
        **_torch_facts(),
        **requirement_facts("torch"),
        **_temporary_facts(),
    )


def compiler_facts() -> dict[str, Any]:
    """The C++ compiler that a build would run, and how it links libstdc++."""
    facts: dict[str, Any] = {"compiler_command": compiler_command()}
    try:
        facts["compiler"] = compiler_version()
        facts["libstdcxx"] = libstdcxx_linkage()
    except EnvironmentFault as fault:
        facts["compiler_error"] = fault.message
    return facts


def _temporary_facts() -> dict[str, Any]:
    folder = tempfile.gettempdir()
    return {
        "temporary": folder,
        "temporary_noexec": bool(os.statvfs(folder).f_flag & os.ST_NOEXEC),
        "temporary_free": shutil.disk_usage(folder).free,
    }


def _torch_facts() -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", "from aot.probe import report_torch; report_torch()"],
        capture_output=True,
        text=True,
        timeout=300,
        env=child_environment(),
    )
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        last = child.stderr.strip().splitlines()[-1:] or [f"the process ended with code {child.returncode}"]
        return {"torch_error": last[0]}
    report = json.loads(lines[-1])
    owners = file_owners()
    libraries = [Library(path, owners.get(path)) for path in report.pop("mapped")]
    report["libraries"] = tuple(library for library in libraries if _is_library(library))
    report["arches"] = tuple(report["arches"])
    report["devices"] = tuple(map(tuple, report["devices"]))
    return report


def _is_library(library: Library) -> bool:
    """Leave out Python's own extension modules: what is of interest are libraries and the packages they come
    from.
    """
    return library.package is not None or re.search(r"\.cpython-\d+|/lib-dynload/", library.path) is None


def report_torch() -> None:
    """Import torch and print one line of JSON about it. Runs in a child of the doctor."""
    before = mapped_libraries()
    import torch
    import torch.fx._symbolic_trace as symbolic_trace

    available, error = False, None
    try:
        available = torch.cuda.is_available()
        if torch.version.cuda and not available:
            torch.cuda.init()
    except (RuntimeError, AssertionError) as problem:
        error = str(problem).strip().splitlines()[0]
    devices = []
    for index in range(torch.cuda.device_count() if available else 0):
        major, minor = torch.cuda.get_device_capability(index)
        devices.append((torch.cuda.get_device_name(index), f"sm_{major}{minor}"))
    report = {
        "torch_version": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "cuda_available": available,
        "cuda_error": error,
        "arches": torch.cuda.get_arch_list(),
        "devices": devices,
        # A plain bool is one flag for all threads; from 2.14 on it is thread-local.
        "global_tracing_flag": isinstance(getattr(symbolic_trace, "_is_fx_tracing_flag", None), bool),
        "mapped": sorted(mapped_libraries() - before),
    }
    print(json.dumps(report))


def mapped_libraries() -> set[str]:
    """Resolved paths of the shared libraries that this process has mapped."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if path[1] and re.search(r"\.so(\.[\d.]+)?$", path[2]):
            found.add(str(Path("/" + path[2]).resolve()))
    return found


def file_owners() -> dict[str, str]:
    """{resolved path: package} of every shared library that an installed package's RECORD lists."""
    owners = {}
    for distribution in metadata.distributions():
        for file in distribution.files or ():
            if ".so" in file.name:
                path = str(Path(str(distribution.locate_file(file))).resolve())
                owners[path] = normalized(distribution.metadata["Name"])
    return owners


def requirement_facts(root: str) -> dict[str, Any]:
    """What `root` requires, transitively, by name: what is installed, what is not, which libraries are gone.

    A library is gone when a RECORD lists it and the file does not exist.
    """
    from packaging.requirements import Requirement

    installed: dict[str, metadata.Distribution] = {}
    missing: dict[str, str] = {}
    pending = [Requirement(root)]
    while pending:
        requirement = pending.pop()
        name = normalized(requirement.name)
        if name in installed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            distribution = installed[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            missing[name] = f"{requirement.name}{requirement.specifier}"
            continue
        pending.extend(map(Requirement, distribution.requires or ()))
    gone = [
        f"{file} of {name}"
        for name, distribution in installed.items()
        for file in distribution.files or ()
        if ".so" in file.name and not Path(str(distribution.locate_file(file))).exists()
    ]
    return {
        "required": tuple(sorted(installed)),
        "missing_requirements": tuple(missing.values()),
        "missing_files": tuple(gone),
    }
