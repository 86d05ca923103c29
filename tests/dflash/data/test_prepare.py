import json
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest

from aot.errors import ConfigError
from dflash.data.dataset import Documents
from dflash.data.prepare import REJECTED_NAME, TooManyBadRows, prepare, tokenizer_identity
from tests.support.models import CHATML, MARKED_CHATML, tiny_chat_tokenizer

CHATS = [
    {
        "id": f"c{i}",
        "messages": [{"role": "user", "content": f"what {i}?"}, {"role": "assistant", "content": text}],
    }
    for i, text in enumerate(["it is a cat", "the mat", "that is what it is", "on the mat sat a cat"])
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chat_tokenizer()


def write(path: Path, rows) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8"
    )
    return path


def token_row(name, length=6, value=5, **more):
    return {"id": name, "input_ids": [value] * length, "loss_mask": [0, 0] + [1] * (length - 2), **more}


def everything(folder):
    documents = Documents.open(folder)
    return [
        (d.id, d.input_ids.tolist(), d.loss_mask.tolist())
        for d in map(documents.__getitem__, range(len(documents)))
    ]


def as_sharegpt(row):
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in row["messages"]]
    return {"id": row["id"], "conversations": turns}


def as_json_array(path):
    path.write_text(json.dumps(CHATS, indent=1), "utf-8")
    return path


def as_folder(path):
    datasets.Dataset.from_list(CHATS).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    "make_input",
    [
        as_json_array,
        as_folder,
        lambda path: write(path, map(as_sharegpt, CHATS)),
        lambda path: write(path, ["\ufeff" + json.dumps(CHATS[0]), "", *CHATS[1:]]),
    ],
    ids=["JSON array", "datasets folder", "ShareGPT", "byte order mark and blank lines"],
)
def test_every_input_format_gives_the_same_documents(tmp_path, tokenizer, make_input):
    prepare([write(tmp_path / "plain.jsonl", CHATS)], tmp_path / "plain", tokenizer)
    prepare([make_input(tmp_path / "other")], tmp_path / "out", tokenizer)
    assert everything(tmp_path / "out") == everything(tmp_path / "plain")
    assert Documents.open(tmp_path / "out").digest == Documents.open(tmp_path / "plain").digest


def test_prepared_documents_can_be_prepared_again_as_token_rows(tmp_path, tokenizer):
    prepare([write(tmp_path / "in.jsonl", CHATS)], tmp_path / "once", tokenizer)
    prepare([tmp_path / "once"], tmp_path / "twice", tokenizer)
    assert everything(tmp_path / "once") == everything(tmp_path / "twice")
    assert len(everything(tmp_path / "twice")) == len(CHATS)


BAD_ROWS = [
    "{not json",
    "7",
    '{"id": "deep", "messages": ' + "[" * 100_000,
    '{"id": "digits", "input_ids": [' + "9" * 5000 + "]}",
    {"id": "neither"},
    {"id": "no answer", "messages": [{"role": "user", "content": "a"}]},
    {
        "id": "surrogate",
        "messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a cat"}],
    },
    {"id": "\ud800", "input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]},
    {"id": "no mask", "input_ids": [1, 2, 3]},
    {"id": "lengths", "input_ids": [1, 2, 3], "loss_mask": [1, 1]},
    {"id": "nested", "input_ids": [[1], [2]], "loss_mask": [[1], [1]]},
    {"id": "ragged", "input_ids": [[1], [2, 3]], "loss_mask": [[1], [1]]},
    {"id": "floats", "input_ids": [1.5, 2.0, 3.0], "loss_mask": [1, 1, 1]},
    {"id": "huge", "input_ids": [1, 2, 2**70], "loss_mask": [1, 1, 1]},
    {"id": "mask of two", "input_ids": [1, 2, 3], "loss_mask": [1, 2, 1]},
    {"id": "negative", "input_ids": [1, -2, 3], "loss_mask": [1, 1, 1]},
    {"id": "beyond", "input_ids": [1, 2, 320], "loss_mask": [1, 1, 1]},
    {"id": "empty", "input_ids": [], "loss_mask": []},
    {"id": "nothing to learn", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]},
]


