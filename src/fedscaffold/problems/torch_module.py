"""Problems whose model is a torch module: the same module and loss as at the sites of a deployment.

The loss is recorded by `torch.export` and evaluated in JAX (`torch_export`). The model of the
problem, and of its runs,
is a `StateDict`: trained parameters are its arrays; tied names, frozen parameters and buffers come
along. Buffers that the module changes in training, such as running statistics, are the problem's
state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.metrics import Metric, metric
from fedscaffold.problems.batches import Kinds
from fedscaffold.problems.compilation import ONCE
from fedscaffold.problems.problem import Problem
from fedscaffold.problems.torch_export import (
    WAY_OUT,
    Graph,
    TracedFunction,
    collect_later,
    copied_module,
)
from fedscaffold.problems.torch_kinds import (
    inspect_torch,
    moved_module,
    one_thread,
    tensors_of,
    value_and_slopes,
)

__all__ = ["StateDict", "TorchProblem", "torch_problem"]

Array: TypeAlias = Any
Module: TypeAlias = Any
Tree: TypeAlias = Any

RECORDS = 8  # on which the gradient is compared with torch's
SEED = 0  # of the initial model, as for TorchLearner


class StateDict(Mapping[str, Any]):
    """The `state_dict` of a module whose trained parameters are arrays.

    `module.load_state_dict(run.x)`.

    It is a JAX pytree with the trained parameters as leaves. As a mapping it has all entries of the
    module's
    `state_dict()`, as torch tensors: tied parameters under each of their names, frozen parameters
    and buffers as they were when the problem was made. `run.x | run.state` is the `state_dict` with
    the buffers that training changed.
    """

    def __init__(self, arrays: dict[str, Array], entries: _Entries) -> None:
        self.arrays, self.entries = arrays, entries

    def __getitem__(self, name: str) -> Any:
        import torch

        place = self.entries.places[name]
        if place in self.arrays:
            return torch.from_numpy(np.array(self.arrays[place]))
        return self.entries.fixed[place].clone()

    def __or__(self, buffers: Mapping[str, Array] | None) -> dict[str, Any]:
        import torch

        def tensor(name: str, value: Array) -> Any:
            made = torch.from_numpy(np.array(value))
            return made if made.is_floating_point() else made.to(self.entries.fixed[name].dtype)

        return dict(self) | {name: tensor(name, value) for name, value in (buffers or {}).items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries.places)

    def __len__(self) -> int:
        return len(self.entries.places)

    def __repr__(self) -> str:
        return f"StateDict({', '.join(self)})"


class _Entries:
    """The entries of a module's `state_dict()`.

    Which array each name has, and those that are not trained.
    """

    def __init__(self, module: Module) -> None:
        trained = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        held = module.state_dict(keep_vars=True)
        self.places = {name: trained.get(id(tensor), name) for name, tensor in held.items()}
        self.fixed = {
            name: t.detach().cpu().clone() for name, t in held.items() if id(t) not in trained
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Entries) and (self.places, *self.fixed) == (
            other.places,
            *other.fixed,
        )

    def __hash__(self) -> int:
        return hash(tuple(self.places.items()))


def _flatten(tree: StateDict) -> Any:
    names = tuple(tree.arrays)
    keys = [(jax.tree_util.DictKey(name), tree.arrays[name]) for name in names]
    return keys, (names, tree.entries)


def _unflatten(auxiliary: Any, leaves: Iterable[Any]) -> StateDict:
    names, entries = auxiliary
    return StateDict(dict(zip(names, leaves, strict=True)), entries)


jax.tree_util.register_pytree_with_keys(StateDict, _flatten, _unflatten)


class TorchProblem(Problem):
    """A problem whose model is a torch module; made by `fs.problems.torch`."""

    metrics: tuple[Metric, ...] = ()
    """The module's metrics other than accuracy, which torch evaluates; `simulate` takes them in its
    `metrics`."""
    inspect: Callable[[], Kinds]

    @cached_property
    def kinds(self) -> Kinds:
        """Kinds of the problem's functions, found on first use by torch."""
        return self.inspect()


