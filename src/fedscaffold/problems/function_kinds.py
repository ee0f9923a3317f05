"""Inspection of the user's functions before a run.

Which couple records, which arrays are batch statistics.

A loss is recognised as a mean over records by comparing it, and its gradient, on real batches with
the mean over their records, at random parameters (at the start, a network whose last layer is zero
would be inconclusive). The comparison is in float64 if the functions allow it. A coupling that is
inactive at these points is found in the function's jaxpr (`mixing`). Functions that cannot be
classified count as coupled, which is always correct and only slower.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from numpy.typing import NDArray

from fedscaffold.checks import InputError, one_number, taken_by_name
from fedscaffold.problems.batches import Kind, Kinds, bound, call, measured, record_values
from fedscaffold.problems.compilation import ONCE
from fedscaffold.problems.mixing import mixes_records

if TYPE_CHECKING:
    from fedscaffold.problems.problem import Problem

__all__ = ["SPREADS", "draw_samples", "inspect_functions"]

Tree: TypeAlias = Any
Array: TypeAlias = Any

RECORDS = 61  # in a batch that is compared with its records: prime, so no constant divisor is near
DIGITS = {"bf16": 7, "f16": 10, "f32": 23, "f64": 52}  # binary, after the point
SPREADS = (0.1, 1.0)  # of the random parameters, in units of the model's own size
STATISTICS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "batch_stats",
    "moving_mean",
    "moving_variance",
)
STATISTIC_TYPES = {"BatchStat"}  # Flax NNX
PAIR = ("mean", "var")  # the names of Flax's batch statistics


def inspect_functions(problem: Problem) -> Kinds:
    """Find the kind of each function, and refuse batch statistics among the parameters.

    Args:
        problem: The problem; its functions are evaluated on some of its records.

    Returns:
        The kinds; those given by the user are not checked.

    Raises:
        InputError: An array of the parameters holds batch statistics.
    """
    kinds, statistics = Kinds(), _named_statistics(problem.params)
    given = [function for function in problem.functions if function is not None]
    stated = problem.coupled is False and not any(map(taken_by_name, given))
    if not statistics and not stated:
        with warnings.catch_warnings():  # of double precision in a model that is written in single
            warnings.simplefilter("ignore")
            kinds, statistics = _inspect_unnamed(problem)
    for layer in statistics[:1]:
        raise InputError(
            f"{layer} looks like batch statistics: they have no gradient, and control variates "
            "would drive them "
            "off; give them as Problem(..., state=...), apart from params (group or layer "
            "normalisation needs none)"
        )
    return kinds


def _inspect_unnamed(problem: Problem) -> tuple[Kinds, list[str]]:
    """Return the kinds, and the names of arrays that are statistics by what the functions do."""
    functions = problem.functions
    stated: Kind | None = (
        None if problem.coupled is None else "coupled" if problem.coupled else "mean"
    )
    train, test = draw_samples(problem.records, problem.offsets), None
    if problem.test is not None:
        size = len(jax.tree.leaves(problem.test)[0])
        test = draw_samples(problem.test, np.array([0, size]))
    slopes = np.ones(len(problem.layout.names))

    def kind_of(
        name: str,
        function: Callable[..., Any] | None,
        batches: list[Tree],
        key: Array | None = None,
    ) -> Kind:
        nonlocal slopes
        if function is None:
            return "mean"
        if "weights" in taken_by_name(function, name):
            return "weighted"
        if stated == "coupled" or (stated is not None and key is None):
            return stated
        one = (
            measured(function, problem.state)
            if key is None
            else bound(function, key, problem.state, train=True)
        )
        coupled, found = _couples(name, one, problem.params, batches)
        slopes = found if name == "loss" else slopes
        return "coupled" if coupled else "mean"

    for name, function in (("loss", functions.loss), ("gradient", functions.gradient)):
        if function is not None and "key" in taken_by_name(function):
            _refuse_without_key(name, function, problem, train[0])
    loss = kind_of("loss", functions.loss, train) if functions.has_loss else "mean"
    accuracy = kind_of("accuracy", functions.accuracy, train if test is None else test)
    given = functions.gradient is not None
    slope = kind_of("gradient", functions.gradient, train) if given else loss
    if functions.stateful:  # it may compute statistics of the batch, whatever it does at rest
        weighted = "weights" in taken_by_name(functions.gradient or functions.loss)
        slope = "weighted" if weighted else "coupled"
    elif functions.random:  # what is drawn with a key may depend on the batch's shape
        slope = kind_of(
            "gradient" if given else "loss",
            functions.gradient or functions.loss,
            train,
            jax.random.key(0),
        )
    kinds = Kinds(loss, accuracy, slope)
    untrained = np.flatnonzero(slopes == 0).tolist()
    used = partial(_is_measured, problem, kinds.accuracy, (train if test is None else test)[0])
    return kinds, [problem.layout.names[j] for j in untrained if used(j)]


def _refuse_without_key(
    name: str, function: Callable[..., Any], problem: Problem, batch: Tree
) -> None:
    """Raise an InputError for a function that works with a random key but not with key=None."""
    try:
        jax.eval_shape(measured(function, problem.state), problem.params, batch)
    except Exception as error:
        try:
            jax.eval_shape(
                bound(function, jax.random.key(0), problem.state, train=True), problem.params, batch
            )
        except Exception:  # it fails either way, and a run will say why
            return
        raise InputError(
            f"{name} must run with key=None, as it is measured without randomness: draw random "
            "numbers only where "
            f"key is not None; it said {type(error).__name__}: {str(error).splitlines()[0][:100]}"
        ) from None


def draw_samples(records: Tree, offsets: NDArray[np.int64]) -> list[Tree]:
    """Return two batches of real records: from the largest client, and from all clients."""
    rng = np.random.default_rng(0)
    counts = np.diff(offsets)
    largest, total = int(np.argmax(counts)), int(offsets[-1])
    own = offsets[largest] + np.sort(rng.permutation(int(counts[largest]))[:RECORDS])
    mixed = np.sort(rng.choice(total, min(total, len(own)), replace=False, shuffle=False))
    return [jax.tree.map(lambda a: np.asarray(a[rows]), records) for rows in (own, mixed)]  # noqa: B023


def _models(params: Tree) -> list[Tree]:
    """Return random parameters around the initial model, near and far."""
    rng = np.random.default_rng(1)

    def moved(spread: float, array: Any) -> NDArray[Any]:
        start = np.asarray(array, np.float64)
        width = spread * (np.sqrt(np.mean(start**2)) + 0.1) if start.size else 0.0
        return np.asarray(start + width * rng.normal(size=start.shape))

    return [jax.tree.map(partial(moved, spread), params) for spread in SPREADS]


def _couples(
    name: str, function: Callable[..., Any], params: Tree, batches: list[Tree]
) -> tuple[bool, NDArray[Any]]:
    """Return whether a function couples records, and the largest slope of each array."""
    models = _models(params)
    traced, double = _trace(function, models[0], batches[0])
    found = set(re.findall(r"\b(bf16|f16|f32)\[", str(traced)))
    coarsest = next((kind for kind in ("bf16", "f16", "f32") if kind in found), "f64")
    tolerance = 2 ** (-DIGITS[coarsest] / 2)  # the square root of its eps
    mixed = mixes_records(traced, batches[0])
    with jax.enable_x64(double):
        jax.eval_shape(
            partial(_on_batch, name, function), params, batches[0]
        )  # what fails here, fails in a run
        mismatches, slopes = [], []
        way = jax.tree.map(np.subtract, *models)
        for model, batch in zip(models, batches, strict=True):
            try:
                mismatch, slope = _compare(name, function, model, way, batch)
            except Exception:  # it cannot be called with a single record
                slope = jax.jit(partial(_on_batch, name, function))(model, batch)[2]
                return True, np.asarray(slope)
            mismatches.append(float(mismatch))
            slopes.append(np.asarray(slope))
    known = [mismatch for mismatch in mismatches if not np.isnan(mismatch)]
    return mixed or not known or max(known) > tolerance, np.max(slopes, axis=0)


def _trace(function: Callable[..., Any], params: Tree, batch: Tree) -> tuple[ClosedJaxpr, bool]:
    """Return a function's jaxpr in float64, and True; that in float32 if float32 is hard-coded."""
    with contextlib.suppress(Exception), jax.enable_x64(True):
        return jax.make_jaxpr(function)(params, batch), True
    with jax.enable_x64(False):
        return jax.make_jaxpr(function)(params, batch), False


