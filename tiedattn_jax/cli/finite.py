"""`tiedattn gamp` and `tiedattn train`: instances of finite size, and the theory at their realised teacher."""

from __future__ import annotations

import argparse

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from ..averages.recipes import SIZES
from ..base.errors import require_memory
from ..base.report import Status
from ..finite.data import Data
from ..finite.instances import run_instances
from ..finite.message_passing import GAMP, gamp
from ..finite.training import OPTIMIZERS, Training, default_optimizer, train
from ..model.parameters import scalar_parameters
from .options import ALPHA, MODEL, averages, integer, model_of, nodes_of, subcommand
from .report import Report, progress_bars

INITS = ("semantic", "positional", "random", "spectral")
STEPS = {"gamp": 1000, "gd": 5000, "adam": 5000, "lbfgs": 2000}
_STEPS_TEXT = ", ".join(f"{steps} for {method}" for method, steps in STEPS.items())
_INSTANCE_BYTES = 10_000  # memory of the results of an instance: its numbers and the fixed point of the theory


def register(commands: argparse._SubParsersAction) -> None:
    options = {
        "d": {"type": integer(), "default": 1000, "help": "dimension of a token"},
        "init": {"choices": INITS, "default": "semantic", "help": "initial weights"},
        "steps": {"type": integer(), "help": f"largest number of steps; by default {_STEPS_TEXT}"},
        "instances": {"type": integer(), "default": 1, "metavar": "K", "help": "number of independent instances"},
    }
    text = "by default lbfgs, or gd with --l1; the paper uses gd, which is not at a minimum after its 5000 steps"
    optimizer = {"optimizer": {"choices": OPTIMIZERS, "help": text}}
    common_options = {**ALPHA, **MODEL, **averages(), **options}
    text = "on sampled data and compare it with the theory"
    subcommand(commands, "gamp", run, f"run message passing {text}", common_options)
    subcommand(commands, "train", run, f"train the layer {text}", {**common_options, **optimizer})


def run(args: argparse.Namespace) -> Report:
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
    nodes = nodes_of(args, model, args.nodes if args.instances == 1 else SIZES["instances"])
    with progress_bars(args, "instance", delay=1) as stage:
        instances = run_instances(model, args.d, args.alpha, run_one, keys, nodes=nodes, progress=stage(method))
    text = f"{method} from the {args.init} start, d = {args.d}, alpha = {args.alpha:g}\n{instances.summary()}"
    numbers = {"d": args.d, "alpha": args.alpha, **scalar_parameters(model), **instances.to_dict()}
    succeeded = bool(np.all(instances.ok) & np.all(instances.theory_status <= Status.stalled))
    return Report(numbers, text, {}, succeeded, nodes)