def torch_problem(
    module: Module | Callable[[], Module],
    loss: Callable[[Module, Any], Any],
    clients: Sequence[Any],
    *,
    test: Any = None,
    metrics: Callable[[Module, Any], dict[str, Any]] | None = None,
    name: str = "torch module",
    coupled: bool | None = None,
    evaluation_batch: int | None = None,
) -> TorchProblem:
    """Make a problem of a torch module, with the loss and metrics that `TorchLearner` takes.

    The loss is recorded by `torch.export`, in training and in evaluation mode, and runs in JAX;
    torch is only needed to make the problem. The gradient is compared with torch's before it is
    used.

    Args:
        module: The module, or a function that makes it, called with torch's random seed 0 as at the
            sites.
        loss: `loss(module, batch)`, one number. Training is in training mode, with random numbers
            (dropout) of a stream for each client and step; measuring in evaluation mode.
        clients: The records of each client: a tensor, a tuple or dict of tensors (or arrays) with
            one row per record, or a `torch.utils.data.Dataset`, which is read once.
        test: Records kept apart, for the metrics.
        metrics: `metrics(module, batch)`, a dict of numbers, called in evaluation mode. "accuracy"
            becomes the problem's accuracy, the others are `problem.metrics`.
        name: How the problem is called in messages.
        coupled: As for `Problem`.
        evaluation_batch: As for `Problem`.

    Returns:
        A problem whose `params`, and whose runs' `x`, are a `StateDict`, which `load_state_dict`
        takes.

    Raises:
        InputError: for what cannot be used, by name: an operator without a rule in JAX, or a
            gradient that is not torch's.

    >>> import torch
    >>> import fedscaffold as fs
    >>> def loss(module, batch):
    ...     return torch.nn.functional.mse_loss(module(batch[0]), batch[1])
    >>> clients = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (6, 8)]
    >>> network = torch.nn.Linear(3, 1)
    >>> problem = fs.problems.torch(network, loss, clients)
    >>> run = fs.simulate(fs.scaffold(), problem, rounds=2, local_steps=3, lr=0.1)
    >>> network.load_state_dict(run.x)
    <All keys matched successfully>
    """
    made = _make(module)
    held = [_arrays(client) for client in clients]
    if not held:
        raise InputError("clients must hold at least one client, got an empty list")
    kept_apart = None if test is None else _arrays(test)
    start = _start(made)
    with one_thread(), collect_later():
        found = _functions(made, loss, metrics, held, kept_apart)
    problem = TorchProblem(
        found.loss,
        start,
        held,
        test=kept_apart,
        accuracy=found.accuracy,
        name=name,
        coupled=coupled,
        evaluation_batch=evaluation_batch,
        state={name: made.state_dict()[name].numpy() for name in found.changed} or None,
    )
    score = partial(_entry, metrics, "accuracy") if metrics and found.accuracy else None
    problem.inspect = partial(inspect_torch, problem, made, loss, score, found.draws)
    problem.metrics = tuple(
        _on_host(made, metrics, one, kept_apart is not None) for one in found.measured
    )
    return problem


class _Functions(NamedTuple):
    """The functions of a torch problem in JAX, and what is known of them."""

    loss: Callable[..., Any]
    accuracy: Callable[..., Any] | None
    changed: list[str]
    """Buffers that the loss changes in training."""
    draws: bool
    """Whether the loss draws random numbers in training."""
    measured: list[str]
    """Names of the metrics that torch evaluates."""


def _functions(
    module: Module,
    loss: Callable[[Module, Any], Any],
    metrics: Callable[[Module, Any], dict[str, Any]] | None,
    held: Sequence[Tree],
    test: Tree | None,
) -> _Functions:
    """Convert the loss and the accuracy to JAX, after comparing them with torch's."""
    data = held if test is None else [*held, test]
    sample = jax.tree.map(lambda a: a[:RECORDS], max(held, key=_rows))
    in_jax, changed, draws = _loss(TracedFunction(module, loss, data), module, sample)
    if metrics is None:
        return _Functions(in_jax, None, changed, draws, [])
    names = _names(module, metrics, sample if test is None else test)
    accuracy = None
    if "accuracy" in names:
        accuracy = _accuracy(metrics, module, data, bool(changed))
    others = [name for name in names if name != "accuracy"]
    return _Functions(in_jax, accuracy, changed, draws, others)


