"""A digest of what source files mean, for keys of compiled kernels and for measured times.

Comments, docstrings, formatting, file names, the order of definitions, and imports between the package's own modules do
not count: a docstring can be improved and a file moved or split without making a kernel or a measurement stale. All
else counts: the digest of Python is made of the syntax trees of the top-level statements, that of C++ of its tokens.

The digest of one text is the same under every Python version, so that a table made under one is fresh under another.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_OWN_PACKAGES = ("cutegemm", "legacy_cuda")
_NOT_MEANING = frozenset(("ctx", "kind", "type_comment", "type_ignores"))
"""Fields of syntax trees that follow from their place, or that the compiler ignores."""
_CPP_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?\*/|\\\n|[^\S\n]+)"""
    r"""|(?P<line>\n\s*)|(?P<token>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[\w.]+|.)""",
    re.DOTALL,
)


def source_digest(*paths: Path) -> str:
    """16 hexadecimal digits that change when what the files do may have changed.

    Args:
        paths: Python files (.py), or C++ and CUDA ones (any other ending); their order does not count.

    Raises:
        SyntaxError: a Python file that cannot be parsed. OSError: a file that cannot be read.
    """
    meanings = sorted(meaning for path in paths for meaning in _meanings(path))
    return hashlib.sha256("\n".join(meanings).encode()).hexdigest()[:16]


def _meanings(path: Path) -> Iterator[str]:
    """A digest of each top-level statement of a Python file, or one of a C++ file."""
    text = path.read_text(encoding="utf-8")
    for part in _statements(text) if path.suffix == ".py" else [_cpp_tokens(text)]:
        yield hashlib.sha256("\0".join(part).encode()).hexdigest()


def _statements(text: str) -> Iterator[list[str]]:
    for statement in _without_docstring(ast.parse(text).body):
        if not _is_for_readers(statement):
            parts: list[str] = []
            _write(statement, parts)
            yield parts


def _is_for_readers(statement: ast.stmt) -> bool:
    """Whether a statement runs nothing: an import of the package's own, one for type checkers, a bare string."""
    if isinstance(statement, ast.ImportFrom):
        return statement.level > 0 or (statement.module or "").split(".")[0] in (*_OWN_PACKAGES, "__future__")
    if isinstance(statement, ast.Import):
        return all(name.name.split(".")[0] in _OWN_PACKAGES for name in statement.names)
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    return isinstance(statement, ast.Expr) and _is_text(statement)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return body[1:] if body and _is_text(body[0]) else body


def _write(node: object, parts: list[str]) -> None:
    """Appends the text of a syntax tree; empty fields, which newer Pythons add, leave no trace."""
    if isinstance(node, ast.AST):
        parts.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                value = _body(node.body)
            if value is None or value == [] or name in _NOT_MEANING:
                continue
            parts.append(name)
            _write(value, parts)
        parts.append(")")
    elif isinstance(node, Iterable) and not isinstance(node, str | bytes):
        for each in node:
            _write(each, parts)
    else:
        parts.append(repr(node))


def _body(statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a function or class without strings that document it or its attributes, and own imports."""
    return [each for each in _without_docstring(statements) if not _is_for_readers(each)]


def _cpp_tokens(text: str) -> list[str]:
    """The tokens of a C++ text. Space counts only between two operators; a line's end only behind a directive."""
    tokens: list[str] = []
    directive = gap = False
    for found in _CPP_TOKEN.finditer(text):
        token = found["token"]
        if token is None:
            if found["line"] is not None and directive:
                tokens.append("\n")
                directive = False
            gap = True
            continue
        if gap and tokens and _are_operators(tokens[-1], token):
            tokens.append(" ")
        directive = directive or token == "#"
        tokens.append(token)
        gap = False
    return tokens


def _are_operators(*tokens: str) -> bool:
    return not any(token[0].isalnum() or token[0] in "_\"'" for token in tokens)
