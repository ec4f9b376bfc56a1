"""Break the library on purpose, one change at a time, and see which tests notice: `python tests/mutants.py [names]`.

The changes lie beside the tests of their subject, in `mutants.toml`: a text that occurs once in a file of the package,
what stands there instead, and the tests that should fail. Run by hand, on the last commit; it takes about half a minute
for each change.

Args on the command line: words, which select the changes whose file or reason contains one of them, and `--jobs N`,
the number of changes that are tested at the same time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 900


class Mutant(NamedTuple):
    file: str  # path in the package
    was: str  # text that occurs once in the file
    now: str
    why: str  # what the change breaks
    tests: str  # arguments for pytest

    @property
    def text(self) -> str:
        return (ROOT / "tiedattn_jax" / self.file).read_text()


def mutants() -> list[Mutant]:
    """Read all changes."""
    changes = []
    for path in sorted((ROOT / "tests").rglob("mutants.toml")):
        changes += [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]
    return changes


def verdict_on(mutant: Mutant, home: Path) -> str:
    """Run the tests of one change in a copy of the tree: "caught", "NOT CAUGHT", "no verdict" or "no place"."""
    copy = Path(tempfile.mkdtemp(dir=home))
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=copy, input=archive, check=True)
    file = copy / "tiedattn_jax" / mutant.file
    text = file.read_text()
    if text.count(mutant.was) != 1:
        return "no place"
    file.write_text(text.replace(mutant.was, mutant.now))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]  # long tests run, too
    command = [sys.executable, "-m", "pytest", *options, *shlex.split(mutant.tests)]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        process = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "caught (time)"
    finally:
        shutil.rmtree(copy)
    # 1: a test failed; 2: a module could not even be imported, which says nothing about the tests.
    return {0: "NOT CAUGHT", 1: "caught"}.get(process.returncode, "no verdict")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    selection = [m for m in mutants() if not args.names or any(n in f"{m.file} {m.why}" for n in args.names)]
    home = Path(tempfile.mkdtemp())

    def run(mutant: Mutant) -> str:
        start = time.perf_counter()
        verdict = verdict_on(mutant, home)
        print(f"{verdict:12s} {time.perf_counter() - start:5.0f} s  {mutant.file}: {mutant.why}", flush=True)
        return verdict

    try:
        with ThreadPoolExecutor(args.jobs) as pool:
            verdicts = list(pool.map(run, selection))
    finally:
        shutil.rmtree(home)
    caught = sum(v.startswith("caught") for v in verdicts)
    print(f"{caught} of {len(verdicts)} caught")


if __name__ == "__main__":
    main()
