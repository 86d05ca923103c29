"""Call specs, identities and example inputs of the two programs, and what their traced graphs hold."""

import json
import resource

import pytest
import torch

from aot.buckets import Bucket
from aot.errors import ConfigError
from aot.graph import graph_lines
from aot.source import source_files
from aot.trace import trace
from dflash.config import load_config
from dflash.drafter.programs import DRAFTER_EXCLUDED, LOSS_EXCLUDED, TrainStep, make_programs, program_set
from tests.support.drafter import BUCKET, CPU, LOSS, SLIDING, example, tiny_config, tiny_programs


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_both_programs_trace_to_their_call_specs_without_constants(backend):
    for program in tiny_programs(attention=backend, dtype="bfloat16", **SLIDING):
        assert program.device_type == ("cuda" if backend == "flex" else "cpu")
        exported = trace(program, BUCKET, device_type="cpu")
        assert not exported.constants, "weights or tables are baked into the graph"


def nodes(exported, name):
    return [node for node in exported.graph.nodes if getattr(node.target, "__name__", None) == name]


def test_flex_graph_has_one_forward_and_backward_per_layer_over_sound_tables():
    """The mask's buffers are inputs of the graph, its index tables are not transposed views."""
    program, _ = tiny_programs(attention="flex", **SLIDING)
    exported = trace(program, BUCKET, device_type="cpu")
    found = nodes(exported, "flex_attention") + nodes(exported, "flex_attention_backward")
    assert len(found) == 2 * program.config.num_layers
    for node in found:
        assert all(buffer.op == "placeholder" for buffer in node.args[-1]), (
            "computed mask buffers may not lower"
        )
        tables = [arg for part in node.args if isinstance(part, tuple) and len(part) > 10 for arg in part]
        tables = [arg.meta["val"] for arg in tables if getattr(arg, "op", None) == "call_function"]
        assert len(tables) == 8
        assert all(t.is_contiguous() and t.dtype == torch.int32 for t in tables)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_no_tensor_holds_the_logits_of_all_slots_nor_flex_all_scores(backend):
    bucket = Bucket(256, 32)
    loss = LOSS.model_copy(update={"max_chunk_rows": 70})
    program = TrainStep(tiny_config(attention=backend, vocab_size=1000), loss)
    queries, keys = 32 * 8, 256 + 32 * 8
    values = [node.meta.get("val") for node in trace(program, bucket, device_type="cpu").graph.nodes]
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    logits = [shape for shape in shapes if shape[-1:] == (1000,)]
    assert logits
    assert max(torch.Size(shape).numel() for shape in logits) <= loss.max_chunk_rows * 1000
    assert any(shape[-2:] == (queries, keys) for shape in shapes) == (backend == "sdpa")


def test_identity_is_canonical_and_holds_all_structure():
    base, _ = tiny_programs()
    assert json.loads(json.dumps(base.identity)) == base.identity
    assert "float" not in {type(v).__name__ for part in base.identity.values() for v in part.values()}
    changes = {
        "num_layers": 3,
        "block_size": 16,
        "rope_theta": 2e6,
        "rms_norm_eps": 1e-5,
        "mask_token_id": 7,
        "is_causal": True,
        "attention": "flex",
        "dtype": "bfloat16",
        "num_kv_heads": 4,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 9,
    }
    for field, value in changes.items():
        others = {"sliding_window": 9} if field == "layer_types" else {}
        assert tiny_programs(**{field: value} | others)[0].identity != base.identity, field
    for change in ({"weighting": "dpace"}, {"max_chunk_rows": 7}):
        assert TrainStep(base.config, LOSS.model_copy(update=change)).identity != base.identity


def test_what_the_identity_leaves_out_changes_no_graph():
    base, _ = tiny_programs()
    lines = graph_lines(trace(base, BUCKET))
    drafter = {
        "initializer_range": 0.5,
        "max_position_embeddings": 77,
        "num_target_layers": 99,
        "target_layer_ids": (0, 2, 4),
        "layer_types": ("full_attention",) * 2,
    }
    loss = {"gamma": 2.0, "dpace_alpha": 0.1, "kl_weight": 0.9, "temperature": 3.0, "cap_weight": 0.0}
    assert drafter.keys() == DRAFTER_EXCLUDED.keys()
    assert loss.keys() == LOSS_EXCLUDED.keys()
    other = TrainStep(tiny_config(**drafter), LOSS.model_copy(update=loss))
    assert other.identity == base.identity
    assert graph_lines(trace(other, BUCKET)) == lines


