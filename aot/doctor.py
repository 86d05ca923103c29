"""Looks at a machine and an installation, and says what will go wrong before it does.

Each check is a pure function of the facts that `aot.probe` gathers. No hint ever asks to remove a package:
what looks superfluous may be what torch loads, and the cure of a mixed environment is a fresh one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aot.probe import Facts

Level = Literal["ok", "note", "warning", "error"]

#: Inclusive ranges of minor versions that the project is tested with.
TESTED = {"torch": ("2.11", "2.13"), "transformers": ("5.10", "5.25")}
TESTED_PYTHON = ((3, 11), (3, 13))
SERVING_STACKS = (
    "aphrodite-engine",
    "lmdeploy",
    "mlc-llm",
    "sgl-kernel",
    "sglang",
    "tensorrt-llm",
    "text-generation-server",
    "tritonserver",
    "vllm",
)
#: The oldest driver branch that runs each CUDA major (minor-version compatibility).
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
FREE_SPACE_NEEDED = 2 << 30
FRESH_ENVIRONMENT = (
    "make a fresh environment for this project: `python -m venv .venv && .venv/bin/pip install .`"
)


@dataclass(frozen=True)
class Finding:
    """`check` is the check's name; `hint` the command or step that mends it."""

    level: Level
    check: str
    title: str
    hint: str | None = None


def check_python(facts: Facts) -> Iterator[Finding]:
    low, high = TESTED_PYTHON
    text = ".".join(map(str, facts.python))
    if low <= facts.python <= high:
        yield Finding("ok", "python", f"Python {text}")
    else:
        yield Finding("warning", "python", f"Python {text} is outside the tested range", FRESH_ENVIRONMENT)


def check_compiler(facts: Facts) -> Iterator[Finding]:
    """A build needs a C++ compiler that links libstdc++ dynamically; loading and training need none."""
    if facts.compiler is None:
        yield Finding(
            "error",
            "compiler",
            f"no working C++ compiler: {facts.compiler_error or facts.compiler_command} "
            "(needed by `build` only; training from artifacts runs none)",
            "`apt-get install g++`, or name one: `export CXX=/usr/bin/g++`",
        )
    elif facts.libstdcxx == "dynamic":
        yield Finding("ok", "compiler", f"{facts.compiler}, links libstdc++ dynamically")
    elif facts.libstdcxx == "static":
        yield Finding(
            "error",
            "compiler",
            f"'{facts.compiler_command}' links libstdc++ statically: a CUDA package built with it crashes "
            "when it is loaded, because two copies of the library meet in one process",
            "use the system's compiler: `export CXX=/usr/bin/g++`",
        )
    else:
        yield Finding(
            "warning",
            "compiler",
            f"cannot tell how '{facts.compiler_command}' links libstdc++{_because(facts.compiler_error)}",
            "use the system's compiler: `export CXX=/usr/bin/g++`",
        )


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def check_torch(facts: Facts) -> Iterator[Finding]:
    if facts.torch_error:
        yield Finding("error", "torch", f"torch cannot be imported: {facts.torch_error}", FRESH_ENVIRONMENT)
    for requirement in facts.missing_requirements:
        yield Finding(
            "error", "torch", f"torch needs {requirement}, which is not installed", FRESH_ENVIRONMENT
        )
    for file in facts.missing_files:
        yield Finding(
            "error", "torch", f"a file of a package that torch needs is gone: {file}", FRESH_ENVIRONMENT
        )
    if facts.torch_version:
        yield Finding("ok", "torch", f"torch {facts.torch_version} (CUDA {facts.torch_cuda or 'none'})")


def check_tested_range(facts: Facts) -> Iterator[Finding]:
    found = {"torch": facts.torch_version, "transformers": facts.packages.get("transformers")}
    for name, (low, high) in TESTED.items():
        version = found[name] or facts.packages.get(name)
        if version is None:
            yield Finding("error", "versions", f"{name} is not installed", FRESH_ENVIRONMENT)
        elif not _minor(low) <= _minor(version) <= _minor(high):
            yield Finding(
                "warning",
                "versions",
                f"{name} {version} is outside the tested range {low} - {high}",
                FRESH_ENVIRONMENT,
            )
        else:
            yield Finding("ok", "versions", f"{name} {version} is in the tested range {low} - {high}")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_tracing_race(facts: Facts) -> Iterator[Finding]:
    if facts.global_tracing_flag:
        yield Finding(
            "note",
            "race",
            f"torch {facts.torch_version} keeps one 'tracing' flag for the whole process (before 2.14): "
            "while any thread traces or compiles, compiled calls of every other thread fail with "
            "'Detected that you are using FX to symbolically trace a dynamo-optimized function'. An "
            "artifact's call does not read that flag: train from artifacts, not with torch.compile in "
            "worker threads",
        )


def check_serving_stack(facts: Facts) -> Iterator[Finding]:
    found = [f"{name} {facts.packages[name]}" for name in SERVING_STACKS if name in facts.packages]
    if found:
        yield Finding(
            "warning",
            "serving",
            f"a serving stack shares this environment: {', '.join(found)}. It pins torch and CUDA packages "
            "of its own, and its next upgrade can change the ones that artifacts were built with",
            "serve from another environment and talk to it over HTTP; " + FRESH_ENVIRONMENT,
        )


