"""The workflows and the scripts of `.ci` are well formed, and a release begins only with its version and changelog."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tiedattn_jax.base import VERSION

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="an sdist has no workflows")
KEYS = {"name", "on", "permissions", "concurrency", "jobs"}
JOB_KEYS = {"name", "if", "needs", "runs-on", "timeout-minutes", "environment", "permissions", "strategy", "steps"}
STEP_KEYS = {"name", "uses", "with", "run", "if", "env", "id"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_valid(path):
    """Keys are known, actions have a version, and expressions, needed jobs and scripts name things that exist."""
    text = path.read_text()
    workflow = {"on" if key is True else key: value for key, value in yaml.safe_load(text).items()}  # YAML 1.1: on
    assert set(workflow) == KEYS
    assert workflow["permissions"] == {"contents": "read"}  # a job that needs more says so itself
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job) <= JOB_KEYS
        assert {job.get("needs")} <= {None, *workflow["jobs"]}
        matrix = job.get("strategy", {}).get("matrix", {})
        known = {name for row in matrix.get("include", [matrix]) for name in row}
        assert set(re.findall(r"matrix\.(\w+)", yaml.safe_dump(job))) <= known
        for step in job["steps"]:
            assert set(step) <= STEP_KEYS and len({"uses", "run"} & set(step)) == 1
            assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])
            for script in re.findall(r"\.ci/\w+", step.get("run", "")):
                assert (ROOT / script).stat().st_mode & 0o111
    for script in (ROOT / ".ci").glob("*"):
        subprocess.run(["bash", "-n", script], check=True)


DATED = f"## {VERSION} (2026-01-31)"


HERE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"].partition(".com/")[2]


@pytest.mark.parametrize(
    ("tag", "section", "repository", "complaint"),
    [
        ("v9.9.9", DATED, HERE, f"the tag must be v{VERSION}, "),
        (VERSION, DATED, HERE, f"the tag must be v{VERSION}, "),
        (f"v{VERSION}", f"## {VERSION} (unreleased)", HERE, "CHANGELOG.md must have a section"),
        (f"v{VERSION}", "## 9.9.9 (2026-01-31)", HERE, "CHANGELOG.md must have a section"),
        (f"v{VERSION}", DATED, "a/b", "Repository of pyproject.toml must be https://github.com/a/b, got "),
        (f"v{VERSION}", DATED, HERE, None), (f"v{VERSION}", DATED, "", None),
    ],
)  # fmt: skip
def test_a_release_needs_its_version_its_section_and_its_address(tag, section, repository, complaint, tmp_path):
    """The script stops before it builds anything if tag, version, changelog and repository do not agree."""
    for file in (".ci/release", "tiedattn_jax/base/__init__.py", "pyproject.toml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{section}\n")
    python = tmp_path / "bin" / "python3"  # ends the script where the build would begin
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho build >&2\nexit 7\n")
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "GITHUB_REPOSITORY": repository}
    run = subprocess.run([tmp_path / ".ci" / "release", tag], env=environment, capture_output=True, text=True)
    expected = (7, "build\n") if complaint is None else (1, complaint)
    assert run.returncode == expected[0] and run.stderr.startswith(expected[1])


def test_the_version_is_the_same_everywhere():
    """The citation and the BibTeX entry name the version of the package; the paper does not replace the software."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["type"] == "software" and citation["version"] == VERSION
    assert "preferred-citation" not in citation and citation["references"][0]["doi"] == "10.48550/arXiv.2402.03902"
    page = (ROOT / "docs" / "howto" / "report.md").read_text()
    assert f"version = {{{VERSION}}}" in page and f"tiedattn_jax {VERSION})" in page
