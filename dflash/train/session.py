"""Everything a run needs, opened and checked before the first step, cheapest refusal first."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aot import runtime
from aot.console import note, warn
from aot.environment import snapshot
from aot.errors import ConfigError, CorruptArtifact, MissingArtifact, StaleArtifact, UserError
from aot.lockfile import FILE_NAME, LockMismatch, lock_differences, lock_of, lock_text, read_lock
from aot.policy import Policy
from dflash.data.dataset import Documents
from dflash.drafter.model import init_parameters
from dflash.drafter.programs import make_programs, weights
from dflash.train import checkpoint, provenance
from dflash.train.coordinator import Progress
from dflash.train.devices import aligned, on, resolve_devices
from dflash.train.drafter_worker import EagerStep
from dflash.train.optimizer import Replica
from dflash.train.plan import EVAL, TRAIN, RunPlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aot.buckets import Bucket
    from aot.lockfile import Lock
    from aot.program import Program
    from aot.store import Store
    from dflash.config import RunConfig
    from dflash.target.huggingface import HuggingFaceTarget

Artifact = runtime.PreparedArtifact | EagerStep
Need = tuple["Program", "Bucket"]


@dataclass(frozen=True)
class Invocation:
    """How the run was asked for: the run file with its flags, as typed, and the whole command line; the lock
    file that names its artifacts, and whom to trust.
    """

    run_text: str
    command: tuple[str, ...]
    lock_path: Path = Path(FILE_NAME)
    policy: Policy = field(default_factory=Policy.of)


def open_documents(config: RunConfig) -> dict[str, Documents]:
    """{program: the split it reads}; evaluation is absent without `data.eval`.

    Raises ConfigError when a split is absent, was made with another tokenizer, or may hold ids that
    the vocabulary lacks.
    """
    if not config.data.train:
        raise ConfigError(
            "data.train is not set", "e.g. `--set data.train=FOLDER`, written by `dflash prepare`"
        )
    splits = {TRAIN: Documents.open(config.data.train)}
    if config.data.eval:
        splits[EVAL] = Documents.open(config.data.eval)
    if len({split.manifest["tokenizer_hash"] for split in splits.values()}) > 1:
        raise ConfigError(
            f"'{config.data.train}' and '{config.data.eval}' were prepared with different tokenizers",
            "prepare both with the target's: `dflash prepare INPUT --output FOLDER --tokenizer TARGET`",
        )
    for split in splits.values():
        if split.manifest["vocab_size"] > config.drafter.vocab_size:
            raise ConfigError(
                f"'{split.folder}' was prepared for {split.manifest['vocab_size']} tokens, "
                f"drafter.vocab_size is {config.drafter.vocab_size}",
                "prepare it again with the target's tokenizer",
            )
    return splits


def check_drafter_devices(config: RunConfig, devices: Sequence[torch.device], program: Program) -> None:
    """Raise ConfigError for a drafter device that the attention backend's programs do not run on."""
    for device in devices:
        if device.type != program.device_type:
            raise ConfigError(
                f"topology.drafter_devices: '{device}' cannot run drafter.attention "
                f"'{config.drafter.attention}', whose programs are built for {program.device_type}",
                f"name {program.device_type} devices with `--drafter-devices`",
            )


def prepare_artifacts(
    store: Store,
    needs: Sequence[Need],
    invocation: Invocation,
    device: torch.device,
    on_miss: str,
    lock: Lock | None = None,
) -> dict[tuple[str, Bucket], Artifact]:
    """Prove that every program and bucket of the run is there, verified and tried, or eager where allowed.

    Raises MissingArtifact, StaleArtifact, LockMismatch, CorruptArtifact or UntrustedArtifact, each with the
    command to run.
    """
    run_text = invocation.run_text
    artifacts: dict[tuple[str, Bucket], Artifact] = {}
    present = list(needs)
    if on_miss == "eager":
        fingerprints = runtime.Fingerprints()
        for program, bucket in needs:
            try:
                runtime.resolve(store, program, bucket, fingerprints(program.device_type), run_text, lock)
            except (MissingArtifact, StaleArtifact, LockMismatch) as error:
                warn(
                    f"{error.message}; it will run EAGER, slowly, as train.on_miss says (build: {error.hint})"
                )
                artifacts[program.name, bucket] = EagerStep(program, bucket)
                present.remove((program, bucket))
    with on(device):
        return artifacts | runtime.prepare(
            store, present, run=run_text, device=str(device), policy=invocation.policy, lock=lock
        )


