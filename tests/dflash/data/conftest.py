from __future__ import annotations

import json

import numpy as np
import pytest

from dflash.data.dataset import Documents
from dflash.data.prepare import prepare
from tests.support.models import tiny_chat_tokenizer


@pytest.fixture(scope="session")
def documents(tmp_path_factory) -> Documents:
    """400 documents of 3 to 120 tokens with holes in their loss masks."""
    random = np.random.default_rng(7)
    root = tmp_path_factory.mktemp("documents")
    with (root / "in.jsonl").open("w") as file:
        for index in range(400):
            length = int(random.integers(3, 121))
            mask = random.random(length) < 0.7
            mask[-2:] = True
            ids = random.integers(0, 250, length)
            file.write(
                json.dumps({"id": f"d{index}", "input_ids": ids.tolist(), "loss_mask": mask.tolist()}) + "\n"
            )
    prepare([root / "in.jsonl"], root / "out", tiny_chat_tokenizer())
    return Documents.open(root / "out")
