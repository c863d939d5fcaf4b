"""MGDA with FIRM's regularization (FIRM eqs. 1-3 and 9; Desideri 2012).

The weights lambda of several objectives' gradients, whose weighted sum is the step:

    lambda = argmin over the simplex of  lambda' Ghat lambda + (beta / 2) lambda' diag(1 / p) lambda
    Ghat   = G / trace(G),  G_ij = <g_i, g_j>

Without the second term, the combination is the shortest of all convex ones, along which no
objective gets worse to first order; where gradients are similar, noise determines the weights. With
it, the problem is strongly convex, and clients with similar gradients get similar weights. A larger
p_j gives objective j a larger weight.

With beta = 0 the solution need not be unique. `solve` returns the limit of the solutions for beta
towards 0, which gives equal weights to identical objectives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain, combinations
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

MAX_ENUMERATED_OBJECTIVES = 8
"""Largest number of objectives M for which all 2^M - 1 faces of the simplex are enumerated."""
MIN_BETA = 1e-9
"""Regularization in place of beta = 0."""


def solve(gram: np.ndarray, beta: float, preference: Sequence[float] | None = None) -> np.ndarray:
    """Compute the weights lambda, [M], up to MAX_ENUMERATED_OBJECTIVES without a numerical solver.

    A Gram matrix, [M, M] in any unit, that is 0 or has values that are NaN or infinite contains no
    information about the objectives. The weights are then p / sum(p), those of the regularization
    alone, and a warning is logged. The preference p, [M], is 1 for each objective if it is None.
    """
    quadratic, shares = _build_quadratic(gram, beta, preference)
    if quadratic is None:
        return shares
    if len(quadratic) == 2:
        # The denominator is above 0, because the matrix is positive definite.
        (a, b), (_, c) = quadratic
        first = min(1.0, max(0.0, (c - b) / (a + c - 2 * b)))
        return np.array([first, 1.0 - first])
    if len(quadratic) <= MAX_ENUMERATED_OBJECTIVES:
        return _solve_by_faces(quadratic)
    return _solve_by_cvxpy(quadratic)


def solve_with_cvxpy(gram: np.ndarray, beta: float, preference: Sequence[float] | None = None) -> np.ndarray:
    """As `solve`, by cvxpy for any number of objectives; tests and benchmarks compare the two."""
    quadratic, shares = _build_quadratic(gram, beta, preference)
    return shares if quadratic is None else _solve_by_cvxpy(quadratic)


def _build_quadratic(
    gram: np.ndarray, beta: float, preference: Sequence[float] | None
) -> tuple[np.ndarray | None, np.ndarray]:
    """The matrix Q of the objective lambda' Q lambda, [M, M], positive definite, and p / sum(p).

    There is no Q of a Gram matrix that has no information.
    """
    gram = np.asarray(gram, dtype=np.float64)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not gram.size:
        raise ValueError(f"the Gram matrix has the shape {gram.shape}: it must be [M, M] for M objectives")
    p = np.ones(len(gram)) if preference is None else np.asarray(preference, dtype=np.float64)
    if p.shape != gram.shape[:1] or not (np.isfinite(p) & (p > 0)).all():
        raise ValueError(
            f"the preference is {np.asarray(preference).tolist()}: it must be {len(gram)} numbers above 0, "
            "one for each objective"
        )
    if not 0 <= beta < np.inf:
        raise ValueError(f"beta is {beta}: it must be at least 0")
    problem = ""
    if not np.isfinite(gram).all():
        problem = f"the Gram matrix of {len(gram)} gradients has values that are NaN or infinite"
    elif not np.diag(gram).max() > 0:
        problem = f"all {len(gram)} gradients are 0"
    if problem:
        log.warning("MGDA: %s; the weights are those of the preference alone", problem)
        return None, p / p.sum()
    # Dividing by the largest diagonal value first keeps the trace finite.
    scaled = (gram + gram.T) / 2 / np.diag(gram).max()
    # The second term replaces a beta that is 0 or almost 0.
    penalty = np.maximum(beta / p, MIN_BETA / (p / p.max()))
    return scaled / np.trace(scaled) + np.diag(penalty / 2), p / p.sum()


def _solve_by_faces(quadratic: np.ndarray) -> np.ndarray:
    """The best of the minima of the faces that lie within their face.

    On the face S the minimum is lambda = Q_SS^-1 1 / (1' Q_SS^-1 1), with the value 1 / (1' Q_SS^-1
    1).
    """
    m = len(quadratic)
    best = np.inf
    weights = np.zeros(m)
    for face in chain.from_iterable(combinations(range(m), size) for size in range(1, m + 1)):
        rows = list(face)
        solution = np.linalg.solve(quadratic[np.ix_(rows, rows)], np.ones(len(rows)))
        if (solution >= 0).all() and 1 / solution.sum() < best:
            best = 1 / solution.sum()
            weights = np.zeros(m)
            weights[rows] = solution / solution.sum()
    return weights


def _solve_by_cvxpy(quadratic: np.ndarray) -> np.ndarray:
    import cvxpy

    untyped: Any = cvxpy
    variable = untyped.Variable(len(quadratic), nonneg=True)
    objective = untyped.Minimize(untyped.quad_form(variable, untyped.psd_wrap(quadratic)))
    problem = untyped.Problem(objective, [untyped.sum(variable) == 1])
    problem.solve(solver=untyped.CLARABEL, tol_gap_abs=1e-14, tol_gap_rel=1e-14, tol_feas=1e-12)
    weights = np.maximum(variable.value, 0.0)
    normalized: np.ndarray = weights / weights.sum()
    return normalized
