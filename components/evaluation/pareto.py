"""Dominated points, and the hypervolume of a front of several objectives (Zitzler and Thiele 1999).

All objectives are maximized.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]


def dominated(points: Points) -> npt.NDArray[np.bool_]:
    """Mark those of N points [N, M] that another one dominates, [N].

    A point dominates another one if it is at least as good in every objective and better in one, so
    that equal points do not dominate each other.
    """
    points = _checked(points)
    as_good = np.all(points[None, :, :] >= points[:, None, :], axis=2)
    better = np.any(points[None, :, :] > points[:, None, :], axis=2)
    mask: npt.NDArray[np.bool_] = np.any(as_good & better, axis=1)
    return mask


def hypervolume(points: Points, reference_point: Points) -> float:
    """The exact volume that N points [N, M] dominate above a reference point [M] of the worst that counts.

    It is summed over slices along the last objective. A point adds nothing if it lies below the reference
    point in an objective.
    """
    points = _checked(points)
    reference_point = np.asarray(reference_point, dtype=np.float64)
    if reference_point.shape != points.shape[1:] or not np.isfinite(reference_point).all():
        raise ValueError(
            f"the reference point is {reference_point.tolist()}: it must be {points.shape[1]} finite numbers,"
            " one for each objective"
        )
    return _volume(np.maximum(points - reference_point, 0.0))


def _volume(points: Points) -> float:
    """Volume between the origin and points without negative values."""
    points = points[(points > 0).all(axis=1)]
    if not len(points):
        return 0.0
    if points.shape[1] == 1:
        return float(points.max())
    total = 0.0
    previous_height = 0.0
    for height in np.unique(points[:, -1]):
        total += (height - previous_height) * _volume(points[points[:, -1] >= height, :-1])
        previous_height = height
    return total


def _checked(points: Points) -> Points:
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or not points.shape[1] or not np.isfinite(points).all():
        raise ValueError(
            f"points have the shape {points.shape}: they must be [N, M] finite numbers, one row for each"
            " point"
        )
    return points
