"""The mean of paired differences, and how sure it is, where observations come in clusters.

Tokens of one text resemble each other, so that a thousand of them say less than a thousand texts
would: the standard error is that of the clusters' sums.

Shape letters: A observations, C clusters.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Difference(NamedTuple):
    """A mean difference with its standard error, infinite where there is one cluster only."""

    mean: float
    standard_error: float

    def exceeds(self, least: float, num_errors: float) -> bool:
        """Whether it is larger than `least`, and than so many of its standard errors."""
        return self.mean > least and self.mean > num_errors * self.standard_error


def clustered_difference(
    differences_A: NDArray[np.floating], clusters_A: NDArray[np.integer]
) -> Difference:
    """The mean of some differences, observations of one cluster not taken for independent.

    Args:
        differences_A: one or more.
        clusters_A: the cluster of each, from 0.
    """
    mean = float(differences_A.mean())
    sums_C = np.bincount(clusters_A, differences_A - mean)[np.unique(clusters_A)]
    num_clusters = len(sums_C)
    if num_clusters < 2:
        return Difference(mean, float("inf"))
    spread = float((sums_C**2).sum()) * num_clusters / (num_clusters - 1)
    return Difference(mean, spread**0.5 / len(differences_A))
