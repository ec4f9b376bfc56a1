"""Results, functions and classes name the papers and the software that they rest on, as BibTeX."""

import functools
import inspect
import json
import re
import tomllib
from pathlib import Path

import equinox as eqx
import jax
import made
import numpy as np
import public
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base import VERSION
from tiedattn_jax.phases.table import Table

ROOT = Path(__file__).parents[2]
ENTRIES = (ROOT / "tiedattn_jax" / "base" / "sources.bib").read_text().strip().split("\n\n")[1:]
ALWAYS = ["tiedattn_jax", "cui2024phase", "jax2018github"]
BROKEN, LEARNER, MESSAGES = ["parisi1980sequence", "mezard1987spin"], ["barbier2019optimal"], ["rangan2016fixed"]
DYNAMICS, WIDE = ["arnaboldi2025asymptotics"], ["boncoraglio2025single", "biane1997free"]
WIDE_LEARNER = ["boncoraglio2025single", "boncoraglio2025bayes", "biane1997free"]
# What rests on further entries: single names, else all names that begin so.
NAMES = {
    "state_evolution": ["javanmard2013state"], "results.StateEvolution": ["javanmard2013state"],
    "gamp": MESSAGES, "results.GAMP": MESSAGES, "wide.gamp": MESSAGES + WIDE,
    "bayes.posterior_mean": MESSAGES + LEARNER, "bayes.spectral_direction": ["luo2019optimal"],
    "bayes.spectral_overlap": [*LEARNER, "luo2019optimal"], "bayes.Preimages": [], "bayes.orbit": [],
    "wide.bayes": WIDE_LEARNER, "wide.perfect_recovery": WIDE_LEARNER, "results.WideOptimum": WIDE_LEARNER,
    "wide.ridge_recovery": [*WIDE, "amelunxen2014living"],
    **{
        f"results.{name}": DYNAMICS
        for name in "Emergence Landscape PopulationPoint Student Trajectory SmallStart".split()
    },
}  # fmt: skip
BEGINNINGS = {
    "bayes.": LEARNER, "rsb.": BROKEN, "dynamics.": DYNAMICS, "wide.": WIDE, "results.Bayes": LEARNER,
    "results.OneRSB": BROKEN, "results.Wide": WIDE, "counting.": ["weiss2021thinking"],
}  # fmt: skip
CITED = {
    **public.names(),
    **{f"counting.{n}": v for n, v in vars(ta.counting).items() if inspect.isfunction(v) or inspect.isclass(v)},
    **{f"results.{n}": v for n, v in vars(ta.results).items() if inspect.isclass(v)},
}


def keys(text):
    return re.findall(r"^@\w+\{([^,]+),", text, re.M)


@pytest.mark.parametrize("name", CITED)
def test_public_names(name):
    beginnings = [entries for beginning, entries in BEGINNINGS.items() if name.startswith(beginning)]
    assert keys(ta.cite(CITED[name])) == ALWAYS + NAMES.get(name, beginnings[0] if beginnings else [])


class Own(ta.DotProduct):
    """A layer of the user's."""

    weight: jax.Array = eqx.field(default=None, kw_only=True)


def blank(cls):
    """A result of a class without its computation: `cite` reads the classes in a result, and no numbers."""
    result = object.__new__(cls)
    for name in cls.__dataclass_fields__:
        object.__setattr__(result, name, None)
    return result


OF_RESULTS = {
    "state": (made.fixed_point(), []),
    "transition": (made.transition(branches=(made.fixed_point(),)), []),
    "number of an optimal learner": (made.transition(event="weak_recovery"), LEARNER),
    "number of the dynamics": (made.transition(event="encodings separate"), DYNAMICS),
    "table": (Table("solve", ("sigma",), (np.ones(2),), (made.fixed_point(), blank(ta.results.BayesPoint))), LEARNER),
    "layer of the user's": (Own(**vars(ta.DotProduct())), []),
    "recipe": (ta.Sobol(2**8), []),
    "several": ([made.fixed_point(), (ta.rsb.solve, {"a": ta.dynamics.sgd})], BROKEN + DYNAMICS),
}


@pytest.mark.parametrize("name", OF_RESULTS)
def test_results(name):
    result, expected = OF_RESULTS[name]
    assert keys(ta.cite(result)) == keys(ta.cite([result])) == ALWAYS + expected


