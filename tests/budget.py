"""The compilations that every test file may cost: counted as it runs, and compared with `budget.toml`.

jax reports every compilation, also one that its folder answers. The number is therefore the same on every machine and
with every cache. It is that of a process which has nothing compiled; after other files a file finds some programs.
Tests of `-m full` do not count. `python tests/budget.py [FILES]` runs files, each with no programs at hand, and writes
their numbers with a quarter to spare, for other versions of JAX and other orders. With `--check` it names the files
that need more than the table says, or less than half of it.
"""

import math
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

import jax

HERE = Path(__file__).parent
TABLE = HERE / "budget.toml"
# Programs that a file may compile beyond its number: fixtures of the whole run, and states that `problems` keeps, are
# paid by the first file of a process that asks for them.
SHARED = 40
_OUT = "TIEDATTN_BUDGET"  # variable of the environment: a file that gets the numbers
_HEAD = (
    "# Compilations of the default tests of a file, run alone. A file without a line compiles nothing. See budget.py.\n"
)

_charged: str = ""  # file that pays for the next programs
_spent: Counter[str] = Counter()


def _count(event: str, _seconds: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _spent[_charged] += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def charge(file: Path | None) -> None:
    """Let a file pay for the programs that are compiled from now on; None for tests that cost it nothing."""
    global _charged
    _charged = "" if file is None else _name(file)


def excess(file: Path) -> str:
    """Return what to do about a file that compiles more than it may, or nothing."""
    name, allowed = _name(file), budgets().get(_name(file), 0) + SHARED
    if _OUT in os.environ:
        with open(os.environ[_OUT], "a") as out:
            out.write(f"{name} {_spent[name]}\n")
        jax.clear_caches()
    elif _spent[name] > allowed:
        return (
            f"tests/{name} compiles {_spent[name]} programs and may compile {allowed}. Take models and rules of"
            f" `problems`, numpy for expected values, or mark what is dear as `full`. If it is worth its programs,"
            f" `python tests/budget.py {name}` writes their number"
        )
    return ""


def _name(file: Path) -> str:
    return file.relative_to(HERE).as_posix()


def budgets() -> dict[str, int]:
    return tomllib.loads(TABLE.read_text())


def measured(files: list[str]) -> dict[str, int]:
    """Run files and return how much each compiles."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "numbers"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
        subprocess.run([*command, *(HERE / name for name in files)], env={**os.environ, _OUT: str(out)})
        lines = [line.split() for line in out.read_text().splitlines()]
    return {name: int(number) for name, number in lines}


def write(spent: dict[str, int]) -> None:
    """Write the numbers of files; those that are not among them keep theirs, unless the file is gone."""
    spared = {name: math.ceil(1.25 * number / 10) * 10 for name, number in spent.items()}
    numbers = {name: number for name, number in budgets().items() if (HERE / name).exists()} | spared
    lines = [f'"{name}" = {number}\n' for name, number in sorted(numbers.items()) if number]
    TABLE.write_text("".join([_HEAD, *lines]))


def complaints(spent: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """Name the files that compile more than they may, or so much less that their numbers can be lowered."""
    found = []
    for name, number in sorted(spent.items()):
        most = allowed.get(name, 0)
        if number > most or number < most / 2 - 10:
            what = "too many" if number > most else "lower it"
            found.append(f"tests/{name} compiles {number} programs, and its number is {most}: {what}")
    return found


if __name__ == "__main__":
    check = "--check" in sys.argv
    chosen = [a for a in sys.argv[1:] if a != "--check"] or sorted(_name(path) for path in HERE.rglob("test_*.py"))
    if check:
        sys.exit("\n".join(complaints(measured(chosen), budgets())) or 0)
    write(measured(chosen))
