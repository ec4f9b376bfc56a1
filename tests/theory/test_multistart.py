import pytest

import tiedattn_jax as ta


@pytest.mark.slow  # the notebook on phase diagrams does the same
def test_random_starts_find_both_branches(model):
    rule = ta.line_nodes(model, 5, replicates=1, even=True)
    found = ta.find_states(model, 2.0, rule, count=24)
    assert {"semantic", "positional", "mixed"} <= {f.label for f in found}
    losses = [float(f.train_loss) for f in found]
    assert losses == sorted(losses) and found[0].label == "semantic"


@pytest.mark.parametrize(("arguments", "named"), [({"alpha": -1.0}, "alpha"), ({"alpha": 2.0, "count": 0}, "count")])
def test_bad_input(model, lines, arguments, named):
    with pytest.raises(ta.InputError, match=named):
        ta.find_states(model, nodes=lines, **arguments)
