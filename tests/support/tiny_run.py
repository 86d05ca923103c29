"""A whole run small enough for a test: a random Llama target, its tokenizer, documents and a run file.

Everything is made from seeds, so its artifacts have the same keys in every session: they are built once into
`.cache/tests/store` (or $DFLASH_TEST_STORE) and found there afterwards.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HIDDEN, VOCAB, LAYERS = 64, 256, 4
SMALL, LARGE = "128x16", "256x32"
#: What the run file emits.
NEEDS = [("train_step", SMALL), ("train_step", LARGE), ("eval_step", LARGE)]
REPOSITORY = Path(__file__).resolve().parents[2]
FACTORY = "dflash.drafter.programs:program_set"

RUN_FILE = """\
name = "tiny"

[target]
model = "{root}/target"

[drafter]
hidden_size = 64
intermediate_size = 96
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 16
vocab_size = 256
num_target_layers = 4
target_layer_ids = [0, 2]
mask_token_id = 5
block_size = 8

[loss]
kl_weight = 0.15
temperature = 2.0
cap_weight = 0.1
max_chunk_rows = 128

[data]
train = "{root}/data/train"
eval = "{root}/data/eval"
max_seq_len = 96
token_budget = 256
max_anchors = 32
max_batch_size = 8
buckets = ["128x16"]

[train]
lr = 2e-3
epochs = 2
noise_start = 0.05
noise_end = 0.01

[eval]
eval_max_batches = 3

[topology]
target_devices = ["cpu", "cpu"]
drafter_devices = ["cpu", "cpu", "cpu"]
stall_timeout_s = 120

[output]
dir = "{root}/out"
"""


@dataclass(frozen=True)
class TinyRun:
    """Paths of one tiny run."""

    root: Path
    store: Path

    @property
    def run_file(self) -> str:
        return str(self.root / "run.toml")

    @property
    def lock(self) -> Path:
        return self.root / "artifacts.lock"


def make_target(folder: Path) -> None:
    """Save a random 4-layer Llama with untied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.random.set_rng_state(state)


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Make and save a word-level tokenizer of VOCAB entries whose template marks the assistant's turns."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "<mask>"]
    words = special + [f"w{i}" for i in range(VOCAB - len(special))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<user>", "<assistant>", "<mask>"],
    )
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} {% else %}"
        "<assistant> {% generation %}{{ m['content'] }} </s> {% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    fast.save_pretrained(folder)
    return fast


def make_rows(seed: int, count: int) -> list[dict[str, object]]:
    """Documents of 24 to 96 tokens whose text repeats itself, so that a drafter can learn something."""
    random = np.random.Generator(np.random.Philox(seed))
    rows = []
    for index in range(count):
        length, prompt = int(random.integers(24, 97)), int(random.integers(4, 12))
        phrase = random.integers(6, VOCAB, size=int(random.integers(4, 9)))
        ids = np.resize(phrase, length).tolist()
        rows.append(
            {"id": f"{seed}-{index}", "input_ids": ids, "loss_mask": [i >= prompt for i in range(length)]}
        )
    return rows


def make_tiny_run(root: Path, store: Path | None = None) -> TinyRun:
    """Write target, tokenizer, data and run file under `root`."""
    from dflash.data.prepare import prepare

    root.mkdir(parents=True, exist_ok=True)
    make_target(root / "target")
    tokenizer = make_tokenizer(root / "target")
    for split, seed, count in (("train", 1, 64), ("eval", 2, 12)):
        source = root / f"{split}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in make_rows(seed, count)))
        prepare([source], root / "data" / split, tokenizer)
    (root / "run.toml").write_text(RUN_FILE.format(root=root))
    return TinyRun(root, store or default_store())


def default_store() -> Path:
    return Path(os.environ.get("DFLASH_TEST_STORE") or REPOSITORY / ".cache" / "tests" / "store")


def build_artifacts(run: TinyRun, needs: list[tuple[str, str]], overrides: tuple[str, ...] = ()) -> None:
    """Build what the store lacks and name it in the lock file; sessions take turns, later ones find it."""
    from aot.compile import BuildRequest, build
    from aot.lockfile import update_lock
    from aot.store import Store

    run.store.mkdir(parents=True, exist_ok=True)
    requests = [BuildRequest(FACTORY, run.run_file, overrides, program, bucket) for program, bucket in needs]
    with (run.store.parent / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = build(requests, Store(run.store), jobs=2)
    update_lock(run.lock, [result.manifest for result in results], whole=False)
