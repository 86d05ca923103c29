"""The run file: one typed schema for TOML, flags, environment and help.

Precedence: flags (`--set section.key=value`), environment (`DFLASH_SECTION__KEY=value`), run file, defaults.
Unknown keys are errors. This module imports no torch.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field

from aot.buckets import Bucket, parse_buckets
from aot.errors import ConfigError

ENVIRONMENT_PREFIX = "DFLASH_"
LayerType = Literal["full_attention", "sliding_attention"]


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DrafterConfig(Section):
    """Shape of the drafter; hidden size and vocabulary are the target's, whose embedding it shares."""

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(default=5, gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    num_target_layers: int = Field(gt=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    mask_token_id: int = Field(ge=0)
    block_size: int = Field(default=16, ge=2)
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    layer_types: tuple[LayerType, ...] | None = Field(
        default=None, description="one per layer; all full_attention when absent"
    )
    sliding_window: int | None = Field(default=None, gt=0)
    is_causal: bool | None = Field(
        default=None,
        description="causality inside the block; when absent, sliding layers are causal, full ones not",
    )
    attention: Literal["sdpa", "flex"] = "sdpa"
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "activations", "layers"] = Field(
        default="none",
        description="what the backward computes again to save memory: norms and gates, or whole layers",
    )

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "DrafterConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers")
        if "sliding_attention" in self.resolved_layer_types and self.sliding_window is None:
            raise ValueError("sliding_attention layers need sliding_window")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not in a vocabulary of {self.vocab_size}"
            )
        if any(not 0 <= i < self.num_target_layers for i in self.target_layer_ids):
            raise ValueError(f"target_layer_ids must lie in 0..{self.num_target_layers - 1}")
        return self

    @property
    def resolved_layer_types(self) -> tuple[str, ...]:
        return self.layer_types or ("full_attention",) * self.num_layers


class TargetConfig(Section):
    model: str = Field(default="", description="folder or hub name of the frozen target")
    dtype: Literal["float32", "bfloat16"] = "float32"


class LossConfig(Section):
    weighting: Literal["gamma", "dpace"] = "gamma"
    gamma: float = Field(default=7.0, gt=0)
    dpace_alpha: float = Field(default=0.5, ge=0, le=1)
    kl_weight: float = Field(default=0.0, ge=0, le=1)
    temperature: float = Field(default=1.0, gt=0)
    cap: Literal["confidence"] = "confidence"
    cap_weight: float = Field(default=0.0, ge=0)
    max_chunk_rows: int = Field(
        default=2048, gt=0, description="rows of logits held at once; at most 16 chunks"
    )
    fused: bool = Field(
        default=False, description="with attention 'flex': Triton kernels read the logits twice and no more"
    )

    def fused_on(self, attention: str) -> bool:
        """Whether the loss of a program with this attention runs through the Triton operators."""
        return self.fused and attention == "flex"


class DataConfig(Section):
    train: str = Field(default="", description="folder written by `dflash prepare`")
    eval: str = Field(default="", description="held-out folder written by `dflash prepare`")
    max_seq_len: int = Field(default=4096, gt=0)
    token_budget: int = Field(default=8192, gt=0, description="context tokens of a micro-batch")
    max_anchors: int = Field(default=512, gt=0, description="anchors of a micro-batch")
    max_batch_size: int = Field(default=64, gt=0, description="documents of a micro-batch")
    anchors_per_token: float | None = Field(
        default=None, gt=0, description="anchors per supervised token; max_anchors / token_budget when absent"
    )
    buckets: tuple[str, ...] = Field(default=(), description="the largest is token_budget x max_anchors")

    @property
    def resolved_anchors_per_token(self) -> float:
        return self.anchors_per_token or self.max_anchors / self.token_budget

    @property
    def resolved_buckets(self) -> tuple[Bucket, ...]:
        largest = Bucket.parse(f"{self.token_budget}x{self.max_anchors}")
        listed = parse_buckets(",".join(self.buckets)) if self.buckets else ()
        return tuple(sorted({*listed, largest}))


