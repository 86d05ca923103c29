"""`dflash`: prepare data, train a drafter, evaluate it, look at a run's configuration.

Modules that import torch or pydantic are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aot import console
from aot.console import (
    CONTEXT,
    allow_unsigned_option,
    emit,
    emit_json,
    examples,
    json_option,
    lock_option,
    policy_option,
    run_argument,
    set_option,
    store_option,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflash.config import RunConfig

SCHEMA = 1
LIST = "DEVICE,..."
VARIABLES = (
    "Every key of the run file is also a variable, e.g. DFLASH_TRAIN__LR=3e-4 for train.lr; flags win."
)


def key_option(flag: str, key: str, help_text: str, **settings: Any) -> Any:
    """A flag for one key of the run file, whose variable it names."""
    variable = f"DFLASH_{key.upper().replace('.', '__')}"
    return click.option(flag, help=f"{help_text}  [{key}; env: {variable}]", **settings)


target_devices_option = key_option(
    "--target-devices", "topology.target_devices", "One target worker each.", metavar=LIST
)
drafter_devices_option = key_option(
    "--drafter-devices", "topology.drafter_devices", "One drafter worker each.", metavar=LIST
)
output_option = key_option("--output", "output.dir", "Folder of checkpoints and metrics.", metavar="FOLDER")


@click.group(context_settings=CONTEXT, epilog=VARIABLES)
@click.version_option(package_name="dflash-aot", prog_name="dflash")
def cli() -> None:
    """Train DFlash drafters on compiled steps that `dflash-aot` built and verified."""


def flag_texts(flags: Mapping[str, Any]) -> list[str]:
    """Turn {dotted key: value or None} into `--set` texts; the devices of one flag are given as `a,b`."""
    given = {key: value for key, value in flags.items() if value is not None}
    for key in given:
        if key.endswith("_devices"):
            given[key] = [part.strip() for part in given[key].split(",") if part.strip()]
    # JSON's strings, numbers and arrays are TOML's too.
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


def typed_run(run_file: str, overrides: Sequence[str], lock_path: Path | None = None) -> str:
    """The run, its `--set` flags and its lock file as they would be typed again."""
    words = [run_file, *(word for text in overrides for word in ("--set", text))]
    if lock_path is not None and lock_path != Path("artifacts.lock"):
        words += ["--lock", str(lock_path)]
    return shlex.join(words)


@cli.command(
    epilog=examples(
        "dflash prepare chats.jsonl --output data --tokenizer Qwen/Qwen3.6-27B --eval-fraction 0.02",
        "dflash prepare tokens.jsonl --output data/train --tokenizer .cache/smollm2-135m-instruct",
    )
)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--tokenizer", "tokenizer_name", required=True, help="Folder or hub name of the target.")
@click.option("--eval-fraction", default=0.0, help="Share of conversations held out, into OUTPUT/eval.")
@click.option(
    "--max-bad-rate",
    type=click.FloatRange(0, 1),
    default=0.01,
    help="Share of unusable rows that is tolerated.",
)
@click.option(
    "--vocab-size", type=click.IntRange(min=1), help="Bound of token ids; the tokenizer's when absent."
)
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT.")
@json_option
def prepare(
    inputs: tuple[str, ...],
    output: Path,
    tokenizer_name: str,
    eval_fraction: float,
    max_bad_rate: float,
    vocab_size: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Tokenize conversations and mark the assistant's tokens.

    INPUT is a JSON or JSON Lines file of chats (`messages` or ShareGPT `conversations`) or of tokens
    (`input_ids`, `loss_mask`), or a `datasets` folder.
    """
    from dataclasses import asdict

    from transformers import AutoTokenizer

    from aot.errors import ConfigError
    from dflash.data.prepare import prepare as prepare_documents

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--tokenizer '{tokenizer_name}' cannot be loaded: {reason}",
            "name the target's folder, or a hub model that is downloaded",
        ) from None
    report = prepare_documents(
        inputs,
        output,
        tokenizer,
        vocab_size=vocab_size,
        eval_fraction=eval_fraction,
        max_bad_rate=max_bad_rate,
        overwrite=overwrite,
        progress=console.at_intervals(lambda rows: console.note(f"{rows} rows read")),
    )
    if as_json:
        emit_json({"schema": SCHEMA, **asdict(report)})
        return
    counts = ", ".join(f"{count} {split}" for split, count in report.documents.items())
    emit(f"{counts} documents of {report.rows} rows in {output} ({report.bad_rows} rows skipped)")


