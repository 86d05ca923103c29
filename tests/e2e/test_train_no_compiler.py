"""Training runs no compiler and traces nothing, seen from outside the process and from inside."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.import_hooks import write_sitecustomize
from tests.support.tiny_run import TinyRun
from tests.support.training import finish, start

COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc", "ptxas")
TRAP = '#!/bin/sh\necho "$0 $*" >> "{log}"\nexit 1\n'

# Each guard writes down that it stands and whenever it is hit: what it raises may be swallowed.
GUARDS = """
LOG = open({log!r}, "a", buffering=1)

def guard(name, *functions):
    def change(module):
        for function in functions:
            def refuse(function=function):
                print("hit", function, file=LOG)
                raise RuntimeError(f"{{function}} during training")
            import_hooks.before_call(module, function, refuse)
            print("armed", function, file=LOG)
    import_hooks.after_import(name, change)

guard("torch.fx._symbolic_trace", "Tracer.trace")
guard("torch.fx.experimental.proxy_tensor", "make_fx")
guard("torch._dynamo.convert_frame", "ConvertFrame.__call__", "ConvertFrameAssert.__call__")
"""

# Planted where a run would meet them: in a micro-batch, and where a worker loads its artifacts.
PLANTS = {
    "torch.compile": """
def plant(module):
    import torch
    compiled = torch.compile(lambda x: x + 1)
    import_hooks.before_call(module, "DrafterWorker._micro_batch", lambda: compiled(torch.ones(2)))
""",
    "make_fx": """
def plant(module):
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    trace = lambda: make_fx(lambda x: x + 1)(torch.ones(2))
    import_hooks.before_call(module, "DrafterWorker._micro_batch", trace)
""",
    "symbolic_trace": """
def plant(module):
    import torch
    trace = lambda: torch.fx.symbolic_trace(torch.nn.Identity())
    import_hooks.before_call(module, "DrafterWorker._micro_batch", trace)
""",
    "aoti_load_package": """
def plant(module):
    import torch
    from aot.runtime import PreparedArtifact
    load = PreparedArtifact.load
    def with_torch(self, device):
        torch._inductor.aoti_load_package(str(self.path))
        return load(self, device)
    PreparedArtifact.load = with_torch
""",
}
HIT = {
    "torch.compile": "ConvertFrame.__call__",
    "make_fx": "make_fx",
    "symbolic_trace": "Tracer.trace",
}


@dataclass(frozen=True)
class Seen:
    """What one run left: exit code, stderr, compiler calls, guards hit, files in the compilers' caches."""

    code: int
    errors: str
    compilers: list[str]
    guards: list[str]
    cached: list[str]

    @property
    def hits(self) -> list[str]:
        return [line.removeprefix("hit ") for line in self.guards if line.startswith("hit ")]


def train_under_guard(tiny: TinyRun, folder: Path, plant: str = "", trapped: bool = True) -> Seen:
    """Two steps and an evaluation, and every package's trial run, whose child process is watched too."""
    trap_log, guard_log = folder / "compilers.log", folder / "guards.log"
    traps, caches = folder / "bin", [folder / "inductor", folder / "triton"]
    for path in (traps, *caches):
        path.mkdir()
    for name in COMPILERS:
        (traps / name).write_text(TRAP.format(log=trap_log))
        (traps / name).chmod(0o755)
    for log in (trap_log, guard_log):
        log.touch()
    code = GUARDS.format(log=str(guard_log))
    if plant:
        code += f'{plant}\nimport_hooks.after_import("dflash.train.drafter_worker", plant)\n'
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches[0]),
        "TRITON_CACHE_DIR": str(caches[1]),
        "DFLASH_AOT_PRIVATE_DIR": str(folder / "private"),
        "PYTHONPATH": write_sitecustomize(folder / "hooks", code),
    }
    if trapped:
        variables |= {"PATH": f"{traps}{os.pathsep}{os.environ['PATH']}", "CC": "gcc", "CXX": "g++"}
    arguments = ("--max-steps", "2", "--set", "eval.eval_max_batches=1")
    exit_code, errors = finish(start(tiny, folder / "out", *arguments, **variables))
    cached = [str(path) for cache in caches for path in cache.rglob("*")]
    return Seen(
        exit_code, errors, trap_log.read_text().splitlines(), guard_log.read_text().splitlines(), cached
    )


def test_training_runs_no_compiler_and_traces_nothing(tiny: TinyRun, tmp_path: Path) -> None:
    seen = train_under_guard(tiny, tmp_path)
    assert seen.code == 0, seen.errors
    assert "eval at step 2" in seen.errors
    assert (seen.compilers, seen.cached, seen.hits) == ([], [], [])
    assert "armed Tracer.trace" in seen.guards
    assert any(path.suffix == ".tried" for path in (tmp_path / "private").iterdir())


@pytest.mark.parametrize("plant", HIT)
def test_the_guards_see_a_planted(plant: str, tiny: TinyRun, tmp_path: Path) -> None:
    seen = train_under_guard(tiny, tmp_path, PLANTS[plant])
    assert HIT[plant] in seen.hits
    assert seen.code == 1
    assert "drafter worker" in seen.errors


def test_the_traps_see_a_planted_aoti_load_package(tiny: TinyRun, tmp_path: Path) -> None:
    seen = train_under_guard(tiny, tmp_path, PLANTS["aoti_load_package"])
    assert any("g++" in line for line in seen.compilers), seen.errors


@pytest.mark.long
def test_a_compiler_that_works_is_seen_in_the_cache(tiny: TinyRun, tmp_path: Path) -> None:
    seen = train_under_guard(tiny, tmp_path, PLANTS["aoti_load_package"], trapped=False)
    assert seen.compilers == []
    assert seen.cached
