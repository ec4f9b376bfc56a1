"""Bad input to a subcommand gives exit code 2 and one sentence: the option, its value and what to give instead."""

import os

import jax
import pytest

from tiedattn_jax.base import errors
from tiedattn_jax.cli.main import main

LONG, SMALL = "a" * 300, "diagram --x alpha 1 2 2 --y omega .3 .4 2 --nodes 64"
# By words of the sentence: command lines that it refuses. The last option and its value stand in it, too.
QUOTED = {
    "a number": "solve --alpha two, solve --lam x",
    "a number from 1e-30 to 1e+30":
        "solve --alpha 0, solve --alpha -1, solve --alpha nan, solve --alpha inf, solve --sigma 0, "
        "solve --sigma 1e200, solve --sigma 1e-200, solve --lam -1, solve --teacher 0, solve --l1 0, solve --rtol 0",
    "in [0, 1]": "solve --omega 1.5, solve --omega -.1, solve --omega nan",
    "choose from": "train --layer causal, solve --branch lexical, solve --rule grid, gamp --init teacher, "
                   "train --optimizer sgd, histogram --mechanism lexical",
    "a power of two": "solve --nodes 1000, solve --nodes 0",
    "from 16 to 16777216": "solve --nodes 8, solve --nodes 33554432, solve --rule sobol --nodes 68719476736",
    "an integer": "solve --nodes 1e4, gamp --instances x",
    "from 0": "solve --seed -1",
    "from 1": "solve --rank 0, solve --replicates 0, diagram --devices 0, gamp --d 0, train --steps 0, "
              "histogram --epochs 0",
    "from 2": "histogram --width 0, histogram --samples 1, histogram --length 1, histogram --tokens 1",
    "even": "histogram --width 63",
    "to 2147483647": "solve --replicates 99999999999, histogram --free-epochs 3000000000",
    "to 9223372036854775807": "solve --seed 9223372036854775808, gamp --seed 9223372036854775808",
    "a folder that can be written": f"solve --out /dev/null/here, solve --out /dev/null, solve --out {LONG}",
    "LOW < HIGH": "diagram --x alpha 2 1 5, diagram --x alpha 1 inf 5",
    "POINTS >= 1": "diagram --x alpha 1 2 0, diagram --x alpha 1 2 2.5",
    "another": "diagram --y alpha 1 2 5",
    "K/N with 1 <= K <= N": "diagram --part 0/2, diagram --part 3/2, diagram --part 2, diagram --part 1/a",
}  # fmt: skip
MEMORY = (
    "transition --replicates, gamp --instances, gamp --alpha 1000 --d, train --alpha 1000 --d, histogram --hidden, "
    "histogram --tokens, histogram --runs, histogram --samples"
)


def option_of(call):
    """The last option of a command line, and its value in quotes."""
    option, _, value = call[call.rindex("--") :].partition(" ")
    return option, f"'{value}'"


# Rows: the command line, the option that the sentence names, and words of it (the value and the remedy).
ROWS = [
    ("", "command", "got none", "begin with"), ("lines", "command", "'lines'", "choose from"),
    ("solve --nodse 4096", "--nodse", "unrecognized"), ("solve 7", "7", "unrecognized"),
    ("gamp --optimizer gd", "--optimizer", "unrecognized"),
    ("solve --alpha", "--alpha", "expected one argument"),
    ("diagram --x beta 1 2 5", "--x", "'beta'", "one of alpha, lam, omega, sigma, or an entry like mixing[0,1]"),
    ("diagram --y beta 1 2 5 --optimal", "--y", "'beta'", "one of alpha, lam, omega, sigma, or an entry like"),
    ("diagram --y mixing[0,2] .1 .2 5", "--y", "'mixing[0,2]'", "an entry like mixing[0,1]"),
    ("solve --mixing .6 .6 .4 .6", "--mixing", "[[0.6, 0.6], [0.4, 0.6]]", "every row summing to 1"),
    ("solve --mixing 1.2 -.2 .4 .6", "--mixing", "'1.2'", "in [0, 1]"),
    ("solve --layer softmax", "--layer", "'softmax'", "choose from", "untied_dot_product"),
    ("solve --layer causal_dot_product --mixing .6 .4 .4 .6", "--mixing", "lower triangular"),
    ("solve --tied-teacher", "--tied-teacher", "left out beside --layer dot_product"),
    ("solve --lam 0", "--lam", "0.0", "positive"),
    ("solve --replicates 1000000000", "--replicates", "1000000000", "6.1e+04 GiB of memory, of which there are 59.6"),
    ("solve --rule sobol --nodes 65536 --replicates 2000000", "--replicates", "2000000", "1.22e+04 GiB of memory"),
    ("solve --rtol 1e-20", "--rtol", "1e-20", "at least 2.2e-14"),
    *((f"solve --rtol 1e-3 --{words}", *f"--{words}".split(), "left out beside --rtol")
      for words in ("nodes 4096", "rule sobol", "replicates 8", "seed 1")),
    (["solve", "--out", ""], "--out", "''", "a folder that can be written"),
    (["solve", "--out", "a\0b"], "--out", "a folder that can be written"),
    ("diagram --x alpha 0 2 5", "--x", "0.0", "positive"),
    ("diagram --x alpha 1 2 1000000000000", "--x", "got alpha 1 2 1000000000000", "GiB of memory"),
    ("diagram --y omega 0 1 1000000000", "--y", "got omega 0 1 1000000000", "25000000000 cells", "4.66e+05 GiB"),
    ("diagram --alpha 1", "--alpha", "1.0", "left out where alpha is an axis"),
    ("diagram --x sigma .4 .6 3 --y lam .01 .02 2 --optimal", "--optimal", "left out where alpha is not an axis"),
    (f"{SMALL} --resume", "--out", "None", "name the folder of the run to resume"),
    (f"{SMALL} --devices 4096", "--devices", "4096", "between 1 and"),
    ("gamp --d 2", "--d", "2"), ("gamp --alpha 1e-6", "--alpha", "1e-06"),
    ("train --steps 1" + "0" * 30, "--steps", "to 2147483647"),
    ("histogram --width 1000000", "--width", "1000000", "6.71e+04 GiB of memory"),
    ("histogram --samples 2 --length 2 --tokens 2 --seed 1", "--samples", "2", "must be more"),
    *((call, *option_of(call), words) for words, calls in QUOTED.items() for call in calls.split(", ")),
    *((f"{call} 2000000000", call.split()[-1], "2000000000", "GiB of memory") for call in MEMORY.split(", ")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def machine_memory(monkeypatch):
    """Make the machine one with 64 GB of memory, for the sentences about sizes that do not fit."""
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 64_000_000}[name])
    if jax.default_backend() != "cpu":
        monkeypatch.setattr(errors, "_memory", lambda: 64e9)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0])[:60])
def test_bad_input_is_one_sentence_and_code_two(capsys, row):
    call, option, *words = row
    with pytest.raises(SystemExit) as stop:
        main(call.split() if isinstance(call, str) else call)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.startswith("tiedattn") and err.endswith("\n")
    assert err.count("\n") == 1 and "Traceback" not in err
    for word in (option, *words):
        assert word in err
    # The value stands without a Python name before it.
    assert "got " not in err or "=" not in err.partition("got ")[2].partition(" ")[0]
