"""The tests in parts, for machines that share them: `pytest --part 2/4` runs one of four parts.

A test belongs to a part by a hash of its name. New tests therefore move no other test, and no machine needs to know
what the others run.
"""

from __future__ import annotations

import hashlib
import re
from argparse import ArgumentTypeError
from typing import NamedTuple


class Part(NamedTuple):
    number: int  # from 1 to count
    count: int

    def contains(self, node_id: str) -> bool:
        """Whether the hash of a test's name is `number` modulo `count`. It is the same in every process."""
        digest = hashlib.sha256(node_id.encode()).digest()
        return (int.from_bytes(digest) - self.number) % self.count == 0


def part(text: str) -> Part:
    """Read "K/N".

    Raises:
        ArgumentTypeError: if it is something else, or K is not from 1 to N.
    """
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ArgumentTypeError(f'must be K/N with K from 1 to N, such as "2/4", not "{text}"')
    return Part(int(match[1]), int(match[2]))
