"""Progress bars, and options that describe a model and its averages; their defaults are the library's."""

import argparse
import contextlib
import io

import jax
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import SIZES, default_recipe
from tiedattn_jax.cli import options
from tiedattn_jax.cli.main import main
from tiedattn_jax.model.layers import LAYERS


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stderr, json=False):
    """What three stages write: one that is resumed, one that is not called, one that is called once and interrupted."""
    with contextlib.redirect_stderr(stderr), contextlib.suppress(KeyboardInterrupt):
        with options.progress_bars(argparse.Namespace(json=json), "solve") as stage:
            progress = stage("one")
            progress(3, 10)
            progress(10, 10)
            stage("two")
            stage("three")(0, 7)
            raise KeyboardInterrupt
    return "" if stderr is None else stderr.getvalue()


def test_progress_bars(capsys):
    text = shown(Terminal())
    assert text.index("one:  30%") < text.index("3/10") < text.index("three:   0%") < text.index("0/7")
    assert "two" not in text and "?solve/s" in text  # earlier work says nothing about the rate
    assert text.endswith("\r") and "\n" not in text  # a bar replaces the one before, and the last one is wiped away
    assert shown(Terminal(), json=True) == shown(io.StringIO()) == shown(None) == ""  # nobody looks
    assert capsys.readouterr() == ("", "")


def read(*words, size="solve"):
    """Parse the words of a subcommand with the options of a state."""
    parser = options.Parser()
    groups = {**options.ALPHA, **options.MODEL, **options.averages(size)}
    options.Command("some", lambda args: None, "some text", groups).add_to(parser.add_subparsers())
    return parser.parse_args(["some", *words])


def model_of(words):
    return options.model_of(read(*words.split()))


def test_defaults_are_the_library_s():
    args = read()
    model = options.model_of(args)
    jax.tree.map(np.testing.assert_array_equal, model, ta.DotProduct())
    assert (args.alpha, args.seed, args.json, args.out) == (2.0, 0, False, None)
    assert args.nodes == SIZES["solve"] and read(size="grid").nodes == SIZES["grid"]
    default, chosen = default_recipe(model).rule(model), options.nodes_of(args, model)
    assert (chosen.size, chosen.replicates) == (default.size, default.replicates)
    assert options.nodes_of(args, model, SIZES["curve"]).size < default.size


def test_every_option_of_model_and_averages_counts():
    words = "--omega .2 --sigma .7 --lam .03 --mixing .9 .1 .2 .8 --rule sobol --nodes 1024 --replicates 3 --seed 5"
    args = read(*words.split())
    model = options.model_of(args)
    expected = ta.DotProduct(0.2, 0.7, 0.03, mixing=[[0.9, 0.1], [0.2, 0.8]])
    jax.tree.map(np.testing.assert_array_equal, model, expected)
    points, expected = options.nodes_of(args, model), ta.Sobol(1024, seed=5, replicates=3).rule(model)
    np.testing.assert_array_equal(points.stack.student, expected.stack.student)
    for name, make in LAYERS.items():
        jax.tree.map(np.testing.assert_array_equal, model_of(f"--layer {name}"), make())
    for words, model in (
        ("--layer linear_attention --mixing .9 .1 .2 .8", ta.LinearAttention(mixing=[[0.9, 0.1], [0.2, 0.8]])),
        ("--l1 .02 --lam 0", ta.DotProduct(lam=0.0, penalty=ta.L1(0.02))),
        ("--rank 2 --teacher 1.5", ta.DotProduct(rank=2, teacher=1.5)),
        ("--layer untied_dot_product --rank 2 --tied-teacher", ta.UntiedDotProduct(rank=2, tied_teacher=True)),
    ):
        jax.tree.map(np.testing.assert_array_equal, model_of(words), model)


def test_a_folder_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    for usable in (tmp_path, tmp_path / "new" / "folder", "relative"):
        assert options.folder(str(usable)) == str(usable)
    for unusable in ("", "a\0b", "a" * 300, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"must be a folder that can be written, got "):
            options.folder(str(unusable))


def test_help(capsys):
    for command in ("solve", "transition", "diagram", "join", "gamp", "train", "histogram"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert all(words in text for words in ("seed of the random numbers (default 0)", "--json", "--out DIR"))
