import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from aot.errors import ConfigError
from aot.fingerprint import Fingerprint
from aot.program import CallSpec, TensorSpec
from aot.trace import CallSpecMismatch, effective_options, key_inputs, torch_release, trace
from tests.support.toy import LARGE, SMALL, ToyStep, toy_step

FINGERPRINT = Fingerprint(**{field.name: "2.13" for field in dataclasses.fields(Fingerprint)})


class OtherOutputs(ToyStep):
    """A toy that returns what `change` makes of its outputs."""

    def __init__(self, change):
        super().__init__()
        object.__setattr__(self, "change", change)

    def function(self, bucket):
        return lambda *inputs: self.change(toy_step(*inputs))


@pytest.mark.parametrize("bucket", [SMALL, LARGE], ids=str)
def test_the_traced_graph_computes_what_the_function_does(bucket):
    exported = trace(ToyStep(), bucket)
    inputs = ToyStep().example_inputs(bucket, 3, torch.device("cpu"))
    for output, expected in zip(exported.module()(*inputs), toy_step(*inputs), strict=True):
        assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out[:-1], "2 outputs, declared 3"),
        (lambda out: (out[0].double(), *out[1:]), r"output 'loss' is float64\[\] .* declared float32\[\]"),
        (lambda out: (out[0][None], *out[1:]), r"output 'loss' is float32\[1\]"),
        (lambda out: (out[0], out[2], out[1]), r"output 'grad.w1' is float32\[16, 8\]"),
        (
            lambda out: (*out[:2], out[2].t().contiguous().t()),
            r"output 'grad.w2' .* strides \[1, 16\], .* \[8, 1\]",
        ),
    ],
    ids=["missing", "dtype", "rank", "order", "stride"],
)
def test_outputs_other_than_declared_are_refused_by_name(change, message):
    with pytest.raises(CallSpecMismatch, match=message):
        trace(OtherOutputs(change), SMALL)


def test_a_program_may_refuse_a_bucket_before_anything_is_traced():
    class Refusing(ToyStep):
        def check_bucket(self, bucket):
            raise ConfigError("not this one")

    for attempt in (lambda: trace(Refusing(), SMALL), lambda: key_inputs(Refusing(), SMALL, FINGERPRINT)):
        with pytest.raises(ConfigError, match="not this one"):
            attempt()


def test_a_cuda_program_is_traced_on_fake_cpu_tensors_where_asked():
    exported = trace(ToyStep(device_type="cuda"), SMALL, device_type="cpu")
    devices = {node.meta["val"].device.type for node in exported.graph.nodes if node.op != "output"}
    assert devices == {"cpu"}


def test_inputs_are_traced_with_the_declared_strides():
    class Transposed(ToyStep):
        def call_spec(self, bucket):
            spec = super().call_spec(bucket)
            first = TensorSpec("param.w1", (8, 16), "float32", (1, 8))
            gradient = TensorSpec("grad.w1", (8, 16), "float32", (1, 8))
            return CallSpec("cpu", (first, *spec.inputs[1:]), (spec.outputs[0], gradient, spec.outputs[2]))

        def function(self, bucket):
            def step(w1, *rest):
                loss, grad_w1, grad_w2 = toy_step(w1, *rest)
                return loss, torch.empty_like(w1).copy_(grad_w1), grad_w2

            return step

    placeholder = next(iter(trace(Transposed(), SMALL).graph.nodes))
    assert placeholder.meta["val"].stride() == (1, 8)


def test_options_are_the_defaults_with_the_programs_own_over_them():
    options = effective_options(ToyStep(compile_options={"cpp.threads": 4, "cpp.simdlen": 256}), "2.13.0+cpu")
    assert options == {
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.precompile_headers": False,
        "cpp.dynamic_threads": True,
        "cpp.simdlen": 256,
        "cpp.threads": 4,
    }


def test_options_that_a_torch_does_not_know_are_left_out():
    program = ToyStep(compile_options={"cpp.march": "x86-64-v3"})
    assert set(effective_options(program, "2.13.0")) - set(effective_options(program, "2.11.0+cu130")) == {
        "cpp.march",
        "aot_inductor.enable_line_tables",
    }


def test_the_installed_torch_knows_every_default_option():
    from torch._inductor import config

    for name in effective_options(ToyStep()):
        assert name in config._config, name


@pytest.mark.parametrize(
    ("version", "release"), [("2.13.0+cpu", (2, 13)), ("2.11.0", (2, 11)), ("3.0.0a0+git1", (3, 0))]
)
def test_a_torch_version_is_read_by_its_release(version, release):
    assert torch_release(version) == release


def test_the_inputs_of_the_key_are_the_programs():
    inputs = key_inputs(ToyStep(), SMALL, FINGERPRINT)
    assert (inputs.program, inputs.bucket, inputs.identity) == ("toy_step", SMALL, ToyStep().identity)
    assert list(inputs.sources) == ["tests/support/toy.py"]
    assert inputs.compile_options == effective_options(ToyStep(), FINGERPRINT.torch_version)
    keys = {
        key_inputs(ToyStep(inner=inner), bucket, FINGERPRINT).key()
        for inner in (8, 16)
        for bucket in (SMALL, LARGE)
    }
    assert len(keys) == 4


def test_making_a_key_loads_none_of_torchs_compilers():
    code = (
        "import dataclasses, sys\n"
        "from aot.fingerprint import Fingerprint\n"
        "from aot.trace import key_inputs\n"
        "from tests.support.toy import SMALL, ToyStep\n"
        "key_inputs(ToyStep(), SMALL, Fingerprint.probe('cpu', with_compiler=False)).key()\n"
        "print([m for m in sys.modules if m.startswith(('torch._inductor', 'torch._dynamo'))])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"
