"""Rare kinds of models and of rules, each beside an ordinary setting that has the same numbers, or nearly.

Every question of `asked` is asked of every kind, unless a table below says why not. All questions about a kind take
the same small rule, so that they share programs.
"""

from typing import Any, NamedTuple

import asked
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from channels import Unheard
from twins import ENCODINGS, GRAM, LAM, MIXING, TWINS, Case, D, Twin, Unit, isotropic

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import Rule


def along(*weights: float, sizes: Any = (1.0, 1.0, 3.0), **options: Any) -> ta.Model:
    """A teacher that points along the encodings in part, in atoms whose moments have these sizes; the last is empty."""
    sizes = np.array(sizes)[:, None, None]
    tau, cross = ENCODINGS @ ENCODINGS.T, ENCODINGS @ [[0.4], [-0.3]]
    gamma = [[0.25, 0.25], [0.25, 0.25], [7.0, 7.0]]
    law = ta.SpectralLaw(weights, gamma, sizes * tau, sizes**0 + (sizes > 2), sizes * cross)
    return ta.DotProduct(omega=0.3, mixing=MIXING, spectrum=law, **{"lam": LAM} | options)


def in_sentences(shares: dict, **options: Any) -> ta.Model:
    variances = [0.25, 0.25, 3.0, 9.0][: 1 + max(map(max, shares))]
    law = ta.SpectralLaw.of_classes(variances, shares, encodings=ENCODINGS)
    return ta.DotProduct(omega=0.3, mixing=MIXING, spectrum=law, **{"lam": LAM} | options)


def _columns(unit: Unit) -> Twin:
    return Twin(lambda **options: isotropic(unit, **{"rank": 2, "teacher": GRAM} | options), unit, same=True)


def _short(length: float) -> Twin:
    return Twin(lambda **options: isotropic(encodings=length * ENCODINGS, **options), same=True)


def _sentences(shares: dict) -> Twin:
    return Twin(lambda **options: in_sentences(shares, **options), same=True)


class Kind(NamedTuple):
    """A rare kind.

    Attributes:
        twin: its setting.
        standard: the ordinary setting.
        rtol: relative tolerance of the numbers.
        replicates: replicates of the rule of the kind, and of that of the ordinary setting, by their places in the
            rule that both share; None is a replicate without sentences, hence without a state.
        differs: questions whose numbers are not those of the standard setting.
    """

    twin: Twin = TWINS[""]
    standard: Twin = TWINS[""]
    rtol: float = 1e-6
    replicates: tuple[tuple[int | None, ...], tuple[int | None, ...]] = ((0, 1), (0, 1))
    differs: tuple[str, ...] = ()


KINDS = {
    "silent noise": Kind(Twin(lambda **options: Unheard(**vars(isotropic(**options))))),
    "an empty atom": Kind(TWINS["atoms"]),
    "a teacher along the encodings": Kind(
        Twin(lambda **options: along(0.3, 0.7, 0.0, sizes=(1.4, 0.58 / 0.7, 2.5), **options)),
        Twin(lambda **options: along(0.5, 0.5, 0.0, **options)),
        differs=("solve None", "sgd"),
    ),
    "two columns": Kind(_columns(Unit(weights=2.0**7, loss=2.0**-14)), _columns(Unit())),
    "short encodings": Kind(_short(1e-7), _short(0.0), 1e-4),
    "a rare sentence": Kind(_sentences({(2, 3): 1e-9, (0, 1): 1 - 1e-9}), _sentences({(0, 1): 1.0}), 1e-5),
    "one replicate": Kind(replicates=((0,), (0, 0))),
    "a replicate without a state": Kind(replicates=((0, 1, None), (0, 1))),
}


class KindCase(Case):
    """A setting of a kind, or the ordinary one."""

    def __init__(self, kind: Kind, twin: Twin, replicates: tuple[int | None, ...]):
        super().__init__(twin, kind.standard)
        self.replicates = replicates

    def rule(self, recipe: Any, student: int | str | None = None) -> Rule:
        rule = super().rule(asked.POINTS, student)

        def with_noise(a: Any) -> Any:
            silent = jax.random.normal(asked.KEY, (*a.shape[:-2], self.model.noise, a.shape[-1]))
            return jnp.concatenate([a, silent], -2)

        def noisy(stack: Any) -> Any:
            stack = eqx.tree_at(lambda s: s.teacher, stack, replace_fn=with_noise)
            return eqx.tree_at(lambda s: s.student, stack, replace_fn=with_noise) if student == "label" else stack

        def chosen(k: int | None) -> Any:
            stack = jax.tree.map(lambda a: a[k or 0], noisy(rule.stack))
            return eqx.tree_at(lambda s: s.weight, stack, 0 * stack.weight) if k is None else stack

        stacks = [chosen(k) for k in self.replicates]
        return Rule(jax.tree.map(lambda *a: jnp.stack(a), *stacks), noisy(rule.coarse))

    def data(self, **options: Any) -> ta.Data:
        return self._completed(super().data(**options))

    def labelled(self) -> ta.Data:
        return self._completed(super().labelled())

    def _completed(self, data: ta.Data) -> ta.Data:
        """Add the fields of noise, and the classes of the tokens, none of them rare."""
        n, L, _ = data.y.shape
        noise = jax.random.normal(asked.KEY, (n, L, self.model.noise)) if self.model.noise else None
        added = {"noise": noise}
        if self.model.law().sentences is not None:
            variances = self.model.trace[:, None]
            added |= {"gamma": variances, "means": jnp.zeros((len(variances), D)), "classes": jnp.array([[0, 1]] * n)}
        return eqx.tree_at(
            lambda d: [getattr(d, k) for k in added], data, [*added.values()], is_leaf=lambda a: a is None
        )


