"""Promises of the project as a whole: layering, and what installing it does to an environment."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Packages that an installation must leave as they are, by the beginning of their names.
TORCH_STACK = ("torch", "nvidia", "triton", "pytorch")


def imported_modules(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return imports | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_aot_never_imports_dflash():
    files = sorted((ROOT / "aot").rglob("*.py"))
    assert files
    offenders = [p.name for p in files if any(m.split(".")[0] == "dflash" for m in imported_modules(p))]
    assert offenders == []


@pytest.mark.timeout(300)
def test_installing_swaps_no_package_of_the_torch_stack():
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [item["metadata"]["name"].lower() for item in json.loads(done.stdout)["install"]]
    assert "dflash-aot" in names
    assert [name for name in names if name.startswith(TORCH_STACK)] == []
