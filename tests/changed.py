"""The tests of what changed: `pytest --changed` selects those of the files that differ from main.

A changed module selects the tests of its room, and the tests of the package as a whole that are quick. Rooms that
import the changed one are left to the default tests.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_WHOLE = tuple(f"tests/test_{name}.py" for name in "arguments asked interfaces pages precision prose rooms".split())
# Patterns of files, and the tests of what they match: files, or folders with all their tests. The first match counts.
_PLACES = (
    (r"tiedattn_jax/(\w+)/", (r"tests/\1/", *_WHOLE)),
    (r"tiedattn_jax/", _WHOLE),
    (r"benchmarks/", ("tests/test_benchmarks.py", "tests/test_compiled.py", "tests/test_paper.py")),
    (r"docs/\w+\.py|mkdocs\.yml", ("tests/test_site.py", "tests/test_pages.py")),
    (r"docs/|notebooks/|[A-Z]+\.md", ("tests/test_pages.py", "tests/test_prose.py", "tests/test_notebooks.py")),
    (r"\.(ci|github)/", ("tests/test_workflows.py",)),
    (r"(tests/(\w+/)?test_\w+\.py)", (r"\1",)),
    (r"(tests/\w+/)", (r"\1",)),
    (r"tests/|pyproject\.toml", ("tests/",)),  # settings and helpers of all tests
)


def tests_of(file: str) -> list[str]:
    """Return the files and folders of the tests of a file; all paths begin at the root of the repository."""
    for pattern, tests in _PLACES:
        if (match := re.match(pattern, file)) is not None:
            return [match.expand(test) for test in tests]
    return []


def changed_files(commit: str) -> list[str]:
    """Return the files that differ from where this branch left a commit, with those that git does not know yet.

    Raises:
        ValueError: there is no such commit, or no git.
    """

    def git(*words: str) -> list[str]:
        return subprocess.run(
            ["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    try:
        (base,) = git("merge-base", commit, "HEAD")
        return [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f'must name a commit of this repository, as in --changed=main, not "{commit}"') from error


def tests_since(commit: str) -> tuple[str, ...]:
    """Return the beginnings of the names of the tests of what changed; raises as `changed_files`."""
    return tuple(sorted({test for file in changed_files(commit) for test in tests_of(file)}))
