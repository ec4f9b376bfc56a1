"""Progress bars, numbers with error bars, and defaults that are the library's."""

import argparse
import csv
import math

import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.cli import options
from tiedattn_jax.cli.main import main


def counted(capsys, **given):
    """What three stages leave on stderr: one that is resumed, one that is not called, one that is called once."""
    with options.progress_bars(argparse.Namespace(**given), "solve") as stage:
        progress = stage("one")
        progress(3, 10)
        progress(10, 10)
        stage("two")
        stage("three")(0, 7)
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_progress_bars(capsys):
    err = counted(capsys, json=False)
    assert err.index("one:  30%") < err.index("3/10") < err.index("three:   0%") < err.index("0/7")
    assert "two" not in err
    assert "?solve/s" in err  # what was done before says nothing about the rate
    assert err.endswith("\r")  # the last bar is wiped away
    assert counted(capsys, json=True) == ""


def test_an_interrupt_wipes_the_bar_away(capsys):
    with pytest.raises(KeyboardInterrupt), options.progress_bars(argparse.Namespace(json=False), "solve") as stage:
        stage("one")(1, 2)
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith("\r")


def test_numbers_with_error_bars():
    assert options.with_error(1.251537, 0.000123) == "1.25154(12)"
    assert options.with_error(1.251537, 0.0) == "1.25154" == options.with_error(1.251537, math.inf)
    assert options.with_error(-12.3, 4.56) == "-12.3(46)"
    assert options.with_error(math.nan, math.nan) == "nan"


def test_defaults_are_the_library_s():
    parents = [options.model_options(), options.alpha_options(), options.node_options(), options.output_options()]
    args = options.Parser(parents=parents).parse_args([])
    model, standard = options.model_of(args), ta.dot_product()
    for name in ("omega", "sigma", "lam", "mixing"):
        np.testing.assert_array_equal(getattr(model, name), getattr(standard, name))
    assert args.nodes == ta.SIZES["solve"]
    default, chosen = ta.default_nodes(model), options.nodes_of(args, model)
    assert (chosen.size, chosen.replicates) == (default.size, default.replicates)
    assert options.nodes_of(args, model, ta.SIZES["curve"]).size < default.size
    args = options.Parser(parents=[options.node_options(), options.output_options()]).parse_args(
        ["--rule", "sobol", "--nodes", "1024", "--replicates", "3"]
    )
    points = options.nodes_of(args, model)
    assert (points.size, points.replicates) == (1024, 3)


def test_help_of_every_subcommand(capsys):
    for command in ("solve", "transition", "diagram", "gamp", "train", "histogram"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0 and "(default" in capsys.readouterr().out


def test_table():
    rows = [{"branch": "semantic", "q": 0.5}, {"branch": "positional", "q": math.nan}]
    found = list(csv.DictReader(options.csv_of(rows).decode().splitlines()))
    assert found == [{"branch": "semantic", "q": "0.5"}, {"branch": "positional", "q": "nan"}]
