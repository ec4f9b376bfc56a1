"""Every public function is asked of rare kinds of models and rules; see `kinds`."""

import asked
import numpy as np
import pytest
from kinds import KINDS, REFUSED, WITHOUT, KindCase, entry
from twins import TWINS, asked_of, compare

import tiedattn_jax as ta

# Every kind needs programs of its own. A refusal comes before they are compiled, but for that of a 1RSB transition: it
# is given the replica-symmetric one.
CASES = [
    pytest.param(kind, name, marks=[pytest.mark.full] * (refusal is None or name == "transition_1rsb"))
    for kind in KINDS
    for name in asked.QUESTIONS
    if entry(WITHOUT, kind, name) is None
    for refusal in [entry(REFUSED, kind, name)]
]
# Slopes of an event are first order in the residuals of its states and in the last step towards it, and the searches
# for two settings stop at different places.
RTOL = {"transition_1rsb": 1e-4, "linear_crossing": 1e-4, "find_event": 1e-4}
_asked: dict = {}


def numbers_of(kind, name, twin, replicates):
    """Return what a question finds at a setting: error bars only where there are replicates that differ.

    A replicate without a state counts as `stalled`.
    """
    key = name, id(twin), replicates
    if key not in _asked:
        found = asked_of(asked.QUESTIONS[name], KindCase(KINDS[kind], twin, replicates))
        _asked[key] = {k: a for k, a in found.items() if "stderr" not in k or len(set(replicates)) > 1}
    return _asked[key]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_kinds(kind, name):
    """A kind has the numbers of its ordinary setting, or is refused in the sentence of the table."""
    twin, standard, rtol, (replicates, others), differs = KINDS[kind]
    if (sentence := entry(REFUSED, kind, name)) is not None:
        with pytest.raises(ta.InputError, match=sentence):
            numbers_of(kind, name, twin, replicates)
        return
    expected = numbers_of(kind, name, standard, others)
    found = dict(numbers_of(kind, name, twin, replicates))
    if None in replicates:
        found |= {k: a for k, a in expected.items() if isinstance(a, str) and "stalled" in found[k]}
    for number, b in expected.items():
        if np.shape(found[number]) != np.shape(b):  # those of the replicates that both have
            expected, rows = dict(expected), min(len(found[number]), len(b))
            expected[number], found[number] = b[:rows], found[number][:rows]
    compare(found, expected, max(rtol, RTOL.get(name, 0.0)), least=1e-3)
    if name in differs:
        with pytest.raises(AssertionError):
            compare(numbers_of(kind, name, TWINS["atoms"], others), expected, 1e-3)


def test_the_tables_name_kinds_and_questions():
    names = {*asked.QUESTIONS, *(question.room for question in asked.QUESTIONS.values()), ""}
    for text, questions in [*WITHOUT.items(), *REFUSED.items()]:
        assert questions.keys() <= {*KINDS, ""}, text
        assert {name for listed in questions.values() for name in listed.split(" | ")} <= names, text
