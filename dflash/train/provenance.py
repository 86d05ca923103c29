"""What makes a run repeatable: its resolved configuration as a reloadable TOML file, and its command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash.config import RunConfig

RUN_FILE = "run.toml"
COMMAND_FILE = "command.txt"


def run_toml(config: RunConfig) -> str:
    """The whole resolved config as TOML that `load_config` reads back to an equal one."""
    lines: list[str] = []
    sections: list[str] = []
    for key, value in config.model_dump(mode="json").items():
        if isinstance(value, Mapping):
            sections += ["", f"[{key}]", *_assignments(value)]
        else:
            lines += _assignments({key: value})
    return "\n".join([*lines, *sections]) + "\n"


def _assignments(values: Mapping[str, Any]) -> list[str]:
    """JSON's scalars, strings and arrays are TOML too; what is None is left out, as TOML has no null."""
    return [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]


def command_line(arguments: Sequence[str]) -> str:
    return shlex.join(arguments) + "\n"


def config_differences(stored: Mapping[str, Any], current: RunConfig) -> dict[str, tuple[Any, Any]]:
    """{dotted key: (stored, current)} of what a resumed run may not change.

    Devices, output, evaluation and names may change. So may `grad_accum` with the number of drafters and the
    data folders' paths: the digests of the plan and of the data tell whether the work is still the same.
    """
    from dflash.config import flatten

    then, now = flatten(stored), flatten(current.model_dump(mode="json"))
    return {
        key: (then.get(key), now.get(key))
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key) and not _may_change(key)
    }


def _may_change(key: str) -> bool:
    section = key.split(".", 1)[0]
    free_keys = {"data.train", "data.eval", "target.model", "train.grad_accum", "train.on_miss"}
    return section in {"name", "topology", "output", "eval", "environment"} or key in free_keys
