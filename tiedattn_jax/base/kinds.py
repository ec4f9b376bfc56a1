"""Functions of the public API that have another form for another kind of model, such as `solve` for a wide layer.

The room of that kind registers its form by `form_of`; the function itself, under `with_other_forms`, does not know it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_FORMS: dict[str, dict[type, Callable[..., Any]]] = {}


def with_other_forms(fn: Callable[P, T]) -> Callable[P, T]:
    """Let `form_of` give the function another form for other kinds of its first argument, or of models in a list."""
    forms = _FORMS.setdefault(fn.__name__, {})

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0] if args else kwargs.get("model")
        while isinstance(first, (list, tuple)) and first:  # models, or pairs of a model and an alpha
            first = first[0]
        return next((form for kind, form in forms.items() if isinstance(first, kind)), fn)(*args, **kwargs)

    return call


def form_of(name: str, kind: type) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that makes a function the form of the public function `name` for models of a kind."""

    def register(form: Callable[..., T]) -> Callable[..., T]:
        _FORMS.setdefault(name, {})[kind] = form
        return form

    return register