def _make(module: Module | Callable[[], Module]) -> Module:
    """Return a copy of the module on the CPU, after checking its parameters."""
    try:
        import torch
    except ModuleNotFoundError:
        raise InputError(
            "fs.problems.torch needs torch: pip install 'fedscaffold[torch]'"
        ) from None
    if isinstance(module, torch.nn.Module):
        made = copied_module(module)
    elif callable(module):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            made = module()
    if not isinstance(module, torch.nn.Module) and not (
        callable(module) and isinstance(made, torch.nn.Module)
    ):
        raise InputError(
            f"module must be a torch.nn.Module or make one, got {type(module).__name__}"
        )
    _check_hooks(module if isinstance(module, torch.nn.Module) else made)
    places: dict[int, str] = {}
    for name, parameter in made.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(
                f"parameter {name!r} has no shape yet; send a batch through the module first"
            )
        other = places.setdefault(parameter.data_ptr(), name) if parameter.numel() else name
        if other != name:
            raise InputError(
                f"{name!r} shares the memory of {other!r}; tie them by assigning the Parameter "
                "itself"
            )
    half = {torch.float16, torch.bfloat16} & {p.dtype for p in made.parameters()}
    return made.to(device="cpu", dtype=torch.float32) if half else made.cpu()


def _check_hooks(module: Module) -> None:
    """Raise if a parameter has hooks for its gradient, which copies of the module do not have."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"parameter {name!r} has a hook for its gradient, which is not recorded; {WAY_OUT}"
            )


def _start(module: Module) -> StateDict:
    """Return the module's own parameters, to start from."""
    trained = {
        name: p.detach().cpu().numpy().copy()
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    if not trained:
        raise InputError(
            "the module has no parameter that is trained; requires_grad_(True) trains one"
        )
    return StateDict(trained, _Entries(module))


def _arrays(records: Any) -> Tree:
    """Return records as NumPy arrays."""
    import torch

    if isinstance(records, torch.utils.data.DataLoader):
        raise InputError(
            "records must be tensors or a Dataset, got a DataLoader: the simulator draws batches "
            "itself"
        )
    if isinstance(records, torch.utils.data.Dataset):
        if not hasattr(records, "__len__"):
            raise InputError(
                "records must be tensors or a Dataset with a length; read an IterableDataset first"
            )
        records = torch.utils.data.default_collate([records[i] for i in range(len(records))])

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return np.asarray(leaf)
        leaf = leaf.detach().cpu()
        return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()

    return jax.tree.map(array, records)


def _rows(client: Tree) -> int:
    leaves = jax.tree.leaves(client)
    return len(leaves[0]) if leaves and np.ndim(leaves[0]) else 0


def _loss(
    recorded: TracedFunction, module: Module, sample: Tree
) -> tuple[Callable[..., Any], list[str], bool]:
    """Return the loss in JAX, the buffers that it changes in training, and whether it is random.

    It takes a random key if training is another function than evaluation, and the buffers as its
    state.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(sample)]
    precision = "float32"
    try:
        train = recorded.graph(precision, True, shapes)
    except InputError as error:  # double precision written into it, or it fails in any
        precision = "float64"
        try:
            train = recorded.graph(precision, True, shapes)
        except InputError:
            raise error from None
    if not set(train.parameters.values()) & {
        name for name, p in module.named_parameters() if p.requires_grad
    }:
        raise InputError(
            "loss(module, batch) uses no trained parameter of its module: it is made of something "
            "else"
        )
    differ = not recorded.ignores_mode(precision, shapes)
    if (recorded.graph(precision, False, shapes) if differ else train).random:
        raise InputError(
            "loss(module, batch) draws random numbers in evaluation mode; draw them if "
            "module.training"
        )
    _check_memory(recorded, module, sample, precision, train.changed)
    _check_gradient(recorded, module, sample, not train.random)

    def loss(params: StateDict, batch: Tree) -> Array:
        return recorded(params.arrays, batch, train=True)

    def random_loss(params: StateDict, batch: Tree, key: Array | None = None) -> Array:
        return recorded(params.arrays, batch, train=key is not None, key=key)

    def stateful_loss(params: StateDict, batch: Tree, state: Any, train: bool) -> tuple[Array, Any]:
        value, changed = recorded.evaluate(params.arrays, batch, train=train, buffers=state)
        return value, state | changed

    def random_stateful_loss(
        params: StateDict, batch: Tree, state: Any, train: bool, key: Array | None = None
    ) -> tuple[Array, Any]:
        value, changed = recorded.evaluate(
            params.arrays, batch, train=train, key=key, buffers=state
        )
        return value, state | changed

    if train.changed:
        in_jax = random_stateful_loss if train.random else stateful_loss
        return in_jax, list(train.changed), train.random
    return random_loss if differ else loss, [], train.random


def _check_memory(
    recorded: TracedFunction, module: Module, sample: Tree, precision: str, changed: Iterable[str]
) -> None:
    """Raise if calls of the loss change more of the module than the recorded ones do.

    An export evaluates counters of Python once, and leaves out what is assigned to a buffer. Calls
    after the first are compared: it may fill caches.
    """
    import torch

    for name in sorted(set(changed) - set(module.state_dict())):
        raise InputError(
            f"loss(module, batch) changes the buffer {name!r}, which is no part of the module's "
            "state_dict: register it without persistent=False"
        )
    called = moved_module(module, precision, 0.0).train()
    noted = []
    with torch.random.fork_rng(devices=[]):  # dropout
        for _ in range(3):
            value_and_slopes(recorded.function, called, tensors_of(sample, precision), slopes=False)
            noted.append(_numbers_kept(called))
    before, after = noted[-2:]
    for name in sorted(after.keys() - set(changed)):
        if name not in before or not np.array_equal(before[name], after[name], equal_nan=True):
            raise InputError(
                f"loss(module, batch) changes {name!r} of the module at each call, which is not "
                "recorded; keep it in a buffer that is changed in place, such as "
                "self.number.add_(1)"
            )


def _numbers_kept(module: Module) -> dict[str, Any]:
    """Return the buffers of a module, and the attributes that are numbers."""
    kept = {name: buffer.detach().numpy().copy() for name, buffer in module.named_buffers()}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, (bool, int, float)):
                kept[f"{prefix}.{name}".lstrip(".")] = np.asarray(value)
    return kept


def _check_gradient(recorded: TracedFunction, module: Module, sample: Tree, train: bool) -> None:
    """Raise unless JAX's gradient is torch's, at random parameters.

    An export leaves custom derivatives out. What is compared is a derivative in a random
    direction, in double precision: first of the graph for single precision, computed in double,
    which spares an export; if that differs, of the graph for double precision. Where the module
    runs in single precision only, it is compared in that.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(sample)]
    failure, compared = None, False
    for recorded_in, precision in (("float32", "float64"), ("float64",) * 2, ("float32",) * 2):
        if compared and precision == "float32":
            break
        try:
            graph = recorded.graph(recorded_in, train, shapes)
            graph = graph.in_double() if recorded_in != precision else graph
            apart, size = _compare_slopes(recorded, graph, module, sample, precision, train)
        except InputError as error:
            failure = failure or error
            continue
        compared = True
        if not np.isfinite(size) or apart <= (1e-8 if precision == "float64" else 1e-3) * size:
            return
    if not compared and failure is not None:
        raise failure
    raise InputError(
        f"the gradient of loss(module, batch) is not torch's (its derivative in a random direction "
        f"is off by {apart:.2g} of {size:.2g}): torch.export leaves custom autograd functions and "
        f"hooks out; {WAY_OUT}"
    )


