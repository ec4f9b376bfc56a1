"""Progress bars, and defaults that equal the library's."""

import argparse
import sys

import jax
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import SIZES, default_recipe
from tiedattn_jax.cli import options
from tiedattn_jax.cli.main import main
from tiedattn_jax.model.layers import LAYERS


def stages_stderr(capsys, **settings):
    """Stderr of three stages: one that is resumed, one that is not called, one that is called once."""
    with options.progress_bars(argparse.Namespace(**settings), "solve") as stage:
        progress = stage("one")
        progress(3, 10)
        progress(10, 10)
        stage("two")
        stage("three")(0, 7)
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_progress_bars(capsys, monkeypatch):
    assert stages_stderr(capsys, json=False) == ""  # nobody looks
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    err = stages_stderr(capsys, json=False)
    assert err.index("one:  30%") < err.index("3/10") < err.index("three:   0%") < err.index("0/7")
    assert "two" not in err
    assert "?solve/s" in err  # earlier work says nothing about the rate
    assert err.endswith("\r") and "\n" not in err  # a bar replaces the one before, and the last one is wiped away
    assert stages_stderr(capsys, json=True) == ""
    with pytest.raises(KeyboardInterrupt), options.progress_bars(argparse.Namespace(json=False), "solve") as stage:
        stage("one")(1, 2)
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith("\r")


@pytest.fixture
def read():
    """A parser of words for a subcommand with the options of a state."""

    def parsed(*words, size="solve"):
        parser = options.Parser()
        commands = parser.add_subparsers()
        groups = {**options.ALPHA, **options.MODEL, **options.averages(size)}
        options.Command("some", lambda args: None, "some text", groups).add_to(commands)
        return parser.parse_args(["some", *words])

    return parsed


def test_defaults_are_the_library_s(read):
    args = read()
    model, standard = options.model_of(args), ta.DotProduct()
    for name in ("omega", "sigma", "lam", "mixing"):
        np.testing.assert_array_equal(getattr(model, name), getattr(standard, name))
    assert (args.alpha, args.seed, args.json, args.out) == (2.0, 0, False, None)
    assert args.nodes == SIZES["solve"] and read(size="grid").nodes == SIZES["grid"]
    default, chosen = default_recipe(model).rule(model), options.nodes_of(args, model)
    assert (chosen.size, chosen.replicates) == (default.size, default.replicates)
    assert options.nodes_of(args, model, SIZES["curve"]).size < default.size


def test_every_option_of_model_and_averages_counts(read):
    words = "--omega .2 --sigma .7 --lam .03 --mixing .9 .1 .2 .8 --rule sobol --nodes 1024 --replicates 3 --seed 5"
    args = read(*words.split())
    model = options.model_of(args)
    assert (float(model.omega), float(model.sigma), float(model.lam)) == (0.2, 0.7, 0.03)
    np.testing.assert_array_equal(model.mixing, [[0.9, 0.1], [0.2, 0.8]])
    points, expected = options.nodes_of(args, model), ta.Sobol(1024, seed=5, replicates=3).rule(model)
    np.testing.assert_array_equal(points.stack.student, expected.stack.student)


def test_layers(read):
    for name, make in LAYERS.items():
        model = options.model_of(read("--layer", name))
        jax.tree.map(np.testing.assert_array_equal, model, make())
    model = options.model_of(read(*"--layer linear_attention --mixing .9 .1 .2 .8".split()))
    assert isinstance(model, ta.LinearAttention) and model.mixing[0, 0] == 0.9
    model = options.model_of(read(*"--l1 .02 --lam 0".split()))
    assert (float(model.penalty.strength), float(model.lam)) == (0.02, 0.0)


def test_ranks_and_teachers(read):
    model = options.model_of(read(*"--rank 2 --teacher 1.5".split()))
    assert model.shape == (2, 2, 1) and float(model.teacher[0, 0]) == 1.5 and model.penalty is None
    untied = "--layer untied_dot_product --rank 2".split()
    assert options.model_of(read(*untied)).shape == (2, 4, 2)
    assert options.model_of(read(*untied, "--tied-teacher")).shape == (2, 4, 1)


def test_a_folder_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    for usable in (tmp_path, tmp_path / "new" / "folder", "relative"):
        assert options.folder(str(usable)) == str(usable)
    for unusable in ("", "a\0b", "a" * 300, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a folder that can be written, got "):
            options.folder(str(unusable))


@pytest.mark.parametrize(("words", "size"), [("", 2**16), ("--rule sobol", 100 * 2**15), ("--nodes 65536", 2**17)])
def test_averages_that_do_not_fit_are_refused(unchecked, read, monkeypatch, words, size):
    requests = []
    monkeypatch.setattr(options, "require_memory", lambda *arguments: requests.append(arguments))
    monkeypatch.setitem(options.RULES, "lines", lambda *arguments, **keywords: None)
    monkeypatch.setitem(options.RULES, "sobol", lambda *arguments, **keywords: None)
    args = read(*words.split(), "--replicates", "1000")
    options.nodes_of(args, options.model_of(args))
    assert requests[0][:3] == (1000 * size, "replicates", 1000)


def test_help_of_every_subcommand(capsys):
    for command in ("solve", "transition", "diagram", "gamp", "train", "histogram"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert stop.value.code == 0 and "seed of the random numbers (default 0)" in text
        for option in ("--json", "--out DIR"):
            assert option in text
