"""Damaged and crafted artifacts (rows 10-16 of the fault table): none is loaded, each is refused by name."""

import dataclasses
import hashlib
import io
import itertools
import json
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from aot import runtime
from aot.archive import check_archive
from aot.canary import child_environment
from aot.errors import CorruptArtifact, UntrustedArtifact
from aot.manifest import MAX_MANIFEST_BYTES, Manifest
from aot.store import Store
from tests.support.faults import scaled
from tests.support.stores import publish
from tests.support.toy import LARGE, SMALL

PAGE = 4096
MODEL = "model/data/aotinductor/model/"


def flipped(content: bytes, generator: random.Random) -> bytes:
    position = generator.randrange(len(content))
    changed = content[position] ^ 1 << generator.randrange(8)
    return content[:position] + bytes([changed]) + content[position + 1 :]


def truncated(content: bytes, generator: random.Random) -> bytes:
    return content[: generator.randrange(len(content))]


def with_a_zero_page(content: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(0, len(content), PAGE)
    return content[:start] + bytes(len(content[start : start + PAGE])) + content[start + PAGE :]


def spliced(content: bytes, generator: random.Random) -> bytes:
    """A stretch of the blob copied over another of its stretches; the size stays."""
    length = generator.randrange(1, len(content) // 2)
    source, target = (generator.randrange(len(content) - length) for _ in range(2))
    return content[:target] + content[source : source + length] + content[target + length :]


def extended(content: bytes, generator: random.Random) -> bytes:
    return content + generator.randbytes(generator.randrange(1, 100))


DAMAGES = [flipped, truncated, with_a_zero_page, spliced, extended]


def resolved(store: Store) -> list[Manifest]:
    """Load every artifact the way `prepare` does, up to the private copy. Raises for a bad one."""
    manifests = store.manifests()
    for manifest in manifests:
        check_archive(store.read_package(manifest), str(manifest))
    return manifests


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_blobs_are_refused_by_name(damage, own_store: Store, total) -> None:
    """Rows 10, 11. Fails for truncated and extended when the size check of `read_package` is removed (their
    message is another), for all when both digests are not compared."""
    manifest = own_store.manifests()[0]
    path = own_store.blob_path(manifest)
    whole, generator, mutants = path.read_bytes(), random.Random(damage.__name__), 0
    while mutants < scaled(1400):
        mutant = damage(whole, generator)
        if mutant == whole:
            continue
        path.write_bytes(mutant)
        expected = "published with" if len(mutant) != len(whole) else "not those that were published"
        with pytest.raises(CorruptArtifact, match=expected) as caught:
            resolved(own_store)
        assert str(path) in caught.value.message
        mutants += 1
    total("mutated artifacts refused", mutants)


def test_every_flipped_bit_of_a_manifest_is_refused(own_store: Store, total) -> None:
    """Row 12. Fails when the checksum, or the comparison with the canonical form, is not looked at."""
    path = own_store.manifest_paths()[0]
    content = path.read_bytes()
    bits = range(0, 8 * len(content), max(1, 1 // 1 if scaled(100) == 100 else 53))
    for bit in bits:
        mutant = bytearray(content)
        mutant[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptArtifact, match="manifest"):
            Manifest.parse(bytes(mutant))
    total("flipped bits of a manifest refused", len(bits))


def edited(**fields: object) -> Callable[[dict], bytes]:
    return lambda document: json.dumps({**document, **fields}, sort_keys=True).encode()


@pytest.mark.parametrize(
    "craft",
    [
        pytest.param(lambda d: json.dumps(d)[:-1].encode() + b',"key":"0"}', id="a field twice"),
        pytest.param(edited(note="x"), id="a field more"),
        pytest.param(edited(package_size=10**400), id="a huge integer"),
        pytest.param(edited(package_size=-1), id="a negative size"),
        pytest.param(edited(package_size=float("nan")), id="NaN"),
        pytest.param(edited(package_size=True), id="a truth for a size"),
        pytest.param(edited(blob_digest="../../../etc/passwd"), id="a path for a digest"),
        pytest.param(edited(blob_digest="md5:" + "0" * 32), id="another hash"),
        pytest.param(edited(key_inputs=[]), id="a list for an object"),
        pytest.param(lambda d: b"\xff" + json.dumps(d).encode(), id="bad UTF-8"),
        pytest.param(lambda d: json.dumps(d).encode() + b" ", id="trailing space"),
        pytest.param(lambda d: b"[" * 100_000, id="deep nesting"),
        pytest.param(lambda d: b"", id="empty"),
    ],
)
def test_a_crafted_manifest_is_refused_quickly(craft, own_store: Store) -> None:
    """Row 12. Each case fails without its own check in `aot.manifest`."""
    path = own_store.manifest_paths()[0]
    path.write_bytes(craft(json.loads(path.read_bytes())))
    started = time.monotonic()
    with pytest.raises(CorruptArtifact) as caught:
        own_store.manifests()
    assert time.monotonic() - started < 1
    assert str(path) in caught.value.message
    assert len(caught.value.message) < 1000
    assert MAX_MANIFEST_BYTES < 2 << 20


READ_MANIFESTS = """
import resource, sys
from aot.errors import CorruptArtifact
from aot.store import Store
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
try:
    Store(sys.argv[1]).manifests()
except CorruptArtifact as error:
    print("refused:", error.message)
"""


def test_a_manifest_of_any_size_is_refused_in_little_memory(store: Store, package: Path) -> None:
    """Row 12: 4 GB (a hole of the file). Fails when `read_manifest` reads the whole file."""
    manifest = publish(store, package)
    path = store.manifest_path("toy_step", SMALL, manifest.key)
    with path.open("r+b") as file:
        file.truncate(4 << 30)
    result = in_python(READ_MANIFESTS, str(store.root))
    assert result.startswith(f"refused: {path}: manifest: ")


def in_python(code: str, *arguments: str) -> str:
    """Run code in a new process and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True).stdout


def test_a_manifest_in_the_place_of_another_is_refused(store: Store, package: Path, total) -> None:
    """Row 13: all ordered pairs of artifacts. Fails when `read_manifest` does not compare the path with what
    the manifest describes."""
    number = scaled(20, 4)
    manifests = [publish(store, package, SMALL if n % 2 else LARGE, inner=16 + n) for n in range(number)]
    paths = [store.manifest_path(m.program, m.bucket, m.key) for m in manifests]
    contents = [path.read_bytes() for path in paths]
    for (path, own), other in itertools.product(zip(paths, contents, strict=True), contents):
        if own == other:
            continue
        path.write_bytes(other)
        with pytest.raises(CorruptArtifact, match="filed under another name"):
            store.manifests()
        path.write_bytes(own)
    total("mutated artifacts refused", number * (number - 1))


def test_a_blob_in_the_place_of_another_is_refused(own_store: Store) -> None:
    """Row 11. Fails when sizes and digests are not compared."""
    small, large = own_store.manifests()
    one, other = own_store.blob_path(small), own_store.blob_path(large)
    aside = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(aside)
    for manifest in (small, large):
        with pytest.raises(CorruptArtifact):
            own_store.read_package(manifest)


def rezipped(package: bytes, change: Callable[[list[tuple[zipfile.ZipInfo, bytes]]], None]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    change(members)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for info, content in members:
            archive.writestr(info, content)
    return buffer.getvalue()


def member(name: str, kind: int = 0o100644, compression: int = zipfile.ZIP_STORED) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr, info.compress_type = kind << 16, compression
    return info


NAMES = [
    "{m}../../../../x.so", "/etc/{r}", "../{r}", "{m}{r}.sh", "{m}sub/{r}.so", "model/../{r}.so", "{m}{r}/",
    "{r}.pth", "{m}{r}.so.txt", "model\\{r}.so", "{m}.{r}.so", "{m}{r}_compile_flags.json",
    "model/data/weights/{r}",
    "{m}{r}.so", "other/byteorder", "{m}{r}\n.json", "{m}\u202e{r}.json", "C:{r}.so",
]  # fmt: skip


def mutated_archive(package: bytes, generator: random.Random) -> bytes:
    """One change that a forger of digests could publish: a member more, less, twice, of another kind."""
    random_name = f"x{generator.randrange(10**6)}"

    def change(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
        kind = generator.randrange(6)
        library = next(i for i, (info, _) in enumerate(members) if info.filename.endswith(".so"))
        place = generator.randrange(len(members) + 1)
        if kind <= 1:
            name = generator.choice(NAMES).format(m=MODEL, r=random_name)
            members.insert(place, (member(name), generator.randbytes(20)))
        elif kind == 2:
            del members[library]
        elif kind == 3:
            info, content = generator.choice(members)
            twin = info.filename if generator.random() < 0.5 else info.filename.swapcase()
            members.insert(place, (member(twin), content))
        elif kind == 4:
            info, content = members[library]
            special = generator.choice([0o120777, 0o020644, 0o060644, 0o010644, 0o140644, 0o040755])
            members[library] = (member(info.filename, special), content)
        else:
            info, content = members[library]
            method = generator.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
            members[library] = (member(info.filename, compression=method), content)

    return rezipped(package, change)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_mutated_archives_are_refused_before_anything_is_written_or_loaded(
    own_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total
) -> None:
    """Rows 14, 15. The store vouches for each, so that only the allow-list stands between it and the loader.
    Fails when `check_archive` is not called, and for each kind of change without its check there.
    """
    monkeypatch.setattr(runtime, "try_packages", lambda trials: pytest.fail("a bad package was tried"))
    (manifest,) = own_store.manifests("toy_step", SMALL)
    package = own_store.read_package(manifest)
    # A small library keeps ten thousand archives quick.
    package = rezipped(package, lambda members: members.__setitem__(slice(None), _shrunk(members)))
    check_archive(package, "the unmutated archive passes")
    generator = random.Random(14)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    number = scaled(3000, 60)
    for _ in range(number):
        mutant = mutated_archive(package, generator)
        monkeypatch.setattr(own_store, "read_package", lambda manifest, mutant=mutant: mutant)
        with pytest.raises(CorruptArtifact) as caught:
            runtime.private_copy(own_store, manifest, private)
        assert str(manifest) in caught.value.message
        assert list(private.iterdir()) == []
    total("mutated artifacts refused", number)


def _shrunk(members: list[tuple[zipfile.ZipInfo, bytes]]) -> list[tuple[zipfile.ZipInfo, bytes]]:
    return [(member(info.filename), content[:64]) for info, content in members]


def test_a_package_that_would_run_a_shell_command_is_refused(
    own_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 15: sources and compile flags without a library make torch's loader call `system`. Fails, and the
    marker appears where torch is that careless, when the allow-list is not asked."""
    marker = tmp_path / "marker"
    (manifest,) = own_store.manifests("toy_step", SMALL)
    flags = json.dumps({"compiler": f"touch {marker} #", "cflags": []}).encode()

    def change(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
        members[:] = [pair for pair in members if not pair[0].filename.endswith(".so")]
        members.append((member(f"{MODEL}x.wrapper_compile_flags.json"), flags))
        members.append((member(f"{MODEL}x.wrapper.cpp"), b"int x;"))

    mutant = rezipped(own_store.read_package(manifest), change)
    monkeypatch.setattr(own_store, "read_package", lambda manifest: mutant)
    with pytest.raises(CorruptArtifact, match="run a compiler"):
        runtime.private_copy(own_store, manifest, tmp_path)
    assert not marker.exists()


UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
import zstandard
from aot.errors import CorruptArtifact
from aot.store import _decompress
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
blob = Path(sys.argv[1]).read_bytes()
try:
    _decompress(blob, int(sys.argv[3]), Path("blob.zst"))
    print("accepted")
except CorruptArtifact as error:
    print("refused:", error.message)
"""

# More than one step of the reader: smaller frames are expanded at once, within what they state.
SIZE = 2 << 20


def frame(content: bytes, **options) -> bytes:
    return zstandard.ZstdCompressor(**{"write_checksum": True, **options}).compress(content)


def raw_frame(window: int, blocks: list[bytes], stated: int) -> bytes:
    """A frame by hand: 8-byte content size, checksum flag, a window of `window` bytes."""
    exponent = (window - 1).bit_length() - 10
    header = bytes.fromhex("28b52ffd") + bytes([0b11000100, exponent << 3]) + stated.to_bytes(8, "little")
    return header + b"".join(blocks) + bytes(4)


def rle_block(length: int, last: bool) -> bytes:
    return (length << 3 | 1 << 1 | int(last)).to_bytes(3, "little") + b"\0"


WIDE = [*([rle_block(1 << 17, last=False)] * 15), rle_block(1 << 17, last=True)]
BOMB_MESSAGE = "does not hold what it states"
BOMB = [rle_block(1 << 17, last=False)] * 20_000 + [rle_block(1, last=True)]


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        pytest.param(frame(bytes(1 << 30)), "does not state", id="a bomb that says so"),
        pytest.param(raw_frame(1 << 20, BOMB, SIZE), BOMB_MESSAGE, id="a bomb that lies"),
        pytest.param(
            raw_frame(1 << 26, WIDE, SIZE),
            "too much memory",
            id="a window of 64 MiB",
        ),
        pytest.param(bytes.fromhex("28b52ffde0ffffffffffffff7f"), "does not state", id="13 bytes for 2^63"),
        pytest.param(frame(bytes(SIZE)) + frame(b""), "is followed by", id="an empty second frame"),
        pytest.param(
            frame(bytes(SIZE)) + bytes.fromhex("502a4d1804000000") + b"junk", "is followed by", id="skippable"
        ),
        pytest.param(
            bytes.fromhex("502a4d1804000000") + b"junk" + frame(bytes(SIZE)), "", id="skippable first"
        ),
        pytest.param(frame(bytes(SIZE)) + b"x", "is followed by 1 bytes", id="trailing byte"),
        pytest.param(frame(bytes(SIZE), write_checksum=False), "does not state", id="no checksum"),
        pytest.param(frame(bytes(SIZE))[:-1], "cut short", id="a cut checksum"),
        pytest.param(frame(bytes(SIZE), write_content_size=False), "does not state", id="no size"),
    ],
)
def test_a_crafted_frame_is_refused_in_little_memory(blob: bytes, message: str, tmp_path: Path) -> None:
    """Row 16. The child may use 200 MiB of addresses. "A bomb that lies" fails when `_decompress` reads to
    the end at once, the window without `max_window_size`, followers without `_frame_end`."""
    path = tmp_path / "blob"
    path.write_bytes(blob)
    output = in_python(UNDER_A_LIMIT, str(path), str(200 << 20), str(SIZE))
    assert output.startswith("refused: blob.zst: ")
    assert message in output


@pytest.mark.parametrize("length", [1, 1000, 1 << 17, (1 << 17) + 1, 3 << 20])
@pytest.mark.parametrize("fill", ["random", "zero", "both"])
def test_honest_frames_of_every_shape_are_read(length: int, fill: str, store: Store, package: Path) -> None:
    """The other side of row 16: fails when `_frame_end` takes a block's kind or size for another."""
    noise = random.Random(length).randbytes(length)
    content = {"random": noise, "zero": bytes(length), "both": noise + bytes(length)}[fill]
    package.write_bytes(content)
    assert store.read_package(publish(store, package)) == content


def test_a_vouched_for_package_of_another_digest_is_refused(store: Store, package: Path) -> None:
    """Row 11. Fails when the digest of the decompressed package is not compared."""
    manifest = publish(store, package)
    other = frame(bytes(manifest.package_size))
    forged = dataclasses.replace(
        manifest, blob_digest=hashlib.sha256(other).hexdigest(), blob_size=len(other)
    )
    store.blob_path(forged).write_bytes(other)
    with pytest.raises(CorruptArtifact, match="not the one published"):
        store.read_package(forged)


def test_paths_that_others_could_have_made_are_refused(store: Store, package: Path, tmp_path: Path) -> None:
    """Row 7, on a store's own paths (`tests/aot/test_trust.py` has the rest). Fails when a manifest or a blob
    is opened by another way than `open_trusted`."""
    manifest = publish(store, package)
    blob, path = store.blob_path(manifest), store.manifest_path("toy_step", SMALL, manifest.key)
    for target in (blob, path, store.blobs, path.parent, store.root):
        mode = target.stat().st_mode
        target.chmod(mode | 0o020)
        with pytest.raises(UntrustedArtifact, match="may be written by group"):
            store.read_package(store.read_manifest(path))
        target.chmod(mode)
    real = blob.rename(tmp_path / "elsewhere")
    blob.symlink_to(real)
    with pytest.raises(UntrustedArtifact, match="symbolic link"):
        store.read_package(manifest)
    link = tmp_path / "link"
    link.symlink_to(store.root)
    with pytest.raises(UntrustedArtifact, match="symbolic link"):
        Store(link).manifests()
    with pytest.raises(UntrustedArtifact, match="symbolic link"):
        publish(Store(link), package, LARGE)