def run_lock(store: Store, needs: Sequence[Need], invocation: Invocation, on_miss: str) -> Lock:
    """Read the lock file that a run must have; without one, `on_miss` eager may run all of it eagerly.

    Raises ConfigError or CorruptArtifact, with the command that writes it.
    """
    path = invocation.lock_path
    if on_miss == "eager" and not path.exists():
        warn(f"there is no lock file '{path}': no artifact will be used")
        return {}
    try:
        return read_lock(path)
    except UserError as error:
        # Entries of a damaged file cannot be kept: only a build of the whole run writes it anew.
        buckets = [] if isinstance(error, CorruptArtifact) else [bucket for _, bucket in needs]
        command = runtime.build_command(invocation.run_text, buckets, store)
        raise type(error)(error.message, f"`{command}` writes it") from None


def load_targets(
    config: RunConfig, devices: Sequence[torch.device], sample: torch.Tensor
) -> dict[torch.device, HuggingFaceTarget]:
    """One frozen target per distinct device, each run once, one after the other.

    That first run lets a target whose own kernels are compiled on first use do so before any other thread
    works.
    """
    from dflash.target.huggingface import HuggingFaceTarget

    targets: dict[torch.device, HuggingFaceTarget] = {}
    for device in dict.fromkeys(devices):
        with on(device), torch.no_grad():
            target = HuggingFaceTarget.load(config.target, config.drafter.target_layer_ids, device)
            target.check(config.drafter)
            target.features([sample.to(device)])
        targets[device] = target
    return targets


def frozen_inputs(
    config: RunConfig, target: HuggingFaceTarget, devices: Sequence[torch.device]
) -> dict[torch.device, dict[str, torch.Tensor]]:
    """The inputs that never change, once per device: embedding, head (drafter's dtype), loss weights."""
    dtype = getattr(torch, config.drafter.dtype)
    inputs = {}
    for device in dict.fromkeys(devices):
        embed_VH = aligned(target.embed_tokens.to(device, dtype))
        tied = target.lm_head is target.embed_tokens
        inputs[device] = {
            "embed_tokens": embed_VH,
            "lm_head": embed_VH if tied else aligned(target.lm_head.to(device, dtype)),
            **weights(config.loss, config.drafter.block_size, device),
        }
    return inputs


@dataclass(frozen=True)
class Work:
    """What a run will do and on which devices: all that is known without artifacts, target or checkpoint."""

    target_devices: list[torch.device]
    drafter_devices: list[torch.device]
    documents: dict[str, Documents]
    plan: RunPlan
    needs: list[Need]

    @classmethod
    def of(cls, config: RunConfig) -> Work:
        """Raises UserError for devices, data and budgets that cannot be."""
        target_devices = resolve_devices(config.topology.target_devices, "topology.target_devices")
        drafter_devices = resolve_devices(config.topology.drafter_devices, "topology.drafter_devices")
        programs = {program.name: program for program in make_programs(config)}
        check_drafter_devices(config, drafter_devices, programs[TRAIN])
        documents = open_documents(config)
        plan = RunPlan.make(config, documents[TRAIN], documents.get(EVAL))
        needs = [(programs[name], bucket) for name, bucket in plan.needs()]
        return cls(target_devices, drafter_devices, documents, plan, needs)

    def artifacts(
        self, config: RunConfig, store: Store, invocation: Invocation
    ) -> dict[tuple[str, Bucket], Artifact]:
        on_miss = config.train.on_miss
        lock = run_lock(store, self.needs, invocation, on_miss)
        return prepare_artifacts(store, self.needs, invocation, self.drafter_devices[0], on_miss, lock)