class TrainConfig(Section):
    lr: float = Field(default=6e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup_ratio: float = Field(default=0.04, ge=0, le=1)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    grad_accum: int = Field(default=1, gt=0, description="micro-batches of one drafter per optimizer step")
    clip: float = Field(default=1.0, gt=0)
    epochs: int = Field(default=1, gt=0)
    max_steps: int | None = Field(default=None, gt=0)
    noise_start: float = Field(default=0.0, ge=0, description="amplitude of the uniform feature noise")
    noise_end: float = Field(default=0.0, ge=0)
    noise_scale: Literal["absolute", "rms"] = "absolute"
    seed: int = 0
    on_miss: Literal["error", "eager"] = "error"


class EvalConfig(Section):
    eval_every: int = Field(default=0, ge=0, description="optimizer steps between evaluations; 0: at the end")
    eval_max_batches: int | None = Field(default=None, gt=0)


class TopologyConfig(Section):
    target_devices: tuple[str, ...] = ("cpu",)
    drafter_devices: tuple[str, ...] = ("cpu",)
    queue_depth: int = Field(default=2, gt=0, description="micro-batches waiting per drafter")
    stall_timeout_s: float = Field(default=600.0, gt=0)


class OutputConfig(Section):
    dir: str = "runs/run"
    checkpoint_every: int = Field(default=0, ge=0, description="optimizer steps; 0: at the end only")
    keep_last: int = Field(default=3, ge=2)
    wandb_project: str | None = None
    wandb_run: str | None = None


class RunConfig(Section):
    """A whole run. Every value is in `dflash config show RUN`."""

    name: str = "run"
    drafter: DrafterConfig
    target: TargetConfig = TargetConfig()
    loss: LossConfig = LossConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    topology: TopologyConfig = TopologyConfig()
    output: OutputConfig = OutputConfig()
    environment: dict[str, str] = Field(default={}, description="variables the launch script exports")

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        for bucket in self.data.resolved_buckets:
            if bucket.anchors * self.drafter.block_size % 128:
                raise ValueError(
                    f"bucket {bucket}: {bucket.anchors} anchors x block size {self.drafter.block_size} "
                    "is not a multiple of 128"
                )
        if self.data.max_seq_len > self.data.token_budget:
            raise ValueError("data.max_seq_len exceeds data.token_budget: such a document fits no bucket")
        return self


def recipe_names() -> list[str]:
    folder = resources.files("dflash") / "recipes"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _read_run_file(run_file: str) -> dict[str, Any]:
    if run_file in recipe_names():
        text = (resources.files("dflash") / "recipes" / f"{run_file}.toml").read_text("utf-8")
    else:
        try:
            text = Path(run_file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(
                f"cannot read run file '{run_file}': {reason}",
                f"name a TOML file or a recipe: {', '.join(recipe_names())}",
            ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"run file '{run_file}' is not valid TOML: {error}",
            f"mend that line; `dflash config show {recipe_names()[0]}` prints a run file as it should be",
        ) from None


def _parse_value(text: str) -> Any:
    """Read a value as TOML would (`3`, `true`, `[1, 2]`); anything else is a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"'{dotted}': '{section}' is a value, not a section")
        values = inner
    values[key] = value


def environment_overrides(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return {dotted key: value} of variables such as `DFLASH_TRAIN__LR`; names without `__` are others'."""
    environ = os.environ if environ is None else environ
    return {
        name[len(ENVIRONMENT_PREFIX) :].lower().replace("__", "."): _parse_value(value)
        for name, value in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name
    }


def flag_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse `section.key=value` texts of `--set`."""
    parsed: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set '{text}' is not KEY=VALUE", "e.g. `--set train.lr=3e-4`")
        parsed[key.strip()] = _parse_value(value.strip())
    return parsed


def validate(values: Mapping[str, Any], source: str) -> RunConfig:
    """Build the config; every problem becomes part of one ConfigError."""
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        problems = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"]) or "run"
            unknown = item["type"] == "extra_forbidden"
            what = "unknown key" if unknown else item["msg"].removeprefix("Value error, ")
            problems.append(f"{where}: {what}")
        raise ConfigError(
            f"{source}: " + "; ".join(problems), "`dflash config schema` lists every key with its type"
        ) from None


def load_config(run_file: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file or recipe, then apply the environment, then `--set` flags.

    Raises ConfigError naming the file, the key and what is wrong with it.
    """
    values = _read_run_file(run_file)
    for layer in (environment_overrides(), flag_overrides(overrides)):
        for key, value in layer.items():
            _assign(values, key, value)
    return validate(values, run_file)


def config_origins(run_file: str, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return {dotted key: flag | environment | run file | default} for every key of the resolved config."""
    file_values, env, flags = _read_run_file(run_file), environment_overrides(), flag_overrides(overrides)

    def origin(dotted: str) -> str:
        if dotted in flags:
            return "flag"
        if dotted in env:
            return "environment"
        node: Any = file_values
        for part in dotted.split("."):
            if not isinstance(node, dict) or part not in node:
                return "default"
            node = node[part]
        return "run file"

    return {key: origin(key) for key in flatten(load_config(run_file, overrides).model_dump(mode="json"))}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value}; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
