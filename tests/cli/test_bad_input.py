"""Bad input to a subcommand gives exit code 2 and one sentence: the option, its value and what to give instead."""

import os

import jax
import pytest

from tiedattn_jax.base import errors
from tiedattn_jax.cli.main import main

LONG = "a" * 300
# Rows: the command line, the option that the sentence names, and words of it (the value and the remedy).
ROWS = [
    ("", "command", "required"),
    ("lines", "command", "'lines'", "choose from"),
    ("solve --nodse 4096", "--nodse", "unrecognized"),
    ("solve 7", "7", "unrecognized"),
    ("solve --alpha", "--alpha", "expected one argument"),
    ("solve --alpha 0", "--alpha", "'0'", "a number from 1e-30 to 1e+30"),
    ("solve --alpha -1", "--alpha", "'-1'", "from 1e-30"),
    ("solve --alpha nan", "--alpha", "'nan'", "from 1e-30"),
    ("solve --alpha inf", "--alpha", "'inf'", "to 1e+30"),
    ("solve --alpha two", "--alpha", "'two'", "a number"),
    ("solve --omega 1.5", "--omega", "'1.5'", "in [0, 1]"),
    ("solve --omega -.1", "--omega", "'-.1'", "in [0, 1]"),
    ("solve --omega nan", "--omega", "'nan'", "in [0, 1]"),
    ("solve --sigma 0", "--sigma", "'0'", "from 1e-30"),
    ("solve --sigma 1e200", "--sigma", "'1e200'", "to 1e+30"),
    ("solve --sigma 1e-200", "--sigma", "'1e-200'", "from 1e-30"),
    ("solve --lam -1", "--lam", "'-1'", "from 1e-30"),
    ("solve --lam x", "--lam", "'x'", "a number"),
    ("solve --mixing .6 .4 .4", "--mixing", "expected 4 arguments"),
    ("solve --mixing .6 .6 .4 .6", "--mixing", "[[0.6, 0.6], [0.4, 0.6]]", "every row summing to 1"),
    ("solve --mixing 1.2 -.2 .4 .6", "--mixing", "'1.2'", "in [0, 1]"),
    ("solve --layer softmax", "--layer", "'softmax'", "choose from", "untied_dot_product"),
    ("train --layer causal", "--layer", "'causal'", "choose from"),
    ("solve --layer causal_dot_product --mixing .6 .4 .4 .6", "--mixing", "lower triangular"),
    ("solve --tied-teacher", "--tied-teacher", "left out beside --layer dot_product"),
    ("solve --teacher 0", "--teacher", "'0'", "from 1e-30"),
    ("solve --rank 0", "--rank", "'0'", "from 1"),
    ("solve --lam 0", "--lam", "0.0", "positive"),
    ("solve --l1 0", "--l1", "'0'", "from 1e-30"),
    ("solve --l1 .01 --rank 5", "penalty", "got 5", "more than 4 columns"),
    ("solve --nodes 1000", "--nodes", "'1000'", "a power of two"),
    ("solve --nodes 0", "--nodes", "'0'", "a power of two"),
    ("solve --nodes 33554432", "--nodes", "'33554432'", "from 1 to 16777216"),
    ("solve --rule sobol --nodes 68719476736", "--nodes", "'68719476736'", "to 16777216"),
    ("solve --nodes 1e4", "--nodes", "'1e4'", "an integer"),
    ("solve --replicates 0", "--replicates", "'0'", "from 1"),
    ("solve --replicates 1000000000", "--replicates", "1000000000", "6.1e+04 GiB of memory, of which there are 59.6"),
    ("solve --rule sobol --nodes 65536 --replicates 2000000", "--replicates", "2000000", "1.22e+04 GiB of memory"),
    ("solve --replicates 99999999999", "--replicates", "'99999999999'", "to 2147483647"),
    ("solve --branch lexical", "--branch", "'lexical'", "choose from"),
    ("solve --rule grid", "--rule", "'grid'", "choose from"),
    ("solve --rtol 0", "--rtol", "'0'", "from 1e-30"),
    ("solve --rtol 1e-20", "--rtol", "1e-20", "at least 2.2e-14"),
    ("solve --rtol 1e-3 --nodes 4096", "--nodes", "4096", "left out beside --rtol"),
    ("solve --rtol 1e-3 --rule sobol", "--rule", "sobol", "left out beside --rtol"),
    ("solve --rtol 1e-3 --replicates 8", "--replicates", "8", "left out beside --rtol"),
    ("solve --rtol 1e-3 --seed 1", "--seed", "1", "left out beside --rtol"),
    ("solve --seed -1", "--seed", "'-1'", "from 0"),
    ("solve --seed 9223372036854775808", "--seed", "'9223372036854775808'", "to 9223372036854775807"),
    ("gamp --seed 9223372036854775808", "--seed", "'9223372036854775808'", "to 9223372036854775807"),
    ("solve --seed " + "9" * 400, "--seed", "9999", "to 9223372036854775807"),
    ("solve --out /dev/null/here", "--out", "'/dev/null/here'", "a folder that can be written"),
    ("solve --out /dev/null", "--out", "'/dev/null'", "a folder that can be written"),
    (f"solve --out {LONG}", "--out", LONG, "a folder that can be written"),
    (["solve", "--out", ""], "--out", "''", "a folder that can be written"),
    (["solve", "--out", "a\0b"], "--out", "a folder that can be written"),
    ("transition --branch semantic", "--branch", "unrecognized"),
    ("transition --replicates 1000000000", "--replicates", "1000000000", "GiB of memory"),
    ("diagram --x alpha 2 1 5", "--x", "'alpha 2 1 5'", "LOW < HIGH"),
    ("diagram --x alpha 1 inf 5", "--x", "'alpha 1 inf 5'", "LOW < HIGH"),
    ("diagram --x alpha 1 2 0", "--x", "'alpha 1 2 0'", "POINTS >= 1"),
    ("diagram --x alpha 1 2 2.5", "--x", "'alpha 1 2 2.5'", "POINTS >= 1"),
    ("diagram --x beta 1 2 5", "--x", "'beta 1 2 5'", "one of alpha, omega, sigma, lam"),
    ("diagram --x alpha 1 2", "--x", "expected 4 arguments"),
    ("diagram --x alpha 0 2 5", "--x", "0.0", "positive"),
    ("diagram --x alpha 1 2 1000000000000", "--x", "got alpha 1 2 1000000000000", "GiB of memory"),
    ("diagram --y omega 0 1 1000000000", "--y", "got omega 0 1 1000000000", "25000000000 cells", "4.66e+05 GiB"),
    ("diagram --y omega .5 1.5 5", "--y", "1.5", "in [0, 1]"),
    ("diagram --y alpha 1 2 5", "--y", "'alpha 1 2 5'", "another"),
    ("diagram --alpha 1", "--alpha", "1.0", "left out where alpha is an axis"),
    ("diagram --resume", "--out", "None", "name the folder of the run to resume"),
    ("diagram --devices 0", "--devices", "'0'", "from 1"),
    ("diagram --devices 4096", "--devices", "4096", "between 1 and"),
    ("gamp --d 0", "--d", "'0'", "from 1"),
    ("gamp --d 2", "--d", "2"),
    ("gamp --d 10000000 --alpha 1000", "--d", "10000000", "GiB of memory"),
    ("train --d 10000000 --alpha 1000", "--d", "10000000", "GiB of memory"),
    ("gamp --alpha 1e-6", "--alpha", "1e-06"),
    ("gamp --init teacher", "--init", "'teacher'", "choose from"),
    ("gamp --instances 1000000000", "--instances", "1000000000", "GiB of memory"),
    ("gamp --instances x", "--instances", "'x'", "an integer"),
    ("gamp --optimizer gd", "--optimizer", "unrecognized"),
    ("train --steps 0", "--steps", "'0'", "from 1"),
    ("train --steps 1" + "0" * 30, "--steps", "to 2147483647"),
    ("train --optimizer sgd", "--optimizer", "'sgd'", "choose from"),
    ("histogram --width 63", "--width", "'63'", "even"),
    ("histogram --width 0", "--width", "'0'", "from 2"),
    ("histogram --width 1000000", "--width", "1000000", "6.71e+04 GiB of memory"),
    ("histogram --hidden 2000000000", "--hidden", "2000000000", "GiB of memory"),
    ("histogram --tokens 2000000000", "--tokens", "2000000000", "GiB of memory"),
    ("histogram --runs 2000000000", "--runs", "2000000000", "GiB of memory"),
    ("histogram --samples 2000000000", "--samples", "2000000000", "GiB of memory"),
    ("histogram --samples 1", "--samples", "'1'", "from 2"),
    ("histogram --samples 2 --length 2 --tokens 2 --seed 1", "--samples", "2", "must be more"),
    ("histogram --length 1", "--length", "'1'", "from 2"),
    ("histogram --tokens 1", "--tokens", "'1'", "from 2"),
    ("histogram --epochs 0", "--epochs", "'0'", "from 1"),
    ("histogram --free-epochs 3000000000", "--free-epochs", "'3000000000'", "to 2147483647"),
    ("histogram --mechanism lexical", "--mechanism", "'lexical'", "choose from"),
]


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