# Questions that a kind is not asked, with the reason: by kinds and questions. An empty text stands for all kinds, and
# a room for all of its questions.
WITHOUT = {
    "wide layers have no such atoms, classes, fields of noise or averages": {"": "wide"},
    "its start is one of a student of one column and a teacher of two": {"": "solve, two columns"},
    "another branch of the function is asked": {"": "solve positional | population positional | population None"},
    "it takes a number of replicates": {"one replicate": "rsb", "a replicate without a state": "rsb"},
    "it takes no averages": {"one replicate": "finite", "a replicate without a state": "finite"},
    "it returns a path of every replicate": {"one replicate": "trace_branch"},
    "every replicate has its numbers": {
        "a replicate without a state": "sgd | emergence | small_start | landscape | separation"
    },
    "its status is that of the worst replicate, which has no state": {
        "a replicate without a state": "population semantic"
    },
    "its draws depend on the atoms and kinds of sentences": dict.fromkeys(
        ("an empty atom", "a teacher along the encodings", "a rare sentence"), "run_instances | sample_data"
    ),
    "its averages are over the span of the encodings, and those of length zero have none": {
        "short encodings": "population semantic | landscape | emergence"
    },
    "its start has an m that short encodings do not allow": {"short encodings": "sgd"},
    "its regression over the sentences contains the fields of noise": {"silent noise": "gamp | gamp, penalty"},
    "its random starts and its steps are measured in the overlaps of rare classes, too": {
        "a rare sentence": "find_states | trace_branch"
    },
    "a replicate without sentences has the uninformed state, at which a branch ends": {
        "a replicate without a state": "branch_ends"
    },
    "its start is one of a student of one column": {"two columns": "sgd"},
    "its map on so few points is too rough for Newton's method along an arc": {"two columns": "trace_branch"},
    "its program takes minutes and gigabytes to compile": {
        "two columns": "solve, penalty | rsb",
        "silent noise": "solve_1rsb",
    },
}
_POPULATION = "population semantic | landscape"
_PENALTIES = "solve, penalty | train, penalty | gamp, penalty"
# The sentences by which functions refuse a kind.
REFUSED = {
    r"^law\(\).tau_mean must be given for a penalty": dict.fromkeys(
        ("an empty atom", "a teacher along the encodings", "a rare sentence"), _PENALTIES
    ),
    r"^law(\(\))?\.cross must be (zero|a teacher orthogonal)": {
        "a teacher along the encodings": f"{_POPULATION} | emergence | small_start | separation | bayes | "
        "spectral_overlap | weak_recovery | perfect_recovery | posterior_mean | spectral_direction | train, Adam"
    },
    r"^law\(\)\.cross must be a teacher orthogonal": {
        "a teacher along the encodings": "solve semantic | critical_alpha | "
        "linear_crossing | find_event | branch_ends | sweep | phase_diagram | best_ridge | trace_branch | rsb"
    },
    "^model must have tokens without classes": {
        "a rare sentence": "landscape | emergence | small_start | separation | spectral_overlap | "
        "train, Adam | spectral_direction | rsb"
    },
    "^model must have exact labels": {"a rare sentence": "perfect_recovery"},
    "^data must have no classes of tokens": {"a rare sentence": "posterior_mean"},
    "^model must have fewer columns of the teacher than tokens": {
        "two columns": "bayes | spectral_overlap | weak_recovery | perfect_recovery | posterior_mean | "
        "spectral_direction | train, Adam"
    },
    "^init must be .* for data without encodings": {"short encodings": "train, penalty | gamp, penalty"},
    "^transition must have been found, got status absent": {"short encodings": "transition_1rsb"},
    "^start must be near a state, got one with status absent": {"a replicate without a state": "trace_branch"},
}


def entry(table: dict, kind: str, name: str) -> str | None:
    """Return the reason, or the sentence, of a table for a kind and a question."""
    for text, questions in table.items():
        names = " | ".join(questions.get(k, "") for k in ("", kind)).split(" | ")
        if name in names or asked.QUESTIONS[name].room in names:
            return text
    return None
