"""`pytest --changed` selects the tests of what differs from a commit."""

import re
import subprocess
from pathlib import Path

import changed
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "tests", "others"),
    [
        (
            "tiedattn_jax/phases/sweep.py",
            ["tests/phases/", "tests/test_prose.py"],
            ["tests/model/", "tests/test_paper.py"],
        ),
        ("tiedattn_jax/__init__.py", ["tests/test_arguments.py", "tests/test_rooms.py"], ["tests/phases/"]),
        ("docs/howto/grids.md", ["tests/test_pages.py", "tests/test_prose.py"], ["tests/test_site.py"]),
        ("docs/layout.py", ["tests/test_site.py"], ["tests/test_prose.py"]),
        ("README.md", ["tests/test_pages.py"], ["tests/test_rooms.py"]),
        ("benchmarks/paper.py", ["tests/test_paper.py"], ["tests/test_rooms.py"]),
        (".github/workflows/lint.yml", ["tests/test_workflows.py"], ["tests/test_rooms.py"]),
        ("tests/phases/test_sweep.py", ["tests/phases/test_sweep.py"], ["tests/phases/", "tests/"]),
        ("tests/finite/conftest.py", ["tests/finite/"], ["tests/"]),
        ("tests/phases/mutants.toml", ["tests/test_mutants.py"], ["tests/phases/"]),
        ("tests/made.py", ["tests/"], []),
        ("CITATION.cff", [], ["tests/"]),
    ],
)
def test_the_tests_of_a_file(file, tests, others):
    found = changed.tests_of(file)
    assert set(tests) <= set(found) and not set(others) & set(found)
    assert all((ROOT / test).exists() for test in found)


def test_every_file_of_the_package_has_tests():
    for file in (ROOT / "tiedattn_jax").rglob("*.py"):
        assert all((ROOT / test).exists() for test in changed.tests_of(str(file.relative_to(ROOT)))), file


def test_what_differs_from_a_commit(tmp_path, monkeypatch):
    """Committed, changed and new files count; what the commit itself got since the branch left it does not."""

    def git(*words):
        identity = "-c", "user.name=a", "-c", "user.email=a@b.c"
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(name):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)

    monkeypatch.setattr(changed, "_ROOT", tmp_path)
    git("init", "-b", "main")
    commit("old.py")
    git("checkout", "-b", "branch")
    commit("committed.py")
    (tmp_path / "old.py").write_text("changed")
    (tmp_path / "new.py").write_text("new")
    assert sorted(changed.changed_files("main")) == ["committed.py", "new.py", "old.py"]
    with pytest.raises(ValueError, match=re.escape('as in --changed=main, not "nowhere"')):
        changed.changed_files("nowhere")
