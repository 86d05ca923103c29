"""Golden records: equal today, and red with a readable difference for each planted edit."""

import dataclasses
import json

import golden
import pytest

from aot.buckets import Bucket
from aot.golden import GoldenRecord
from aot.program import TensorSpec
from dflash.config import load_config
from dflash.drafter import programs, step
from dflash.drafter.block_mask import MaskRule
from dflash.drafter.programs import TrainStep, make_programs

CASES = {name: (program, bucket) for name, program, bucket in golden.cases()}
PLANTED = "smollm2-cpu.train_step.512x32"


@pytest.mark.parametrize("name", CASES)
def test_program_compiles_to_its_golden_graph(name):
    expected = GoldenRecord.load(golden.golden_folder(), name)
    found = GoldenRecord.make(*CASES[name])
    assert expected.differences(found) == []
    assert expected == found


def test_source_digests_equal_the_committed_ones():
    assert json.loads((golden.GOLDEN / "source.json").read_text()) == golden.source_digests()


def test_missing_golden_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        GoldenRecord.load(tmp_path, PLANTED)


def test_record_survives_saving(tmp_path):
    record = GoldenRecord.load(golden.golden_folder(), PLANTED)
    record.save(tmp_path, "copy")
    assert GoldenRecord.load(tmp_path, "copy") == record


def altered(**changes) -> TrainStep:
    """The demonstration's train step with one structural value changed."""
    config = load_config("smollm2-cpu")
    return TrainStep(config.drafter.model_copy(update=changes), config.loss)


def compared(program, bucket: Bucket = CASES[PLANTED][1]) -> str:
    expected = GoldenRecord.load(golden.golden_folder(), PLANTED)
    return "\n".join(expected.differences(GoldenRecord.make(program, bucket)))


def test_dropped_mask_term_shows_in_the_graph(monkeypatch):
    def without_start(rule, query, key, context_start_A, anchors_A):
        block = query // rule.block_size
        key_slot = key - rule.tokens - block * rule.block_size
        in_block = (key_slot >= 0) & (key_slot < rule.block_size)
        return (key < anchors_A[block]) | in_block

    monkeypatch.setattr(MaskRule, "visible", without_start)
    report = compared(altered())
    assert report.startswith("graph: expected ")
    assert "-    " in report or "-%" in report
    assert "aten.ge" in report


def test_added_input_shows_by_name(monkeypatch):
    original = programs.DrafterProgram._input_specs
    monkeypatch.setattr(
        programs.DrafterProgram,
        "_input_specs",
        lambda self, bucket: (*original(self, bucket), TensorSpec("extra", (), "float32")),
    )
    report = compared(altered())
    assert "call_spec.inputs.extra: expected (absent), found" in report


def test_changed_dtype_shows_by_name():
    report = compared(altered(dtype="bfloat16"))
    assert "call_spec.inputs.features.dtype: expected float32, found bfloat16" in report
    assert "identity.drafter.dtype: expected float32, found bfloat16" in report


def test_changed_stride_shows_by_name(monkeypatch):
    original = programs.DrafterProgram._input_specs

    def transposed(self, bucket):
        specs = original(self, bucket)
        return tuple(
            dataclasses.replace(s, stride=(1, s.shape[0])) if s.name == "features" else s for s in specs
        )

    monkeypatch.setattr(programs.DrafterProgram, "_input_specs", transposed)
    assert "call_spec.inputs.features.stride: expected [2880, 1], found [1, 512]" in compared(altered())


def test_changed_compile_option_shows_by_name(monkeypatch):
    monkeypatch.setattr(TrainStep, "compile_options", {"cpp.threads": 3})
    assert compared(altered()) == "compile_options.cpp.threads: expected 2, found 3"


def test_changed_block_size_shows_by_name():
    report = compared(altered(block_size=32))
    assert "identity.drafter.block_size: expected 8, found 32" in report


def test_changed_layer_count_shows_by_name():
    report = compared(altered(num_layers=4))
    assert "identity.drafter.num_layers: expected 5, found 4" in report
    assert "call_spec.outputs.grad.layers.4.mlp.up_proj.weight" in report


def test_edited_step_shows_in_the_graph(monkeypatch):
    original = step.train_step

    def scaled(config, loss, inputs):
        outputs = original(config, loss, inputs)
        return outputs | {"loss": outputs["loss"] * 2}

    monkeypatch.setattr(step, "train_step", scaled)
    assert "aten.mul" in compared(altered())


def test_reference_run_is_covered_at_its_largest_bucket():
    config = load_config("qwen3.6-27b-5x3")
    names = {f"qwen3.6-27b-5x3.{p.name}.49152x1024" for p in make_programs(config)}
    assert names <= set(CASES)
