"""The vector of a secure sum: what a site's reply has in it, one after the other.

    train       the fields of the algorithm's message, its travel where the server needs it, and the
                changes of the buffers that are averaged
    resync      the fields of the site's memory
    metrics     with training and evaluation: the metrics in the order of their names, and for each
                whether the site has no finite value of it

All are weighted by the site's mass but the last, which is the number of such sites. Both ends
compute the same layout from the settings and the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange, work_of
from fedscaffold.deploy.aggregation import blank_memory, measure
from fedscaffold.deploy.gate import MOST_METRICS, Refused, Update
from fedscaffold.deploy.schema import Array, Record, Schema, pack
from fedscaffold.deploy.settings import Settings
from fedscaffold.secure.ring import OutOfRange, Ring

__all__ = [
    "Layout",
    "fit_to_sum",
    "join_metrics",
    "layout_of",
    "sent_fields",
    "smallest_sum",
    "split_metrics",
    "threshold_of",
]

METRICS, UNMEASURED = "metrics", "unmeasured"


class Layout(NamedTuple):
    """Names and sizes of the parts of a vector.

    >>> layout = Layout((("d", 2), ("unmeasured", 1)))
    >>> ring = Ring.fit(10.0, 8)
    >>> parts = {"d": np.array([1.0, 2.0]), "unmeasured": np.ones(1)}
    >>> layout.decode(ring, layout.encode(ring, parts, 3), 3, 1)
    {'d': array([1., 2.]), 'unmeasured': array([1.])}
    """

    parts: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return sum(size for _, size in self.parts)

    def encode(self, ring: Ring, arrays: Mapping[str, Array], mass: int) -> NDArray[np.uint64]:
        """Encode the arrays of a site of a mass.

        Raises:
            Refused: A number exceeds the limit of the ring, or the arrays are others.
        """
        out = np.empty(self.size, np.uint64)
        begin = 0
        for name, size in self.parts:
            if (array := arrays[name].ravel()).size != size:
                raise Refused("schema", f"{name} has {array.size} numbers where {size} belong")
            try:
                weight = 1 if name == UNMEASURED else mass
                out[begin : begin + size] = ring.encode(array, weight)
            except OutOfRange as error:
                raise Refused("range", f"{name} has {error}: deploy.limit") from None
            begin += size
        return out

    def decode(
        self, ring: Ring, total: NDArray[np.uint64], mass: int, sites: int
    ) -> dict[str, NDArray[np.float64]]:
        """Decode a sum to the weighted means by part.

        Args:
            ring: The numbers.
            total: The sum.
            mass: Mass of the sites that it is of.
            sites: Number of these sites; the last part is a sum over them.

        Raises:
            OutOfRange: The sum cannot be one of numbers within the limit.
        """
        out, begin = {}, 0
        for name, size in self.parts:
            weight = sites if name == UNMEASURED else mass
            out[name] = ring.decode(total[begin : begin + size], weight)
            begin += size
        if UNMEASURED in out:
            out[UNMEASURED] = np.rint(out[UNMEASURED] * sites)
        return out


def layout_of(
    settings: Settings, schema: Schema, algorithm: Algorithm, kind: str, measures: bool
) -> Layout:
    """Return the layout of the sum of a round.

    Args:
        settings: The deployment's settings.
        schema: The model.
        algorithm: The algorithm, fitted to the model.
        kind: train, resync or evaluate.
        measures: Whether sites measure the model.
    """
    whole = np.empty(schema.size, schema.dtype)
    size = pack(whole, algorithm.private).size
    parts: list[tuple[str, int]] = []
    if kind == "resync":
        memory = blank_memory(algorithm, whole)._asdict().items()
        parts += [(name, pack(value, algorithm.private).size) for name, value in memory]
    if kind == "train":
        parts += [(name, size) for name in sent_fields(settings, algorithm)]
        parts += [("travel", 1)] if exchange(algorithm).travel else []
        if settings.local.buffers == "average":
            parts += [(f"buffer.{name}", math.prod(shape)) for name, shape, _ in schema.buffers]
    if measures:
        parts += [(METRICS, MOST_METRICS), (UNMEASURED, MOST_METRICS)]
    return Layout(tuple(parts))


def sent_fields(settings: Settings, algorithm: Algorithm) -> tuple[str, ...]:
    """Return the vectors of the algorithm's message that a site sends.

    Where the server receives single messages, and where all sites take the same number of plain
    steps, one vector carries move and mean direction. A sum over sites with numbers of steps of
    their own, or clipped ones, has no such factor.
    """
    known, local = exchange(algorithm), settings.local
    if settings.deploy.secure and (local.steps is None or settings.deploy.clip is not None):
        return known.vectors
    return known.sent(local.plain)


def fit_to_sum(
    vectors: Mapping[str, Array],
    settings: Settings,
    algorithm: Algorithm,
    sent: Record,
    steps: int,
    lr: float,
) -> dict[str, Array]:
    """Return the vectors of a site's message as they count: clipped, and rounded to the ring.

    A site remembers what counted, so that c stays the mean of the c_i.

    Args:
        vectors: The fields of the message.
        settings: The deployment's settings.
        algorithm: The algorithm.
        sent: The server's record as the site was sent it.
        steps: Local steps that it took.
        lr: Their size.

    Raises:
        Refused: A number exceeds the limit, or the steps are not those that all sites take.
    """
    known, asked = exchange(algorithm), settings.local.steps
    usual = steps if asked is None else work_of(algorithm, asked).steps
    # one vector for both: the server multiplies the mean direction by the travel of all
    if known.rebuilt(settings.local.plain) not in {None, *vectors} and steps != usual:
        raise Refused("implausible", f"{steps} local steps where all sites take {usual}")
    if settings.deploy.clip is not None:
        most = lr * (usual if known.travel else steps)
        update = Update(dict(vectors), steps * lr, {})
        clipped = measure(update, algorithm, sent, most, settings.deploy.clip).vectors
        vectors = {name: np.asarray(value) for name, value in clipped.items()}
    for name, vector in vectors.items():
        largest = float(np.abs(vector).max(initial=0.0))
        if not largest <= settings.deploy.limit:
            raise Refused(
                "range" if math.isfinite(largest) else "not finite",
                f"{name} has numbers beyond deploy.limit = {settings.deploy.limit:g}",
            )
    return {name: settings.ring.round(vector) for name, vector in vectors.items()}


def join_metrics(metrics: Mapping[str, float], limit: float) -> dict[str, NDArray[np.float64]]:
    """Return metrics as parts of a vector; one that is not finite or beyond the limit is left out.

    >>> join_metrics({"loss": 0.5, "auc": math.nan}, 10.0)["metrics"][:3]
    array([0. , 0.5, 0. ])
    """
    values = np.zeros(MOST_METRICS)
    missing = np.zeros(MOST_METRICS)
    for i, name in enumerate(sorted(metrics)):
        if abs(metrics[name]) <= limit:
            values[i] = metrics[name]
        else:
            missing[i] = 1.0
    return {METRICS: values, UNMEASURED: missing}


def split_metrics(
    means: Mapping[str, NDArray[np.float64]], names: Iterable[str]
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the means of metrics by name, and for those without a mean the number of sites."""
    if METRICS not in means:
        return {}, {}
    found, unmeasured = {}, {}
    for i, name in enumerate(sorted(names)):
        if count := int(means[UNMEASURED][i]):
            unmeasured[name] = count
        else:
            found[name] = float(means[METRICS][i])
    return found, unmeasured


def threshold_of(settings: Settings, sites: int) -> int:
    """Return how many sites of a cohort must stay to the end: more than half.

    >>> from fedscaffold.deploy.settings import Settings
    >>> [threshold_of(Settings(), sites) for sites in (3, 4, 5)]
    [2, 3, 3]
    """
    asked = settings.deploy.threshold
    number = asked if isinstance(asked, int) else math.ceil(asked * sites - 1e-9)
    return max(number, sites // 2 + 1)


def smallest_sum(settings: Settings) -> int:
    r"""Return from how many sites on the rules of a kit let a site take part in a sum.

    It is the threshold of a whole cohort: a round in which some are away takes the others only if
    as many stay to the end.

    >>> from fedscaffold.deploy.settings import parse
    >>> smallest_sum(parse("[deploy]\nsites = ['ant', 'bee', 'cow', 'dog', 'elk']"))
    3
    """
    count, share = len(settings.deploy.sites), settings.cohort
    cohort = min(count, share) if isinstance(share, int) else max(1, round(share * count))
    return max(2, threshold_of(settings, cohort))
