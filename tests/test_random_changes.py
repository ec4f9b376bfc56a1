"""The random changes of the library are programs, differ from it, and depend on the seed alone."""

import ast

from random_changes import drawn


def test_every_change_is_another_program():
    for change in drawn(40, 0, ("theory", "base")):
        programs = (ast.dump(ast.parse(code)) for code in (change.code, change.file.read_bytes()))
        assert len(set(programs)) == 2, change


def test_the_places_depend_on_the_seed_alone():
    first, again, other = (drawn(20, seed, ("base",)) for seed in (3, 3, 4))
    assert first == again != other and len(set(first)) == 20
