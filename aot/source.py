"""Source digests: what modules say, whatever their comments, docstrings, layout or the Python version.

The closure of a set of modules follows their imports inside their own top-level packages by reading syntax
trees; nothing is imported. Imports under `if TYPE_CHECKING:` shape no graph and are left out.
Standard library only, so that every supported interpreter can compute a digest without torch.
"""

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot.errors import EnvironmentFault

# Fields whose presence depends on the Python version, or that carry no meaning of their own.
SKIPPED_FIELDS = frozenset({"ctx", "kind", "type_comment"})
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class _Import:
    """`import module` or `from module import name`; level counts the leading dots."""

    module: str
    name: str | None
    level: int


def source_files(modules: Sequence[str]) -> dict[str, str]:
    """Return {file, relative to its top-level package's parent: sha256 of its canonical syntax tree}.

    `modules` are dotted names; what they import of the same top-level packages is followed, with the
    `__init__` of every package on the way. Raises EnvironmentFault if one of `modules` has no source here.
    """
    top_levels = {module.partition(".")[0] for module in modules}
    for module in modules:
        if _locate(module)[1] is None:
            raise EnvironmentFault(
                f"module '{module}' has no Python source to digest",
                "install the project from source: `pip install -e .`",
            )
    pending, seen, files = list(modules), set(), {}
    while pending:
        module = pending.pop()
        if module in seen or module.partition(".")[0] not in top_levels:
            continue
        seen.add(module)
        exists, path = _locate(module)
        parent = module.rpartition(".")[0]
        if exists and parent:
            pending.append(parent)
        if path is None:
            continue
        digest, imports = _read(path.read_bytes())
        is_package = path.name == "__init__.py"
        files[module.replace(".", "/") + ("/__init__.py" if is_package else ".py")] = digest
        pending.extend(_imported(module if is_package else parent, imports))
    return dict(sorted(files.items()))


def source_digest(modules: Sequence[str]) -> str:
    """Return one digest over the closure of `modules` (see `source_files`), as 64 hex digits."""
    return digest_of_files(source_files(modules))


def digest_of_files(files: Mapping[str, str]) -> str:
    """Combine {file: digest} into one digest, independent of the order."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_digest(source: bytes) -> str:
    """Return the digest of one file's canonical syntax tree, as 64 hex digits. Raises SyntaxError."""
    return _read(source)[0]


def _locate(module: str) -> tuple[bool, Path | None]:
    """Return (exists, its .py file) without importing its parents; a namespace package has no file."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False, None
    path = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for part in rest:
        candidates = [
            file for folder in folders for file in (folder / part / "__init__.py", folder / f"{part}.py")
        ]
        path = next((file for file in candidates if file.is_file()), None)
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
        if path is None and not folders:
            return False, None
    return True, path


def _imported(package: str, imports: Sequence[_Import]) -> Iterator[str]:
    """Yield every module that the imports of a module in `package` may execute."""
    for item in imports:
        base = package
        for _ in range(item.level - 1):
            base = base.rpartition(".")[0]
        module = ".".join(filter(None, (base, item.module))) if item.level else item.module
        yield module
        if item.name is not None:
            yield f"{module}.{item.name}"


@functools.lru_cache(maxsize=512)
def _read(source: bytes) -> tuple[str, tuple[_Import, ...]]:
    tree = ast.parse(source)
    digest = hashlib.sha256()
    for token in _tokens(tree):
        digest.update(f"{len(token)}:".encode() + token)
    return digest.hexdigest(), tuple(_imports(tree))


def _imports(node: ast.AST) -> Iterator[_Import]:
    if isinstance(node, ast.Import):
        yield from (_Import(alias.name, None, 0) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (_Import(node.module or "", alias.name, node.level) for alias in node.names)
    children = node.orelse if _is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from _imports(child)


def _is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _tokens(value: object) -> Iterator[bytes]:
    """Yield a prefix-free walk of the tree; values that only some Python versions store are left out."""
    if isinstance(value, ast.AST):
        yield type(value).__name__.encode()
        for name in value._fields:
            field = getattr(value, name, None)
            if name == "body" and isinstance(value, DOCUMENTED):
                field = _without_docstring(field)
            elif name == "values" and isinstance(value, ast.JoinedStr):
                field = _merge_constants(field)
            if name not in SKIPPED_FIELDS and field is not None and field != []:
                yield f".{name}".encode()
                yield from _tokens(field)
        yield b"end"
    elif isinstance(value, list):
        yield b"["
        for item in value:
            yield from _tokens(item)
        yield b"]"
    elif isinstance(value, str):
        # Not repr(): which characters it escapes depends on the interpreter's Unicode tables.
        yield value.encode("utf-8", "surrogatepass")
    else:
        yield type(value).__name__.encode()
        yield repr(value).encode()


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return body[1:]
    return body


def _merge_constants(values: list[ast.expr]) -> list[ast.expr]:
    """Join neighbouring literal parts of an f-string and drop empty ones: parsers cut them differently."""
    merged: list[ast.expr] = []
    for value in values:
        last = merged[-1] if merged else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            merged[-1] = ast.Constant(last.value + value.value)
        else:
            merged.append(value)
    return [value for value in merged if not (isinstance(value, ast.Constant) and value.value == "")]
