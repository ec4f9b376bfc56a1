"""Change the library at random places, one at a time, and see whether the tests notice.

    python tests/random_changes.py --count 20 --seed 3 --rooms theory,phases --marks "full or not full"

A change swaps an operator, a comparison, `and` and `or`, a sign or a condition, or moves a number. The tests of the
room run on a copy of the last commit, those of the changed module first. A change that no test notices is either
without effect or a place that lacks a test: read it. One core takes half a minute for a change that is noticed, and as
long as the tests of the room for another one. The places depend on the seed and on the code of the package alone.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tiedattn_jax"
_WITHOUT = "cli", "plotting"  # rooms of words and pictures

_OPERATORS = {ast.Add: "+-", ast.Sub: "-+", ast.Mult: "*/", ast.Div: "/*", ast.MatMult: "@*"}
_COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
}  # fmt: skip
_WORDS = {ast.And: ("and", "or"), ast.Or: ("or", "and")}


class Change(NamedTuple):
    file: Path
    start: int  # first byte of what is replaced
    end: int
    now: str

    @property
    def code(self) -> bytes:
        """The changed file."""
        old = self.file.read_bytes()
        return old[: self.start] + self.now.encode() + old[self.end :]

    def __str__(self) -> str:
        old = self.file.read_bytes()
        row = old[: self.start].count(b"\n")
        before, after = (text.decode().splitlines()[row].strip() for text in (old, self.code))
        return f"{self.file.relative_to(ROOT)}:{row + 1}: {before}  ->  {after}"


def changes_of(file: Path) -> Iterator[Change]:
    """Yield all changes of a file. Annotations, decorators, messages and strings are left alone."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        place: ast.expr = node  # type: ignore[assignment]
        return starts[place.lineno - 1] + place.col_offset, starts[place.end_lineno - 1] + place.end_col_offset

    def text(start: int, end: int) -> str:
        return source[start:end].decode()

    def between(left: ast.AST, right: ast.AST, was: str, now: str) -> Iterator[Change]:
        start, end = span(left)[1], span(right)[0]
        if text(start, end).count(was) == 1:
            yield Change(file, start, end, text(start, end).replace(was, now))

    for node in _executed(ast.parse(source)):
        match node:
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS and not _is_text(left) and not _is_text(right):
                yield from between(left, right, *_OPERATORS[type(op)])
            case ast.Compare(left, [op], [right]) if type(op) in _COMPARISONS:
                yield from between(left, right, *_COMPARISONS[type(op)])
            case ast.BoolOp(op, [first, second, *_]):
                yield from between(first, second, *_WORDS[type(op)])
            case ast.Constant(bool() as value):
                yield Change(file, *span(node), str(not value))
            case ast.Constant(int() as value):
                yield Change(file, *span(node), str(value + 1))
            case ast.Constant(float() as value):
                yield Change(file, *span(node), repr(1.5 * value or 0.1))
            case ast.UnaryOp(ast.USub() | ast.Not(), operand):
                yield Change(file, *span(node), text(*span(operand)))
            case ast.If(test) | ast.IfExp(test):
                yield Change(file, *span(test), f"not ({text(*span(test))})")


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the code does."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.Raise | ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _executed(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def drawn(count: int, seed: int, rooms: tuple[str, ...] = ()) -> list[Change]:
    """Draw changes of the package, each equally likely."""
    pool: list[Change] = []
    for file in sorted(PACKAGE.glob("*/*.py")):
        room = file.parent.name
        if file.name != "__init__.py" and (room in rooms if rooms else room not in _WITHOUT):
            pool += changes_of(file)
    return random.Random(seed).sample(pool, count)


def verdict_on(change: Change, marks: str, limit_s: float) -> str:
    """Return the test that notices a change, or "SURVIVED"."""
    with tempfile.TemporaryDirectory() as copy:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], cwd=copy, input=archive, check=True)
        (Path(copy) / change.file.relative_to(ROOT)).write_bytes(change.code)
        tests = sorted((Path(copy) / "tests" / change.file.parent.name).glob("test_*.py"))
        tests.sort(key=lambda test: not test.stem.startswith(f"test_{change.file.stem}"))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *map(str, tests)]
        try:
            environment = {**os.environ, "PYTHONPATH": copy}
            run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"SURVIVED {limit_s:.0f} s"
        if run.returncode in (0, 5):
            return "SURVIVED"
        return next((line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "noticed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default="", help="folders of the package, separated by commas; by default most")
    parser.add_argument("--marks", default="not full", help='as -m of pytest; "full or not full" runs all tests')
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of one change")
    options = parser.parse_args()
    survived = 0
    for change in drawn(options.count, options.seed, tuple(filter(None, options.rooms.split(",")))):
        begin = time.monotonic()
        verdict = verdict_on(change, options.marks, options.limit)
        survived += verdict.startswith("SURVIVED")
        print(f"{change}\n    {verdict} ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"{options.count - survived} of {options.count} changes were noticed")


if __name__ == "__main__":
    main()
