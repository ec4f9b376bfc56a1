"""`tiedattn --check`: does the library work on this machine, and what does a call cost?"""

from __future__ import annotations

import argparse
import time
from importlib import metadata
from typing import Any

import jax
import numpy as np

from ..base import VERSION
from ..base.programs import use_compilation_cache
from ..base.report import table
from ..model.layers import dot_product
from ..theory.engine import cores
from ..theory.solve import solve

# The semantic state of the standard model at alpha = 2, from an integration rule of another kind than any here.
KNOWN = {"q": 0.11481726, "V": 12.66853, "theta": 0.15815827, "train_loss": 0.0035906160}
_TOLERANCE = 1e-4  # relative: the averages are accurate to 4e-5


def check_machine() -> tuple[bool, str]:
    """Solve one state twice; return whether its numbers are the known ones, and a report.

    The first call compiles its programs, or reads them from the folder of the compilation cache.
    """
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        state = solve(dot_product(), 2.0, "semantic")
        losses = jax.block_until_ready((state.train_loss, state.stderr.train_loss))
        seconds.append(time.perf_counter() - begin)
    device, dtype = jax.devices()[0], losses[0].dtype
    rows: list[tuple[str, ...]] = [("", "here", "known", "off by")]
    works = bool(state.ok)
    for name, known in KNOWN.items():
        value = float(getattr(state, name))
        error = abs(value / known - 1)
        works &= bool(np.isfinite(value)) and error < _TOLERANCE
        rows.append((name, f"{value:.8g}", f"{known:.8g}", f"{error:.0e}"))
    jaxlib = metadata.version("jaxlib")
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    setting = [
        ("versions", f"tiedattn_jax {VERSION}, jax {jax.__version__}, jaxlib {jaxlib}"),
        (
            "device",
            f"{len(jax.devices())} x {device.device_kind} ({device.platform}), {cores()} cores of the host",
        ),
        ("precision", f"{dtype}"),
        ("programs", f"kept in {folder}" if folder else "not kept"),
        ("first call", f"{seconds[0]:.2f} s, which compiles or reads compiled programs"),
        ("second call", f"{seconds[1]:.2f} s"),
    ]
    verdict = f"the numbers agree with the known ones to {_TOLERANCE:.0e}" if works else "the numbers are WRONG here"
    title = f"semantic state at alpha = 2: {state.status_name}; {verdict}"
    return works, "\n".join([table(setting), title, table(rows)])


class CheckAction(argparse.Action):
    """Option that checks the machine instead of running a command; the exit code is 1 if the numbers are wrong."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        jax.config.update("jax_enable_x64", True)
        try:
            jax.devices()
        except Exception as problem:  # jax has no type of its own for it
            reason = (str(problem).splitlines() or [type(problem).__name__])[0] or type(problem).__name__
            parser.error(f"JAX must find a device, got {reason!r}: see JAX_PLATFORMS and the installed plugins of JAX")
        use_compilation_cache()
        works, text = check_machine()
        print(text)
        parser.exit(0 if works else 1)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the option to the parser of the command."""
    text = "solve one state twice, compare it with known numbers, and show device, precision, versions and times"
    parser.add_argument("--check", action=CheckAction, nargs=0, help=text)
