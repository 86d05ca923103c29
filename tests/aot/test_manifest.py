import dataclasses
import hashlib
import json
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aot.buckets import Bucket
from aot.errors import ConfigError, CorruptArtifact
from aot.fingerprint import Fingerprint
from aot.manifest import MAX_MANIFEST_BYTES, KeyInputs, Manifest
from aot.program import CallSpec, TensorSpec
from aot.source import digest_of_files

FINGERPRINT = Fingerprint(**{field.name: f"a {field.name}" for field in dataclasses.fields(Fingerprint)})
SOURCES = {"pkg/model.py": "1" * 64, "pkg/step.py": "2" * 64}
SPEC = CallSpec(
    "cpu",
    (TensorSpec("x", (4, 2), "float32"), TensorSpec("anchors", (3,), "int32")),
    (TensorSpec("loss", (), "float32"),),
)
INPUTS = KeyInputs(
    program="step",
    identity={"drafter": {"num_layers": 5, "layer_types": ["full", "full"], "causal": None}, "eps": "1e-6"},
    bucket=Bucket(128, 8),
    call_spec=SPEC,
    compile_options={"cpp.threads": 2, "cpp.dynamic_threads": True, "cpp.march": "x"},
    source_digest=digest_of_files(SOURCES),
    sources=SOURCES,
    fingerprint=FINGERPRINT,
)


def manifest_of(inputs: KeyInputs = INPUTS) -> Manifest:
    return Manifest(inputs, inputs.key(), "a" * 64, "b" * 64, 1000, "c" * 64, 100, {"python": "3.11.7"})


DATA = manifest_of().to_bytes()


def changed(**fields) -> KeyInputs:
    return dataclasses.replace(INPUTS, **fields)


def other_fingerprint(**fields) -> KeyInputs:
    return changed(fingerprint=dataclasses.replace(FINGERPRINT, **fields))


def test_a_manifest_reads_back_as_it_was_written():
    assert Manifest.parse(DATA) == manifest_of()


def test_the_key_is_the_sha256_of_sorted_compact_json():
    def tensor(name, shape, dtype, stride):
        return {"name": name, "shape": shape, "dtype": dtype, "stride": stride}

    document = {
        "schema": 1,
        "program": "step",
        "identity": {
            "drafter": {"num_layers": 5, "layer_types": ["full", "full"], "causal": None},
            "eps": "1e-6",
        },
        "bucket": "128x8",
        "call_spec": {
            "device_type": "cpu",
            "inputs": [tensor("x", [4, 2], "float32", [2, 1]), tensor("anchors", [3], "int32", [1])],
            "outputs": [tensor("loss", [], "float32", [])],
        },
        "compile_options": {"cpp.threads": 2, "cpp.dynamic_threads": True, "cpp.march": "x"},
        "source_digest": INPUTS.source_digest,
        "fingerprint": {
            name: f"a {name}"
            for name in (
                *("torch_version", "torch_git", "cuda", "triton", "device_arch"),
                *("cpu_isa", "glibc", "compiler", "libstdcxx"),
            )
        },
    }
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert INPUTS.key() == hashlib.sha256(text.encode()).hexdigest()


OTHER_SOURCES = {**SOURCES, "pkg/model.py": "3" * 64}
CHANGES = {
    "program": changed(program="eval"),
    "identity": changed(identity={**INPUTS.identity, "eps": "1e-5"}),
    "identity type": changed(identity={**INPUTS.identity, "eps": 1}),
    "bucket": changed(bucket=Bucket(128, 16)),
    "input added": changed(
        call_spec=dataclasses.replace(SPEC, inputs=(*SPEC.inputs, TensorSpec("y", (1,), "bool")))
    ),
    "inputs swapped": changed(call_spec=dataclasses.replace(SPEC, inputs=SPEC.inputs[::-1])),
    "device": changed(call_spec=dataclasses.replace(SPEC, device_type="cuda")),
    "dtype": changed(call_spec=dataclasses.replace(SPEC, outputs=(TensorSpec("loss", (), "float64"),))),
    "stride": changed(
        call_spec=dataclasses.replace(
            SPEC, inputs=(TensorSpec("x", (4, 2), "float32", (1, 4)), SPEC.inputs[1])
        )
    ),
    "option": changed(compile_options={**INPUTS.compile_options, "cpp.threads": 4}),
    "option type": changed(compile_options={**INPUTS.compile_options, "cpp.dynamic_threads": 1}),
    "option removed": changed(compile_options={"cpp.threads": 2, "cpp.dynamic_threads": True}),
    "source": changed(sources=OTHER_SOURCES, source_digest=digest_of_files(OTHER_SOURCES)),
    "schema": changed(schema=2),
    **{
        f"fingerprint {field.name}": other_fingerprint(**{field.name: "another"})
        for field in dataclasses.fields(Fingerprint)
        if field.name not in Fingerprint.EXCLUDED_FROM_KEY
    },
}


@pytest.mark.parametrize("inputs", CHANGES.values(), ids=CHANGES.keys())
def test_every_input_enters_the_key_and_its_change_is_named(inputs):
    assert inputs.key() != INPUTS.key()
    assert INPUTS.differences(inputs, at_load=False)


