"""A frozen Hugging Face causal LM as the source of context features.

Features are the residual stream after the feature layers, taken by hooks on those layers; the teacher is the
output of the final norm. `lm_head` never runs over the context. Batches are right-padded without an attention
mask: with causal attention, and with linear attention alike, what lies right of a token cannot change it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from aot.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import Cache, PretrainedConfig, PreTrainedModel

    from dflash.config import DrafterConfig, TargetConfig

FINAL_NORM = -1
#: Share of a target batch that may be padding.
MAX_PADDING = 0.05
HASHED_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
#: How far logits may be from lm_head(final norm), relative to the largest: rounding of one matrix product.
HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass
class HuggingFaceTarget:
    """One model on one device. `features` and `extend` may be called from several threads at once."""

    model: PreTrainedModel
    layer_ids: tuple[int, ...]
    device: torch.device
    folder: Path | None = None
    _captured: threading.local = field(default_factory=threading.local, repr=False)

    @classmethod
    def load(cls, config: TargetConfig, layer_ids: Sequence[int], device: torch.device) -> HuggingFaceTarget:
        """Load the model of `config` in its dtype, frozen, onto `device`.

        Raises ConfigError when it cannot be found or read, or is no plain causal LM.
        """
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, config.dtype)
        with _told(config):
            model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype)
        check_fast_kernels(model.config, device)
        return cls(model.to(device), tuple(layer_ids), device, _local_folder(config.model))

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        decoder = self._decoder
        if any(not 0 <= i < len(decoder.layers) for i in self.layer_ids):
            raise ConfigError(
                f"feature layers {list(self.layer_ids)}: the target has {len(decoder.layers)} layers",
                "drafter.target_layer_ids counts from 0",
            )
        for i in self.layer_ids:
            decoder.layers[i].register_forward_hook(self._hook(i))
        decoder.norm.register_forward_hook(self._hook(FINAL_NORM))
        self._check_head()

    @property
    def _decoder(self) -> Any:
        """The stack of decoder layers of a text model, or of the text part of a multimodal one."""
        decoder = self.model.get_decoder()
        decoder = getattr(decoder, "language_model", decoder)
        if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
            raise ConfigError(
                f"target {type(self.model).__name__} has no `layers` and `norm` to take features from",
                "use a decoder-only causal LM",
            )
        return decoder

    @property
    def embed_tokens(self) -> Tensor:
        """The frozen embedding [V, H]."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> Tensor:
        """The frozen output matrix [V, H]; logits are final hidden states times its transpose."""
        return self.model.get_output_embeddings().weight

    @property
    def num_layers(self) -> int:
        return len(self._decoder.layers)

    @cached_property
    def model_hash(self) -> str:
        """SHA-256 over configuration and weights on disk; over the tensors of a model made in memory."""
        digest = hashlib.sha256()
        if self.folder is None:
            for name, tensor in sorted(self.model.state_dict().items()):
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
            return digest.hexdigest()
        for path in sorted(path for pattern in HASHED_FILES for path in self.folder.glob(pattern)):
            digest.update(f"{path.name} {_file_digest(path)}\n".encode())
        return digest.hexdigest()

    def check(self, drafter: DrafterConfig) -> None:
        """Raise ConfigError naming every way in which the drafter's shape is not this target's."""
        vocab_size, hidden_size = self.embed_tokens.shape
        pairs = {
            "hidden_size": (drafter.hidden_size, hidden_size),
            "vocab_size": (drafter.vocab_size, vocab_size),
            "num_target_layers": (drafter.num_target_layers, self.num_layers),
            "target_layer_ids": (drafter.target_layer_ids, self.layer_ids),
        }
        wrong = [
            f"drafter.{key} is {ours}, the target has {its}"
            for key, (ours, its) in pairs.items()
            if ours != its
        ]
        if wrong:
            raise ConfigError(
                f"the drafter does not fit its target: {'; '.join(wrong)}",
                "set these keys to the target's values and build again",
            )

    @torch.no_grad()
    def features(self, documents: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Run whole documents; return (features [length, n*H], final hidden [length, H]) of each.

        `documents` are int64 [length] token ids on any device, run in batches of like length. Results lie on
        the target's device, without padding.
        """
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for group in length_groups([len(document) for document in documents]):
            found.update(zip(group, self._batch([documents[index] for index in group]), strict=True))
        return [found[index] for index in range(len(documents))]

    def _batch(self, documents: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """`features` of documents that are run as one padded batch."""
        padded_NL = torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
        if self.device.type == "cuda" and padded_NL.device.type == "cpu":
            padded_NL = padded_NL.pin_memory()
        captured = self._forward(padded_NL.to(self.device, non_blocking=True))
        # Cut by lengths that the host knows: an index of the padding would have to wait for the device.
        return [
            (
                torch.cat([captured[i][row, : len(document)] for i in self.layer_ids], dim=-1),
                captured[FINAL_NORM][row, : len(document)],
            )
            for row, document in enumerate(documents)
        ]

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ids = self.model.generation_config.eos_token_id
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)

    def prefill(self, input_ids: Tensor, rewind: int) -> tuple[Cache, Tensor, Tensor]:
        """Run a prompt int64 [L] into a fresh cache; returns it with `extend`'s results.

        `rewind` is the most tokens that a `rewind` will ever take back at once.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        features_LF, logits_LV = self.extend(input_ids, cache)
        # From here on each `extend` keeps what a `rewind` needs, also of sliding and linear attention; the
        # states of linear attention one by one since transformers 5.25.
        keeps = "kwargs" in inspect.signature(cache.activate_past_recording).parameters
        cache.activate_past_recording(**({"recurrent_states_to_keep": rewind} if keeps else {}))
        return cache, features_LF, logits_LV

    @staticmethod
    def rewind(cache: Cache, tokens: int) -> None:
        """Forget the last `tokens` tokens of the last `extend`; call it after each one, also with 0."""
        cache.crop(-tokens)

    @torch.no_grad()
    def extend(self, input_ids: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Append tokens int64 [L] to one sequence in `cache`; return (features [L, n*H], logits [L, V])."""
        captured = self._forward(input_ids[None].to(self.device), cache)
        features_LF = torch.cat([captured[i][0] for i in self.layer_ids], dim=-1)
        return features_LF, F.linear(captured[FINAL_NORM][0], self.lm_head)

    def _forward(self, input_ids_NL: Tensor, cache: Cache | None = None) -> dict[int, Tensor]:
        """Run the decoder stack; return what this thread's hooks saw."""
        self._captured.outputs = {}
        try:
            decoder = self._decoder
            given = {} if cache is None else {_cache_argument(decoder): cache}
            decoder(input_ids=input_ids_NL, use_cache=cache is not None, **given)
            return self._captured.outputs
        finally:
            self._captured.outputs = None

    def _hook(self, key: int) -> Any:
        def capture(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            outputs = getattr(self._captured, "outputs", None)
            if outputs is not None:
                outputs[key] = output[0] if isinstance(output, tuple) else output

        return capture

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a target whose logits are more than lm_head(final norm): scaled, capped or biased ones."""
        probe_1L = torch.arange(min(8, self.embed_tokens.shape[0]), device=self.device)[None]
        logits = self.model(input_ids=probe_1L, use_cache=False).logits
        ours = F.linear(self._forward(probe_1L)[FINAL_NORM], self.lm_head)
        error = (logits - ours).abs().max() / logits.abs().max()
        if error > HEAD_TOLERANCE.get(logits.dtype, 3e-2):
            raise ConfigError(
                f"target {type(self.model).__name__} changes its logits after lm_head (relative {error:.2g})",
                "a DFlash drafter shares the head as it is; use a target without scaled or capped logits",
            )


def length_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Cut documents into batches of like length, as indices, longest first; MAX_PADDING holds for each."""
    groups: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        real += lengths[index]
        if not groups or real < (1 - MAX_PADDING) * lengths[groups[-1][0]] * (len(groups[-1]) + 1):
            groups.append([])
            real = lengths[index]
        groups[-1].append(index)
    return groups


def check_configuration(config: TargetConfig) -> None:
    """Raise ConfigError unless the target's configuration can be read; its weights are not touched."""
    from transformers import AutoConfig

    with _told(config):
        AutoConfig.from_pretrained(config.model)


@contextlib.contextmanager
def _told(config: TargetConfig) -> Iterator[None]:
    """Turn what transformers raises for a model that it cannot load into a ConfigError.

    Truncated weights are a SafetensorError, those of other shapes than config.json says a RuntimeError.
    """
    if not config.model:
        raise ConfigError("target.model is empty", "name a folder or a hub model: `--set target.model=NAME`")
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "mismatched_sizes" in reason:
            reason = "its weights have other shapes than its config.json says"
        raise ConfigError(
            f"target.model '{config.model}' cannot be loaded: {reason}",
            "name a folder with config.json and the safetensors that belong to it, or a hub model that is "
            "downloaded",
        ) from None


def check_fast_kernels(config: PretrainedConfig, device: torch.device) -> None:
    """Raise EnvironmentFault if linear-attention layers would run on a GPU without their kernels.

    transformers then falls back to a loop over chunks in plain PyTorch, with no more than a warning.
    """
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    if device.type != "cuda" or "linear_attention" not in layer_types:
        return
    try:
        importlib.import_module("fla")
    except ImportError as error:
        raise EnvironmentFault(
            f"the target has linear-attention layers, whose kernels are in `fla-core`: {error}",
            "`pip install 'dflash-aot[target]'`; without it they run as slow PyTorch loops",
        ) from None


def _cache_argument(decoder: torch.nn.Module) -> str:
    """The key/value cache's argument, which transformers renamed in 5.x."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def _local_folder(model: str) -> Path:
    """The folder that a model was loaded from: itself, or its snapshot in the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def _file_digest(path: Path) -> str:
    """SHA-256 of a file; the hub's cache names large files by it, which saves reading them."""
    name = path.resolve().name
    if path.is_symlink() and len(name) == hashlib.sha256().digest_size * 2:
        return name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
