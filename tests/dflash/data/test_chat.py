import numpy as np
import pytest

from dflash.data.chat import BadRow, ChatTokenizer, read_messages
from tests.support.models import CHATML, MARKED_CHATML, tiny_chat_tokenizer

CHATS = {
    "one turn": [("user", "what is it?"), ("assistant", "it is a cat")],
    "system": [("system", "the mat"), ("user", "what"), ("assistant", "that is\n\nwhat it is.")],
    "three turns": [
        ("user", "a"),
        ("assistant", "it is"),
        ("user", "assistant\nit is"),
        ("assistant", "é 你 cat"),
        ("user", "what?"),
        ("assistant", "it is"),
    ],
    "empty answer": [("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "cat")],
    "starts like the prompt": [
        ("user", "a"),
        ("assistant", "<think and <|im"),
        ("user", "b"),
        ("assistant", "<"),
    ],
}
# An earlier answer's thoughts vanish once others follow, as in Qwen3; the generation prompt opens a thought.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)


def messages_of(chat):
    return [{"role": role, "content": content} for role, content in chat]


def by_hand(tokenizer, chat):
    """Tokenize the pieces of a ChatML conversation one by one; learn the answer and its end-of-turn token."""
    ids, mask = [], []

    def add(text, learn):
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(piece)
        mask.extend([learn] * len(piece))

    for role, content in chat:
        learn = role == "assistant"
        add(f"<|im_start|>{role}\n", False)
        add(content, learn)
        add("<|im_end|>", learn)
        add("\n", False)
    return ids, np.array(mask)


@pytest.mark.parametrize("template", [CHATML, MARKED_CHATML], ids=["rendered turns", "generation marks"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_loss_mask_covers_answers_and_their_end_token_only(chat, template):
    tokenizer = tiny_chat_tokenizer(template)
    chat_tokenizer = ChatTokenizer(tokenizer)
    ids, mask = chat_tokenizer.encode(messages_of(chat))
    expected_ids, expected_mask = by_hand(tokenizer, chat)
    assert ids == expected_ids
    assert mask.tolist() == expected_mask.tolist()
    assert mask.any()
    assert not mask.all()
    assert chat_tokenizer.disagreements == 0


def test_generation_marks_that_start_elsewhere_decide_and_are_counted():
    template = MARKED_CHATML.replace(
        "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{%- generation -%}",
        "{% if m['role'] == 'assistant' %}{%- generation -%}{{ '<|im_start|>' + m['role'] + '\n' }}",
    ).replace("{% else %}", "{% else %}{{ '<|im_start|>' + m['role'] + '\n' }}")
    tokenizer = tiny_chat_tokenizer(template)
    chat_tokenizer = ChatTokenizer(tokenizer)
    ids, mask = chat_tokenizer.encode(messages_of(CHATS["one turn"]))
    assert ids == by_hand(tokenizer, CHATS["one turn"])[0]
    assert tokenizer.decode(np.array(ids)[mask]) == "<|im_start|>assistant\nit is a cat<|im_end|>"
    assert chat_tokenizer.disagreements == 1


def test_template_that_hides_earlier_thoughts_still_yields_every_answer():
    chat = [
        ("user", "what?"),
        ("assistant", "<think>the mat</think>it is a cat"),
        ("user", "is it?"),
        ("assistant", "<think>cat</think>it is"),
    ]
    tokenizer = tiny_chat_tokenizer(THINKING)
    ids, mask = ChatTokenizer(tokenizer).encode(messages_of(chat))
    # The last answer's opening `<think>` belongs to the generation prompt, so it is not learned.
    assert tokenizer.decode(np.array(ids)[mask]) == "it is a cat<|im_end|>cat</think>it is<|im_end|>"


def test_template_without_end_token_learns_the_text_without_the_newline_after_it():
    template = (
        "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    )
    tokenizer = tiny_chat_tokenizer(template)
    ids, mask = ChatTokenizer(tokenizer).encode(messages_of(CHATS["one turn"]))
    assert tokenizer.decode(np.array(ids)[mask]) == "it is a cat"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages[::-1] %}{{ m['content'] }}{% endfor %}", "cannot be located"),
        ("{{ raise_exception('no system role') }}", "no system role"),
    ],
    ids=["reorders turns", "raises"],
)
def test_template_that_cannot_serve_makes_a_bad_row(template, reason):
    with pytest.raises(BadRow, match=reason):
        ChatTokenizer(tiny_chat_tokenizer(template)).encode(messages_of(CHATS["one turn"]))


def test_special_token_inside_a_message_makes_a_bad_row():
    chat = [("user", "say <|im_end|> now"), ("assistant", "no")]
    with pytest.raises(BadRow, match="special token"):
        ChatTokenizer(tiny_chat_tokenizer()).encode(messages_of(chat))


def test_sharegpt_turns_become_messages_between_first_question_and_last_answer():
    row = {
        "conversations": [
            {"from": "gpt", "value": "cut off"},
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
            {"from": "human", "value": "unanswered"},
        ]
    }
    assert read_messages(row) == messages_of([("user", "a"), ("assistant", "b")])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no `messages`"),
        ({"messages": "hello"}, "not a list"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no assistant turn"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "not text"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}, "not text"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "unknown role"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "unknown role"),
    ],
)
def test_malformed_conversation_makes_a_bad_row(row, reason):
    with pytest.raises(BadRow, match=reason):
        read_messages(row)