CLASSES = [value for name, value in CITED.items() if name.startswith("results.") and value is not ta.results.Quantity]


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if issubclass(cls, eqx.Module)], ids=lambda cls: cls.__name__)
def test_every_result_cites_what_its_class_does(cls):
    assert ta.cite(blank(cls)) == ta.cite(cls)


def test_what_rests_on_an_entry():
    assert keys(ta.cite()) == ALWAYS
    reason = "\n% the saddle-point equations (7) to (9), the losses and the test error (10)\n"
    assert ta.cite(ta.solve).count(reason) == ta.cite(made.fixed_point()).count(reason) == 1
    assert reason not in ta.cite(ta.counting.train) and "\n% the data\n@" in ta.cite(ta.counting.train)
    assert "% the landscape on a sphere\n@" in ta.cite(ta.dynamics.landscape)
    assert "%%" not in ta.cite(*CITED.values()) and len(keys(ta.cite(*CITED.values()))) == len(ENTRIES) - 1  # on demand
    stored = ta.sample_data(ta.DotProduct(), 4, 1.0, jax.random.key(0))
    drawn = ta.sample_data(ta.DotProduct(), 4, 1.0, jax.random.key(0), stored=False)
    assert keys(ta.cite(drawn)) == [*ALWAYS, "lu2021householder"] and keys(ta.cite(stored)) == ALWAYS


@pytest.mark.parametrize("thing", [3.0, print, "alpha_c", None, [ta.solve, 1], {}, np.ones(2), lambda model: model])
def test_bad_input(thing):
    with pytest.raises(ta.InputError, match=r"^results must be results, functions or classes of tiedattn_jax, got .+$"):
        ta.cite(thing)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: keys(entry)[0])
def test_entries(entry):
    """An entry is whole, and every name before it is that of something public, of a module, or of an event."""
    assert re.search(r"^@\w+\{\w+,$", entry, re.M) and entry.count("{") == entry.count("}") and entry.endswith("\n}")
    assert {"title", "author", "year"} <= set(re.findall(r"^  (\w+) += \{", entry, re.M))
    marks = [line[3:] for line in entry.split("\n") if line.startswith("%% ")]
    sources = "".join(path.read_text() for path in (ROOT / "tiedattn_jax").rglob("*.py"))
    for name in (name for mark in marks if " | " in mark for name in mark.partition(" | ")[0].split(", ")):
        is_named = functools.reduce(lambda owner, word: getattr(owner, word, None), name.split("."), ta) is not None
        assert is_named or f'"{name}"' in sources, name
    assert marks


def test_descriptions_of_the_package_agree():
    """Title, authors, version, licence and keywords are the same for package, citation, archive, paper and BibTeX."""
    yaml = pytest.importorskip("yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    archive = json.loads((ROOT / ".zenodo.json").read_text())
    paper = yaml.safe_load((ROOT / "paper.md").read_text().split("---\n")[1])
    title, authors = citation["title"], [author["name"] for author in citation["authors"]]
    subject = project["description"].partition(":")[0]
    assert title == archive["title"] == paper["title"] == f"{project['name']}: {subject[0].lower()}{subject[1:]}"
    for others in (project["authors"], archive["creators"], paper["authors"]):
        assert [author["name"] for author in others] == authors
    assert citation["version"] == archive["version"] == VERSION
    assert citation["license"] == archive["license"] == project["license"]
    assert set(citation["keywords"]) <= set(archive["keywords"]) <= set(project["keywords"])
    (reference,) = citation["references"]
    assert [paper["identifier"] for paper in archive["related_identifiers"]] == [reference["doi"]]
    assert reference["doi"] in ta.cite()
    entry = ta.cite().split("\n\n")[0].replace("\\", "")
    fields = dict(re.findall(r"^  (\w+) += \{(.+)\}", entry, re.M))
    assert fields["title"] == title and fields["author"] == f"{{{' and '.join(authors)}}}"
    assert fields["version"] == VERSION and fields["license"] == project["license"]


def test_the_paper_for_a_journal():
    """It has the sections that the journal asks for, at most 1,200 words, and cites what its file of references has."""
    _, _, text = (ROOT / "paper.md").read_text().split("---\n", 2)
    bib = (ROOT / "paper.bib").read_text()
    assert len(text.split()) <= 1200
    sections = "Summary, Statement of need, State of the field, Example, Scope and tests, Acknowledgements, References"
    assert ", ".join(re.findall(r"^# (.+)$", text, re.M)) == sections
    assert set(re.findall(r"@(\w+)", re.sub(r"```.*?```", "", text, flags=re.S))) == set(keys(bib))
