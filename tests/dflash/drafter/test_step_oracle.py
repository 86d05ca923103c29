"""The step against the oracle: every output and every gradient by name, and faults that must not pass."""

import pytest
import torch

from dflash.drafter import loss as loss_module
from dflash.drafter import model, step
from dflash.drafter.block_mask import MaskRule
from dflash.drafter.loss import Slots
from dflash.drafter.model import parameter_shapes
from tests.support.drafter import LOSS, SLIDING, VARIANTS, example, run_eager, tiny_programs
from tests.support.oracle import oracle_step, relative_errors

FLOAT32_LIMIT = 1e-5
DPACE = LOSS.model_copy(update={"weighting": "dpace"})


def worst(errors):
    return max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("loss", [LOSS, DPACE], ids=["gamma", "dpace"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_both_steps_equal_the_oracle_in_float64(backend, changes, loss):
    train, evaluate = tiny_programs(loss, attention=backend, **changes)
    inputs = example(train, seed=1)
    reference, gaps = oracle_step(train.config, loss, inputs)
    assert min(gaps) > 1e-5, "an argmax is too close to call"
    for program in (train, evaluate):
        outputs = run_eager(program, inputs, double=True)
        name, error = worst(relative_errors(outputs, reference))
        assert error < 1e-12, f"{program.name}: {name}"
    assert {f"grad.{name}" for name in parameter_shapes(train.config)} < set(reference)


def test_a_row_full_to_its_end_and_invalid_anchors_inside_it():
    """The last document ends with the row, an anchor just before; invalid anchors lie on real tokens."""
    program, _ = tiny_programs()
    inputs = example(program, seed=1)
    start = inputs["doc_ids"].tolist().index(3)
    for name in ("doc_ids", "position_ids", "loss_mask", "anchors", "context_start"):
        inputs[name] = inputs[name].clone()
    inputs["doc_ids"][start:] = 3
    inputs["position_ids"][start:] = torch.arange(128 - start)
    inputs["loss_mask"][start:] = True
    last = int(inputs["anchor_valid"].sum()) - 1
    inputs["anchors"][last], inputs["context_start"][last] = 126, start
    inputs["anchors"][last + 1 :] = inputs["context_start"][last + 1 :] = 5
    reference, _ = oracle_step(program.config, LOSS, inputs)
    name, error = worst(relative_errors(run_eager(program, inputs, double=True), reference))
    assert error < 1e-12, name


def trained(program, steps=30):
    """Parameters after some steps on fresh batches, with the frozen embedding and head they belong to."""
    inputs = example(program, seed=100)
    fixed = {name: t for name, t in inputs.items() if name in ("embed_tokens", "lm_head")}
    parameters = {name: t.clone().requires_grad_() for name, t in inputs.items() if name.startswith("param.")}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    for seed in range(steps):
        batch = example(program, seed=200 + seed) | fixed
        outputs = run_eager(program, batch | {name: p.detach() for name, p in parameters.items()})
        for name, parameter in parameters.items():
            parameter.grad = outputs[f"grad.{name.removeprefix('param.')}"] / outputs["anchors"]
        optimizer.step()
    return fixed | {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
def test_float32_stays_near_the_oracle_with_random_and_trained_parameters(changes):
    program, _ = tiny_programs(**changes)
    for parameters in ({}, trained(program)):
        inputs = example(program, seed=2) | parameters
        reference, _ = oracle_step(program.config, LOSS, inputs)
        name, error = worst(relative_errors(run_eager(program, inputs), reference))
        assert error < FLOAT32_LIMIT, name


@pytest.mark.parametrize(
    "change", [{"cap_weight": 0.7}, {"kl_weight": 0.9}, {"temperature": 0.5}, {"gamma": 2.0}]
)
def test_scalars_of_the_loss_are_inputs(change):
    program, _ = tiny_programs()
    loss = LOSS.model_copy(update=change)
    inputs = example(program, seed=3)
    inputs |= {
        k: v
        for k, v in example(tiny_programs(loss)[0], seed=3).items()
        if v.dim() == 0 or k == "slot_weights"
    }
    reference, _ = oracle_step(program.config, loss, inputs)
    _, error = worst(relative_errors(run_eager(program, inputs, double=True), reference))
    assert error < 1e-12


def shifted_slots(**shift):
    """Slots whose labels or teachers are read one position late."""
    real = loss_module.slots

    def slots(batch, block_size):
        found = real(batch, block_size)
        label_AS = torch.roll(batch["input_ids"], -1)[
            (batch["anchors"].long()[:, None] + torch.arange(1, block_size)).clamp(
                max=batch["input_ids"].shape[0] - 1
            )
        ]
        last = batch["input_ids"].shape[0] - 1
        return Slots(
            label_AS if "label" in shift else found.label_AS,
            found.supervised_AS,
            (found.teacher_index_AS + 1).clamp(max=last) if "teacher" in shift else found.teacher_index_AS,
        )

    return slots


def patched_rule(visible):
    """A mask rule with another idea of what is visible; it is given the right one too."""
    right = MaskRule.visible

    def patched(self, query, key, context_start_A, anchors_A):
        return visible(self, query, key, context_start_A, anchors_A, right)

    return patched


def sees_own_anchor(rule, query, key, context_start_A, anchors_A, right):
    return right(rule, query, key, context_start_A, anchors_A) | (key == anchors_A[query // rule.block_size])


def sees_next_block(rule, query, key, context_start_A, anchors_A, right):
    other = (key - rule.tokens) // rule.block_size == query // rule.block_size + 1
    return right(rule, query, key, context_start_A, anchors_A) | ((key >= rule.tokens) & other)


def sees_other_documents(rule, query, key, context_start_A, anchors_A, right):
    return right(rule, query, key, torch.zeros_like(context_start_A), anchors_A)


def swapped_causality(monkeypatch):
    real = step.mask_rule

    def swapped(*args):
        rule = real(*args)
        return MaskRule(rule.tokens, rule.block_size, not rule.causal, rule.window)

    monkeypatch.setattr(step, "mask_rule", swapped)


def late_block_positions(monkeypatch):
    real = step.forward

    def late(config, params, features, embeds, position_T, position_Q, attend):
        return real(config, params, features, embeds, position_T, position_Q + 1, attend)

    monkeypatch.setattr(step, "forward", late)


def next_feature_layer(monkeypatch):
    """Each part of the features comes from the next tapped layer."""
    real = model.context_states

    def shifted(config, params, features):
        return real(config, params, features.roll(-config.hidden_size, dims=1))

    monkeypatch.setattr(model, "context_states", shifted)


def without(name):
    """The loss without one of its terms; what the step reports of the term itself stays right."""

    def plant(monkeypatch):
        real = loss_module.block_loss

        def dropped(config, hidden, teacher, head, slots, weights):
            part = real(config, hidden, teacher, head, slots, weights)
            share = {
                "ce": 1 - weights["kl_weight"],
                "kl": weights["kl_weight"] * weights["temperature"] ** 2,
                "cap": weights["cap_weight"],
            }[name]
            return loss_module.BlockLoss(
                part.loss - share * getattr(part, name),
                *(getattr(part, f) for f in ("ce", "kl", "cap")),
                part.slot_ce_AS,
                part.correct_AS,
            )

        monkeypatch.setattr(loss_module, "block_loss", dropped)

    return plant


def visible(function):
    return lambda monkeypatch: monkeypatch.setattr(MaskRule, "visible", patched_rule(function))


FAULTS = {
    "label one late": lambda m: m.setattr(step, "slots", shifted_slots(label=1)),
    "teacher one late": lambda m: m.setattr(step, "slots", shifted_slots(teacher=1)),
    "next feature layer": next_feature_layer,
    "anchor's own feature visible": visible(sees_own_anchor),
    "cross-block": visible(sees_next_block),
    "cross-document": visible(sees_other_documents),
    "causal and bidirectional swapped": swapped_causality,
    "wrong RoPE offset": late_block_positions,
    "no CE": without("ce"),
    "no KL": without("kl"),
    "no CAP": without("cap"),
}


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_goes_red(fault, changes, monkeypatch):
    program, _ = tiny_programs(**changes)
    inputs = example(program, seed=5)
    reference, _ = oracle_step(program.config, LOSS, inputs)
    assert worst(relative_errors(run_eager(program, inputs), reference))[1] < FLOAT32_LIMIT
    fault(monkeypatch)
    errors = relative_errors(run_eager(program, inputs), reference)
    red = {name for name, error in errors.items() if error > 10 * FLOAT32_LIMIT}
    assert "loss" in red, worst(errors)
    assert any(name.startswith("grad.layers.0.self_attn") for name in red), (
        "no gradient of the first layer is red"
    )
