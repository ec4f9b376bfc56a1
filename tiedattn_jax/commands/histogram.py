"""`tiedattn histogram`: the counting task of Appendix A, one mechanism, several runs."""

from __future__ import annotations

import argparse
import csv
import io
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from ..histogram import MECHANISMS, Curves, Data, Training, compare, sample, table, train, unfreeze
from ..plotting import attention_figure, learning_figure
from ..state_evolution import Status
from .common import Report, count, output_options, ticking


def register(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("histogram", parents=[output_options()], help="train transformers to count tokens")
    add = parser.add_argument
    add("--mechanism", choices=MECHANISMS, default="semantic", help="what attention may read (default semantic)")
    add("--runs", type=count, default=10, help="independent trainings, at once (default 10)")
    add("--epochs", type=count, default=200, help="epochs of Adam, frozen (default 200)")
    add("--free-epochs", type=count, default=100, help="epochs of plain gradient descent, unfrozen (default 100)")
    add("--samples", type=count, default=50_000, help="sequences, 70 %% of them to train on (default 50000)")
    add("--length", type=count, default=10, help="tokens in a sequence (default 10)")
    add("--tokens", type=count, default=15, help="size of the alphabet (default 15)")
    add("--width", type=count, default=64, help="dimension of the embeddings, even (default 64)")
    add("--hidden", type=count, default=128, help="hidden units (default 128)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Report:
    """Train, unfreeze, compare. With `--out`, every epoch leaves a checkpoint there, from which the same call resumes."""
    sampling, running = jax.random.split(jax.random.key(args.seed))
    data = sample(sampling, args.samples, length=args.length, tokens=args.tokens)
    keys = jax.random.split(running, args.runs)
    seconds: list[float] = []
    total = args.epochs + args.free_epochs
    with tqdm(total=total, disable=args.json, file=sys.stderr, unit="epoch", leave=False) as bar:

        def options(stage: str) -> dict[str, Any]:
            bar.set_description(f"{args.mechanism}, {stage}")
            path = None if args.out is None else checkpoint(args.out, args.mechanism, stage)
            return {"checkpoint": path, "progress": lambda epochs: ticking(_timed(epochs, seconds), bar)}

        try:
            sizes = {"width": args.width, "hidden": args.hidden}
            frozen = train(keys, data, args.mechanism, epochs=args.epochs, **sizes, **options("frozen"))
            per_epoch = float(np.median(seconds[1:])) / args.runs if seconds[1:] else None
            free = unfreeze(keys, frozen, data, epochs=args.free_epochs, **options("free"))
        except ValueError as problem:
            raise ValueError(str(problem).replace("checkpoint must", "out: its checkpoint must", 1)) from None
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*([] if args.out is None else [f"the same call resumes from {args.out}"])) from None
    found = compare(frozen, free)
    numbers = {
        **{"mechanism": args.mechanism, "runs": args.runs, "epochs": args.epochs, "free_epochs": args.free_epochs},
        **found.summary(),
        **{"seconds_per_epoch": per_epoch, "status": Status.name_of(np.max(found.status))},
    }
    text = table({args.mechanism: found})
    if per_epoch is not None:
        text += f"\n{per_epoch:.2f} s per epoch and run"
    files = {} if args.out is None else _files(args.mechanism, frozen, free, data, text)
    return Report(numbers, text, files, not np.any(found.status == Status.nonfinite))


def checkpoint(out: Path, mechanism: str, stage: str) -> Path:
    """Where the command keeps a training; `stage` is frozen or free."""
    return out / f"{mechanism}_{stage}.checkpoint"


def _timed(items: Iterable, seconds: list[float]) -> Iterator:
    """The items, noting the time each one takes."""
    for item in items:
        begin = time.perf_counter()
        yield item
        seconds.append(time.perf_counter() - begin)


def _files(mechanism: str, frozen: Training, free: Training, data: Data, text: str) -> dict[str, bytes]:
    stages = {"frozen": frozen, "free": free}
    pictures = {
        "attention.png": attention_figure({name: stage.run(0) for name, stage in stages.items()}, data.examples()),
        "learning.png": learning_figure({mechanism: [frozen, free]}),
    }
    files = {"curves.csv": _csv(stages).encode(), "table.md": f"{text}\n".encode()}
    for name, figure in pictures.items():
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=150)
        files[name] = content.getvalue()
    return files


def _csv(stages: dict[str, Training]) -> str:
    """The curves of all runs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [field.name for field in fields(Curves)]
    writer.writerow(["stage", "run", "epoch", *names])
    for stage, training in stages.items():
        values = np.stack([getattr(training.curves, name) for name in names], axis=-1)
        for (k, epoch), _ in np.ndenumerate(values[..., 0]):
            writer.writerow([stage, k, epoch + 1, *values[k, epoch]])
    return out.getvalue()
