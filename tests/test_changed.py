"""`pytest --changed` selects the tests of what differs from a commit."""

import re
import subprocess
from pathlib import Path

import changed
import pytest

ROOT = Path(__file__).parents[1]
# By file: tests that it selects, and some that it does not select.
SELECTED = {
    "tiedattn_jax/phases/sweep.py": ("phases/ test_prose.py", "model/ test_paper.py"),
    "tiedattn_jax/__init__.py": ("test_arguments.py test_rooms.py", "phases/"),
    "docs/howto/grids.md": ("test_pages.py test_prose.py", "test_site.py"),
    "docs/layout.py": ("test_site.py", "test_prose.py"),
    "README.md": ("test_pages.py", "test_rooms.py"),
    "benchmarks/paper.py": ("test_paper.py", "test_rooms.py"),
    ".github/workflows/lint.yml": ("test_workflows.py", "test_rooms.py"),
    "tests/phases/test_sweep.py": ("phases/test_sweep.py", "phases/"),
    "tests/finite/conftest.py": ("finite/", "phases/"),
    "CITATION.cff": ("", "test_pages.py"),
}


@pytest.mark.parametrize("file", SELECTED)
def test_the_tests_of_a_file(file):
    found = changed.tests_of(file)
    tests, others = ({f"tests/{name}" for name in names.split()} for names in SELECTED[file])
    assert tests <= set(found) and not (others | {"tests/"}) & set(found)
    assert all((ROOT / test).exists() for test in found) and changed.tests_of("tests/made.py") == ["tests/"]


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
