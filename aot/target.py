"""Builds for other CPUs: `cpu:x86-64-v3` stands for every machine that has the instructions of that level.

A target replaces the machine's instructions in the fingerprint and tells the compiler to use no others. A
machine with more instructions accepts such an artifact, one with fewer refuses it by name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aot.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aot.fingerprint import Fingerprint

Option = bool | int | str

_BASELINE = "cx16 lahf_lm mmx popcnt sse sse2 sse4_1 sse4_2 ssse3"
_V3 = f"{_BASELINE} abm avx avx2 bmi1 bmi2 f16c fma movbe"
#: The levels of the x86-64 psABI, in the kernel's names for their instructions.
X86_LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v2": frozenset(_BASELINE.split()),
    "x86-64-v3": frozenset(_V3.split()),
    "x86-64-v4": frozenset(f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl".split()),
}
MARCH, VECTOR_BITS = "cpp.march", "cpp.simdlen"
FIRST_RELEASE = (2, 13)


@dataclass(frozen=True)
class Target:
    """A level of x86-64. Make one with `parse`."""

    level: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `cpu:LEVEL`. Raises ConfigError with the known ones."""
        device, _, level = text.partition(":")
        if device != "cpu" or level not in X86_LEVELS:
            raise ConfigError(
                f"unknown target '{text}'",
                f"targets: {', '.join(f'cpu:{name}' for name in X86_LEVELS)}; "
                "a GPU program is built on a GPU of its own kind",
            )
        return cls(level)

    def __str__(self) -> str:
        return f"cpu:{self.level}"

    def options(self) -> dict[str, Option]:
        """Compile options that keep the compiler, and Inductor's own vectors, within the level."""
        # Inductor's 512-bit vectors come with VNNI or AMX, which no level has.
        return {MARCH: self.level, VECTOR_BITS: 1 if self.level == "x86-64-v2" else 256}

    def fingerprint(self, here: Fingerprint, release: tuple[int, int]) -> Fingerprint:
        """Return `here` with the level's instructions in place of the machine's.

        Raises EnvironmentFault if this machine lacks some of them (the package could not be tried), is no
        x86-64, or if its torch cannot be told what to compile for.
        """
        flags = X86_LEVELS[self.level]
        missing = sorted(flags - set(here.cpu_isa.split()))
        if here.device_arch != "x86_64" or missing:
            lacks = f"lacks {' '.join(missing)}" if missing else f"is {here.device_arch}"
            raise EnvironmentFault(
                f"a package for {self} cannot be tried here: this machine {lacks}",
                "build on a machine that has at least the target's instructions",
            )
        if release < FIRST_RELEASE:
            raise EnvironmentFault(
                f"torch {here.torch_version} always compiles for the machine it runs on",
                f"a target needs torch {'.'.join(map(str, FIRST_RELEASE))} or newer",
            )
        return dataclasses.replace(here, cpu_isa=" ".join(sorted(flags)))


def without_target(options: Mapping[str, Option], cpu_isa: str) -> dict[str, Option]:
    """Compile options without those of the target that `cpu_isa` is.

    They choose instructions and nothing else, and the fingerprint compares instructions.
    """
    level = options.get(MARCH)
    if level not in X86_LEVELS or X86_LEVELS[level] != set(cpu_isa.split()):
        return dict(options)
    chosen = Target(level).options()
    return {name: value for name, value in options.items() if chosen.get(name) != value}