@partial(jax.jit, static_argnums=(0, 1), compiler_options=ONCE)
def _compare(
    name: str, function: Callable[..., Any], params: Tree, way: Tree, batch: Tree
) -> tuple[Array, Array]:
    """Compare a function on a batch with its mean over the records.

    Of a loss the derivatives in the direction `way` are compared too; those of the records in
    forward mode, which compiles much faster than a second gradient.

    Returns:
        The relative difference, of values or derivatives if that is larger; and the largest slope
        of each array.
    """
    whole, slope, largest = _on_batch(name, function, params, batch)
    if slope is None:
        return _relative_to_mean(whole, record_values(function, params, batch)), largest
    each, along = _values_along(partial(record_values, function, batch=batch), params, way)
    size = _norm(slope) * _norm(way) / np.sqrt(sum(leaf.size for leaf in jax.tree.leaves(way)))
    slant = _relative(_product(slope, way), along.mean(), size)
    return jnp.maximum(_relative_to_mean(whole, each), slant), largest


def _values_along(function: Callable[[Tree], Array], params: Tree, way: Tree) -> Any:
    """Return a function's values, and their derivatives in a direction."""
    try:
        return jax.jvp(function, (params,), (way,))
    except TypeError:  # a custom_vjp has no forward mode: the derivative of the mean is enough
        value, slope = jax.value_and_grad(lambda p: jnp.mean(function(p)))(params)
        return jnp.reshape(value, 1), jnp.reshape(_product(slope, way), 1)