def check_gpu(facts: Facts) -> Iterator[Finding]:
    """Driver, devices and torch's CUDA build must fit together."""
    if facts.torch_version is None:
        return
    if facts.torch_cuda is None:
        if facts.driver:
            yield Finding(
                "warning",
                "gpu",
                f"there is an NVIDIA driver ({facts.driver}), but torch is a CPU build",
                "make a fresh environment and install a CUDA build of torch in it first",
            )
        else:
            yield Finding("ok", "gpu", "no GPU, and torch is a CPU build")
        return
    oldest = OLDEST_DRIVER.get(int(facts.torch_cuda.split(".")[0]))
    if facts.driver is None:
        yield Finding(
            "warning",
            "gpu",
            f"torch is built for CUDA {facts.torch_cuda}, but no NVIDIA driver is loaded: "
            "only CPU programs run here",
            "run on a GPU machine (in a container: with `--gpus all`)",
        )
    elif oldest and _numbers(facts.driver) < _numbers(oldest):
        yield Finding(
            "error",
            "gpu",
            f"driver {facts.driver} is too old for torch's CUDA {facts.torch_cuda}: "
            f"it needs {oldest} or newer",
            "update the driver, or make a fresh environment with a torch build for an older CUDA",
        )
    elif not facts.cuda_available:
        yield Finding(
            "error",
            "gpu",
            f"driver {facts.driver} is loaded, but torch sees no GPU{_because(facts.cuda_error)}",
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
        )
    yield from _check_devices(facts)


def _check_devices(facts: Facts) -> Iterator[Finding]:
    for index, (name, arch) in enumerate(facts.devices):
        if _runs_on(arch, facts.arches):
            yield Finding(
                "ok", "gpu", f"cuda:{index} {name} ({arch}), driver {facts.driver}, CUDA {facts.torch_cuda}"
            )
        else:
            yield Finding(
                "error",
                "gpu",
                f"cuda:{index} {name} is {arch}; torch is built for {', '.join(facts.arches) or 'nothing'}",
                "make a fresh environment with a torch build for this GPU",
            )
    if len({arch for _, arch in facts.devices}) > 1:
        yield Finding(
            "warning",
            "gpu",
            "the GPUs are of different architectures: an artifact runs on the one it was built for",
            "choose devices of one kind, e.g. `export CUDA_VISIBLE_DEVICES=0,1`",
        )


def _runs_on(arch: str, built: tuple[str, ...]) -> bool:
    """Machine code runs on its own major from its minor on, PTX (`compute_`) on anything newer."""
    number = int(arch.removeprefix("sm_"))
    for item in built:
        kind, _, text = item.partition("_")
        known = int(re.sub(r"\D", "", text) or 0)
        same_major = known // 10 == number // 10
        if known <= number and (kind == "compute" or (same_major and (text.isdigit() or known == number))):
            return True
    return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def check_cuda_majors(facts: Facts) -> Iterator[Finding]:
    """Several CUDA majors side by side are a note: each may be what some package loads."""
    majors: dict[int, list[str]] = {}
    for name, version in facts.packages.items():
        major = cuda_major(name, version)
        if major is not None:
            majors.setdefault(major, []).append(name)
    if len(majors) > 1:
        listed = "; ".join(
            f"CUDA {major}: {', '.join(sorted(names))}" for major, names in sorted(majors.items())
        )
        yield Finding(
            "note",
            "cuda packages",
            f"packages of several CUDA majors are installed ({listed}). Leave them all: those marked "
            "'needed by torch' are what torch loads, whatever their number says",
        )


def cuda_major(name: str, version: str) -> int | None:
    """The CUDA major of an NVIDIA package: its suffix `-cu12`, or a runtime package's version."""
    suffix = re.fullmatch(r"(?:nvidia|cuda|cupy)-.*-?cu(?:da)?(\d{2})\d*x?", name)
    if suffix:
        return int(suffix[1])
    if name in ("nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cuda-cupti", "nvidia-nvjitlink"):
        return int(version.split(".")[0])
    return None


def check_libraries(facts: Facts) -> Iterator[Finding]:
    """One note per package that torch loads libraries from, or that it requires and loads later."""
    providers: dict[str, list[str]] = {name: [] for name in facts.required if _brings_libraries(name)}
    for library in facts.libraries:
        providers.setdefault(library.package or "the system", []).append(Path(library.path).name)
    for provider, names in sorted(providers.items()):
        what = ", ".join(sorted(names)) if names else "required, loaded when first used"
        yield Finding("note", "libraries", f"{provider}: needed by torch, do not remove ({what})")


def _brings_libraries(package: str) -> bool:
    return package.startswith(("nvidia-", "cuda-", "triton", "pytorch-triton", "intel-", "mkl"))


def check_temporary_folder(facts: Facts) -> Iterator[Finding]:
    """The loader unpacks each package into the temporary folder and maps its library from there."""
    if facts.temporary_noexec:
        yield Finding(
            "error",
            "temporary folder",
            f"'{facts.temporary}' is mounted noexec: no package can be loaded from it",
            "name another folder: `export TMPDIR=...`",
        )
    elif facts.temporary_free < FREE_SPACE_NEEDED:
        yield Finding(
            "warning",
            "temporary folder",
            f"'{facts.temporary}' has {facts.temporary_free >> 20} MiB left",
            "free some space, or name another folder: `export TMPDIR=...`",
        )
    else:
        yield Finding("ok", "temporary folder", f"'{facts.temporary}' has room and runs libraries")


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_python,
    check_torch,
    check_tested_range,
    check_compiler,
    check_gpu,
    check_temporary_folder,
    check_serving_stack,
    check_tracing_race,
    check_cuda_majors,
    check_libraries,
)


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(facts)]
