"""Every public function is asked of exact twins, or stands in the list of those that no twin applies to."""

from pathlib import Path

import asked
import public


def test_every_public_name_is_asked_or_excused():
    functions = [question.function for question in asked.QUESTIONS.values()]
    excused = [name for names in asked.WITHOUT.values() for name in names.split()]
    names = public.names()
    missing = [name for name, value in names.items() if name not in excused and value not in functions]
    assert not missing, f"asked.QUESTIONS must ask, or asked.WITHOUT excuse, {missing}"
    assert sorted(excused) == sorted(set(excused) & set(names))
    assert not [name for name in excused if names[name] in functions]


def test_every_room_with_questions_has_their_tests():
    rooms = {question.room for question in asked.QUESTIONS.values()}
    assert rooms == {path.parent.name for path in Path(__file__).parent.glob("*/test_twins.py")}
