"""The numbers of a spectral law from matrices: common eigenvectors, and atoms of equal eigenvalues."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from ..base.errors import InputError, require

_ATOM_TOLERANCE = 1e-9  # eigenvalues that differ by less than this, relative to the largest, are one atom


def eigenbasis(
    covariances: Float[np.ndarray, "L d d"],
) -> tuple[Float[np.ndarray, "d L"], Float[np.ndarray, "d d"]]:
    """Return the eigenvalues of commuting covariances and, in columns, their eigenvectors.

    Raises:
        InputError: a covariance is zero or not symmetric, or they do not commute.
    """
    size = np.abs(covariances).max(axis=(1, 2), keepdims=True)
    require(size > 0, "covariances", size.ravel(), "not zero")
    skew = np.abs(covariances - covariances.swapaxes(1, 2)).max(axis=(1, 2)) / size.ravel()
    if np.any(skew > 1e-8):
        raise InputError("covariances", f"must be symmetric, got Sigma_{np.argmax(skew)} off by {skew.max():.1e}")
    # A random mixture of the covariances has the common eigenvectors and no others.
    share = np.random.default_rng(0).uniform(0.5, 1.5, len(covariances))
    vectors = np.linalg.eigh(np.einsum("l,lij->ij", share, covariances / size))[1]
    rotated = vectors.T @ covariances @ vectors
    values = np.diagonal(rotated, axis1=1, axis2=2)
    off_diagonal = np.abs(rotated - values[:, None] * np.eye(values.shape[1])).max(axis=(1, 2)) / size.ravel()
    if np.any(off_diagonal > 1e-7):
        text = "must commute, with eigenvectors in common (Assumption 4.1)"
        raise InputError("covariances", f"{text}, got an off-diagonal of {off_diagonal.max():.1e} in the best basis")
    return values.T, vectors


def positive(gamma: Float[np.ndarray, " N *tokens"], argument: str) -> Float[np.ndarray, " N *tokens"]:
    """Return eigenvalues with those that are negative by rounding set to zero.

    Raises:
        InputError: an eigenvalue is negative by more than rounding, or all eigenvalues of a token are zero.
    """
    size = np.abs(gamma).max(0)
    require(size > 0, argument, size, "not zero")
    if np.any(gamma < -1e-8 * size):
        raise InputError(argument, f"must be positive semidefinite, got an eigenvalue of {gamma.min():.3g}")
    return np.maximum(gamma, 0.0)


def atoms(gamma: Float[np.ndarray, "N L"]) -> Int[np.ndarray, " N"]:
    """Return the index of the atom of each row of eigenvalues; rows equal to rounding share an atom."""
    order = np.argsort(gamma, 0, kind="stable")
    rising = np.take_along_axis(gamma, order, 0)
    jumps = np.diff(rising, axis=0, prepend=rising[:1]) > _ATOM_TOLERANCE * gamma.max(0)
    labels = np.empty(gamma.shape, int)
    np.put_along_axis(labels, order, np.cumsum(jumps, 0), 0)
    return np.unique(labels, axis=0, return_inverse=True)[1].ravel()