def _compare_slopes(
    recorded: TracedFunction,
    graph: Graph,
    module: Module,
    sample: Tree,
    precision: str,
    train: bool,
) -> tuple[float, float]:
    """Return how far JAX's derivative in a random direction is from torch's, and its scale."""
    import torch

    moved = moved_module(module, precision, 0.1).train(train)
    trained = {name: p for name, p in moved.named_parameters() if p.requires_grad}
    _, slopes = value_and_slopes(recorded.function, moved, tensors_of(sample, precision))
    generator = torch.Generator().manual_seed(2)
    along = {
        name: torch.randn(p.shape, dtype=p.dtype, generator=generator)
        for name, p in trained.items()
    }
    expected = sum(float(torch.sum(slopes[name] * way)) for name, way in along.items())
    size = math.sqrt(sum(float(slope.square().sum()) for slope in slopes.values()))
    with jax.enable_x64(precision == "float64"):
        cast = [
            jnp.asarray(a, precision if a.dtype.kind == "f" else None)
            for a in jax.tree.leaves(sample)
        ]
        held = recorded.held(precision)

        def slope(arrays: dict[str, Array], way: dict[str, Array], leaves: list[Array]) -> Array:
            return jax.jvp(lambda p: graph(held | p, leaves, None)[0], (arrays,), (way,))[1]

        arrays, way = (
            {name: t.detach().numpy() for name, t in tensors.items()}
            for tensors in (trained, along)
        )
        compiled = jax.jit(slope, compiler_options=ONCE)
        return abs(float(compiled(arrays, way, cast)) - expected), size


