"""What `dflash eval` does: one drafter, its held-out split, and the controls that were asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aot.console import Steps, note, table
from aot.errors import ConfigError
from dflash.drafter.model import init_parameters
from dflash.drafter.programs import EvalStep
from dflash.drafter.step import PARAMETER_PREFIX
from dflash.evaluate.held_out import Evaluator, increase
from dflash.evaluate.speculative import evaluate_decoding, prompt_of
from dflash.train import checkpoint
from dflash.train.devices import make_reproducible, on, resolve_devices
from dflash.train.drafter_worker import EagerStep
from dflash.train.plan import EVAL, TRAIN, held_out_batches
from dflash.train.session import (
    Invocation,
    check_drafter_devices,
    check_target,
    frozen_inputs,
    load_targets,
    open_documents,
    prepare_artifacts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aot.store import Store
    from dflash.config import RunConfig
    from dflash.data.dataset import Documents
    from dflash.target.huggingface import HuggingFaceTarget


@dataclass(frozen=True)
class EvaluationOptions:
    """`checkpoint` None is the last one of the run's output; `prompts` is how many to decode."""

    checkpoint: Path | None = None
    untrained: bool = False
    shuffle_features: bool = False
    unigram: bool = False
    prompts: int = 0
    max_new_tokens: int = 64


def evaluate_run(
    config: RunConfig, store: Store, invocation: Invocation, options: EvaluationOptions
) -> dict[str, Any]:
    """Return the report as JSON values.

    Always the means of `Sums.summary` with `token_ce_se`; with the controls, `shuffled` (CE per slot with
    foreign features, the increase and its standard error) and `unigram_ce`; with prompts, `decode`. Raises
    UserError for whatever is missing.
    """
    make_reproducible()
    target_device = resolve_devices(config.topology.target_devices, "topology.target_devices")[0]
    device = resolve_devices(config.topology.drafter_devices, "topology.drafter_devices")[0]
    program = EvalStep(config.drafter, config.loss)
    check_drafter_devices(config, [device], program)
    documents = open_documents(config)
    if EVAL not in documents:
        raise ConfigError(
            "data.eval is not set", "e.g. `--set data.eval=FOLDER`, written by `dflash prepare`"
        )
    held_out = documents[EVAL]
    batches = held_out_batches(config, held_out)
    stored = None if options.untrained else checkpoint.resolve(options.checkpoint or Path(config.output.dir))
    needs = [(program, bucket) for bucket in sorted({batch.bucket for batch in batches})]
    artifacts = prepare_artifacts(store, needs, invocation, device, config.train.on_miss)
    sample = torch.from_numpy(held_out[0].input_ids[: config.data.max_seq_len])
    target = load_targets(config, [target_device], sample)[target_device]
    check_target(stored, target)
    params = drafter_parameters(config, stored, device)
    inputs = {f"{PARAMETER_PREFIX}{name}": tensor for name, tensor in params.items()}
    with on(device), torch.no_grad():
        calls = {
            bucket: artifact if isinstance(artifact, EagerStep) else artifact.load(device)
            for (_, bucket), artifact in artifacts.items()
        }
        evaluator = Evaluator(
            config,
            held_out,
            batches,
            target,
            calls,
            {**inputs, **frozen_inputs(config, target, [device])[device]},
            device,
        )
        report = {
            "step": stored[1].step if stored else 0,
            "checkpoint": str(stored[0]) if stored else None,
            **held_out_report(evaluator, documents[TRAIN], options),
        }
        if options.prompts:
            report["decode"] = decode_report(config, held_out, target, params, options)
    return report


def drafter_parameters(
    config: RunConfig, stored: tuple[Path, checkpoint.State] | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, or the fresh ones of the run's seed, in the drafter's dtype."""
    dtype = getattr(torch, config.drafter.dtype)
    fresh = init_parameters(config.drafter, config.train.seed, "cpu")
    if stored is None:
        masters = fresh
    else:
        masters = checkpoint.load_masters(stored[0])
        if {name: t.shape for name, t in masters.items()} != {name: t.shape for name, t in fresh.items()}:
            raise ConfigError(
                f"checkpoint '{stored[0]}' holds another drafter than the run file describes",
                f"take the run file of the checkpoint, `{stored[0] / 'run.toml'}`",
            )
    # A copy: tensors of a memory-mapped file need not be aligned.
    return {name: tensor.to(device, dtype, copy=True) for name, tensor in masters.items()}


def held_out_report(evaluator: Evaluator, train: Documents, options: EvaluationOptions) -> dict[str, Any]:
    passes = 2 if options.shuffle_features else 1
    with Steps(passes * len(evaluator.batches), "held out") as steps:
        base = evaluator.run(done=lambda: steps.advance("micro-batch"))
        report = base.summary()
        if options.shuffle_features:
            shuffled = evaluator.run(shuffle_features=True, done=lambda: steps.advance("foreign features"))
            worse, error = increase(base, shuffled)
            report["shuffled"] = {
                "token_ce": shuffled.summary()["token_ce"],
                "increase": worse,
                "increase_se": error,
            }
    if options.unigram:
        report["unigram_ce"] = evaluator.unigram_ce(train)
    return report


def decode_report(
    config: RunConfig,
    held_out: Documents,
    target: HuggingFaceTarget,
    params: Mapping[str, torch.Tensor],
    options: EvaluationOptions,
) -> dict[str, Any]:
    """Decode the prompts of the first held-out documents; `equal` counts texts that are the target's own."""
    count = min(options.prompts, len(held_out))
    note(f"decoding {count} prompts, each also by the target alone")
    decoded = evaluate_decoding(
        target,
        config.drafter,
        params,
        (prompt_of(held_out[index]) for index in range(count)),
        options.max_new_tokens,
    )
    return {
        "prompts": decoded.prompts,
        "equal": decoded.prompts - len(decoded.mismatches),
        "mismatches": list(decoded.mismatches),
        "tau": decoded.tau,
        "tokens": decoded.tokens,
        "target_passes": decoded.target_passes,
    }


def table_text(report: Mapping[str, Any]) -> str:
    """The report as two columns; nested values by dotted name."""
    from dflash.config import flatten

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4f}"
        if isinstance(value, list):
            return " ".join(text(item) for item in value)
        return "-" if value is None else str(value)

    return table(("metric", "value"), [(name, text(value)) for name, value in flatten(report).items()])