def test_bad_rows_are_skipped_counted_and_listed(tmp_path, tokenizer):
    rows = [CHATS[0], *BAD_ROWS, CHATS[1]]
    report = prepare(
        [write(tmp_path / "in.jsonl", rows)], tmp_path / "out", tokenizer, vocab_size=320, max_bad_rate=1
    )
    assert [name for name, _, _ in everything(tmp_path / "out")] == ["c0", "c1"]
    rejected = [json.loads(line) for line in (tmp_path / "out" / REJECTED_NAME).read_text().splitlines()]
    assert [entry["place"] for entry in rejected] == [f"in.jsonl:{i + 2}" for i in range(len(BAD_ROWS))]
    assert {entry["id"] for entry in rejected} >= {row["id"] for row in BAD_ROWS if isinstance(row, dict)}
    assert report.rows == len(rows)
    assert report.bad_rows == len(BAD_ROWS)
    assert report.bad_by_reason == Counter(entry["reason"] for entry in rejected)
    manifest = Documents.open(tmp_path / "out").manifest
    assert manifest["bad_rows"] == len(BAD_ROWS)
    assert manifest["documents"] == 2


def test_broken_byte_costs_its_own_row_only(tmp_path, tokenizer):
    path = write(tmp_path / "in.jsonl", CHATS)
    path.write_bytes(path.read_bytes().replace(b"the mat", b"the\xffmat", 1))
    report = prepare([path], tmp_path / "out", tokenizer, max_bad_rate=0.5)
    assert report.bad_by_reason == {"not valid UTF-8": 1}
    assert len(everything(tmp_path / "out")) == len(CHATS) - 1


def test_json_array_cut_short_yields_the_rows_before_the_cut(tmp_path, tokenizer):
    path = tmp_path / "in.json"
    text = json.dumps(CHATS)
    path.write_text(text[: text.index("that is")])
    report = prepare([path], tmp_path / "out", tokenizer, max_bad_rate=0.5)
    assert [name for name, _, _ in everything(tmp_path / "out")] == ["c0", "c1"]
    assert report.bad_rows == 1


@pytest.mark.parametrize("bad", [1, 2])
def test_bad_rate_above_the_limit_fails_and_leaves_nothing(tmp_path, tokenizer, bad):
    rows = [token_row(f"t{i}", length=4 + i) for i in range(20 - bad)] + [{"id": "x"}] * bad
    source = write(tmp_path / "in.jsonl", rows)
    if bad == 1:
        assert prepare([source], tmp_path / "out", tokenizer, max_bad_rate=0.05).bad_rows == 1
        return
    with pytest.raises(TooManyBadRows, match=r"2 of 20 rows .* 5.00%.*\(x, x\)"):
        prepare([source], tmp_path / "out", tokenizer, max_bad_rate=0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_interrupted_preparation_leaves_nothing(tmp_path, tokenizer):
    def interrupt(rows):
        raise KeyboardInterrupt

    source = write(tmp_path / "in.jsonl", [token_row(f"t{i}", length=4 + i) for i in range(200)])
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", tokenizer, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_existing_output_is_kept_unless_overwritten(tmp_path, tokenizer):
    prepare([write(tmp_path / "in.jsonl", CHATS)], tmp_path / "out", tokenizer)
    fewer = write(tmp_path / "fewer.jsonl", CHATS[:2])
    with pytest.raises(ConfigError, match="exists"):
        prepare([fewer], tmp_path / "out", tokenizer)
    assert len(everything(tmp_path / "out")) == 4
    prepare([fewer], tmp_path / "out", tokenizer, overwrite=True)
    assert len(everything(tmp_path / "out")) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fewer.jsonl", "in.jsonl", "out"]


def test_overwriting_never_removes_a_folder_of_something_else(tmp_path, tokenizer):
    source = write(tmp_path / "in.jsonl", CHATS)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "work.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        prepare([source], tmp_path / "precious", tokenizer, overwrite=True)
    assert (tmp_path / "precious" / "work.txt").read_text() == "mine"


def test_split_keeps_a_conversation_on_one_side_in_any_order_of_rows(tmp_path, tokenizer):
    rows = [
        token_row(f"{chat}/{part}", length=4 + chat, value=part, conversation_id=f"chat {chat}")
        for chat in range(100)
        for part in range(3)
    ]
    sides = []
    for name, listed in (("forward", rows), ("backward", rows[::-1])):
        source = write(tmp_path / f"{name}.jsonl", listed)
        report = prepare([source], tmp_path / name, tokenizer, eval_fraction=0.2)
        train, held_out = (
            {row[0] for row in everything(report.folders[split])} for split in ("train", "eval")
        )
        assert {name.split("/")[0] for name in train}.isdisjoint(name.split("/")[0] for name in held_out)
        assert len(train) + len(held_out) == len(rows)
        assert 0.1 < len(held_out) / len(rows) < 0.3
        sides.append(held_out)
    assert sides[0] == sides[1]


def test_split_that_leaves_a_side_empty_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="no document for eval"):
        prepare([write(tmp_path / "in.jsonl", CHATS)], tmp_path / "out", tokenizer, eval_fraction=1e-9)


