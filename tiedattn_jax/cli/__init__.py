"""The subcommands of `tiedattn`, one module each: `register` adds its options, `run` does its work and reports.

This file comes before the rest of the library, whose import takes seconds: an interrupt in them ends the command, too.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any


def ended(*_: Any) -> None:
    """End the process as an interrupted command ends."""
    os.write(2, b"tiedattn: interrupted, nothing was written\n")
    os._exit(130)


_STARTS = Path(sys.argv[0]).stem == "tiedattn" or (sys.argv[0] == "-m" and "tiedattn_jax" in sys.orig_argv)
if _STARTS and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, ended)
