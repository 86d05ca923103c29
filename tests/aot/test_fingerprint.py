import dataclasses
import os
import subprocess
import sys
import time

import pytest

from aot import fingerprint
from aot.errors import EnvironmentFault
from aot.fingerprint import Fingerprint, compiler_version, cpu_flags, libstdcxx_linkage

ONE = Fingerprint(**{field.name: f"a {field.name}" for field in dataclasses.fields(Fingerprint)})


@pytest.fixture(autouse=True)
def _forget_the_compiler():
    yield
    compiler_version.cache_clear()
    libstdcxx_linkage.cache_clear()


@pytest.fixture
def use_compiler(monkeypatch):
    def use(command: str) -> None:
        monkeypatch.setenv("CXX", command)
        compiler_version.cache_clear()
        libstdcxx_linkage.cache_clear()

    return use


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def with_flags(flags: str) -> Fingerprint:
    return dataclasses.replace(ONE, cpu_isa=flags)


def test_this_machine_is_described_in_full():
    import torch

    found = Fingerprint.probe("cpu", with_compiler=True)
    assert found.torch_version == torch.__version__
    assert found.torch_git == torch.version.git_version
    assert found.device_arch == os.uname().machine
    assert all(dataclasses.asdict(found).values())
    assert found == Fingerprint.probe("cpu", with_compiler=True)


def test_without_the_compiler_nothing_is_run(use_compiler, tmp_path):
    log = tmp_path / "log"
    use_compiler(script(tmp_path / "trap", f"echo run >> {log}"))
    found = Fingerprint.probe("cpu", with_compiler=False)
    assert (found.compiler, found.libstdcxx) == ("", "")
    assert not log.exists()
    compiler_version()
    assert log.exists()


def test_probing_imports_no_compiler_of_torch():
    code = (
        "import sys; from aot.fingerprint import Fingerprint; Fingerprint.probe('cpu', with_compiler=False); "
    )
    code += "print([m for m in sys.modules if m.startswith(('torch._inductor', 'torch._dynamo'))])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["/nonexistent/g++", "false"])
def test_a_missing_or_broken_compiler_is_an_environment_fault_with_the_fix(use_compiler, command):
    use_compiler(command)
    started = time.monotonic()
    with pytest.raises(EnvironmentFault, match=command) as caught:
        Fingerprint.probe("cpu", with_compiler=True)
    assert time.monotonic() - started < 1
    assert "CXX" in caught.value.hint


def test_a_compiler_that_cannot_link_is_an_environment_fault(use_compiler, tmp_path):
    use_compiler(
        script(tmp_path / "g++", '[ "$1" = --version ] && echo 1 && exit; echo "cannot find ld" >&2; exit 1')
    )
    with pytest.raises(EnvironmentFault, match="cannot find ld"):
        Fingerprint.probe("cpu", with_compiler=True)


def test_the_linkage_of_libstdcxx_is_seen(use_compiler, tmp_path):
    use_compiler("g++")
    assert libstdcxx_linkage() == "dynamic"
    use_compiler(script(tmp_path / "static", 'exec g++ -static-libstdc++ "$@"'))
    assert libstdcxx_linkage() == "static"


def test_a_cuda_program_without_a_device_is_an_environment_fault(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match="CUDA device"):
        Fingerprint.probe("cuda", with_compiler=False)


def test_a_cuda_program_depends_on_the_device_and_on_triton(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("importlib.metadata.version", {"triton": "3.6.0"}.__getitem__)
    found = Fingerprint.probe("cuda", with_compiler=False)
    assert (found.device_arch, found.triton) == ("sm_90", "3.6.0")
    assert Fingerprint.probe("cpu", with_compiler=False).triton == "unused"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Fingerprint)])
def test_every_field_is_compared_unless_a_reason_is_given(name):
    other = dataclasses.replace(ONE, **{name: "another"})
    excluded = name in Fingerprint.EXCLUDED_FROM_KEY
    assert set(ONE.differences(other, at_load=False)) == (set() if excluded else {name})
    assert set(ONE.differences(other, at_load=True)) == (
        set() if excluded or name in Fingerprint.BUILD_ONLY else {name}
    )
    assert (name in ONE.as_key()) == (not excluded)


@pytest.mark.parametrize(
    ("mine", "theirs", "missing"),
    [
        ("avx2 fma", "avx2 fma", None),
        ("avx2 avx512f fma", "avx2 fma", None),
        ("avx2", "avx2 fma", "fma"),
        ("avx2 fma", "avx2 avx512f fma sha_ni", "avx512f sha_ni"),
        ("", "avx2", "avx2"),
        ("avx", "avx2", "avx2"),
    ],
)
def test_at_load_a_cpu_may_have_more_instructions_but_not_fewer(mine, theirs, missing):
    found = with_flags(mine).differences(with_flags(theirs), at_load=True)
    if missing is None:
        assert found == {}
    else:
        assert found == {"cpu_isa": (f"a CPU without {missing}", f"built to use {missing}")}


def test_only_flags_of_instructions_count(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nflags\t\t: fpu vme sse4_2 avx2 avx512_bf16 hypervisor smep abm\n\nflags : avx\n"
    )
    assert cpu_flags(cpuinfo) == {"sse4_2", "avx2", "avx512_bf16", "abm"}
    cpuinfo.write_text("Features\t: fp asimd sve2 sha3 cpuid\n")
    assert cpu_flags(cpuinfo) == {"fp", "asimd", "sve2", "sha3"}


def test_no_field_holds_a_path():
    found = dataclasses.asdict(Fingerprint.probe("cpu", with_compiler=True))
    assert not any("/" in value for value in found.values())
    assert fingerprint.compiler_command()
