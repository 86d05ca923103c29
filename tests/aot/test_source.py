import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import aot.source
from aot.errors import EnvironmentFault
from aot.source import canonical_digest, source_digest, source_files

REPOSITORY = Path(aot.source.__file__).parents[1]

MODEL = '''
"""A module."""

import math
from typing import TYPE_CHECKING

from . import attention
from .loss import loss_of
import pkg.deep.leaf as leaf

if TYPE_CHECKING:
    from pkg.config import Config
else:
    from pkg import fallback


class Model:
    """A class."""

    def forward(self, x):
        """A method."""
        from pkg import late
        return f"{x:>{4}} and {'a' 'b'} b" + late.name
'''

FILES = {
    "__init__.py": "",
    "model.py": MODEL,
    "attention.py": "from pkg import model\n",
    "loss.py": "from .deep import *\nloss_of = len\n",
    "config.py": "class Config: pass\n",
    "late.py": "name = 'late'\n",
    "fallback.py": "",
    "unrelated.py": "import pkg.model\n",
    "deep/__init__.py": "from ..attention import model\nfrom other import thing\n",
    "deep/leaf.py": "",
    "namespace/inner.py": "",
}


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package `pkg` on the path, in a folder of its own."""
    for name, text in FILES.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "other.py").write_text("thing = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "pkg"


def test_the_closure_is_what_the_module_imports_of_its_own_package(package):
    expected = "__init__ attention deep/__init__ deep/leaf fallback late loss model"
    assert list(source_files(["pkg.model"])) == [f"pkg/{name}.py" for name in expected.split()]


def test_nothing_is_imported(package):
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "model.py").write_text("raise RuntimeError('imported')\n")
    assert list(source_files(["pkg.model"])) == ["pkg/__init__.py", "pkg/model.py"]
    assert not any(name.partition(".")[0] == "pkg" for name in sys.modules)


def test_several_modules_follow_each_others_packages(package):
    files = source_files(["pkg.deep.leaf", "other"])
    assert list(files) == ["other.py", "pkg/__init__.py", "pkg/attention.py", "pkg/deep/__init__.py"] + [
        f"pkg/{name}.py" for name in ("deep/leaf", "fallback", "late", "loss", "model")
    ]


def test_a_module_of_a_namespace_package_is_found(package):
    assert list(source_files(["pkg.namespace.inner"])) == ["pkg/__init__.py", "pkg/namespace/inner.py"]


@pytest.mark.parametrize("module", ["pkg.missing", "missing", "pkg.namespace", "_json"])
def test_a_module_without_source_is_refused_by_name(package, module):
    with pytest.raises(EnvironmentFault, match=module):
        source_files([module])


SAME = {
    "comment": MODEL.replace("class Model:", "# why\nclass Model:  # what"),
    "docstrings edited": MODEL.replace("A module", "Another")
    .replace("A class", "X")
    .replace("A method", "Y"),
    "docstrings dropped": MODEL.replace('"""A module."""', "").replace('"""A method."""', ""),
    "layout": MODEL.replace("def forward(self, x):", "def forward(\n        self, x,\n    ):"),
    "quotes": MODEL.replace("'a' 'b'", "'''ab'''"),
    "encoding line": "# -*- coding: utf-8 -*-\n" + MODEL,
    "line ends": MODEL.replace("\n", "\r\n"),
    "parentheses": MODEL.replace("+ late.name", "+ (late.name)"),
}
OTHER = {
    "operator": MODEL.replace("+ late.name", "* late.name"),
    "constant": MODEL.replace("{4}", "{5}"),
    "constant type": MODEL.replace("{4}", "{4.0}"),
    "name": MODEL.replace("x", "y"),
    "decorator": MODEL.replace("    def forward", "    @staticmethod\n    def forward"),
    "default": MODEL.replace("self, x", "self, x=None"),
    "text after the docstring": MODEL.replace('"""A class."""', '"""A class."""\n    "not a docstring"'),
    "f-string turned plain": MODEL.replace('f"{x', '"{x'),
    "string turned bytes": MODEL.replace("'a' 'b'", "b'ab'"),
    "order": MODEL.replace(
        "from . import attention\nfrom .loss import loss_of",
        "from .loss import loss_of\nfrom . import attention",
    ),
    "annotation": MODEL.replace("(self, x)", "(self, x: int)"),
    "nesting": MODEL.replace("        return", "        if x:\n            return"),
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME.keys())
def test_an_edit_without_meaning_changes_no_digest(text):
    assert text != MODEL
    assert canonical_digest(text.encode()) == canonical_digest(MODEL.encode())


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER.keys())
def test_an_edit_with_meaning_changes_the_digest(text):
    assert text != MODEL
    assert canonical_digest(text.encode()) != canonical_digest(MODEL.encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a = ['b', 'c']", "a = ['bc']"),
        ("a(b)(c)", "a(b, c)"),
        ("x = 'ab', 'c'", "x = 'a', 'bc'"),
        ("x = 1", "x = True"),
        ("x = 1", "x = '1'"),
        ("x = ['a', 'b']", "x = ['aendConstant.valueb']"),
    ],
)
def test_different_trees_never_flatten_to_one_text(one, other):
    assert canonical_digest(one.encode()) != canonical_digest(other.encode())


def test_only_the_edited_file_is_named(package):
    before, digest = source_files(["pkg.model"]), source_digest(["pkg.model"])
    (package / "loss.py").write_text(FILES["loss.py"] + "weight = 2\n")
    after = source_files(["pkg.model"])
    assert [name for name in before if before[name] != after[name]] == ["pkg/loss.py"]
    assert source_digest(["pkg.model"]) != digest
    (package / "unrelated.py").write_text("x = 1\n")
    assert source_files(["pkg.model"]) == after


def interpreter(version: str) -> str | None:
    """A Python of this version that runs, on PATH or among pyenv's."""
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")))
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


