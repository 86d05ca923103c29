"""Conversations and their assistant-only loss masks.

Where the chat template marks the assistant's text with ``{% generation %}``, the marks decide. Elsewhere
assistant turn i is found by rendering: it starts where the conversation before it ends together with the
generation prompt, and ends with its last special token (the end-of-turn token, which the model must learn to
write; the newline that many templates put after it is never generated).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
Span = tuple[int, int]

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


class BadRow(Exception):
    """A row that cannot be used; the message is the reason, the same for every row with that fault."""


def read_messages(row: Mapping[str, Any]) -> list[Message]:
    """Return the conversation of a `messages` or ShareGPT `conversations` row, up to its last answer.

    Leading assistant turns (ShareGPT cuts long chats anywhere) answer something unknown, and what follows the
    last answer has none: both are left out. Raises BadRow.
    """
    if "messages" in row:
        messages = [_checked(message) for message in _turns(row["messages"])]
    elif "conversations" in row:
        messages = [_from_sharegpt(turn) for turn in _turns(row["conversations"])]
    else:
        raise BadRow("no `messages`, `conversations` or `input_ids`")
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise BadRow("no assistant turn after a user turn")
    return messages


def _turns(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, (list, tuple, np.ndarray)) or not all(
        isinstance(turn, Mapping) for turn in value
    ):
        raise BadRow("the conversation is not a list of messages")
    return list(value)


def _checked(message: Mapping[str, Any]) -> Message:
    if message.get("role") not in ROLES:
        raise BadRow("a message has an unknown role")
    # Columns of a `datasets` folder hold None where a message has no such key.
    present = {key: value for key, value in message.items() if value is not None}
    if isinstance(present.get("content"), str):
        return present
    if "content" not in present and present.get("tool_calls"):
        return {**present, "content": ""}
    raise BadRow("a message's content is not text")


def _from_sharegpt(turn: Mapping[str, Any]) -> Message:
    role = SHAREGPT_ROLES.get(str(turn.get("from")))
    if role is None:
        raise BadRow("a message has an unknown role")
    return _checked({"role": role, "content": turn.get("value")})


class ChatTokenizer:
    """Renders conversations with a tokenizer's chat template and finds the assistant's tokens.

    `disagreements` counts conversations whose ``{% generation %}`` marks start elsewhere than the turns that
    rendering finds.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self.disagreements = 0
        self._special = sorted(
            {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        )
        self._has_marks = bool(GENERATION_MARK.search(str(tokenizer.chat_template)))

    def encode(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], np.ndarray]:
        """Return token ids and the bool loss mask of a conversation. Raises BadRow."""
        if any(token in message["content"] for message in messages for token in self._special):
            raise BadRow("a message contains a special token")
        text = self._render(messages, tools)
        if not is_text(text):
            raise BadRow("not valid UTF-8")
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        if not self._has_marks:
            return encoded["input_ids"], _mask(offsets, self._spans(messages, text, tools))
        ids, mask = self._marked(messages, tools)
        if ids != encoded["input_ids"]:
            raise BadRow("the chat template renders differently with its generation marks")
        self._compare(mask, messages, text, offsets, tools)
        return ids, mask

    def _render(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:
            # Templates raise what they like: jinja errors, TypeErrors, their own `raise_exception`.
            raise BadRow(f"the chat template refuses it: {str(error).splitlines()[0]}") from error

    def _marked(self, messages: Sequence[Message], tools: Any) -> tuple[list[int], np.ndarray]:
        encoded = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoded["input_ids"], np.asarray(encoded["assistant_masks"], dtype=bool)

    def _compare(
        self, mask: np.ndarray, messages: Sequence[Message], text: str, offsets: np.ndarray, tools: Any
    ) -> None:
        try:
            starts = [start for start, _ in self._spans(messages, text, tools)]
        except BadRow:
            self.disagreements += 1
            return
        first = mask & ~np.append(False, mask[:-1])
        self.disagreements += offsets[first, 0].tolist() != starts

    def _spans(self, messages: Sequence[Message], text: str, tools: Any) -> list[Span]:
        """Return the character spans of the assistant turns in the rendered conversation."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            header = self._render(messages[:i], tools)
            prompt = self._render(messages[:i], tools, prompt=True)
            # Thinking templates open the prompt with more than an earlier turn shows: what both share counts.
            start = _common_prefix(text, prompt)
            if start <= len(header) or not text.startswith(header):
                raise BadRow("the chat template rewrites earlier turns: the answer cannot be located")
            spans.append((start, self._end(messages[: i + 1], text, start, tools)))
        return spans

    def _end(self, messages: Sequence[Message], text: str, start: int, tools: Any) -> int:
        """Return where the last turn of `messages` ends in `text`: after its last special token if any."""
        rendered = self._render(messages, tools)
        if text.startswith(rendered):
            turn = text[start : len(rendered)]
            ends = [turn.rfind(token) + len(token) for token in self._special if token in turn]
            return start + (max(ends) if ends else len(turn.rstrip()))
        # The template shows this turn differently once others follow: it ends with the next special token.
        ends = [text.index(token, start) + len(token) for token in self._special if token in text[start:]]
        if not ends:
            raise BadRow("the chat template rewrites earlier turns: the answer cannot be located")
        return min(ends)


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8: it has no lone surrogate."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _common_prefix(a: str, b: str) -> int:
    """Length of what both texts start with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _mask(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Mark the tokens that lie inside a span: [start, end) in characters, tokens without text in none."""
    start, end = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), dtype=bool)
    for first, last in spans:
        mask |= (start >= first) & (end <= last) & (end > start)
    return mask
