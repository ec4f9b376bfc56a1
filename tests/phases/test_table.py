"""Tables and transitions print themselves, with error bars, statuses and reasons."""

import json

import made
import matplotlib.pyplot as plt
import numpy as np
from cases import CASES

from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.phases.table import Table


def test_a_transition():
    transition = made.transition(branches=(made.fixed_point(CASES[3]), made.fixed_point(CASES[2])))
    slopes = "d/dlam=3.000(30), d/domega=1.000(10), d/dsigma=2.000(20)"
    assert repr(transition) == f"Quantity(alpha_c = 1.250(10); {slopes}; converged)"
    page = transition.summary().splitlines()
    assert page[0] == "alpha_c = 1.250(10): converged" and "the global minimum is positional below" in page[7]
    assert page[4].split() == "d/dmixing [[0.6000(60), 0.4000(40)], [0.4000(40), 0.6000(60)]]".split()
    assert page[8].split()[:3] == ["branch", "q", "V"]
    assert page[9].split()[:2] == ["positional", f"{CASES[3].q:.6g}"]
    numbers = json.loads(json.dumps(transition.to_dict()))
    arrays = {"mixing": [[0.6, 0.4], [0.4, 0.6]], "encodings": [[1.0], [-1.0]], "teacher": [[1.0]]}
    assert numbers["sensitivities"] == {"lam": 3.0, "omega": 1.0, "sigma": 2.0, **arrays}
    assert numbers["status"] == "converged"
    assert [b["branch"] for b in numbers["branches"]] == ["positional", "semantic"]
    missing, meaning = made.transition(status=6, event="alpha_l"), "the global minimum beats the linear baseline above"
    assert repr(missing) == f"Quantity(alpha_l ({meaning}); not found, as there is none near the start)"
    meanings = {name: event.meaning for name, event in EVENTS.items()}
    assert all(meanings.values())
    assert meanings["semantic instability"] == "m grows on the semantic state below"
    assert meanings["positional instability"] == "theta grows on the positional state above"
    assert meanings["positional pitchfork"] == "m grows on the uninformed state above"


def test_why_a_transition_was_not_found():
    """A transition that was not found says why in a sentence: no branch, no crossing, or states that did not settle."""

    def reason(positional, semantic, alpha=2.0, status=6):
        pairs = (CASES[3], positional), (CASES[2], semantic)
        points = tuple(made.fixed_point(case, status=[s] * 4, residual=[1.0] * 4) for case, s in pairs)
        transition = made.transition(alpha, status=status, branches=points)
        assert transition.reason == transition.to_dict()["reason"]
        assert transition.reason in repr(transition) and transition.reason in transition.summary()
        return transition.reason

    assert reason(0, 0, 1.25, 0) == reason(0, 2, 1.25, 2) == ""
    assert reason(0, 6) == "there is no semantic branch at alpha = 1.25, where the search ended"
    assert reason(6, 6).startswith("there is no positional branch and no semantic branch at")
    lower = "the losses do not cross in the range: that of the positional branch is lower at alpha = 1.25"
    assert reason(0, 1).startswith(lower)
    unsettled = "the semantic branch was not settled at alpha = 1.25, where the search ended: max steps"
    assert reason(0, 2, np.nan, 2) == reason(6, 2, np.nan, 2) == unsettled
    point = (made.fixed_point(),)
    crossing = made.transition(status=6, event="alpha_l", branches=point)
    assert crossing.ended_at.shape == () and np.isnan(made.transition(branches=point).ended_at)
    assert made.transition(np.nan, 6, branches=point).to_dict()["ended_at"] == 2.0
    assert crossing.reason == "nothing changes in the range, up to the state at alpha = 2, where the search ended"


def test_curves_paths_and_boundaries():
    points = (made.fixed_point(CASES[4]), made.fixed_point(CASES[0]))
    curve = Table.of_states("semantic", points)
    assert repr(curve) == "Table(semantic branch at 2 alphas from 1 to 2; found at 2)"
    path = Table.of_states(None, (points[1], made.fixed_point(CASES[1])))
    assert repr(path).startswith("Table(semantic, positional branch at 2 alphas")
    assert [row.split()[0] for row in curve.summary().splitlines()[1:]] == ["alpha", "1", "2"]
    partial = Table.of_states("semantic", (made.fixed_point(CASES[4], status=[6] * 4), points[1]))
    assert repr(partial).endswith("found at 1, from 2 to 2)")
    boundary = made.events("alpha_c", "sigma", [0.5, 0.4], np.array([1.25, np.nan]), np.array([0.01, np.nan]))
    outcome = "found at 1, from 0.5 to 0.5; failed at 1, the first: sigma = 0.4: there is none"
    assert repr(boundary) == f"Table(alpha_c at 2 values of sigma from 0.4 to 0.5; {outcome})"
    lower, upper = boundary.summary().splitlines()[2:4]
    assert lower.split()[:2] == ["0.4", "nan"] and lower.endswith("absent: there is none")
    assert upper.split()[:2] == ["0.5", "1.250(10)"]
    numbers = np.array([0.4, 0.5]), np.array([1.5, 1.25]), np.array([0.01, 0.01])
    for slope, expected in ((None, [["-2.5", "False"]] * 2), (-numbers[0], [["-0.4", "True"], ["-0.5", "True"]])):
        page = made.events("alpha_c", "sigma", *numbers, slope).summary().splitlines()
        assert [row.split()[2:-1] for row in page[2:]] == expected
    end, labels = made.end(made.transition(0.7), "pitchfork", "theta", "lower"), ("alpha", "kind", "direction", "side")
    assert repr(end).startswith("Quantity(alpha_c = 0.700(10); ") and str(end).split("side")[1].split()[0] == "lower"
    assert [end.to_dict()[name] for name in labels] == [0.7, "pitchfork", "theta", "lower"]


def test_every_name_of_a_table_is_a_name_for_values_and_pictures():
    scatter = (-1e-4, 1e-4, -1e-4, 1e-4)
    curve = Table.of_states("semantic", [made.fixed_point(case, scatter=scatter) for case in (CASES[4], CASES[0])])
    events = made.events("alpha_c", "sigma", np.array([0.5, 0.4]), np.array([1.25, 1.5]), np.array([0.01, 0.01]))
    for table in (curve, events):
        rows = table.table()
        assert {"status", "reason", *table.names} < set(rows[0])
        for name in rows[0].keys() - {"status"}:  # the table has its name, the states its integer
            values = table.values(name)
            assert values.tolist() == [row[name] for row in rows], name
            bars = [row.get(f"{name}_stderr", 0.0) for row in rows]
            assert name[-2:] in ("_0", "_1") or table.stderr(name).tolist() == bars, name
            if values.dtype.kind != "U":
                plt.close(table.plot(name))
    assert curve.values("stable").tolist() == [1, 1]
    assert curve.stderr("q_0")[0] == curve.stderr("overlaps.q")[0, 0, 0, 0]
    assert curve.stderr("branch").tolist() == [0, 0]
    nothing = made.events("alpha_c", "sigma", *np.full((3, 2), np.nan))
    assert np.all(np.isnan(nothing.values("gen_error")))