def _product(a: Tree, b: Tree) -> Array:
    return sum(jax.tree.leaves(jax.tree.map(lambda one, other: jnp.sum(one * other), a, b)))


def _relative_to_mean(whole: Tree, each: Tree) -> Array:
    mean = jax.tree.map(lambda a: a.mean(axis=0), each)
    return _relative(whole, mean, _norm(jax.tree.map(lambda a: jnp.abs(a).mean(axis=0), each)))


def _on_batch(
    name: str, function: Callable[..., Any], params: Tree, batch: Tree
) -> tuple[Tree, Tree, Array]:
    """Return a function's value on a batch without padding, and the gradient of a loss.

    The third result is the largest slope of each array, 1 for functions other than a loss.
    """
    if name != "loss":
        return function(params, batch), None, jnp.ones(len(jax.tree.leaves(params)))

    def checked(params: Tree) -> Array:
        value = function(params, batch)
        one_number("loss(params, batch)", value)
        return value

    whole, slope = jax.value_and_grad(checked)(params)
    largest = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(slope)]
    return whole, slope, jnp.stack(largest)


def _relative(a: Tree, b: Tree, size: Array) -> Array:
    """Return the relative distance of two pytrees; infinite if only the second is not finite."""
    own = _norm(a)
    scale = jnp.maximum(own, size)
    apart = _norm(jax.tree.map(jnp.subtract, a, b)) / jnp.where(scale == 0, 1, scale)
    return jnp.where(jnp.isfinite(own) & ~jnp.isfinite(apart), jnp.inf, apart)


def _norm(tree: Tree) -> Array:
    return jnp.sqrt(
        sum(jnp.sum(jnp.square(jnp.asarray(leaf, float))) for leaf in jax.tree.leaves(tree))
    )


def _named_statistics(params: Tree) -> list[str]:
    """Return the arrays whose name or type is that of batch statistics."""

    def typed(node: Any) -> bool:
        return any(kind.__name__ in STATISTIC_TYPES for kind in type(node).__mro__)

    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=typed):
        name = jax.tree_util.keystr(path)
        if typed(node) or any(word in name for word in STATISTICS):
            found.append(name)
    return found


def _is_measured(problem: Problem, kind: Kind, batch: Tree, place: int) -> bool:
    """Return whether an array without a gradient is a statistic.

    By its name, or because the accuracy uses it.
    """
    words = re.findall(r"[a-z]+", problem.layout.names[place].lower())
    if any(word in PAIR for word in words):
        return True
    score = problem.functions.accuracy
    if score is None:
        return False
    rng = np.random.default_rng(2)
    leaves = jax.tree.leaves(_models(problem.params)[0])
    shape, size = leaves[place].shape, np.sqrt(np.mean(leaves[place] ** 2)) + 1.0
    values = []
    for width in (0.1, 1.0, 10.0, 100.0):
        for moved in (
            size * width * rng.normal(size=shape),
            size * width * rng.exponential(size=shape),
        ):
            leaves[place] = np.asarray(moved)
            model = problem.layout.tree(list(leaves))
            values.append(np.asarray(call(measured(score, problem.state), kind, model, batch)))
    return any(not np.array_equal(values[0], other, equal_nan=True) for other in values[1:])
