"""Every condition of a module, and the module without one of them.

A condition is the test of an `if`, `while` or conditional expression, a filter of a comprehension, a guard or a case
of a `match`, what a `-> bool` function returns, and any other comparison or boolean expression, however it is used.
It is deleted in each way that changes the program: forced true, forced false, or, for an operand of `and` and `or`
and a link of a chain of comparisons, dropped. Assertions are left alone: they are tests themselves.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

TRUE, FALSE, DROPPED, NEVER = "true", "false", "dropped", "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """One way to delete one condition."""

    function: str
    """Qualified name of the function (or class, or nothing) around the condition."""
    condition: str
    """Its source text, in one line."""
    kind: str
    """`true`, `false` (forced), `dropped` (from an and, an or, or a chain), `never` (a case)."""
    line: int
    place: int
    """Of the condition's node in the order of `ast.walk`."""
    part: int = -1
    """Of the operand or link that is dropped."""
    occurrence: int = 1
    """Of deletions with the same text in the same function, which."""

    @property
    def key(self) -> str:
        """Names the deletion as long as the text of its condition stays."""
        again = f" #{self.occurrence}" if self.occurrence > 1 else ""
        return f"{self.function}: {self.condition} [{self.kind}]{again}"


@dataclass
class _Scan:
    """A walk over one module that notes what can be deleted."""

    lines: list[bytes]
    places: dict[ast.AST, int]
    found: list[Deletion] = field(default_factory=list)
    scope: tuple[str, ...] = ()
    returns_bool: bool = False
    times: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def note(self, node: ast.AST, kind: str, text: str, line: int, part: int = -1) -> None:
        function, condition = ".".join(self.scope), " ".join(text.split())
        self.times[function, condition, kind] += 1
        self.found.append(
            Deletion(
                function=function,
                condition=condition,
                kind=kind,
                line=line,
                place=self.places[node],
                part=part,
                occurrence=self.times[function, condition, kind],
            )
        )

    def text(self, node: ast.expr | ast.pattern) -> str:
        assert node.end_lineno is not None and node.end_col_offset is not None
        lines = self.lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"\n".join(lines).decode()

    def condition(self, node: ast.expr) -> None:
        """An expression of which only the truth matters."""
        if not isinstance(node, ast.Constant):
            self.note(node, TRUE, self.text(node), node.lineno)
            self.note(node, FALSE, self.text(node), node.lineno)
        self.parts(node)

    def parts(self, node: ast.expr) -> None:
        """What can be dropped from the expression, at any depth."""
        if isinstance(node, ast.BoolOp):
            for part, value in enumerate(node.values):
                self.note(node, DROPPED, self.text(value), value.lineno, part)
                self.parts(value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.parts(node.operand)
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for part in range(len(node.ops) if len(node.ops) > 1 else 0):
                link = ast.Compare(operands[part], [node.ops[part]], [operands[part + 1]])
                self.note(node, DROPPED, ast.unparse(link), node.lineno, part)
            for operand in operands:
                self.visit(operand)
        else:
            self.visit(node)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assert) or _for_type_checkers(node):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            outer = self.scope, self.returns_bool
            self.scope = (*self.scope, node.name)
            self.returns_bool = isinstance(node, ast.FunctionDef) and _says_bool(node.returns)
            self.children(node)
            self.scope, self.returns_bool = outer
        elif isinstance(node, ast.expr) and is_boolean(node):
            self.condition(node)
        elif isinstance(node, ast.BoolOp):
            self.parts(node)
        else:
            self.children(node)

    def children(self, node: ast.AST) -> None:
        tests: list[ast.expr] = []
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = node.ifs
        elif isinstance(node, ast.match_case):
            self.note(node, NEVER, f"case {self.text(node.pattern)}", node.pattern.lineno)
            tests = [node.guard] if node.guard is not None else []
        elif isinstance(node, ast.Return) and node.value is not None and self.returns_bool:
            tests = [node.value]
        for child in ast.iter_child_nodes(node):
            if child in tests:
                self.condition(child)
            else:
                self.visit(child)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _says_bool(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


def is_boolean(node: ast.expr) -> bool:
    """Whether an expression is a truth value by its looks."""
    if isinstance(node, ast.BoolOp):
        return any(map(is_boolean, node.values))
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def deletions(source: str) -> list[Deletion]:
    """All of a module, in the order of its text."""
    tree = ast.parse(source)
    scan = _Scan(source.encode().split(b"\n"), {node: place for place, node in enumerate(ast.walk(tree))})
    scan.visit(tree)
    return sorted(scan.found, key=lambda deletion: (deletion.line, deletion.key))


class _Delete(ast.NodeTransformer):
    def __init__(self, target: ast.AST, deletion: Deletion) -> None:
        self.target, self.deletion = target, deletion

    def visit(self, node: ast.AST) -> ast.AST:
        return _without(node, self.deletion) if node is self.target else self.generic_visit(node)


def _without(node: ast.AST, deletion: Deletion) -> ast.AST:
    if isinstance(node, ast.match_case):
        node.guard = ast.Constant(False)
        return node
    assert isinstance(node, ast.expr)
    new: ast.expr = ast.Constant(deletion.kind == TRUE)
    if deletion.kind == DROPPED and isinstance(node, ast.BoolOp):
        values = _all_but(node.values, deletion.part)
        new = ast.BoolOp(node.op, values) if len(values) > 1 else values[0]
    elif deletion.kind == DROPPED and isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        links: list[ast.expr] = [
            ast.Compare(operands[part], [op], [operands[part + 1]])
            for part, op in enumerate(node.ops)
            if part != deletion.part
        ]
        new = ast.BoolOp(ast.And(), links) if len(links) > 1 else links[0]
    return ast.copy_location(new, node)


def _all_but(values: list[ast.expr], part: int) -> list[ast.expr]:
    return values[:part] + values[part + 1 :]


def without(source: str, deletion: Deletion) -> ast.Module:
    """The module without that condition, ready to be compiled."""
    tree = ast.parse(source)
    target = next(node for place, node in enumerate(ast.walk(tree)) if place == deletion.place)
    changed = _Delete(target, deletion).visit(tree)
    assert isinstance(changed, ast.Module)
    return ast.fix_missing_locations(changed)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(source: str) -> set[str]:
    """Names of the modules that a module imports (and of what may be modules)."""
    return set(_imports(ast.parse(source)))
