"""`tiedattn gamp` and `tiedattn train`: instances of finite size next to the theory at their realised teacher."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import numpy as np

from ..averages.sizes import SIZES
from ..errors import require_memory
from ..finite.data import Data
from ..finite.instances import NAMES, Instances, run_instances
from ..finite.message_passing import GAMP, gamp
from ..finite.training import OPTIMIZERS, Training, train
from ..results import Status, error_bar
from .options import ALPHA, MODEL, NUMBERS, averages, integer, model_of, nodes_of, subcommand
from .report import Report, progress_bars
from .solve import state_report

INITS = ("semantic", "positional", "random")
STEPS = {"gamp": 1000, "gd": 5000, "adam": 5000, "lbfgs": 2000}
_INSTANCE_BYTES = 10_000  # its numbers and the fixed point of the theory beside it


def register(commands: Any) -> None:
    """Add both subcommands."""
    own = {
        "d": {"type": integer(), "default": 1000, "help": "dimension"},
        "init": {"choices": INITS, "default": "semantic", "help": "start"},
        "steps": {"type": integer(), "help": "at most so many"},
        "instances": {"type": integer(), "default": 1, "metavar": "K", "help": "independent draws"},
    }
    text = "gd is the paper's and does not come to rest in its 5000 steps"
    optimizer = {"optimizer": {"choices": OPTIMIZERS, "default": "lbfgs", "help": text}}
    commons = {**ALPHA, **MODEL, **averages(), **own}
    text = "on sampled data, next to the theory"
    subcommand(commands, "gamp", partial(run, name="gamp"), f"message passing {text}", commons)
    subcommand(commands, "train", partial(run, name="train"), f"train the layer {text}", {**commons, **optimizer})


def run(args: argparse.Namespace, name: str) -> Report:
    """Draw the instances, run them, solve the theory for each."""
    model = model_of(args)
    method = name if name == "gamp" else args.optimizer
    steps = args.steps or STEPS[method]

    def one(data: Data, key: jax.Array) -> GAMP | Training:
        if name == "gamp":
            return gamp(model, data, args.init, steps=steps, tol=1e-10, key=key)
        return train(model, data, method, args.init, steps=steps, key=key)

    require_memory(_INSTANCE_BYTES * args.instances, "instances", args.instances, "their results")
    keys = jax.random.split(jax.random.key(args.seed), args.instances)
    nodes = nodes_of(args, model, args.nodes if args.instances == 1 else SIZES["instances"])
    with progress_bars(args, "instance", delay=1) as stage:
        found = run_instances(model, args.d, args.alpha, one, keys, nodes=nodes, progress=stage(method))
    status, largest = Status.name_of(found.status.max()), found.gradient_norm.max()
    title = f"{method} from the {args.init} start, d = {args.d}, alpha = {args.alpha:g}"
    text = f"{title}: {status}, largest gradient {largest:.1e}\n{found.table()}"
    good = bool(np.all(found.ok) & np.all(found.theory_status <= Status.stalled))
    return Report(finite_report(found, model, args.d, args.alpha), text, {}, good, nodes)


def finite_report(found: Instances, model: Any, d: int, alpha: float) -> dict[str, Any]:
    """The JSON object of `tiedattn gamp` and `tiedattn train`: means over the instances, their errors, and each one.

    The means of the theory are those of the instances for which it has a state; its status is the worst.
    """
    each: list[dict[str, Any]] = [
        {
            **{name: float(getattr(found.found, name)[k]) for name in NAMES},
            **{name: getattr(found, name)[k].item() for name in ("branch", "rho", "gradient_norm", "iterations")},
            "finished_by_lbfgs": bool(found.finished[k]),
            "status": Status.name_of(found.status[k]),
            "theory": state_report(point),
        }
        for k, point in enumerate(found.points)
    ]

    def mean(rows: list[dict]) -> dict[str, Any]:
        return {k: float(np.mean([r[k] for r in rows])) if isinstance(v, float) else v for k, v in rows[0].items()}

    usable = np.flatnonzero(found.usable)
    numbers = {name: np.asarray(getattr(found.found, name))[usable] for name in NAMES}
    branches = sorted(set(found.branch.tolist()))
    settled = found.theory_status <= Status.stalled
    theory = [row["theory"] for row, good in zip(each, settled, strict=True) if good or not settled.any()]
    return {
        "d": d,
        "alpha": alpha,
        **{name: float(getattr(model, name)) for name in NUMBERS},
        "branch": branches[0] if len(branches) == 1 else "mixed",
        **{name: float(np.mean(a)) if a.size else None for name, a in numbers.items()},
        "stderr": {name: float(error_bar(a)) if a.size > 1 else None for name, a in numbers.items()},
        "gradient_norm": float(found.gradient_norm.max()),
        "iterations": int(found.iterations.max()),
        "rho": float(np.mean(found.rho)),
        "status": Status.name_of(found.status.max()),
        "theory": {
            **mean(theory),
            "status": Status.name_of(found.theory_status.max()),
            "stderr": mean([row["stderr"] for row in theory]),
        },
        "instances": each,
    }