def test_copies_are_dropped_and_reused_ids_made_distinct(tmp_path, tokenizer):
    rows = [
        token_row("a", 5),
        token_row("a", 5),
        token_row("b", 5),
        token_row("a", 6),
        {**token_row("x", 7), "id": None},
    ]
    report = prepare([write(tmp_path / "in.jsonl", rows)], tmp_path / "out", tokenizer)
    documents = everything(tmp_path / "out")
    assert report.duplicates == 2
    assert [len(ids) for _, ids, _ in documents] == [5, 6, 7]
    assert len({name for name, _, _ in documents}) == 3
    assert documents[0][0] == "a"


def test_manifest_tells_what_the_folder_holds(tmp_path, tokenizer):
    prepare(
        [write(tmp_path / "in.jsonl", [token_row("a", 5, 9), token_row("b", 8, 3)])],
        tmp_path / "out",
        tokenizer,
    )
    documents = Documents.open(tmp_path / "out")
    expected = {
        "documents": 2, "tokens": 13, "supervised_tokens": 9, "candidate_anchors": 7, "max_token_id": 9,
        "lengths_up_to": {"8": 2}, **tokenizer_identity(tokenizer),
    }  # fmt: skip
    assert {key: documents.manifest[key] for key in expected} == expected
    assert documents.max_token_id == 9


def test_digest_and_hashes_follow_content_tokenizer_and_template(tmp_path, tokenizer):
    digests = set()
    for i, rows in enumerate(
        [[token_row("a")], [token_row("b")], [token_row("a", 7)], [token_row("a", value=6)]]
    ):
        prepare([write(tmp_path / f"{i}.jsonl", rows)], tmp_path / str(i), tokenizer)
        digests.add(Documents.open(tmp_path / str(i)).digest)
    assert len(digests) == 4
    plain, marked = tokenizer_identity(tokenizer), tokenizer_identity(tiny_chat_tokenizer(MARKED_CHATML))
    assert plain["tokenizer_hash"] == marked["tokenizer_hash"]
    assert plain["template_hash"] != marked["template_hash"]
    more = tiny_chat_tokenizer(CHATML)
    more.add_tokens(["cat!"])
    assert tokenizer_identity(more)["tokenizer_hash"] != plain["tokenizer_hash"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent.json", "cannot be read"), ("", "cannot be read"), ("splits", "several splits")],
)
def test_unreadable_input_is_refused(tmp_path, tokenizer, name, message):
    folder = tmp_path / "inputs"
    datasets.DatasetDict({"train": datasets.Dataset.from_list(CHATS)}).save_to_disk(folder / "splits")
    with pytest.raises(ConfigError, match=message):
        prepare([folder / name], tmp_path / "out", tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["inputs"]


def test_chat_rows_need_a_chat_template(tmp_path):
    source = write(tmp_path / "in.jsonl", CHATS)
    with pytest.raises(ConfigError, match="no chat template"):
        prepare([source], tmp_path / "out", tiny_chat_tokenizer(None))
    source = write(tmp_path / "tokens.jsonl", [token_row("a")])
    assert prepare([source], tmp_path / "out", tiny_chat_tokenizer(None)).documents == {"train": 1}


def test_documents_are_read_back_as_written(tmp_path, tokenizer):
    random = np.random.default_rng(0)
    rows = []
    for i in range(300):
        length = int(random.integers(3, 40))
        mask = random.random(length) < 0.8
        mask[-2:] = True
        rows.append(
            {"id": f"r{i}", "input_ids": random.integers(0, 256, length).tolist(), "loss_mask": mask.tolist()}
        )
    prepare([write(tmp_path / "in.jsonl", rows)], tmp_path / "out", tokenizer)
    assert everything(tmp_path / "out") == [(row["id"], row["input_ids"], row["loss_mask"]) for row in rows]


@pytest.mark.parametrize("place", ["file/out", "file/below/out", "/proc/below/out"])
def test_an_output_that_cannot_be_made_is_told_by_its_flag(tmp_path, tokenizer, place):
    """Uncaught it is a traceback, or a hint that names the flag of another command."""
    (tmp_path / "file").touch()
    rows = write(tmp_path / "in.jsonl", CHATS)
    with pytest.raises(ConfigError, match=f"--output '{tmp_path / place}' cannot be written"):
        prepare([rows], tmp_path / place, tokenizer)
