"""Inspection of a torch module's functions, by torch itself.

As in `function_kinds`, a function is a mean over records if it agrees, with its gradient, with the
mean over single records, at random parameters, and if its jaxpr does not couple records where these
points do not show it (`mixing`). Torch compares without compiling anything.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from fedscaffold.checks import InputError, one_number
from fedscaffold.problems.batches import Kind, Kinds, bound, measured
from fedscaffold.problems.function_kinds import SPREADS, draw_samples
from fedscaffold.problems.mixing import mixes_records
from fedscaffold.problems.torch_export import first_line

if TYPE_CHECKING:
    from fedscaffold.problems.problem import Problem

__all__ = ["inspect_torch", "moved_module", "one_thread", "tensors_of", "value_and_slopes"]

Module: TypeAlias = Any
Tree: TypeAlias = Any


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread.

    Batches of a few records leave nothing for others to do, and threads that wait for work take
    CPU time: ten times as much as the work where the machine is busy.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def inspect_torch(
    problem: Problem,
    module: Module,
    loss: Callable[[Module, Any], Any],
    accuracy: Callable[[Module, Any], Any] | None,
    draws: bool,
) -> Kinds:
    """Find the kind of each function.

    Args:
        problem: The problem, with the functions in JAX.
        module: The module.
        loss: The loss in torch.
        accuracy: The accuracy in torch, if there is one.
        draws: Whether the loss draws random numbers in training, by the shape of the batch.
    """
    functions, state = problem.functions, problem.state
    train = test = draw_samples(problem.records, problem.offsets)
    if problem.test is not None:
        rows = len(jax.tree.leaves(problem.test)[0])
        test = draw_samples(problem.test, np.array([0, rows]))

    def kind(function: Any, in_jax: Any, batches: list[Tree], mode: bool, slopes: bool) -> Kind:
        if _mixes(in_jax, problem.params, batches[0]):
            return "coupled"
        apart = _couples(function, module, batches, mode, slopes)
        return "coupled" if apart else "mean"

    of_loss: Kind = "coupled" if problem.coupled else "mean"
    of_accuracy = of_loss
    if problem.coupled is None:
        of_loss = kind(loss, measured(functions.loss, state), train, False, True)
        if accuracy is not None and functions.accuracy is not None:
            of_accuracy = kind(accuracy, measured(functions.accuracy, state), test, False, False)
        else:
            of_accuracy = "mean"
    of_gradient = of_loss
    if functions.stateful or draws:  # statistics or random numbers of the batch
        of_gradient = "coupled"
    elif functions.random and not problem.coupled:  # training is another function
        training = bound(functions.loss, jax.random.key(0), state, train=True)
        of_gradient = kind(loss, training, train, True, True)
    return Kinds(of_loss, of_accuracy, of_gradient)


def _mixes(in_jax: Callable[..., Any], params: Tree, batch: Tree) -> bool:
    """Return whether the function certainly couples records, by its jaxpr."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        kind = np.float32 if leaf.dtype.kind == "f" else jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(np.shape(leaf), kind)

    return mixes_records(jax.make_jaxpr(in_jax)(*jax.tree.map(shape, (params, batch))), batch)


def _couples(
    function: Callable[[Module, Any], Any],
    module: Module,
    batches: Sequence[Tree],
    train: bool,
    slopes: bool,
) -> bool:
    """Return whether the function on a batch is not the mean over its records."""
    known = False
    for precision in ("float64", "float32"):
        try:
            for spread, batch in zip(SPREADS, batches, strict=True):
                moved = moved_module(module, precision, spread).train(train)
                apart, coarsest = _compare(function, moved, tensors_of(batch, precision), slopes)
                known |= not math.isnan(apart)
                if apart > math.sqrt(coarsest):
                    return True
        except InputError:  # it does not run in this precision, or not on a single record
            known = False
        if known:
            break
    return not known


def _compare(
    function: Callable[[Module, Any], Any], module: Module, batch: Any, slopes: bool
) -> tuple[float, float]:
    """Return the relative difference of a batch from its records, and the coarsest precision.

    Infinite if only the mean over records is not finite, NaN if the batch is not.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    eps = [0.0]

    class Precisions(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, called: Any, types: Any, args: Any = (), by: Any = None
        ) -> Any:
            made = called(*args, **(by or {}))
            for one in made if isinstance(made, (list, tuple)) else (made,):
                if isinstance(one, torch.Tensor) and one.is_floating_point():
                    eps[0] = max(eps[0], torch.finfo(one.dtype).eps)
            return made

    def mean(module: Module, batch: Any) -> Any:
        each = [
            torch.as_tensor(function(module, jax.tree.map(lambda a: a[i : i + 1], batch)))  # noqa: B023
            for i in range(len(jax.tree.leaves(batch)[0]))
        ]
        sizes.append(float(sum(one.detach().abs() for one in each)) / len(each))
        return sum(each) / len(each)

    sizes: list[float] = []
    with torch.set_grad_enabled(slopes):
        with Precisions():
            whole, own = value_and_slopes(function, module, batch, slopes)
        other, others = value_and_slopes(mean, module, batch, slopes)
    apart = [_relative(float(whole - other), float(whole), sizes[0])]
    if slopes:
        gap = {name: slope - others[name] for name, slope in own.items()}
        apart.append(_relative(*(_norm(one.values()) for one in (gap, own, others))))
    return (math.inf if math.inf in apart else max(apart, key=lambda a: (math.isnan(a), a))), eps[0]


def _relative(gap: float, own: float, other: float) -> float:
    if math.isfinite(own) and not math.isfinite(gap):
        return math.inf
    return abs(gap) / (max(abs(own), other) or 1.0)


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


def tensors_of(records: Tree, precision: Any) -> Any:
    """Return arrays as torch tensors, floating-point ones with the module's dtype."""
    import torch

    dtype = getattr(torch, precision) if isinstance(precision, str) else precision

    def tensor(leaf: Any) -> Any:
        made = torch.from_numpy(np.array(leaf))
        return made.to(dtype) if made.is_floating_point() else made

    return jax.tree.map(tensor, records)


def moved_module(module: Module, precision: str, spread: float) -> Module:
    """Return a copy of the module at random parameters around its own."""
    import torch

    copied = copy.deepcopy(module).to(dtype=getattr(torch, precision))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in copied.parameters():
            if p.requires_grad and p.numel():
                noise = torch.randn(p.shape, dtype=p.dtype, generator=generator)
                p.add_(spread * (p.square().mean().sqrt() + 0.1) * noise)
    return copied


def value_and_slopes(
    function: Callable[[Module, Any], Any], module: Module, batch: Any, slopes: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Return torch's loss and, if wanted, its gradient on a batch."""
    import torch

    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    try:
        value = torch.as_tensor(function(module, batch))
    except Exception as error:  # an export does not look at everything, such as the dtype of labels
        raise InputError(f"loss(module, batch) fails in torch: {first_line(error)}") from error
    one_number("loss(module, batch)", value)
    if not slopes:
        return value.detach(), {}
    found: Any = (None,) * len(trained)  # a loss under torch.no_grad where it is measured
    if value.requires_grad:
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    return value.detach(), {
        name: torch.zeros_like(p) if slope is None else slope.detach()
        for (name, p), slope in zip(trained.items(), found, strict=True)
    }
