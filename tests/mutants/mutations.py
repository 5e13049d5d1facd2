"""Small changes of a program that its tests should notice."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BOTH_WAYS = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.FloorDiv, ast.Mod),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
]
OPERATORS = {a: b for pair in BOTH_WAYS for a, b in (pair, pair[::-1])}
NAMES = [
    ("min", "max"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("minimum", "maximum"),
    ("floor", "ceil"),
]
SWAPPED = {a: b for pair in NAMES for a, b in (pair, pair[::-1])}
DROPPED = {"masked_fill", "masked_fill_", "clamp", "clamp_", "abs", "round", "nan_to_num", "contiguous", "clone"}
UNNOTICED = {"debug", "info"}  # what is only logged for whoever looks


@dataclass(frozen=True)
class Mutant:
    """file: relative to the repository; lines: of the function, or of the statement outside of any; name: what that
    defines; at_import: it acts when the file is imported, and not only when a function is called."""

    file: str
    line: int
    lines: range
    name: str
    at_import: bool
    change: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.file} {self.name}: {self.change}"


def mutants(root: Path, files: list[str], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants chosen by ``seed`` from all of these files, by file and line."""
    places = [(file, *place) for file in sorted(files) for place in _places(_parsed(root / file))]
    chosen = random.Random(seed).sample(range(len(places)), min(count, len(places)))
    return [_mutant(root, *places[number]) for number in sorted(chosen)]


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _places(tree: ast.Module) -> list[tuple[int, int]]:
    return [(n, v) for n, (node, _) in enumerate(_nodes(tree)) for v in range(len(list(_variants(node))))]


def _nodes(node: ast.AST, owner: tuple[ast.stmt | None, bool] = (None, True)) -> Iterator[tuple[ast.AST, tuple]]:
    """The nodes in order, without annotations and messages; each with the function, or else the statement, that it is
    in, and whether it is run by an import."""
    if isinstance(node, ast.JoinedStr):
        return
    yield node, owner
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or field in ("annotation", "returns", "decorator_list"):
                continue
            inner = owner
            if isinstance(child, ast.stmt) and owner[1] and not isinstance(child, ast.ClassDef):
                inner = (child, True)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and field == "body" and owner[1]:
                inner = (node, False)
            yield from _nodes(child, inner)


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPERATORS:
            yield ast.Compare(node.left, [OPERATORS[type(op)]()], node.comparators)
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            changed = copy.copy(node)
            changed.op = OPERATORS[type(op)]()
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(value * 2 if value else 1.0)
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)
        case ast.If(orelse=[]):
            yield ast.If(ast.Constant(False), node.body, [])
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in UNNOTICED:
            return
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield ast.Pass()
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            yield ast.Call(ast.Name(SWAPPED[name], ast.Load()), node.args, node.keywords)
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
            yield ast.Call(node.func, [condition, no, yes], node.keywords)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in SWAPPED:
            yield ast.Call(ast.Attribute(value, SWAPPED[name], ast.Load()), node.args, node.keywords)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in DROPPED:
            yield value


def _mutant(root: Path, file: str, number: int, variant: int) -> Mutant:
    tree = _parsed(root / file)
    node, (owner, at_import) = list(_nodes(tree))[number]
    changed = list(_variants(node))[variant]
    before, after = (ast.unparse(x).splitlines()[0] for x in (node, changed))
    owner = node if owner is None else owner
    name = next((n.id for n in ast.walk(owner) if isinstance(n, ast.Name)), "")
    lines = range(owner.lineno, owner.end_lineno + 1)
    if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
        name = owner.name
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, field, changed)
            elif isinstance(value, list) and any(x is node for x in value):
                setattr(parent, field, [changed if x is node else x for x in value])
    ast.copy_location(changed, node)
    line = (root / file).read_text(encoding="utf-8").splitlines()[node.lineno - 1].strip()
    change = f"{before}  ->  {after}" + (f"  in  {line}" if line != before else "")
    return Mutant(file, node.lineno, lines, name, at_import, change, ast.fix_missing_locations(tree))
