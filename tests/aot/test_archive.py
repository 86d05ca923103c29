"""What a .pt2 may contain, member by member."""

import io
import zipfile
from pathlib import Path

import pytest

from aot import runtime
from aot.archive import check_archive
from aot.errors import CorruptArtifact
from aot.store import Store
from tests.support.toy import SMALL, ToyStep

MODEL = "toy/data/aotinductor/model/"
LIBRARY = f"{MODEL}abc.wrapper.so"


def package(*names: str, compression: int = zipfile.ZIP_STORED, attributes: int = 0) -> bytes:
    """A zip of the given members, each a few bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            info = zipfile.ZipInfo(name)
            info.compress_type, info.external_attr = compression, attributes
            archive.writestr(info, b"content")
    return buffer.getvalue()


def test_a_package_as_torch_writes_it_passes(toy_store: Store) -> None:
    (manifest,) = toy_store.manifests("toy_step", SMALL)
    check_archive(toy_store.read_package(manifest), "toy")


def test_a_cuda_package_may_hold_kernels() -> None:
    check_archive(
        package(LIBRARY, f"{MODEL}kernel_0.cubin", f"{MODEL}abc.wrapper.cpp", "toy/.format_version"), "toy"
    )


@pytest.mark.parametrize(
    "member",
    [
        f"{MODEL}../../../../x.so",
        "/etc/x.so",
        f"{MODEL}x.sh",
        f"{MODEL}deep/x.so",
        "toy/data/aotinductor/other/x.so",
        f"{MODEL}x\\..\\y.so",
        "toy/data/weights/w.bin",
        f"{MODEL}abc.wrapper_compile_flags.json",
    ],
)
def test_a_member_that_does_not_belong_is_refused_by_name(member: str) -> None:
    with pytest.raises(CorruptArtifact, match=r"toy: member .*(allow-list|run a compiler)") as caught:
        check_archive(package(LIBRARY, member), "toy")
    assert repr(member) in caught.value.message


def test_a_name_with_a_hidden_tail_is_refused() -> None:
    content = package(LIBRARY, f"{MODEL}abc.kernel.cpp_x").replace(b"abc.kernel.cpp_x", b"abc.kernel.cpp\0x")
    with pytest.raises(CorruptArtifact, match="allow-list"):
        check_archive(content, "toy")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("other", [LIBRARY, f"{MODEL}ABC.wrapper.so"], ids=["equal", "but for case"])
def test_the_same_name_twice_is_refused(other: str) -> None:
    with pytest.raises(CorruptArtifact, match="is there twice"):
        check_archive(package(LIBRARY, other), "toy")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (package(LIBRARY, compression=zipfile.ZIP_DEFLATED), "is compressed"),
        (package(LIBRARY, attributes=0o120777 << 16), "is not a regular file"),
        (package(f"{MODEL}abc.wrapper.cpp"), "holds 0 compiled libraries"),
        (package(LIBRARY, f"{MODEL}second.so"), "holds 2 compiled libraries"),
        (package(LIBRARY, "other/byteorder"), "holds several folders"),
        (package(), "holds several folders"),
        (b"no zip", "not a package"),
        (package(LIBRARY)[:-5], "not a package"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_compiled_package_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(CorruptArtifact, match=reason):
        check_archive(content, "toy")


def test_prepare_refuses_a_well_published_package_with_a_foreign_member(
    own_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests say that bytes are as published, not that they are harmless."""
    monkeypatch.setattr(runtime, "try_packages", lambda trials: pytest.fail("a bad package was tried"))
    monkeypatch.setattr(own_store, "read_package", lambda manifest: package(LIBRARY, f"{MODEL}x.sh"))
    with pytest.raises(CorruptArtifact, match="allow-list"):
        runtime.prepare(own_store, [(ToyStep(), SMALL)], folder=tmp_path)
