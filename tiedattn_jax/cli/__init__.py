"""The subcommands of `tiedattn`, one module each: `register` adds the options, `run` does the work and reports.

This file is imported before the rest of the library, whose import takes seconds. It installs a handler by which an
interrupt during these seconds ends the command as well.
"""

import os
import signal
import sys
from pathlib import Path


def ended(*_: object) -> None:
    """End the process with the message and the exit code of an interrupted command."""
    os.write(2, b"tiedattn: interrupted, nothing was written\n")
    os._exit(130)


_IS_COMMAND = Path(sys.argv[0]).stem == "tiedattn" or (sys.argv[0] == "-m" and "tiedattn_jax" in sys.orig_argv)
if _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, ended)
