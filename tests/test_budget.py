import budget


def test_complaints():
    """A file above its number is named, and one far below it; a file without a line may compile nothing."""
    spent = {"a": 101, "b": 100, "c": 40, "d": 39, "e": 1, "f": 0}
    found = budget.complaints(spent, dict.fromkeys("abcd", 100))
    assert [(line.split()[0], line.split(": ")[1]) for line in found] == [
        ("tests/a", "too many"), ("tests/d", "lower it"), ("tests/e", "too many")
    ]  # fmt: skip