@dataclass
class Session:
    """An opened run: what the worker threads and the coordinator are made from."""

    config: RunConfig
    output: Path
    documents: dict[str, Documents]
    plan: RunPlan
    target_devices: list[torch.device]
    drafter_devices: list[torch.device]
    artifacts: dict[tuple[str, Bucket], Artifact]
    targets: dict[torch.device, HuggingFaceTarget]
    fixed_inputs: dict[torch.device, dict[str, torch.Tensor]]
    replicas: dict[torch.device, Replica]
    progress: Progress
    extra_files: dict[str, str]

    @classmethod
    def open(cls, config: RunConfig, store: Store, invocation: Invocation, resume: bool) -> Session:
        """Open the run described by `config`; its output folder exists and is locked by the caller.

        Raises UserError for whatever would stop the run later: configuration, devices, data, a resume that
        would not continue the same run, artifacts, target.
        """
        output, work = Path(config.output.dir), Work.of(config)
        stored = find_checkpoint(output, resume)
        if stored is not None:
            check_same_run(stored, config, work.plan, work.documents[TRAIN])
        artifacts = work.artifacts(config, store, invocation)
        if stored is not None:
            check_same_artifacts(stored[0], artifacts)
        sample = torch.from_numpy(work.documents[TRAIN][0].input_ids[: config.data.max_seq_len])
        targets = load_targets(config, work.target_devices, sample)
        target = targets[work.target_devices[0]]
        check_target(stored, target)
        note(summary(work, artifacts))
        replicas = make_replicas(config, work.drafter_devices)
        return cls(
            config=config,
            output=output,
            documents=work.documents,
            plan=work.plan,
            target_devices=work.target_devices,
            drafter_devices=work.drafter_devices,
            artifacts=artifacts,
            targets=targets,
            fixed_inputs=frozen_inputs(config, target, work.drafter_devices),
            replicas=replicas,
            progress=Progress() if stored is None else restored(stored, replicas),
            extra_files=extra_files(config, invocation, target, work.documents, artifacts),
        )

    @property
    def target(self) -> HuggingFaceTarget:
        return self.targets[self.target_devices[0]]

    def save(self) -> None:
        """Publish a checkpoint of the present weights."""
        state = checkpoint.State(
            step=self.progress.step,
            updates=self.progress.updates,
            total_steps=self.plan.total_steps,
            plan=self.plan.digest(),
            data=self.documents[TRAIN].digest,
            target=self.target.model_hash,
            config=self.config.model_dump(mode="json"),
            counters=self.progress.counters,
        )
        replica = self.replicas[self.drafter_devices[0]]
        checkpoint.save(self.output, state, replica, self.extra_files, self.config.output.keep_last)


def make_replicas(config: RunConfig, devices: Sequence[torch.device]) -> dict[torch.device, Replica]:
    """Fresh parameters from the seed, one copy per distinct device."""
    fresh = init_parameters(config.drafter, config.train.seed, "cpu")
    dtype = getattr(torch, config.drafter.dtype)
    return {device: Replica(fresh, dtype, device) for device in dict.fromkeys(devices)}


def restored(stored: tuple[Path, checkpoint.State], replicas: Mapping[torch.device, Replica]) -> Progress:
    """Load the checkpoint into the replicas and return how far it is."""
    folder, state = stored
    checkpoint.restore(folder, list(replicas.values()), state.updates)
    note(f"resuming after step {state.step} from {folder}")
    fresh = Progress()
    return Progress(state.step, state.updates, {**fresh.counters, **state.counters})


def find_checkpoint(output: Path, resume: bool) -> tuple[Path, checkpoint.State] | None:
    """The checkpoint to go on from; raises ConfigError when there is one and nobody asked to resume."""
    checkpoint.sweep(output)
    if not resume:
        if checkpoint.folders(output):
            raise ConfigError(
                f"'{output}' holds checkpoints of an earlier run",
                "go on from the last one with `--resume`, or name another folder with `--output`",
            )
        return None
    found = checkpoint.latest(output)
    if found is None:
        if checkpoint.folders(output):
            raise ConfigError(
                f"no checkpoint in '{output}' is whole", "start anew in another folder with `--output`"
            )
        note(f"no checkpoint in '{output}' yet: starting at step 0")
    return found