TRICKY = r"""
x, name, items = 1, 'n', [1]
a = f"{x=}" f'{x!r:>{10}}' 'plain' f"{{literal}} {x:}" rf"\d{x}" u'unicode'
b = f'''{
    x:%Y-%m-%d
}''' "tail"
c = f"{'nested' f'{x}'} {x!s}" + f"" + f"only text" + f"{items[0]:{x}.{x}}"
d = (1e400, -0.0, 1j, 0x_ff, ..., None, b'\x00\xff', "\N{SNOWMAN} \ud800", 10**3)
async def g(p, /, q: int = 1, *, r) -> None:
    async with p as (s, t): pass
    return [i async for i in q if i]
match x:
    case {"k": [1, *rest], **kw} | name if rest: pass
lambda *a, **k: (yield)
with open(name) as f1, open(name) as f2: pass
@property
class K(metaclass=type): ""
try: pass
except* ValueError as e: del e
"""

SWEEP = """
import json, sys
from pathlib import Path
from aot.source import canonical_digest
print(json.dumps({path.name: canonical_digest(path.read_bytes()) for path in Path(sys.argv[1]).iterdir()}))
"""


def sweep_folder(folder: Path, everything: bool) -> Path:
    """A snapshot of our own sources, hard syntax, and other people's code."""
    folder.mkdir()
    (folder / "tricky.py").write_text(TRICKY)
    own = [path for name in ("aot", "dflash", "tests") for path in sorted((REPOSITORY / name).rglob("*.py"))]
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    for index, path in enumerate([*own, *(library if everything else library[::8])]):
        shutil.copy(path, folder / f"{index}-{path.name}")
    return folder


@pytest.mark.parametrize(
    "everything", [False, pytest.param(True, marks=pytest.mark.long)], ids=["sample", "all"]
)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_supported_python_computes_the_same_digests(version, everything, tmp_path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    folder = sweep_folder(tmp_path / "sources", everything)
    # -S: without site-packages, so that the module proves to need the standard library alone.
    output = subprocess.run(
        [python, "-S", "-c", SWEEP, str(folder)],
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {path.name: canonical_digest(path.read_bytes()) for path in folder.iterdir()}
    assert json.loads(output.stdout) == expected
