"""The changes of `mutants.py` still apply to the code."""

import pytest
from mutants import mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda m: f"{m.file}: {m.why}")
def test_every_change_finds_its_place(mutant):
    assert mutant.text.count(mutant.was) == 1 and mutant.now != mutant.was
