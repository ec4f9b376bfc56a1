"""Every public function is asked of exact twins, or stands in the list of those that no twin applies to."""

from pathlib import Path

import asked

import tiedattn_jax as ta


def test_every_public_name_is_asked_or_excused():
    functions = [question.function for question in asked.QUESTIONS.values()]
    excused = [name for names in asked.WITHOUT.values() for name in names.split()]
    public = [name for name in dir(ta) if not name.startswith("_")]
    missing = [name for name in public if name not in excused and getattr(ta, name) not in functions]
    assert not missing, f"asked.QUESTIONS must ask, or asked.WITHOUT excuse, {missing}"
    assert sorted(excused) == sorted(set(excused) & set(public))
    assert not [name for name in excused if getattr(ta, name) in functions]


def test_every_room_with_questions_has_their_tests():
    rooms = {question.room for question in asked.QUESTIONS.values()}
    assert rooms == {path.parent.name for path in Path(__file__).parent.glob("*/test_twins.py")}
