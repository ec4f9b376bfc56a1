"""Numbers of many states with labels: columns of a table, and datasets of xarray."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Real

from ..base.report import Status

# Names of the axes of order parameters, (L, r, r), (L, r, t) or (L, r).
ORDER_AXES = {
    "q": ("token", "column", "other_column"),
    "V": ("token", "column", "other_column"),
    "theta": ("token", "column", "teacher_column"),
    "m": ("token", "column"),
}


def columns(name: str, values: Real[np.ndarray, "..."]) -> dict[str, Any]:
    """Return the entries of an order parameter by name, or the one number that it has."""
    flat = values.ravel()
    return {name + (f"_{n}" if flat.size > 1 else ""): value for n, value in enumerate(flat)}


def dataset(
    coordinates: Mapping[str, Any],
    names: Iterable[str],
    mean: Callable[[str], Real[np.ndarray, "..."]],
    stderr: Callable[[str], Real[np.ndarray, "..."]],
    labels: Mapping[str, Any],
    attrs: Mapping[str, Any],
) -> Any:
    """Return an xarray dataset of means, error bars (suffix _stderr) and labels; needs the extra `xarray`.

    The attributes of `status` explain its integers as the CF conventions prescribe.

    Args:
        coordinates: values of the axes that all numbers have, by name; those of order parameters follow.
        names: names of the numbers; `mean` and `stderr` give their values.
        labels: what has no error bar, over all coordinates, or as (dimensions, values).
        attrs: what JSON can hold.
    """
    try:
        import xarray
    except ImportError as error:
        raise ImportError("to_xarray needs xarray: pip install 'tiedattn_jax[xarray]'") from error

    dims, data = tuple(coordinates), dict[str, Any]()
    for name in names:
        if name != "status":
            axes = dims + ORDER_AXES.get(name, ())
            data |= {name: (axes, mean(name)), f"{name}_stderr": (axes, stderr(name))}
    flags = {"flag_values": [*map(int, Status)], "flag_meanings": " ".join(s.name for s in Status)}
    for name, values in labels.items():
        label_dims, array = values if isinstance(values, tuple) else (dims, values)
        data[name] = (label_dims, array, flags if name == "status" else {})
    return xarray.Dataset(data, dict(coordinates), {name: json.dumps(value) for name, value in attrs.items()})
