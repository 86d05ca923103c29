"""The resolved run file reads back as the same run; differences are named."""

import pytest

from dflash.config import load_config, recipe_names
from dflash.train.provenance import config_differences, run_toml


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_resolved_run_file_reads_back_equal(recipe, tmp_path):
    config = load_config(recipe, ["train.adam_eps=1e-12", 'name="a \\"quoted\\" name"'])
    (tmp_path / "run.toml").write_text(run_toml(config))
    assert load_config(str(tmp_path / "run.toml")) == config


CHANGES = {
    "train.lr=1.0": {"train.lr"},
    "loss.gamma=3.0": {"loss.gamma"},
    "drafter.rope_theta=10.0": {"drafter.rope_theta"},
    "data.max_batch_size=3": {"data.max_batch_size"},
    "train.grad_accum=7": set(),
    'output.dir="elsewhere"': set(),
    'topology.target_devices=["cpu"]': set(),
    "eval.eval_every=1": set(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_makes_another_run_is_a_difference(change):
    stored = load_config("smollm2-cpu").model_dump(mode="json")
    assert set(config_differences(stored, load_config("smollm2-cpu", [change]))) == CHANGES[change]