def _entry(
    metrics: Callable[[Module, Any], dict[str, Any]], name: str, module: Module, batch: Any
) -> Any:
    """Return an entry of the metrics as a tensor, even if made a number by `float` or `item`."""
    import torch

    numbers: dict[float, Any] = {}

    class Recorded(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """Replaces tensors by unlikely numbers, to find them in what the function returns."""

        def __torch_function__(
            self, called: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if called not in (torch.Tensor.__float__, torch.Tensor.item):
                return called(*args, **(kwargs or {}))
            numbers[math.pi / 10 + len(numbers) * 1e-9] = args[0]
            return list(numbers)[-1]

    with Recorded():
        value = metrics(module, batch)[name]
    if not isinstance(value, torch.Tensor) and value not in numbers:
        raise InputError(
            f"metrics(module, batch)[{name!r}] is not made by one .item() or float(...)"
        )
    return value if isinstance(value, torch.Tensor) else numbers[value].reshape(())


def _names(module: Module, metrics: Callable[..., Any], records: Tree) -> list[str]:
    """Return the names of the metrics, from a call on some records."""
    import torch

    some = tensors_of(jax.tree.map(lambda a: a[:RECORDS], records), next(module.parameters()).dtype)
    with torch.no_grad():
        found = metrics(copy.deepcopy(module).eval(), some)
    if not isinstance(found, Mapping):
        raise InputError(
            f"metrics(module, batch) must return a dict of numbers, got {type(found).__name__}"
        )
    return [name for name in found if name != "loss"]


def _accuracy(
    metrics: Callable[..., Any], module: Module, data: Sequence[Tree], stateful: bool
) -> Callable[..., Any]:
    """Return the accuracy in JAX, after comparing it with torch's on some records."""
    import torch

    some = jax.tree.map(lambda a: a[:RECORDS], data[-1])
    traced = TracedFunction(module, partial(_entry, metrics, "accuracy"), data, "metrics")

    def accuracy(params: StateDict, batch: Tree) -> Array:
        return traced(params.arrays, batch, train=False)

    def accuracy_with_buffers(params: StateDict, batch: Tree, state: Any) -> Array:
        return traced(params.arrays, batch, train=False, buffers=state)

    held = copy.deepcopy(module).to(torch.float32).eval()
    with torch.no_grad():
        expected = float(metrics(held, tensors_of(some, torch.float32))["accuracy"])
    arrays = {name: p.detach().numpy() for name, p in held.named_parameters() if p.requires_grad}
    evaluate = jax.jit(partial(traced, train=False), compiler_options=ONCE)
    found = float(evaluate(arrays, some))
    if not abs(found - expected) <= 1e-4 * max(1.0, abs(expected)):
        raise InputError(
            f"metrics(module, batch)['accuracy'] is {found:.6g} in JAX, {expected:.6g} in torch; "
            f"{WAY_OUT}"
        )
    return accuracy_with_buffers if stateful else accuracy


def _on_host(module: Module, metrics: Any, name: str, tested: bool) -> Metric:
    """Return a metric that torch evaluates."""
    import torch

    def function(params: StateDict, data: Tree, state: Any = None) -> float:
        held = copy.deepcopy(module).eval()
        held.load_state_dict(params | state)
        with torch.no_grad():
            return float(metrics(held, tensors_of(data, next(held.parameters()).dtype))[name])

    return metric(function, on="test" if tested else "train", compiled=False, name=name)
