import contextlib
import json
import shutil

import datasets
import numpy as np
import pytest

from aot.errors import ConfigError
from dflash.data.dataset import MANIFEST_NAME, Documents, content_digest


def candidates_by_definition(mask):
    return [p for p in range(1, len(mask) - 1) if mask[p] and mask[p + 1]]


@pytest.mark.parametrize("max_length", [None, 120, 37, 3, 2, 1])
@pytest.mark.parametrize("chunked", [False, True], ids=["one chunk", "many chunks"])
def test_lengths_and_candidates_equal_a_count_document_by_document(documents, max_length, chunked):
    if chunked:
        parts = [
            documents.rows.select(range(start, min(start + 33, len(documents))))
            for start in range(0, 400, 33)
        ]
        documents = Documents(documents.folder, documents.manifest, datasets.concatenate_datasets(parts))
        assert len(documents.rows.data.column("loss_mask").chunks) > 1
    lengths, candidates = documents.measure(max_length)
    masks = [documents[i].loss_mask[:max_length] for i in range(len(documents))]
    assert lengths.tolist() == [len(mask) for mask in masks]
    assert candidates.tolist() == [len(candidates_by_definition(mask)) for mask in masks]


def test_whole_lengths_and_candidates_are_the_default(documents):
    assert (documents.lengths == documents.measure(None)[0]).all()
    assert (documents.supervised == documents.measure(None)[1]).all()
    assert documents.lengths.max() > 100


@pytest.mark.parametrize(
    "fault", ["absent", "no manifest", "bad manifest", "old schema", "rows missing", "no data"]
)
def test_folder_that_is_not_whole_is_refused_with_the_command_to_make_it(documents, tmp_path, fault):
    folder = tmp_path / "out"
    if fault != "absent":
        rows = documents.rows.with_format(None)
        manifest = dict(documents.manifest)
        if fault == "rows missing":
            rows = rows.select(range(399))
        if fault == "old schema":
            manifest["schema"] = 0
        if fault == "no data":
            folder.mkdir()
        else:
            rows.save_to_disk(folder)
        if fault != "no manifest":
            (folder / MANIFEST_NAME).write_text("[" if fault == "bad manifest" else json.dumps(manifest))
    with pytest.raises(ConfigError) as caught:
        Documents.open(folder)
    assert str(folder) in caught.value.message
    assert "dflash prepare" in caught.value.hint


def changed_copy(documents, folder, change):
    """A copy of the prepared folder whose Arrow file went through `change`, a function of its bytes."""
    shutil.copytree(documents.folder, folder)
    [path] = folder.glob("*.arrow")
    path.write_bytes(change(bytearray(path.read_bytes())))
    return folder


@pytest.mark.parametrize("bit", [0, 30], ids=["another token", "a token beyond every vocabulary"])
def test_one_flipped_bit_of_one_token_is_refused_at_the_start(documents, tmp_path, bit):
    """Without the digest of the data the folder opens, and a run trains on what nobody prepared."""
    ids = documents[7].input_ids[:8].astype(np.int32).tobytes()

    def flip(data):
        assert data.count(ids) == 1
        data[data.index(ids) + bit // 8] ^= 1 << bit % 8
        return data

    with pytest.raises(ConfigError, match="other documents than were prepared") as caught:
        Documents.open(changed_copy(documents, tmp_path / "out", flip))
    assert "dflash prepare" in caught.value.hint


def test_bits_flipped_in_what_describes_the_table_are_refused_without_a_traceback(documents, tmp_path):
    """Damaged metadata raises KeyError, TypeError and more in `datasets`; caught one by one, some get out."""
    random = np.random.default_rng(0)
    for number, place in enumerate(random.integers(0, 1500, 60)):

        def flip(data, place=place):
            data[place] ^= 1 << int(random.integers(8))
            return data

        with contextlib.suppress(ConfigError):
            opened = Documents.open(changed_copy(documents, tmp_path / str(number), flip))
            assert content_digest(opened.rows) == documents.digest