def test_source_closure_is_the_drafter_alone():
    program, _ = tiny_programs()
    assert set(source_files(program.source_modules)) == {
        "dflash/__init__.py",
        *(
            f"dflash/drafter/{name}.py"
            for name in (
                "__init__",
                "attention",
                "block_mask",
                "kernels",
                "loss",
                "model",
                "recompute",
                "step",
            )
        ),
    }


@pytest.mark.parametrize(("bucket", "fit"), [("128x17", "128x32"), ("256x8", "256x16")])
def test_a_bucket_without_whole_tiles_is_refused_with_one_that_fits(bucket, fit):
    program, _ = tiny_programs()
    with pytest.raises(ConfigError) as error:
        program.check_bucket(Bucket.parse(bucket))
    assert fit in error.value.hint
    program.check_bucket(Bucket.parse(fit))


def test_example_inputs_match_the_call_spec_and_hold_every_awkward_case():
    program, _ = tiny_programs()
    inputs, others = (example(program, seed) for seed in (0, 1))
    for spec in program.call_spec(BUCKET).inputs:
        value = inputs[spec.name]
        assert (tuple(value.shape), value.stride(), value.dtype) == (
            spec.shape,
            spec.stride,
            getattr(torch, spec.dtype),
        ), spec.name
    assert not torch.equal(inputs["features"], others["features"])
    assert not torch.equal(inputs["anchors"], others["anchors"])
    valid = inputs["anchor_valid"]
    anchors, documents = inputs["anchors"].long(), inputs["doc_ids"]
    assert set(documents.tolist()) == {-1, 0, 1, 2, 3}
    assert valid.any()
    assert not valid.all()
    assert torch.equal(anchors, anchors.sort().values)
    assert torch.equal(inputs["context_start"][~valid], inputs["anchors"][~valid])
    assert (inputs["position_ids"][anchors[valid]] >= 1).all()
    assert (documents[anchors[valid]] == documents[anchors[valid] + 1]).all()
    assert inputs["loss_mask"][anchors[valid]].all()
    assert inputs["loss_mask"][anchors[valid] + 1].all()
    assert (documents[anchors[valid]] != documents[(anchors[valid] + 7).clamp(max=127)]).any()
    starts = torch.tensor([documents.tolist().index(d) for d in documents[anchors[valid]].tolist()])
    assert torch.equal(inputs["context_start"][valid].long(), starts)
    assert not inputs["loss_mask"][documents >= 0].all()


@pytest.mark.parametrize("recipe", ["smollm2-cpu", "qwen3.6-27b-5x3"])
def test_recipes_give_two_programs_that_take_every_bucket_of_theirs(recipe):
    found = program_set(recipe, ())
    assert [program.name for program in found.programs] == ["train_step", "eval_step"]
    assert len(found.buckets) >= 3
    for program in found.programs:
        for bucket in found.buckets:
            program.check_bucket(bucket)
            inputs = program.call_spec(bucket).input_names
            assert len(inputs) == len(set(inputs)) == 58 + 2 + 9 + 4


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1], ids=["train_step", "eval_step"])
def test_the_reference_bucket_traces_without_memory(index):
    """3.5 GB of parameters, 2.5 GB of features: none of it is ever allocated."""
    program = make_programs(load_config("qwen3.6-27b-5x3"))[index]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exported = trace(program, Bucket(49152, 1024), device_type="cpu")
    assert len(nodes(exported, "flex_attention")) == 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB"


def test_reference_is_the_step_in_float64():
    program, _ = tiny_programs(attention="flex")
    outputs = program.reference(BUCKET, program.example_inputs(BUCKET, 0, CPU))
    assert [tuple(output.shape) for output in outputs] == [
        spec.shape for spec in program.call_spec(BUCKET).outputs
    ]
    assert {output.dtype for output in outputs} == {torch.float64}