@cli.command(
    epilog=examples(
        "dflash train smollm2-cpu",
        "dflash train run.toml --resume",
        "dflash train run.toml --target-devices cuda:0,cuda:1 --drafter-devices cuda:2 --set train.lr=3e-4",
    )
)
@run_argument
@set_option
@store_option
@lock_option
@policy_option
@allow_unsigned_option
@target_devices_option
@drafter_devices_option
@output_option
@key_option("--max-steps", "train.max_steps", "Optimizer steps at most.", type=click.IntRange(min=1))
@click.option("--resume", is_flag=True, help="Go on from the last whole checkpoint of the output folder.")
@click.option("--dry-run", is_flag=True, help="Show the plan, prove its artifacts, train nothing.")
@json_option
def train(
    run_file: str,
    overrides: tuple[str, ...],
    store_root: Path,
    lock_path: Path,
    policy_name: str,
    allow_unsigned: tuple[str, ...],
    target_devices: str | None,
    drafter_devices: str | None,
    output: str | None,
    max_steps: int | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train the drafter of RUN (a run file or a recipe).

    Refuses to start unless every compiled step that the run can need is in the store, verified, and named by
    the lock file. SIGTERM and
    Ctrl-C stop at the next step boundary with a checkpoint and exit code 75; a second one stops at once.
    """
    config = configured(
        run_file,
        overrides,
        {
            "topology.target_devices": target_devices,
            "topology.drafter_devices": drafter_devices,
            "output.dir": output,
            "train.max_steps": max_steps,
        },
    )
    from aot.policy import Policy
    from aot.store import Store
    from dflash.train.session import Invocation

    policy = Policy(policy_name, allow_unsigned)
    invocation = Invocation(typed_run(run_file, overrides, lock_path), tuple(sys.argv), lock_path, policy)
    if dry_run:
        from dflash.train.session import dry_run_report

        report = dry_run_report(config, Store(store_root), invocation)
        if as_json:
            emit_json({"schema": SCHEMA, **report})
        else:
            emit("\n".join(f"{name}: {value}" for name, value in report.items()))
        return 0
    from dflash.train.run import train as run_training

    code = run_training(config, Store(store_root), invocation, resume=resume)
    if as_json:
        from dflash.train.metrics import FILE_NAME, read_rows

        rows = read_rows(Path(config.output.dir) / FILE_NAME)
        last = {
            kind: next((r for r in reversed(rows) if r["kind"] == kind), None) for kind in ("train", "eval")
        }
        emit_json({"schema": SCHEMA, "exit_code": code, "output": config.output.dir, **last})
    return code


@cli.command(
    name="eval",
    epilog=examples(
        "dflash eval smollm2-cpu --shuffle-features --decode 8",
        "dflash eval run.toml --checkpoint runs/run/checkpoints/step-00000100 --json",
    ),
)
@run_argument
@set_option
@store_option
@policy_option
@allow_unsigned_option
@target_devices_option
@drafter_devices_option
@output_option
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), help="A checkpoint or a run; default: the output."
)
@click.option(
    "--untrained", is_flag=True, help="Fresh parameters instead of a checkpoint: the state before training."
)
@click.option(
    "--shuffle-features", is_flag=True, help="Also with features of another document, as a control."
)
@click.option("--unigram", is_flag=True, help="Also the CE of the training text's token frequencies.")
@click.option(
    "--decode", "prompts", type=click.IntRange(min=0), default=0, help="Held-out prompts to decode."
)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, help="Per decoded prompt.")
@json_option
def evaluate(
    run_file: str,
    overrides: tuple[str, ...],
    store_root: Path,
    policy_name: str,
    allow_unsigned: tuple[str, ...],
    target_devices: str | None,
    drafter_devices: str | None,
    output: str | None,
    checkpoint: Path | None,
    untrained: bool,
    shuffle_features: bool,
    unigram: bool,
    prompts: int,
    max_new_tokens: int,
    as_json: bool,
) -> None:
    """Held-out loss and acceptance length of a checkpoint of RUN, through its compiled eval step.

    With --decode, also tau: tokens per target pass in speculative decoding, each text compared with the
    target's own.
    """
    config = configured(
        run_file,
        overrides,
        {
            "topology.target_devices": target_devices,
            "topology.drafter_devices": drafter_devices,
            "output.dir": output,
        },
    )
    if checkpoint is not None and untrained:
        raise click.UsageError("--checkpoint and --untrained exclude each other")
    from aot.policy import Policy
    from aot.store import Store
    from dflash.evaluate.command import EvaluationOptions, evaluate_run, table_text
    from dflash.train.session import Invocation

    options = EvaluationOptions(checkpoint, untrained, shuffle_features, unigram, prompts, max_new_tokens)
    policy = Policy(policy_name, allow_unsigned)
    invocation = Invocation(typed_run(run_file, overrides), tuple(sys.argv), policy=policy)
    report = evaluate_run(config, Store(store_root), invocation, options)
    if as_json:
        emit_json({"schema": SCHEMA, **report})
    else:
        emit(table_text(report))


@cli.group()
def config() -> None:
    """Show what a run file resolves to, and what it may say."""


@config.command(
    epilog=examples("dflash config show smollm2-cpu --origin", "dflash config show run.toml > full.toml")
)
@run_argument
@set_option
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@json_option
def show(run_file: str, overrides: tuple[str, ...], origin: bool, as_json: bool) -> None:
    """Print every value of RUN as it will be used, as a run file."""
    from dflash.config import config_origins, flatten
    from dflash.train.provenance import run_toml

    resolved = configured(run_file, overrides, {})
    if as_json:
        emit_json({"schema": SCHEMA, **resolved.model_dump(mode="json")})
    elif origin:
        values = flatten(resolved.model_dump(mode="json"))
        origins = config_origins(run_file, overrides)
        emit(
            console.table(
                ("key", "value", "from"), [(key, values[key], origins[key]) for key in sorted(values)]
            )
        )
    else:
        emit(run_toml(resolved).rstrip())


@config.command(epilog=examples("dflash config schema"))
def schema() -> None:
    """Print the JSON schema of run files: every key with its type and default."""
    from dflash.config import RunConfig

    emit_json(RunConfig.model_json_schema())


@config.command(epilog=examples("dflash config recipes"))
def recipes() -> None:
    """List the run files that come with the package."""
    from dflash.config import recipe_names

    emit("\n".join(recipe_names()))


def configured(run_file: str, overrides: Sequence[str], flags: Mapping[str, Any]) -> RunConfig:
    """Load RUN with `--set` texts and the flags that stand for keys."""
    from dflash.config import load_config

    return load_config(run_file, [*overrides, *flag_texts(flags)])


def main() -> None:
    from dflash.train.pipeline import WorkerThread

    code = console.run(cli, "dflash")
    if any(isinstance(thread, WorkerThread) for thread in threading.enumerate()):
        # A worker that hangs in native code would crash or hang the interpreter's own end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
