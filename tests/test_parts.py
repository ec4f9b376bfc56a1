"""The parts of `pytest --part K/N` are disjoint, cover all tests, and are the same in every process."""

from argparse import ArgumentTypeError

import pytest
from parts import Part, part

NAMES = [f"tests/theory/test_{file}.py::test_{test}[{case}]" for file in "abc" for test in "def" for case in range(20)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_test_is_in_one_part(count):
    parts = [[name for name in NAMES if Part(k, count).contains(name)] for k in range(1, count + 1)]
    assert sorted(name for names in parts for name in names) == sorted(NAMES)
    assert all(len(names) > len(NAMES) / count / 2 for names in parts)  # no part is left with little


def test_parts_are_the_same_everywhere():
    """Python's own hash of a text differs between processes. These numbers are those of `sha256sum`, modulo 10."""
    numbers = [next(k for k in range(1, 11) if Part(k, 10).contains(name)) for name in ("a", "b", "ab", "[ä]")]
    assert numbers == [9, 5, 9, 6]


def test_how_a_part_is_written():
    assert part("2/4") == Part(2, 4) and part("1/1") == Part(1, 1)
    for text in ("0/4", "5/4", "2", "2/", "/4", "2/0", "-1/4", "2/4/8", "a/b", " 2/4", ""):
        with pytest.raises(ArgumentTypeError, match="K from 1 to N"):
            part(text)
