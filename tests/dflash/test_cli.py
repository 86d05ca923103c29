"""What the command line refuses before it does anything."""

import pytest

from aot import console
from aot.errors import EXIT_USAGE
from dflash.cli import cli

PREPARE = ("prepare", "in.jsonl", "--output", "out", "--tokenizer", "none")
OUT_OF_RANGE = {
    "--vocab-size": (*PREPARE, "--vocab-size", "-3"),
    "--max-bad-rate": (*PREPARE, "--max-bad-rate", "7"),
    "--max-new-tokens": ("eval", "smollm2-cpu", "--max-new-tokens", "1"),
}


@pytest.mark.parametrize("flag", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_its_flag(flag, capsys):
    """Without the range it is taken: bad rows without a bound, or a tau of 0 because no block was drafted."""
    assert console.run(cli, "dflash", OUT_OF_RANGE[flag]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert f"'{flag}'" in said
    assert "range" in said


def test_a_run_file_that_is_no_toml_is_refused_with_a_hint(tmp_path, capsys):
    """Without it the user is left with the parser's message alone."""
    (tmp_path / "run.toml").write_text("name = \n")
    assert console.run(cli, "dflash", ["config", "show", str(tmp_path / "run.toml")]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "line 1" in said
    assert "hint: mend that line" in said
