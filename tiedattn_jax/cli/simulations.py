"""`tiedattn gamp`, `train` and `histogram`: instances of finite size, beside the theory, and the counting task."""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from .. import counting
from ..averages.recipes import SIZES
from ..base.errors import InputError, require_memory
from ..base.files import csv_of, make_folder
from ..base.report import table
from ..base.results import Status
from ..counting.training import counted, mean_and_std, spread
from ..finite.data import Data
from ..finite.instances import means_of, run_instances
from ..finite.message_passing import GAMP, gamp
from ..finite.training import OPTIMIZERS, Training, default_optimizer, train
from ..model.parameters import scalar_parameters
from ..plotting.simulations import attention_figure, learning_figure
from .options import (
    ALPHA,
    MODEL,
    Command,
    Report,
    averages,
    defaults_of,
    integer,
    model_of,
    nodes_of,
    option,
    png,
    progress_bars,
    under_options,
)

INITS = ("semantic", "positional", "random", "spectral")
STEPS = {"gamp": 1000, "gd": 5000, "adam": 5000, "lbfgs": 2000}
_STEPS_TEXT = ", ".join(f"{steps} for {method}" for method, steps in STEPS.items())
_NODES_TEXT = f"{averages()['nodes']['help']}; by default {SIZES['solve']}, for several instances {SIZES['instances']}"
_INSTANCE_BYTES = 10_000  # memory of the results of an instance: its numbers and the fixed point of the theory


_SIMULATION = {
    **ALPHA,
    **MODEL,
    **averages(),
    "nodes": {**averages()["nodes"], "default": None, "help": _NODES_TEXT},
    "d": option("dimension of a token", integer(), 1000),
    "init": option("initial weights", default="semantic", choices=INITS),
    "steps": option(f"largest number of steps; by default {_STEPS_TEXT}", integer()),
    "instances": option("number of independent instances", integer(), 1, metavar="K"),
}
_OPTIMIZER = "by default lbfgs, or gd with --l1; the paper uses gd, which is not at a minimum after its 5000 steps"
_TRAINING = {**_SIMULATION, "optimizer": option(_OPTIMIZER, choices=OPTIMIZERS)}


def run_simulation(args: argparse.Namespace) -> Report:
    """Draw the instances, run message passing or training on them, and solve the theory for each."""
    model = model_of(args)
    method = "gamp" if args.command == "gamp" else args.optimizer or default_optimizer(model)
    steps = args.steps or STEPS[method]

    def run_one(data: Data, key: PRNGKeyArray) -> GAMP | Training:
        if method == "gamp":
            return gamp(model, data, args.init, steps=steps, tol=1e-10, key=key)
        return train(model, data, args.init, optimizer=method, steps=steps, key=key)

    require_memory(_INSTANCE_BYTES * args.instances, "instances", args.instances, "their results")
    keys = jax.random.split(jax.random.key(args.seed), args.instances)
    args.nodes = args.nodes or SIZES["solve" if args.instances == 1 else "instances"]
    nodes = nodes_of(args, model)
    with progress_bars(args, "instance", delay=1) as stage:
        instances = run_instances(model, args.d, args.alpha, run_one, keys, nodes=nodes, progress=stage(method))
    text = f"{method} from the {args.init} start, d = {args.d}, alpha = {args.alpha:g}\n{instances.summary()}"
    numbers = {"d": args.d, "alpha": args.alpha, **scalar_parameters(model), **means_of(instances)}
    succeeded = bool(np.all(instances.ok) & np.all(instances.values("theory_status") <= Status.stalled))
    return Report(numbers, text, {}, succeeded, nodes)


_SAMPLED, _TRAINED, _UNFROZEN = (defaults_of(f) for f in (counting.sample, counting.train, counting.unfreeze))
_EVEN = integer(2, suffix=", even", holds=lambda v: v % 2 == 0)
_MECHANISM = "what attention can read at first: only tokens (semantic), only positions (positional) or both (free)"
_FREE = "number of epochs of plain gradient descent with all weights free"
_SAMPLES = f"number of sequences; {_SAMPLED['train_share']:.0%}% are for training"
_HISTOGRAM = {
    "mechanism": option(_MECHANISM, default="semantic", choices=counting.MECHANISMS),
    "runs": option("number of independent trainings, which run at once", integer(), 10),
    "epochs": option("number of epochs of Adam with frozen weights", integer(), _TRAINED["epochs"]),
    "free-epochs": option(_FREE, integer(), _UNFROZEN["epochs"]),
    "samples": option(_SAMPLES, integer(2), _SAMPLED["n"]),
    "length": option("number of tokens in a sequence", integer(2), _SAMPLED["length"]),
    "tokens": option("size of the alphabet", integer(2), _SAMPLED["tokens"]),
    "width": option("dimension of the embeddings", _EVEN, _TRAINED["width"]),
    "hidden": option("number of hidden units", integer(), _TRAINED["hidden"]),
}


