"""Changes to the modules of a subprocess, made by a `sitecustomize.py` that lies on its PYTHONPATH."""

import importlib.abc
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module as the others do, and has the change follow its execution."""

    def __init__(self, name: str, change: Change):
        self._name, self._change = name, change

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(spec for finder in others if (spec := finder.find_spec(fullname, path, target)))
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(name: str, change: Change) -> None:
    """Call `change(module)` right after the module is first executed, which importing it later will do."""
    assert name not in sys.modules, f"{name} is imported already"
    sys.meta_path.insert(0, _Finder(name, change))


def before_call(module: ModuleType, dotted: str, action: Callable[[], None]) -> None:
    """Call `action()` before each call of the module's function or method `dotted`."""
    *owners, name = dotted.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    function = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    setattr(owner, name, changed)


def kill_at(point: str) -> None:
    """Kill this process without a warning at `module:function:N`, the N-th call of that function."""
    name, function, count = point.split(":")
    left, lock = [int(count)], threading.Lock()

    def countdown() -> None:
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    after_import(name, lambda module: before_call(module, function, countdown))


def write_sitecustomize(folder: Path, code: str) -> str:
    """Write `code` into a folder and return it; a process with that on its PYTHONPATH runs the code first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"from tests.support import import_hooks\n{code}\n")
    return str(folder)
