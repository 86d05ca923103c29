"""The environment that a compiled package depends on, as named text fields.

A version string does not identify a torch build, so the git commit is here too. Probing for a load runs no
compiler: the fields that only a build can know stay empty and are not compared.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

from aot.errors import EnvironmentFault

# Flags of /proc/cpuinfo (x86, then ARM) of instructions that a compiler picks itself under `-march=native`;
# the rest describe the kernel, the hypervisor or instructions that only intrinsics reach.
ISA_FLAG = re.compile(
    r"mmx|s?sse|avx|amx|fma|f16c|bmi|abm$|popcnt|adx|movbe|cx16|lahf_lm|3dnowprefetch|aes$|vaes|v?pclmul|sha|sm[34]$|gfni|"
    r"fp$|fphp|asimd|sve|sme2?$|sme_|crc32|atomics|bf16|i8mm|jscvt|fcma|i?lrcpc|pmull"
)
HAS_NO_COMPILER_HINT = (
    "install one (Debian, Ubuntu: `apt-get install g++`) or name it: `export CXX=/usr/bin/g++`"
)
UNUSED = "unused"


@dataclass(frozen=True)
class Fingerprint:
    """Every field enters the key, but for those named in EXCLUDED_FROM_KEY."""

    torch_version: str
    torch_git: str
    cuda: str
    triton: str
    device_arch: str
    cpu_isa: str
    glibc: str
    compiler: str
    libstdcxx: str
    python: str

    EXCLUDED_FROM_KEY: ClassVar[dict[str, str]] = {
        "python": "a package holds no Python code; kept for the record"
    }
    BUILD_ONLY: ClassVar[dict[str, str]] = {
        "compiler": "a process that loads packages must not run a compiler to ask",
        "libstdcxx": "known by linking a library, which only a build may do",
    }

    @classmethod
    def probe(cls, device_type: str, with_compiler: bool) -> Fingerprint:
        """Describe this machine for programs on `device_type` ("cpu" or "cuda", the current device).

        With `with_compiler` the C++ compiler is run (about a second, once per process); without it the fields
        of BUILD_ONLY are empty. Raises EnvironmentFault if the compiler or the device is missing.
        """
        compiler = compiler_version() if with_compiler else ""
        libstdcxx = libstdcxx_linkage() if with_compiler else ""
        import torch

        on_cuda = device_type == "cuda"
        return cls(
            torch_version=str(torch.__version__),
            torch_git=torch.version.git_version or "",
            cuda=torch.version.cuda or "none",
            triton=_triton_version() if on_cuda else UNUSED,
            device_arch=_cuda_arch() if on_cuda else platform.machine(),
            cpu_isa=" ".join(sorted(cpu_flags())),
            glibc=(os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc "),
            compiler=compiler,
            libstdcxx=libstdcxx,
            python=platform.python_version(),
        )

    def as_key(self) -> dict[str, str]:
        """Return the fields that enter the key."""
        return {name: value for name, value in asdict(self).items() if name not in self.EXCLUDED_FROM_KEY}

    def differences(self, other: Fingerprint, at_load: bool) -> dict[str, tuple[str, str]]:
        """Return {field: (this machine's, the artifact's)} where the artifact `other` does not fit.

        At load the fields of BUILD_ONLY are skipped, and this machine may be the richer one: more CPU
        instructions than the artifact was built with (only missing ones are listed), or a later GPU of one
        binary-compatible line.
        """
        found: dict[str, tuple[str, str]] = {}
        for field in fields(self):
            name = field.name
            mine, theirs = getattr(self, name), getattr(other, name)
            if name in self.EXCLUDED_FROM_KEY or mine == theirs or (at_load and name in self.BUILD_ONLY):
                continue
            if name == "device_arch" and at_load and _runs_binaries_of(mine, theirs):
                continue
            if name == "cpu_isa" and at_load:
                missing = sorted(set(theirs.split()) - set(mine.split()))
                if missing:
                    found[name] = (f"a CPU without {' '.join(missing)}", f"built to use {' '.join(missing)}")
            else:
                found[name] = (mine, theirs)
        return found


def _runs_binaries_of(mine: str, theirs: str) -> bool:
    """Whether a GPU `mine` executes what was compiled for `theirs`: same major, a minor as high or higher.

    From sm_90 on, kernels use features of exactly one architecture, which no other has.
    """
    archs = [re.fullmatch(r"sm_([1-8])(\d)", arch) for arch in (mine, theirs)]
    if archs[0] is None or archs[1] is None:
        return False
    return archs[0][1] == archs[1][1] and archs[0][2] >= archs[1][2]


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the instruction-set flags of the first CPU."""
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return {flag for flag in value.split() if ISA_FLAG.match(flag)}
    return set()


def compiler_command() -> str:
    """Return the C++ compiler that torch will run."""
    return os.environ.get("CXX") or "g++"


@functools.cache
def compiler_version() -> str:
    """Return the first line of the compiler's `--version`, which holds no path. Raises EnvironmentFault."""
    command = compiler_command()
    try:
        result = subprocess.run(
            [command, "--version"], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        raise EnvironmentFault(
            f"no working C++ compiler: '{command}' does not run", HAS_NO_COMPILER_HINT
        ) from None
    return result.stdout.partition("\n")[0].strip()


@functools.cache
def libstdcxx_linkage() -> str:
    """Return how the compiler links libstdc++ into a shared library: "dynamic", "static" or "unknown"."""
    source = '#include <stdexcept>\nextern "C" void probe() { throw std::runtime_error("probe"); }\n'
    with tempfile.TemporaryDirectory(prefix="dflash-aot-") as folder:
        library = Path(folder, "probe.so")
        command = [compiler_command(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        try:
            subprocess.run(command, input=source, capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            raise EnvironmentFault(
                f"the C++ compiler cannot build a shared library: {detail}", HAS_NO_COMPILER_HINT
            ) from None
        content = library.read_bytes()
    # The name of a needed library is text in the dynamic string table.
    if b"libstdc++.so" in content:
        return "dynamic"
    return "unknown" if b"libc++" in content else "static"


def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for package in ("triton", "pytorch-triton"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "none"


def _cuda_arch() -> str:
    import torch

    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "this program needs a CUDA device and torch sees none", "`dflash-aot doctor` says why"
        )
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"
