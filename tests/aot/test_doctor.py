"""Every check of the doctor on made-up facts, and the facts themselves on fakes and on this machine."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.fx import _symbolic_trace

from aot import doctor, probe
from aot.canary import child_environment
from aot.doctor import Finding, cuda_major, diagnose
from aot.environment import driver_version
from aot.fingerprint import compiler_version, libstdcxx_linkage
from aot.probe import Facts, Library, gather, requirement_facts

HEALTHY = Facts(
    python=(3, 12),
    packages={"torch": "2.13.0", "transformers": "5.24.0"},
    compiler="g++ 12.2.0",
    libstdcxx="dynamic",
    torch_version="2.13.0+cu130",
    torch_cuda="13.0",
    cuda_available=True,
    arches=("sm_80", "sm_90", "compute_120"),
    devices=(("H200", "sm_90"), ("H200", "sm_90")),
    driver="580.95.05",
)


def found(facts: Facts, level: str) -> list[Finding]:
    return [finding for finding in diagnose(facts) if finding.level == level]


def only(facts: Facts, level: str) -> Finding:
    (finding,) = found(facts, level)
    return finding


def test_a_healthy_machine_has_no_complaint() -> None:
    assert {finding.level for finding in diagnose(HEALTHY)} == {"ok"}


def test_no_compiler_is_an_error_with_the_fix() -> None:
    finding = only(replace(HEALTHY, compiler=None, compiler_error="'g++' does not run"), "error")
    assert "no working C++ compiler" in finding.title
    assert "apt-get install g++" in (finding.hint or "")


def test_a_compiler_that_links_libstdcxx_statically_is_an_error_that_says_why() -> None:
    finding = only(replace(HEALTHY, libstdcxx="static", compiler_command="/opt/g++"), "error")
    assert re.search(r"'/opt/g\+\+' links libstdc\+\+ statically: .* crashes", finding.title)
    assert "CXX=/usr/bin/g++" in (finding.hint or "")


def test_a_compiler_that_cannot_be_judged_is_a_warning() -> None:
    assert "cannot tell" in only(replace(HEALTHY, libstdcxx="unknown"), "warning").title


def test_the_racing_flag_is_a_note_that_says_why_artifacts_matter() -> None:
    finding = only(replace(HEALTHY, global_tracing_flag=True), "note")
    assert "compiled calls of every other thread fail" in finding.title
    assert "train from artifacts" in finding.title


@pytest.mark.parametrize(
    ("torch_version", "transformers", "complaint"),
    [
        ("2.11.0", "5.10.0", None),
        ("2.13.1+cu130", "5.25.3", None),
        ("2.10.9", "5.24.0", "torch 2.10.9"),
        ("2.14.1", "5.24.0", "torch 2.14.1"),
        ("2.13.0", "4.57.1", "transformers 4.57.1"),
        ("2.13.0", "5.26.0", "transformers 5.26.0"),
    ],
)
def test_versions_outside_the_tested_range_are_warnings(
    torch_version: str, transformers: str, complaint: str | None
) -> None:
    packages = {"torch": torch_version, "transformers": transformers}
    warnings = found(replace(HEALTHY, torch_version=torch_version, packages=packages), "warning")
    assert [finding.title.split(" is ")[0] for finding in warnings] == ([complaint] if complaint else [])


def test_a_missing_transformers_is_an_error() -> None:
    assert (
        "transformers is not installed" in only(replace(HEALTHY, packages={"torch": "2.13.0"}), "error").title
    )


def test_an_untested_python_is_a_warning() -> None:
    assert "Python 3.14" in only(replace(HEALTHY, python=(3, 14)), "warning").title


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt-llm", "lmdeploy"])
def test_a_serving_stack_in_the_environment_is_a_warning(name: str) -> None:
    finding = only(replace(HEALTHY, packages={**HEALTHY.packages, name: "1.2.3"}), "warning")
    assert f"{name} 1.2.3" in finding.title
    assert "fresh environment" in (finding.hint or "")


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"torch_cuda": None, "cuda_available": False, "devices": ()}, "warning", "torch is a CPU build"),
        ({"driver": None, "cuda_available": False, "devices": ()}, "warning", "no NVIDIA driver is loaded"),
        (
            {"driver": "550.54.14", "cuda_available": False, "devices": ()},
            "error",
            "needs 580.65.06 or newer",
        ),
        ({"torch_cuda": "12.8", "driver": "520.61.05", "devices": ()}, "error", "needs 525.60.13 or newer"),
        (
            {"cuda_available": False, "cuda_error": "no device", "devices": ()},
            "error",
            "sees no GPU: no device",
        ),
        ({"arches": ("sm_100",)}, "error", "cuda:0 H200 is sm_90; torch is built for sm_100"),
        ({"devices": (("H200", "sm_90"), ("A100", "sm_80"))}, "warning", "different architectures"),
    ],
)
def test_gpu_driver_and_torch_must_fit(changes: dict, level: str, text: str) -> None:
    assert text in found(replace(HEALTHY, **changes), level)[0].title


def test_a_newer_driver_of_an_older_cuda_is_fine() -> None:
    assert found(replace(HEALTHY, torch_cuda="12.8"), "error") == []


@pytest.mark.parametrize(
    ("arch", "built", "runs"),
    [
        ("sm_90", ("sm_90",), True),
        ("sm_90", ("sm_90a",), True),
        ("sm_89", ("sm_80",), True),
        ("sm_86", ("sm_89",), False),
        ("sm_90", ("sm_80",), False),
        ("sm_120", ("compute_90",), True),
        ("sm_103", ("sm_100a",), False),
        ("sm_80", ("compute_90",), False),
    ],
)
def test_machine_code_runs_within_a_major_and_ptx_on_anything_newer(
    arch: str, built: tuple[str, ...], runs: bool
) -> None:
    assert doctor._runs_on(arch, built) is runs


def test_a_broken_torch_names_the_package_that_is_gone() -> None:
    facts = replace(
        HEALTHY,
        torch_version=None,
        torch_error="libcudnn.so.9: cannot open shared object file",
        missing_requirements=("nvidia-cudnn-cu13==9.15",),
        missing_files=("nvidia/nccl/lib/libnccl.so.2 of nvidia-nccl-cu13",),
    )
    titles = [finding.title for finding in found(facts, "error")]
    assert any("libcudnn.so.9" in title for title in titles)
    assert any("nvidia-cudnn-cu13==9.15, which is not installed" in title for title in titles)
    assert any("libnccl.so.2 of nvidia-nccl-cu13" in title for title in titles)


def test_each_library_is_credited_to_its_package_and_marked_as_needed() -> None:
    facts = replace(
        HEALTHY,
        libraries=(
            Library("/v/nvidia/cudnn/lib/libcudnn.so.9", "nvidia-cudnn-cu13"),
            Library("/v/nvidia/cudnn/lib/libcudnn_ops.so.9", "nvidia-cudnn-cu13"),
            Library("/usr/lib/libstdc++.so.6", None),
        ),
        required=("nvidia-cudnn-cu13", "nvidia-nvshmem-cu13", "sympy"),
    )
    titles = [finding.title for finding in found(facts, "note")]
    assert titles == [
        "nvidia-cudnn-cu13: needed by torch, do not remove (libcudnn.so.9, libcudnn_ops.so.9)",
        "nvidia-nvshmem-cu13: needed by torch, do not remove (required, loaded when first used)",
        "the system: needed by torch, do not remove (libstdc++.so.6)",
    ]


def test_mixed_cuda_majors_are_a_note_and_nothing_more() -> None:
    packages = {**HEALTHY.packages, "nvidia-cublas-cu12": "12.8.4", "nvidia-cudnn-cu13": "9.15"}
    finding = only(replace(HEALTHY, packages=packages), "note")
    assert "CUDA 12: nvidia-cublas-cu12; CUDA 13: nvidia-cudnn-cu13" in finding.title
    assert finding.hint is None


@pytest.mark.parametrize(
    ("name", "version", "major"),
    [
        ("nvidia-cublas-cu12", "12.8.4.1", 12),
        ("nvidia-cudnn-cu13", "9.15.0", 13),
        ("nvidia-cuda-runtime", "13.0.96", 13),
        ("cupy-cuda12x", "14.0", 12),
        ("nvidia-ml-py", "13.615.71", None),
        ("torch", "2.13.0", None),
    ],
)
def test_cuda_major_of_a_package(name: str, version: str, major: int | None) -> None:
    assert cuda_major(name, version) == major


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"temporary_noexec": True}, "error", "noexec"),
        ({"temporary_free": 1 << 20}, "warning", "has 1 MiB left"),
    ],
)
def test_a_temporary_folder_that_cannot_hold_a_package(changes: dict, level: str, text: str) -> None:
    finding = only(replace(HEALTHY, **changes), level)
    assert text in finding.title
    assert "TMPDIR" in (finding.hint or "")


def everything_wrong() -> list[Finding]:
    mixed = {"nvidia-cublas-cu12": "12", "nvidia-cudnn-cu13": "9", "vllm": "1", "torch": "2.9.0"}
    broken = replace(
        HEALTHY, python=(3, 9), packages=mixed, compiler=None, torch_error="x", missing_requirements=("y",),
        missing_files=("z",), global_tracing_flag=True, temporary_noexec=True, driver="400.1",
    )  # fmt: skip
    others = [{"libstdcxx": "static"}, {"driver": None}, {"torch_cuda": None}, {"arches": ()}]
    return [
        *diagnose(broken),
        *(finding for change in others for finding in diagnose(replace(HEALTHY, **change))),
    ]


def test_no_hint_ever_says_uninstall() -> None:
    findings = everything_wrong()
    assert {finding.check for finding in findings} >= {
        "python",
        "compiler",
        "torch",
        "gpu",
        "serving",
        "versions",
    }
    for finding in findings:
        assert not re.search(r"uninstall|\bremove\b|pip install(?! \.)", finding.hint or ""), finding.hint
        assert finding.level in ("ok", "note") or finding.hint


@pytest.fixture
def fresh_compiler_facts():
    """Forget what the compiler said before and after the test."""
    for known in (compiler_version, libstdcxx_linkage):
        known.cache_clear()
    yield
    for known in (compiler_version, libstdcxx_linkage):
        known.cache_clear()


@pytest.mark.usefixtures("fresh_compiler_facts")
@pytest.mark.parametrize(("flag", "linkage"), [("", "dynamic"), ("-static-libstdc++", "static")])
def test_a_tiny_library_tells_how_a_compiler_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, linkage: str
) -> None:
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/g++ "$@" {flag}\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    facts = Facts(**probe.compiler_facts())
    assert facts.libstdcxx == linkage
    levels = [finding.level for finding in doctor.check_compiler(facts)]
    assert levels == ["ok" if linkage == "dynamic" else "error"]


@pytest.mark.usefixtures("fresh_compiler_facts")
def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    (finding,) = doctor.check_compiler(Facts(**probe.compiler_facts()))
    assert finding.level == "error"
    assert "/nonexistent/g++" in finding.title


def test_this_machine_is_described_without_importing_torch_here() -> None:
    program = (
        "import sys, json; from aot.probe import gather; facts = gather()\n"
        "assert 'torch' not in sys.modules\n"
        "owners = {library.path.rsplit('/', 1)[1]: library.package for library in facts.libraries}\n"
        "print(json.dumps([facts.torch_version, facts.torch_error, owners, facts.global_tracing_flag]))\n"
    )
    environment = child_environment()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    version, error, owners, flag = json.loads(result.stdout)
    assert (version, error) == (torch.__version__, None)
    assert owners["libtorch_cpu.so"] == "torch"
    assert [owner for name, owner in owners.items() if name.startswith("libstdc++.so")] == [None]
    assert flag is isinstance(_symbolic_trace._is_fx_tracing_flag, bool)


def test_a_torch_that_cannot_be_imported_is_a_finding_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    facts = gather()
    assert "libcudnn.so.9" in (facts.torch_error or "")
    assert any(finding.check == "torch" and finding.level == "error" for finding in diagnose(facts))


def fake_package(site: Path, name: str, requires: list[str], files: list[str]) -> None:
    folder = site / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    lines = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0",
        *(f"Requires-Dist: {text}" for text in requires),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_requirements_are_followed_and_what_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libhere.so.1").touch()
    fake_package(tmp_path, "fake-root", ["fake-middle>=1", 'fake-never; platform_system == "Plan9"'], [])
    fake_package(tmp_path, "fake-middle", ["fake-gone==2"], ["lib/libhere.so.1", "lib/liblost.so.9"])
    monkeypatch.syspath_prepend(str(tmp_path))
    facts = requirement_facts("fake-root")
    assert facts["required"] == ("fake-middle", "fake-root")
    assert facts["missing_requirements"] == ("fake-gone==2",)
    assert facts["missing_files"] == ("lib/liblost.so.9 of fake-middle",)


def test_the_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    assert driver_version(tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC version: 12.3\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert driver_version(tmp_path) == "580.95.05"
