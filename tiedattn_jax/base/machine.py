"""The cores and the memory that this process may use, which on a cluster are fewer than the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

_UNLIMITED = 2**62  # the first version of control groups writes its largest integer for memory without a limit


def group_files(controller: str, names: tuple[str, str], root: Path = Path("/")) -> Iterator[Path]:
    """Yield the files of a limit of the control groups that contain this process on Linux.

    A container and a batch job are such groups. Each group has its own limit, and those of the groups that contain it.

    Args:
        controller: "memory" or "cpu".
        names: names of the file in the first and the second version of control groups.
        root: folder with `proc` and `sys`.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().split("\n")
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in groups if line):
        if controllers and controller not in controllers.split(","):
            continue
        # A container may see the path that its group has outside, where its own files lie at the top.
        kind, name = (controller, names[0]) if controllers else ("", names[1])
        top = root / "sys/fs/cgroup" / kind
        group = top / path.lstrip("/")
        yield from (
            folder / name
            for folder in (group, *group.parents)
            if folder.is_relative_to(top) and (folder / name).is_file()
        )


def memory_limit(root: Path = Path("/")) -> float:
    """Return the memory that the control groups of this process have, in bytes; infinite without a limit."""
    texts = [file.read_text().strip() for file in group_files("memory", ("memory.limit_in_bytes", "memory.max"), root)]
    limit = min((float(text) for text in texts if text != "max"), default=np.inf)
    return limit if limit < _UNLIMITED else np.inf


def memory() -> float:
    """Return the memory of all devices in bytes, or that of this process if they report none; infinite if unknown."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_limit" in device_stats for device_stats in stats):
        return float(sum(device_stats["bytes_limit"] for device_stats in stats))
    names = getattr(os, "sysconf_names", {})
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in names else np.inf
    return float(min(machine, memory_limit()))


def cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use.

    It is the smallest of its affinity, the limits of its control groups, and the variable OMP_NUM_THREADS.
    """
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for file in group_files("cpu", ("cpu.cfs_quota_us", "cpu.max"), root):
        # Microseconds of processor time, and the period that they are for; the first version has two files.
        quota, *period = file.read_text().split()
        if quota not in ("max", "-1"):
            length = period[0] if period else file.with_name("cpu.cfs_period_us").read_text()
            counts.append(math.ceil(int(quota) / int(length)))
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal() and int(threads) > 0:
        counts.append(int(threads))
    return min(counts)
