"""Finds the programs of a run: factories registered under the entry-point group `aot.programs`.

A package offers its programs with

    [project.entry-points."aot.programs"]
    name = "package.module:factory"

and `factory(run_file, overrides)` returns a `ProgramSet`. Only the chosen factory's module is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from typing import TYPE_CHECKING

from aot.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aot.program import ProgramFactory, ProgramSet

GROUP = "aot.programs"
VARIABLE = "DFLASH_AOT_PROGRAMS"


def registered_factories() -> dict[str, str]:
    """{entry-point name: `module:function`} of what is installed."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}


def factory_string(name: str | None = None) -> str:
    """Choose a factory: `name` (or DFLASH_AOT_PROGRAMS) is an entry point or `module:function`; none: the
    only one.

    Raises ConfigError when none is installed, when the choice is open, or when the name is unknown.
    """
    name = name or os.environ.get(VARIABLE)
    if name and ":" in name:
        return name
    known = registered_factories()
    listed = ", ".join(sorted(known))
    if name:
        if name not in known:
            raise ConfigError(f"no programs are registered as '{name}'", f"registered: {listed or 'none'}")
        return known[name]
    if not known:
        raise ConfigError(
            f"no installed package offers programs (entry-point group '{GROUP}')",
            "`pip install -e .` in the project's folder, or name one, e.g. `--programs module:factory`",
        )
    if len(set(known.values())) > 1:
        raise ConfigError(f"several packages offer programs: {listed}", "choose one, e.g. `--programs NAME`")
    return next(iter(known.values()))


def import_factory(factory: str) -> ProgramFactory:
    """Import `module:function`; ConfigError if there is none or if it takes other arguments."""
    hint = _known()
    module_name, _, function = factory.partition(":")
    try:
        found = importlib.util.find_spec(module_name) is not None
    except (ModuleNotFoundError, ValueError):
        found = False
    if not found:
        raise ConfigError(f"there is no module '{module_name}' for the programs '{factory}'", hint)
    module = importlib.import_module(module_name)
    if not hasattr(module, function):
        raise ConfigError(f"module '{module_name}' has no function '{function}'", hint)
    found = getattr(module, function)
    try:
        inspect.signature(found).bind("run", ())
    except (TypeError, ValueError):
        raise ConfigError(
            f"'{factory}' is no factory of programs: it takes no (run_file, overrides)", hint
        ) from None
    return found


def _known() -> str:
    known = ", ".join(sorted(registered_factories())) or "none"
    return f"name a registered one (there are: {known}), or a `module:function` that Python finds here"


def load_program_set(
    run_file: str, overrides: Sequence[str] = (), name: str | None = None
) -> tuple[str, ProgramSet]:
    """Return the factory's string (what a build worker imports again) and the run's programs.

    Raises ConfigError for an unknown factory or one that makes something else, and whatever the factory
    raises for a bad run file.
    """
    factory = factory_string(name)
    programs = import_factory(factory)(run_file, tuple(overrides))
    from aot.program import ProgramSet

    if not isinstance(programs, ProgramSet):
        raise ConfigError(f"'{factory}' made no ProgramSet, but a {type(programs).__name__}", _known())
    return factory, programs