def check_same_run(
    stored: tuple[Path, checkpoint.State], config: RunConfig, plan: RunPlan, documents: Documents
) -> None:
    """Refuse to resume what would be another run, naming each difference."""
    folder, state = stored
    differences = [
        f"{key}: {then!r} then, {now!r} now"
        for key, (then, now) in provenance.config_differences(state.config, config).items()
    ]
    if state.data != documents.digest:
        differences.append(
            f"data.train: the documents of '{config.data.train}' are not those of the checkpoint"
        )
    if not differences and state.plan != plan.digest():
        differences.append(
            "the micro-batches of a step: keep train.grad_accum x drafters, and the number of steps"
        )
    if differences:
        raise ConfigError(
            f"cannot resume {folder}: " + "; ".join(differences),
            f"use the checkpoint's run file, `{folder / provenance.RUN_FILE}`, or name another `--output`",
        )


def check_target(stored: tuple[Path, checkpoint.State] | None, target: HuggingFaceTarget) -> None:
    if stored is not None and stored[1].target != target.model_hash:
        raise ConfigError(
            f"cannot resume {stored[0]}: the target's weights are not those that it was trained with",
            "point target.model at the same model",
        )


def locked(artifacts: Mapping[tuple[str, Bucket], Artifact]) -> Lock:
    """The lock of what is compiled among a run's artifacts."""
    return lock_of(
        artifact.manifest for artifact in artifacts.values() if isinstance(artifact, runtime.PreparedArtifact)
    )


def check_same_artifacts(folder: Path, artifacts: Mapping[tuple[str, Bucket], Artifact]) -> None:
    """Refuse to go on from a checkpoint with other artifacts than it was made with: the bits would differ.

    Raises LockMismatch naming every field that differs.
    """
    path = folder / FILE_NAME
    found = lock_differences(read_lock(path), locked(artifacts))
    if found:
        texts = [f"{program} {bucket}: {runtime.shown(fields)}" for (program, bucket), fields in found]
        raise LockMismatch(
            f"cannot resume {folder}, made with other artifacts: " + "; ".join(texts),
            f"`dflash-aot verify --lock {path} --explain` says whether the store still has those: "
            f"then add `--lock {path}`",
        )


def summary(work: Work, artifacts: Mapping[tuple[str, Bucket], Artifact]) -> str:
    """One line on what is about to run."""
    plan = work.plan
    padding = ", ".join(f"{program} padding {100 * share:.0f}%" for program, share in plan.padding().items())
    return (
        f"{plan.total_steps} steps of {plan.micro_batches_per_step} micro-batches over "
        f"{len(work.documents[TRAIN])} documents ({padding}); {len(work.target_devices)} target and "
        f"{len(work.drafter_devices)} drafter workers; {len(artifacts)} artifacts verified"
    )


def dry_run_report(config: RunConfig, store: Store, invocation: Invocation) -> dict[str, Any]:
    """What `train` would do, its artifacts proved; nothing is loaded or written but verified copies.

    Of the target only the configuration is read.
    """
    from dflash.target.huggingface import check_configuration

    work = Work.of(config)
    check_configuration(config.target)
    artifacts = work.artifacts(config, store, invocation)
    return {
        "steps": work.plan.total_steps,
        "micro_batches_per_step": work.plan.micro_batches_per_step,
        "documents": {program: len(split) for program, split in work.documents.items()},
        "padding": {program: round(share, 4) for program, share in work.plan.padding().items()},
        "target_devices": [str(device) for device in work.target_devices],
        "drafter_devices": [str(device) for device in work.drafter_devices],
        "artifacts": [f"{program} {bucket}" for program, bucket in sorted(artifacts)],
    }


def extra_files(
    config: RunConfig,
    invocation: Invocation,
    target: HuggingFaceTarget,
    documents: Mapping[str, Documents],
    artifacts: Mapping[tuple[str, Bucket], Artifact],
) -> dict[str, str]:
    """What goes into each checkpoint beside tensors and state."""
    environment: dict[str, Any] = {
        **snapshot(),
        "target": {"model": config.target.model, "hash": target.model_hash},
        "tokenizer": {"hash": documents[TRAIN].manifest["tokenizer_hash"]},
        "data": {program: split.manifest for program, split in documents.items()},
    }
    return {
        FILE_NAME: lock_text(locked(artifacts)),
        checkpoint.ENVIRONMENT: json.dumps(environment, indent=1, default=str),
        provenance.RUN_FILE: provenance.run_toml(config),
        provenance.COMMAND_FILE: provenance.command_line(invocation.command),
    }
