"""What an artifact is: the inputs that name it, the bytes it consists of, and how two of them differ.

The key is the SHA-256 of canonical JSON over every field of `KeyInputs`; a field leaves it only by name, with
a reason. A manifest is parsed strictly: one spelling per manifest, and the key recomputed from what it names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

import rfc8785

from aot.buckets import Bucket
from aot.errors import ConfigError, CorruptArtifact
from aot.fingerprint import Fingerprint
from aot.program import CallSpec, TensorSpec
from aot.source import digest_of_files
from aot.target import without_target

SCHEMA = 1
MAX_MANIFEST_BYTES = 1 << 20
MAX_PACKAGE_BYTES = 1 << 32
MAX_INTEGER = 2**53 - 1
PROGRAM_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
Json = Any


@dataclass(frozen=True)
class Difference:
    """One input that is not the same: where, what was wanted, what the artifact has."""

    field: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class KeyInputs:
    """Everything that went into an artifact. `sources` names the files behind `source_digest`."""

    program: str
    identity: Mapping[str, Json]
    bucket: Bucket
    call_spec: CallSpec
    compile_options: Mapping[str, bool | int | str]
    source_digest: str
    sources: Mapping[str, str]
    fingerprint: Fingerprint
    schema: int = SCHEMA

    EXCLUDED_FROM_KEY: ClassVar[dict[str, str]] = {"sources": "source_digest is computed from them"}

    def as_json(self) -> dict[str, Json]:
        return {field.name: _to_json(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, document: Json) -> KeyInputs:
        """Read what `as_json` wrote and nothing else. Raises CorruptArtifact naming the field."""
        return _parse_key_inputs(document)

    def key(self) -> str:
        """Return 64 hex digits. Raises ConfigError if an input has no single spelling, such as a float."""
        document = {
            name: value for name, value in self.as_json().items() if name not in self.EXCLUDED_FROM_KEY
        }
        document["fingerprint"] = self.fingerprint.as_key()
        return hashlib.sha256(canonical_json(document)).hexdigest()

    def differences(self, other: KeyInputs, at_load: bool = True) -> list[Difference]:
        """Return where an artifact's inputs `other` differ from these, by field; empty if it may be used.

        With `at_load`, what only a build can know is not compared and this machine may be the richer one.
        """
        mine, theirs = self._comparable(at_load), other._comparable(at_load)
        found = list(_differences("", mine, theirs))
        for name, (expected, actual) in self.fingerprint.differences(other.fingerprint, at_load).items():
            found.append(Difference(f"fingerprint.{name}", expected or "(empty)", actual or "(empty)"))
        return found

    def _comparable(self, at_load: bool) -> dict[str, Json]:
        document = self.as_json()
        if at_load:
            document["compile_options"] = without_target(self.compile_options, self.fingerprint.cpu_isa)
        spec = document["call_spec"]
        for kind in ("inputs", "outputs"):
            names = [tensor.pop("name") for tensor in spec[kind]]
            spec[kind] = {"names": names, **dict(zip(names, spec[kind], strict=True))}
        # The files say more than the digest over them.
        document["source"] = document.pop("sources")
        del document["source_digest"], document["fingerprint"]
        return document


@dataclass(frozen=True)
class Manifest:
    """One artifact. `environment` is a record for people and takes part in no decision."""

    key_inputs: KeyInputs
    key: str
    graph_hash: str
    package_digest: str
    package_size: int
    blob_digest: str
    blob_size: int
    environment: Mapping[str, str]

    @property
    def program(self) -> str:
        return self.key_inputs.program

    @property
    def bucket(self) -> Bucket:
        return self.key_inputs.bucket

    def __str__(self) -> str:
        return f"{self.program} {self.bucket} ({self.key[:12]})"

    def to_bytes(self) -> bytes:
        """Return canonical JSON, with a checksum over all of it."""
        document = {field.name: _to_json(getattr(self, field.name)) for field in fields(self)}
        document["key_inputs"] = self.key_inputs.as_json()
        document["checksum"] = hashlib.sha256(canonical_json(document)).hexdigest()
        return canonical_json(document)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read what `to_bytes` wrote and nothing else. Raises CorruptArtifact naming the field."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise CorruptArtifact(f"manifest: {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
        manifest = _parse_manifest(_strict_json(data))
        inputs = manifest.key_inputs
        if inputs.source_digest != digest_of_files(inputs.sources):
            raise CorruptArtifact(
                "manifest: 'key_inputs.source_digest' is not the digest of 'key_inputs.sources'"
            )
        if manifest.key != inputs.key():
            raise CorruptArtifact("manifest: 'key' is not the key of its inputs")
        if manifest.to_bytes() != data:
            raise CorruptArtifact("manifest: its checksum does not fit, or it is not in canonical form")
        return manifest


def canonical_json(document: Json) -> bytes:
    """Return RFC 8785 JSON. Raises ConfigError naming a value without a single spelling, such as a float."""
    for path, value in _leaves("", document):
        if not isinstance(value, (str, bool, int, type(None))):
            raise ConfigError(f"'{path}' is a {type(value).__name__} ({value!r}): write it as a string")
        if type(value) is int and abs(value) > MAX_INTEGER:
            raise ConfigError(
                f"'{path}' is {value}, beyond what JSON numbers hold exactly: write it as a string"
            )
    return rfc8785.dumps(document)


def _to_json(value: Any) -> Json:
    if isinstance(value, Bucket):
        return str(value)
    if isinstance(value, (CallSpec, TensorSpec, Fingerprint)):
        return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return value


def _leaves(path: str, value: Json) -> Iterator[tuple[str, Json]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}".lstrip("."), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    else:
        yield path, value


def _differences(path: str, expected: Json, found: Json) -> Iterator[Difference]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            inner = f"{path}.{key}".lstrip(".")
            if key not in expected or key not in found:
                yield Difference(inner, _describe(expected, key), _describe(found, key))
            else:
                yield from _differences(inner, expected[key], found[key])
    elif expected != found or type(expected) is not type(found):
        yield Difference(path, _text(expected), _text(found))


def _describe(document: dict[str, Json], key: str) -> str:
    return _text(document[key]) if key in document else "(absent)"


def _text(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:12] if DIGEST.fullmatch(text) else text


def _strict_json(data: bytes) -> Json:
    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        document = dict(pairs)
        if len(document) != len(pairs):
            repeated = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
            raise CorruptArtifact(f"manifest: '{repeated}' appears twice")
        return document

    def no_float(text: str) -> NoReturn:
        raise CorruptArtifact(f"manifest: {text[:20]} is not an integer")

    def integer(text: str) -> int:
        if len(text) > 16 or abs(int(text)) > MAX_INTEGER:
            raise CorruptArtifact(f"manifest: integer {text[:20]}... is too large")
        return int(text)

    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_float=no_float,
            parse_constant=no_float,
            parse_int=integer,
        )
    except UnicodeDecodeError:
        raise CorruptArtifact("manifest: not UTF-8") from None
    except (json.JSONDecodeError, RecursionError):
        raise CorruptArtifact("manifest: not JSON") from None


class _Reader:
    """Takes typed fields out of a JSON object by name; `done` refuses what is left."""

    def __init__(self, document: Json, path: str):
        self.path = path
        self.rest = dict(self._typed(document, dict, path))

    def _typed(self, value: Json, kind: type, path: str) -> Any:
        if type(value) is not kind:
            raise CorruptArtifact(f"manifest: '{path}' is not {'an' if kind is int else 'a'} {kind.__name__}")
        return value

    def take(self, name: str, kind: type) -> Any:
        path = f"{self.path}.{name}".lstrip(".")
        if name not in self.rest:
            raise CorruptArtifact(f"manifest: '{path}' is missing")
        return self._typed(self.rest.pop(name), kind, path)

    def matching(self, name: str, pattern: re.Pattern[str]) -> str:
        text = self.take(name, str)
        if pattern.fullmatch(text) is None:
            raise CorruptArtifact(f"manifest: '{self.path}.{name}' is not of the form {pattern.pattern}")
        return text

    def texts(self, name: str) -> dict[str, str]:
        texts = self.take(name, dict)
        for key, value in texts.items():
            self._typed(value, str, f"{self.path}.{name}.{key}")
        return texts

    def size(self, name: str, limit: int) -> int:
        size = self.take(name, int)
        if not 0 < size <= limit:
            raise CorruptArtifact(f"manifest: '{name}' is {size}, not in 1..{limit}")
        return size

    def numbers(self, name: str) -> tuple[int, ...]:
        return tuple(self._typed(item, int, f"{self.path}.{name}") for item in self.take(name, list))

    def done(self) -> None:
        if self.rest:
            unknown = f"{self.path}.{sorted(self.rest)[0]}".lstrip(".")
            raise CorruptArtifact(f"manifest: unknown field '{unknown}'")


def _parse_manifest(document: Json) -> Manifest:
    reader = _Reader(document, "")
    manifest = Manifest(
        key_inputs=KeyInputs.from_json(reader.take("key_inputs", dict)),
        key=reader.matching("key", DIGEST),
        graph_hash=reader.matching("graph_hash", DIGEST),
        package_digest=reader.matching("package_digest", DIGEST),
        package_size=reader.size("package_size", MAX_PACKAGE_BYTES),
        blob_digest=reader.matching("blob_digest", DIGEST),
        blob_size=reader.size("blob_size", MAX_PACKAGE_BYTES),
        environment=reader.texts("environment"),
    )
    reader.matching("checksum", DIGEST)
    reader.done()
    return manifest


def _parse_key_inputs(document: Json) -> KeyInputs:
    reader = _Reader(document, "key_inputs")
    schema = reader.take("schema", int)
    if schema != SCHEMA:
        raise CorruptArtifact(f"manifest: schema {schema}, this version reads {SCHEMA}")
    bucket_text = reader.take("bucket", str)
    try:
        bucket = Bucket.parse(bucket_text)
    except ConfigError as error:
        raise CorruptArtifact(f"manifest: 'key_inputs.bucket': {error.message}") from None
    options = reader.take("compile_options", dict)
    for name, value in options.items():
        if type(value) not in (bool, int, str):
            raise CorruptArtifact(f"manifest: 'key_inputs.compile_options.{name}' is not a bool, int or str")
    fingerprint = _Reader(reader.take("fingerprint", dict), "key_inputs.fingerprint")
    inputs = KeyInputs(
        schema=schema,
        program=reader.matching("program", PROGRAM_NAME),
        identity=reader.take("identity", dict),
        bucket=bucket,
        call_spec=_parse_call_spec(reader.take("call_spec", dict)),
        compile_options=options,
        source_digest=reader.matching("source_digest", DIGEST),
        sources=reader.texts("sources"),
        fingerprint=Fingerprint(
            **{field.name: fingerprint.take(field.name, str) for field in fields(Fingerprint)}
        ),
    )
    fingerprint.done()
    reader.done()
    return inputs


def _parse_call_spec(document: Json) -> CallSpec:
    reader = _Reader(document, "key_inputs.call_spec")
    spec = CallSpec(
        device_type=reader.take("device_type", str),
        inputs=_parse_tensors(reader.take("inputs", list), "key_inputs.call_spec.inputs"),
        outputs=_parse_tensors(reader.take("outputs", list), "key_inputs.call_spec.outputs"),
    )
    reader.done()
    return spec


def _parse_tensors(documents: Sequence[Json], path: str) -> tuple[TensorSpec, ...]:
    tensors = []
    for index, document in enumerate(documents):
        reader = _Reader(document, f"{path}[{index}]")
        name, dtype = reader.take("name", str), reader.take("dtype", str)
        tensors.append(TensorSpec(name, reader.numbers("shape"), dtype, reader.numbers("stride")))
        reader.done()
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise CorruptArtifact(f"manifest: two tensors of '{path}' have one name")
    return tuple(tensors)
