"""Cores and memory of a process in containers and batch jobs, from files of control groups that are made here."""

import os

import numpy as np
import pytest

from tiedattn_jax.base import machine


def write_groups(root, groups, files):
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (texts if groups is None else {"proc/self/cgroup": groups, **texts}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a.slice/job/task\n", {"a.slice/job/memory.max": "4096", "a.slice/job/task/memory.max": "max"}, 4096),
        ("0::/docker/abc\n", {"memory.max": "8192"}, 8192),  # a container that sees the path outside
        (
            "5:cpu:/\n4:hugetlb,memory:/job/task\n0::/\n",
            {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/job/memory.limit_in_bytes": "2048\n"},
            2048,
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, np.inf),
        ("0::/job\n", {"job/memory.max": "max"}, np.inf),
        (None, {"memory.max": "8192"}, np.inf),  # another system
    ],
)
def test_memory_of_containers_and_batch_jobs(tmp_path, groups, files, limit):
    write_groups(tmp_path, groups, files)
    assert machine.memory_limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("threads", "groups", "files", "count"),
    [
        ("", "0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("3,2", "0::/\n", {"cpu.max": "max 100000\n"}, 3),
        ("0", "0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("5", "0::/a/job\n", {"a/cpu.max": "400000 100000\n", "a/job/cpu.max": "600000 100000\n"}, 4),
        (
            "",
            "3:cpu,cpuacct:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "250000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        ("", "3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("12", None, {}, 8),
    ],
)
def test_cores_that_a_process_may_use(monkeypatch, tmp_path, threads, groups, files, count):
    """Affinity, the variable of the user, and the limits of all groups each lower the number."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    write_groups(tmp_path, groups, files)
    assert machine.cores(tmp_path) == count