def run_histogram(args: argparse.Namespace) -> Report:
    """Train frozen solutions, train them on with all weights free, and compare.

    With `--out`, a checkpoint is written there after every epoch; the same call resumes from it.
    """
    _check_memory(args)
    with under_options(n="samples", checkpoint="out its checkpoint"):
        if args.out is not None:
            make_folder(args.out, "out")
        data, frozen, free, per_epoch = _trained(args)
    comparison, status = counting.compare(frozen, free), np.maximum(frozen.status, free.status)
    numbers = {name: getattr(args, name) for name in ("mechanism", "runs", "epochs", "free_epochs")}
    for name, values in comparison.items():
        numbers[f"{name}_mean"], numbers[f"{name}_std"] = mean_and_std(values)
    numbers |= {"seconds_per_epoch": per_epoch, "status": Status.name_of(np.max(status))}
    rows = [(name.replace("_", " "), spread(values)) for name, values in comparison.items()]
    text = f"{args.mechanism}: {args.runs} runs: {counted(status)}\n{table(rows)}"
    if per_epoch is not None:
        text += f"\n{per_epoch:.2f} s per epoch and run"
    published = counting.table({args.mechanism: comparison})
    files = {} if args.out is None else _files(args.mechanism, frozen, free, data, published)
    ok = not np.any(status == Status.nonfinite)
    return Report(numbers, text, files, ok, name=f"{args.mechanism}_histogram")


def _check_memory(args: argparse.Namespace) -> None:
    """Raise an `InputError` that names the largest size if the weights do not fit into memory."""
    d, p, L, T = args.width, args.hidden, args.length, args.tokens
    weights = {"tokens": T * d, "length": L * (d + p), "width": 3 * d * d, "hidden": p * d}
    largest = max(weights, key=lambda name: weights[name])
    run_bytes = 24.0 * sum(weights.values())  # weights, gradient, two moments, start and mask, four bytes each
    require_memory(run_bytes, largest, getattr(args, largest), "the weights of one transformer")
    require_memory(args.runs * run_bytes, "runs", args.runs, "the weights of so many transformers")


def _trained(args: argparse.Namespace) -> tuple[counting.Data, counting.Training, counting.Training, float | None]:
    """Return the data, both trainings, and the median seconds per epoch and run of the frozen one.

    The first epoch is not timed, because it compiles. The seconds are None if no other epoch ran.
    """
    data_key, run_key = jax.random.split(jax.random.key(args.seed))
    try:
        data = counting.sample(data_key, args.samples, length=args.length, tokens=args.tokens)
    except InputError as problem:
        if problem.argument != "train_share":
            raise
        text = "must be more, too few different sequences are left to train and to test"
        raise InputError("samples", f"{text}, got {args.samples}") from None
    keys = jax.random.split(run_key, args.runs)
    times: list[float] = []
    with progress_bars(args, "epoch") as stage:

        def stage_options(name: str, file_name: str) -> dict[str, Any]:
            path = None if args.out is None else args.out / f"{args.mechanism}_{file_name}.checkpoint"
            bar = stage(f"{args.mechanism}, {name}")

            def progress(done: int, total: int) -> None:
                times.append(time.perf_counter())
                bar(done, total)

            return {"checkpoint": path, "progress": progress}

        sizes = {"width": args.width, "hidden": args.hidden}
        frozen = counting.train(
            keys, data, args.mechanism, epochs=args.epochs, **sizes, **stage_options("frozen", "frozen")
        )
        seconds = np.diff(times)[1:]  # without the first epoch, which compiles
        with under_options(epochs="free_epochs"):
            free = counting.unfreeze(
                keys, frozen, data, epochs=args.free_epochs, **stage_options("free", f"free_from_{args.epochs}")
            )
    return data, frozen, free, float(np.median(seconds)) / args.runs if seconds.size else None


def _files(
    mechanism: str, frozen: counting.Training, free: counting.Training, data: counting.Data, text: str
) -> dict[str, bytes]:
    stages, sequences = {"frozen": frozen, "free": free}, data.examples()
    matrices = {name: counting.attention(training.run(0), sequences) for name, training in stages.items()}
    files = {
        "curves.csv": csv_of(_epoch_rows(stages)),
        "table.md": f"{text}\n".encode(),
        "attention.png": png(attention_figure(matrices, sequences)),
        "learning.png": png(learning_figure({mechanism: [frozen, free]})),
    }
    return {f"{mechanism}_{name}": content for name, content in files.items()}


def _epoch_rows(stages: dict[str, counting.Training]) -> list[dict[str, Any]]:
    """Return the table of what was measured after every epoch of every run."""
    rows = []
    for stage, training in stages.items():
        measurements = {field.name: getattr(training.history, field.name) for field in fields(counting.History)}
        for k, epoch in np.ndindex(training.history.train_loss.shape):
            values = {name: a[k, epoch] for name, a in measurements.items()}
            rows.append({"stage": stage, "run": k, "epoch": epoch + 1, **values})
    return rows


_ON_DATA = "on sampled data and compare it with the theory"
COMMANDS = (
    Command("gamp", run_simulation, f"run message passing {_ON_DATA}", _SIMULATION),
    Command("train", run_simulation, f"train the layer {_ON_DATA}", _TRAINING),
    Command(
        "histogram", run_histogram, "train transformers to count tokens", _HISTOGRAM, "the same call resumes from {out}"
    ),
)