def test_the_python_version_is_recorded_but_changes_nothing():
    inputs = other_fingerprint(python="3.13.0")
    assert inputs.key() == INPUTS.key()
    assert INPUTS.differences(inputs, at_load=False) == []


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (CHANGES["source"], "source.pkg/model.py: expected 111111111111, found 333333333333"),
        (
            changed(identity={"drafter": {**INPUTS.identity["drafter"], "num_layers": 6}, "eps": "1e-6"}),
            "identity.drafter.num_layers: expected 5, found 6",
        ),
        (changed(identity={"eps": "1e-6"}), 'identity.drafter: expected {"num_layers": 5, '),
        (
            CHANGES["input added"],
            'call_spec.inputs.names: expected ["x", "anchors"], found ["x", "anchors", "y"]',
        ),
        (CHANGES["stride"], "call_spec.inputs.x.stride: expected [2, 1], found [1, 4]"),
        (CHANGES["option removed"], "compile_options.cpp.march: expected x, found (absent)"),
        (CHANGES["option type"], "compile_options.cpp.dynamic_threads: expected true, found 1"),
        (other_fingerprint(torch_git="f00"), "fingerprint.torch_git: expected a torch_git, found f00"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_difference_says_where_what_was_expected_and_what_was_found(inputs, expected):
    assert str(INPUTS.differences(inputs)[0]).startswith(expected)


def test_at_load_the_compiler_is_not_compared():
    inputs = other_fingerprint(compiler="", libstdcxx="")
    assert INPUTS.differences(inputs, at_load=True) == []
    assert [d.field for d in INPUTS.differences(inputs, at_load=False)] == [
        "fingerprint.compiler",
        "fingerprint.libstdcxx",
    ]


@pytest.mark.parametrize("value", [1.5, float("nan"), 2**53, b"bytes", {1, 2}])
def test_an_identity_without_one_spelling_is_refused_by_name(value):
    inputs = changed(identity={"drafter": {"eps": value}})
    with pytest.raises(ConfigError, match=r"identity\.drafter\.eps"):
        inputs.key()


def flips(step: int):
    for bit in range(0, len(DATA) * 8, step):
        damaged = bytearray(DATA)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_every_flipped_bit_is_refused(step):
    for damaged in flips(step):
        with pytest.raises(CorruptArtifact, match="manifest"):
            Manifest.parse(damaged)


def edited(edit) -> bytes:
    """Edit the document and write it canonically again, checksum and all."""
    document = json.loads(DATA)
    edit(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def set_key_inputs(**fields):
    return lambda document: document["key_inputs"].update(fields)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DATA.replace(b'{"blob_digest"', b'{"blob_digest":1,"blob_digest"', 1),
            "'blob_digest' appears twice",
        ),
        (edited(lambda d: d.update(extra=1)), "unknown field 'extra'"),
        (edited(set_key_inputs(extra=1)), "unknown field 'key_inputs.extra'"),
        (edited(lambda d: d.pop("graph_hash")), "'graph_hash' is missing"),
        (
            edited(lambda d: d["key_inputs"]["fingerprint"].pop("glibc")),
            "'key_inputs.fingerprint.glibc' is missing",
        ),
        (edited(lambda d: d.update(package_size="1000")), "'package_size' is not an int"),
        (edited(lambda d: d.update(package_size=True)), "'package_size' is not an int"),
        (edited(lambda d: d.update(package_size=-1)), "'package_size' is -1"),
        (edited(lambda d: d.update(package_size=2**40)), "'package_size' is"),
        (DATA.replace(b'"package_size":1000', b'"package_size":1e3'), "1e3 is not an integer"),
        (DATA.replace(b'"package_size":1000', b'"package_size":NaN'), "NaN is not an integer"),
        (DATA.replace(b'"package_size":1000', b'"package_size":' + b"9" * 10_000), "too large"),
        (edited(lambda d: d.update(environment={"python": 3})), "'.environment.python' is not a str"),
        (edited(lambda d: d.update(blob_digest="../../etc/passwd")), "'.blob_digest' is not of the form"),
        (edited(lambda d: d.update(blob_digest="C" * 64)), "'.blob_digest' is not of the form"),
        (edited(set_key_inputs(program="../x")), "'key_inputs.program' is not of the form"),
        (edited(set_key_inputs(bucket="128x08")), "'key_inputs.bucket'"),
        (edited(set_key_inputs(schema=2)), "schema 2"),
        (edited(set_key_inputs(bucket="256x8")), "'key' is not the key of its inputs"),
        (edited(lambda d: d.update(key="d" * 64)), "'key' is not the key of its inputs"),
        (edited(set_key_inputs(sources={})), "'key_inputs.source_digest'"),
        (edited(lambda d: d.update(graph_hash="d" * 64)), "checksum"),
        (edited(lambda d: d["environment"].update(python="3.12.0")), "checksum"),
        (json.dumps(json.loads(DATA)).encode(), "canonical"),
        (DATA + b"\n", "canonical"),
        (DATA[:-1], "not JSON"),
        (b"", "not JSON"),
        (b"[]", "'' is not a dict"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff" + DATA, "not UTF-8"),
        (b" " * (MAX_MANIFEST_BYTES + 1), "more than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_that_is_not_exactly_what_was_written_is_refused(data, message):
    with pytest.raises(CorruptArtifact) as caught:
        Manifest.parse(data)
    assert message in caught.value.message


def test_a_hostile_manifest_costs_little():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    for data in (
        b"[" * MAX_MANIFEST_BYTES,
        b'{"a":' * 200_000,
        b"9" * MAX_MANIFEST_BYTES,
        b"0" * (100 << 20),
    ):
        with pytest.raises(CorruptArtifact):
            Manifest.parse(data)
    assert time.monotonic() - started < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def paths(document, prefix=()):
    yield prefix
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in items:
        yield from paths(value, (*prefix, key))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(paths(json.loads(DATA)))[1:]), JSON)
def test_any_value_in_any_place_is_refused_by_name_or_the_same(path, value):
    document = json.loads(DATA)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    if data != DATA:
        with pytest.raises(CorruptArtifact, match="manifest"):
            Manifest.parse(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    with pytest.raises(CorruptArtifact, match="manifest"):
        Manifest.parse(data)
