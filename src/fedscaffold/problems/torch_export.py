"""Functions of (module, batch) written in torch, evaluated in JAX.

`torch.export` records a function, module and all, as a graph of core ATen operators; the operators
are evaluated one after another by their JAX functions (`aten`, `aten_layers`, `aten_linalg`), so
that JAX can differentiate, vectorise and compile the whole. A graph holds for any number of records
from 2 if torch finds it to; otherwise every number that occurs has a graph of its own, as has a
single record. Graphs are also made by mode (training or evaluation) and floating-point type.

The graph of an export has no autograd: what `detach` and `torch.no_grad` cut off is marked in it
    here.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.problems import aten_layers, aten_linalg  # noqa: F401 (register operators)
from fedscaffold.problems.aten import OPERATORS, RANDOM, Unsupported

__all__ = ["WAY_OUT", "Graph", "TracedFunction", "collect_later", "copied_module", "first_line"]

Array: TypeAlias = Any
Module: TypeAlias = Any
Tree: TypeAlias = Any

EXAMPLE = 5  # records in the example of an export for any number
WHOLE = (
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
)  # not unrolled over time: each has a rule of its own
NAMESPACE = "fedscaffold"  # of our own operators in torch
RESHAPING = (
    "view",
    "permute",
    "transpose",
    "slice",
    "select",
    "squeeze",
    "unsqueeze",
    "expand",
    "alias",
)
IGNORED = (
    "_assert",
    "sym_constrain_range",
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
)
ABOUT_STORAGE = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit")
WAY_OUT = "write this part in JAX (fs.Problem), or run the module by `fedscaffold deploy simulate`"


class Node(NamedTuple):
    """An operation of a graph; references to other nodes in its arguments are `Reference`."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    by_name: dict[str, Any]
    results: Any
    """Dtype and shape of each result: a `Result`, a list of them with None for those that are no
    arrays, or None."""
    random: bool
    where: str


class Reference(NamedTuple):
    """The result of another node."""

    name: str


class Precision(NamedTuple):
    """A dtype among the arguments.

    What JAX makes of 64 bits is known when the graph is evaluated.
    """

    name: str


class Result(NamedTuple):
    """What torch knows of an array: its dtype, and its shape with None for sizes that vary."""

    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A function of (parameters, batch) as a list of operations."""

    nodes: tuple[Node, ...]
    parameters: dict[str, str]
    """Name in the graph -> name of the parameter, for those that it uses."""
    buffers: dict[str, str]
    constants: dict[str, Any]
    leaves: tuple[str, ...]
    """Names of the batch's arrays."""
    value: Any
    """The result."""
    changed: dict[str, Any]
    """Buffer -> its value after the call, for those that the function changes."""

    @property
    def text(self) -> str:
        """The operations as text, to compare graphs."""
        return "\n".join(f"{n.name} = {n.function} {n.args} {n.by_name}" for n in self.nodes) + str(
            self.value
        )

    @property
    def random(self) -> bool:
        """Whether the function may draw random numbers."""
        return any(node.random for node in self.nodes)

    def in_double(self) -> Graph:
        """Return the graph with double precision wherever it has single precision."""

        def widened(value: Any) -> Any:
            if isinstance(value, (Precision, Result)):
                return type(value)(value[0].replace("float32", "float64"), *value[1:])
            if isinstance(value, (list, tuple)) and not isinstance(value, Reference):
                return type(value)(map(widened, value))
            return value

        nodes = tuple(
            node._replace(
                args=widened(node.args),
                by_name={name: widened(value) for name, value in node.by_name.items()},
                results=widened(node.results),
            )
            for node in self.nodes
        )
        constants = {
            at: value.astype(np.float64) if value.dtype == np.float32 else value
            for at, value in self.constants.items()
        }
        return replace(self, nodes=nodes, constants=constants)

    def __call__(
        self, arrays: Mapping[str, Array], leaves: Sequence[Array], key: Array | None
    ) -> tuple[Array, dict[str, Array]]:
        """Evaluate the graph.

        Args:
            arrays: Parameters and buffers by name.
            leaves: The batch's arrays.
            key: Random key for operators that draw random numbers.

        Returns:
            The function's value, and the buffers that it changes.
        """
        known: dict[str, Any] = {
            at: arrays[name] for at, name in (self.parameters | self.buffers).items()
        }
        known |= {
            at: jnp.asarray(value, _dtype(value.dtype)) for at, value in self.constants.items()
        }
        known |= dict(zip(self.leaves, map(jnp.asarray, leaves), strict=True))
        for place, node in enumerate(self.nodes):
            args, by_name = _filled(node.args, known), _filled(node.by_name, known)
            if node.random:
                assert key is not None, "a function that draws random numbers is called with a key"
                by_name["key"] = jax.random.fold_in(key, place)
            known[node.name] = _checked(node, _evaluated(node, args, by_name))
        return _filled(self.value, known), _filled(self.changed, known)


def _evaluated(node: Node, args: Any, by_name: Any) -> Any:
    try:
        return node.function(*args, **by_name)
    except Unsupported as error:
        raise InputError(f"{node.where} {error}, which has no rule in JAX: {WAY_OUT}") from None


def _filled(given: Any, known: Mapping[str, Any]) -> Any:
    """Replace the references in arguments by their values."""
    if isinstance(given, Reference):
        return known[given.name]
    if isinstance(given, Precision):
        return _dtype(given.name)
    if isinstance(given, dict):
        return {name: _filled(value, known) for name, value in given.items()}
    return (
        type(given)(_filled(one, known) for one in given)
        if isinstance(given, (list, tuple))
        else given
    )


def _checked(node: Node, value: Any) -> Any:
    """Convert results to torch's dtypes; raise if a shape is not torch's."""
    if isinstance(node.results, list):
        return [_one(node, result, one) for result, one in zip(node.results, value, strict=True)]
    return _one(node, node.results, value)


def _one(node: Node, result: Result | None, value: Any) -> Any:
    if result is None or value is None:
        return value
    shape = jnp.shape(value)
    if len(shape) != len(result.shape) or any(
        b not in (a, None) for a, b in zip(shape, result.shape, strict=True)
    ):
        raise AssertionError(f"{node.where}: shape {shape}, in torch {result.shape}")
    return jnp.asarray(value, _dtype(result.dtype))


def _dtype(name: Any) -> Any:
    """Return the JAX dtype: with 32 bits for 64 unless double precision is on."""
    return jax.dtypes.canonicalize_dtype(str(name))


class TracedFunction:
    """A torch function of (module, batch) as a JAX function of (parameters, batch).

    Args:
        module: The module; it is copied, never changed.
        function: `function(module, batch)`, one number.
        data: All records that it is called with, in batches of the same structure and dtypes.
        name: What it is called in messages.
    """

    def __init__(
        self,
        module: Module,
        function: Callable[[Module, Any], Any],
        data: Sequence[Tree],
        name: str = "loss",
    ) -> None:
        self.function, self.name, self.architecture = function, name, repr(module)
        self.constants = _fixed(module)
        self._module = module
        leaves = [jax.tree.leaves(records) for records in data]
        self._structure = jax.tree.structure(data[0])
        self._dtypes = [leaf.dtype for leaf in leaves[0]]
        self._ranges = [_range([part[i] for part in leaves]) for i, _ in enumerate(self._dtypes)]
        self._programs: dict[Any, Any] = {}
        self._graphs: dict[Any, Graph] = {}
        self._modules: dict[str, Module] = {}

    def __call__(
        self,
        arrays: Mapping[str, Array],
        batch: Tree,
        *,
        train: bool,
        key: Array | None = None,
        buffers: Mapping[str, Array] | None = None,
    ) -> Array:
        """Return the function's value.

        Args:
            arrays: Trained parameters by name.
            batch: Arrays with one row per record.
            train: Whether the module is in training mode.
            key: Random key for what draws random numbers, such as dropout.
            buffers: Buffers by name, instead of the module's own.
        """
        return self.evaluate(arrays, batch, train=train, key=key, buffers=buffers)[0]

    def evaluate(
        self,
        arrays: Mapping[str, Array],
        batch: Tree,
        *,
        train: bool,
        key: Array | None = None,
        buffers: Mapping[str, Array] | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return the function's value, and the module's buffers that the call changes."""
        leaves = jax.tree.leaves(batch)
        precision = str(jnp.result_type(*arrays.values()))
        graph = self.graph(precision, train, [jnp.shape(leaf) for leaf in leaves])
        return graph(self.held(precision) | dict(buffers or {}) | dict(arrays), leaves, key)

    def held(self, precision: str) -> dict[str, Array]:
        """Return frozen parameters and buffers by name, in a precision."""
        return {
            n: jnp.asarray(a, _dtype(precision if a.dtype.kind == "f" else a.dtype))
            for n, a in self.constants.items()
        }

    def graph(self, precision: str, train: bool, shapes: Sequence[tuple[int, ...]]) -> Graph:
        """Return the graph for batches of these shapes, made on first use."""
        at, program = self._recorded(precision, train, shapes)
        if at not in self._graphs:
            core = self._told(lambda: _decomposed(program))
            self._graphs[at] = _read(core, self.name, self._in_precision(precision), self._occurs)
        return self._graphs[at]

    def _recorded(
        self, precision: str, train: bool, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Any, Any]:
        """Return the program for batches of these shapes, and any number of records if possible."""
        rows, number = tuple(shape[1:] for shape in shapes), shapes[0][0]
        any_number, this = (precision, train, rows, None), (precision, train, rows, number)
        if number > 1 and any_number not in self._programs:  # tried once
            try:
                self._programs[any_number] = self._program(*any_number)
            except InputError:
                self._programs[any_number] = None
        if number > 1 and self._programs[any_number] is not None:
            return any_number, self._programs[any_number]
        if this not in self._programs:
            self._programs[this] = self._program(*this)
        return this, self._programs[this]

    def ignores_mode(self, precision: str, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Return whether the function is the same in training and in evaluation mode."""
        programs = [
            self._recorded(precision, mode, shapes)[1].graph_module.code for mode in (True, False)
        ]
        return programs[0] == programs[1] or (
            self.graph(precision, True, shapes).text == self.graph(precision, False, shapes).text
        )

    def _program(
        self, precision: str, train: bool, rows: Sequence[tuple[int, ...]], size: int | None
    ) -> Any:
        """Record the function for batches of `size` records, or of any number for None."""
        import torch

        whole = _whole(self._structure, self._in_precision(precision).train(train), self.function)
        kinds = [precision if kind.kind == "f" else str(kind) for kind in self._dtypes]
        leaves = tuple(
            torch.zeros((size or EXAMPLE, *row), dtype=getattr(torch, kind))
            for row, kind in zip(rows, kinds, strict=True)
        )
        shapes = (
            None
            if size is not None
            else ((({0: torch.export.Dim("records", min=2)},) * len(leaves)),)
        )
        return self._told(
            lambda: torch.export.export(whole, (leaves,), dynamic_shapes=shapes, strict=False)
        )

    def _told(self, work: Callable[[], Any]) -> Any:
        """Return what torch makes, or raise its complaint in one line."""
        try:
            with _quiet():
                return work()
        except InputError:
            raise
        except Exception as error:
            if "Expected more than 1 value per channel" in str(error):
                raise InputError(
                    "batch normalisation cannot be trained on a batch of one record: take a "
                    "batch_size that leaves no last batch of one, or draw='replacement'"
                ) from error
            raise InputError(
                f"torch.export cannot record {self.name}(module, batch){_raised_at(error)}: "
                f"{_cause(error)}; {WAY_OUT}"
            ) from error

    def _occurs(self, leaf: int, number: int) -> bool:
        """Return whether a whole number may occur among the records."""
        low, high = self._ranges[leaf]
        return low <= number <= high

    def _in_precision(self, precision: str) -> Module:
        import torch

        if precision not in self._modules:
            copied = copied_module(self._module)
            self._modules[precision] = copied.to(device="cpu", dtype=getattr(torch, precision))
        return self._modules[precision]


def copied_module(module: Module) -> Module:
    """Return a copy of a module, or raise in one line why there is none."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        if "weight_norm" in str(error):
            raise InputError(
                "a module with torch.nn.utils.weight_norm cannot be copied; "
                "torch.nn.utils.parametrizations.weight_norm can"
            ) from error
        raise InputError(f"the module cannot be copied: {first_line(error)}") from error


def _fixed(module: Module) -> dict[str, Any]:
    """Return frozen parameters and buffers by name."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    return {name: t.detach().numpy().copy() for name, t in (*frozen, *module.named_buffers())}


def _range(parts: Sequence[Any]) -> tuple[float, float]:
    """Return the least and the largest of whole numbers; everything for other arrays."""
    whole = all(part.dtype.kind in "iu" and part.size for part in parts)
    return (
        (min(p.min() for p in parts), max(p.max() for p in parts)) if whole else (-np.inf, np.inf)
    )


def _whole(structure: Any, module: Module, function: Callable[[Module, Any], Any]) -> Module:
    """Return a module that calls the function on the module and a batch's arrays."""
    import torch

    class Whole(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, leaves: Any) -> Any:
            with _instead():
                value = function(self.module, jax.tree.unflatten(structure, leaves))
            if value is None:
                raise InputError(
                    "a loss that skips batches by None cannot be simulated; return a loss for "
                    "every batch"
                )
            return value

    return Whole().train(module.training)


def _instead() -> Any:
    """Return a context in which some functions of torch are replaced by ones that export.

    Losses and linear algebra do not check their arguments by a branch on data, a diagonal is not
    filled by strides, and recurrent networks are recorded as one operator.
    """
    import torch

    def gaussian_nll_loss(
        input: Any,
        target: Any,
        var: Any,
        full: bool = False,
        eps: float = 1e-6,
        reduction: str = "mean",
    ) -> Any:
        var = torch.as_tensor(var, dtype=input.dtype)
        var = var.unsqueeze(-1) if var.dim() and var.shape == input.shape[:-1] else var
        var = var + (var.clamp(min=eps) - var).detach()  # as in torch, its derivative is 1
        loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var + full * math.log(2 * math.pi))
        return {"mean": loss.mean, "sum": loss.sum}.get(reduction, lambda: loss)()

    def fill_diagonal_(x: Any, value: float, wrap: bool = False) -> Any:
        if x.dim() != 2 or wrap:
            return x.fill_diagonal_(value, wrap)
        x.diagonal().fill_(value)
        return x

    instead = {
        torch.nn.functional.gaussian_nll_loss: gaussian_nll_loss,
        torch.Tensor.fill_diagonal_: fill_diagonal_,
    } | {getattr(torch, name): _recorded_whole(name) for name in WHOLE}
    linalg = torch.linalg
    for called, unchecked in (
        (linalg.cholesky, linalg.cholesky_ex),
        (linalg.inv, linalg.inv_ex),
        (torch.inverse, linalg.inv_ex),
        (torch.Tensor.inverse, linalg.inv_ex),
        (linalg.solve, linalg.solve_ex),
    ):
        instead[called] = lambda *given, ex=unchecked, **by_name: ex(*given, **by_name)[0]

    class Instead(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, called: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return instead.get(called, called)(*args, **(kwargs or {}))

    return Instead()


@cache
def _recorded_whole(name: str) -> Callable[..., Any]:
    """Return a recurrent network that an export records as one operator of ours.

    Torch would go through all its time steps, several times for each export.
    """
    import torch

    plain, full = getattr(torch, name), f"{NAMESPACE}::{name}"
    # torch keeps an operator for good: also that of a recording that was interrupted here
    known = hasattr(getattr(torch.ops, NAMESPACE), name)
    if not known:
        torch.library.define(
            full,
            "(Tensor x, Tensor[] states, Tensor[] weights, bool biases, int layers, "
            "float dropout, bool train, bool bidirectional, bool batch_first) -> Tensor[]",
        )

    def shapes(x: Any, states: Any, *how: Any) -> Any:
        features = states[0].shape[-1] * (2 if how[5] else 1)
        out = x.new_empty((*x.shape[:2], features))
        return [out, *(torch.empty_like(state) for state in states)]

    with contextlib.suppress(RuntimeError) if known else contextlib.nullcontext():
        torch.library.register_fake(full, shapes)  # older torch refuses a second one
    operator = getattr(getattr(torch.ops, NAMESPACE), name)

    def record(x: Any, states: Any, *how: Any, **more: Any) -> Any:
        if more or not isinstance(
            how[1], bool
        ):  # of a packed sequence, with one argument more before
            return plain(x, states, *how, **more)
        states = list(states) if isinstance(states, (list, tuple)) else [states]
        return tuple(operator(x, states, *how))

    return record


@contextlib.contextmanager
def collect_later() -> Iterator[None]:
    """Leave garbage uncollected for a while.

    Torch imports a thousand modules on its first export, and an export makes millions of objects
    that it keeps: going through all of them again and again took a quarter of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch during an export, and keep attention in its plain form."""
    import torch

    fast, level, trace = (
        torch.backends.mha.get_fastpath_enabled(),
        logging.root.manager.disable,
        "torch.__trace",
    )
    law = torch.distributions.Distribution
    validating = law._validate_args
    law.set_default_validate_args(False)  # which branches on data
    handlers = logging.getLogger(trace).handlers
    torch.backends.mha.set_fastpath_enabled(False)
    logging.getLogger(trace).handlers = []  # with a handler it writes every graph down, for nobody
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.enable_grad(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        law.set_default_validate_args(validating)
        torch.backends.mha.set_fastpath_enabled(fast)
        logging.getLogger(trace).handlers = handlers
        logging.disable(level)


def _decomposed(program: Any) -> Any:
    """Return the program in core ATen operators, with `detach` for `torch.no_grad`."""
    import torch

    detach = torch.ops.aten.detach.default
    for part in program.graph_module.modules():
        for node in list(part.graph.nodes) if isinstance(part, torch.fx.GraphModule) else ():
            if "wrap_with_set_grad_enabled" not in str(node.target) or node.args[0]:
                continue
            for result in list(node.users):
                with part.graph.inserting_after(result):
                    cut = part.graph.call_function(detach, (result,))
                    cut.meta = dict(result.meta)
                result.replace_all_uses_with(
                    cut, delete_user_cb=lambda user, cut=cut: user is not cut
                )
            part.recompile()
    table, aten = torch.export.default_decompositions(), torch.ops.aten
    # a product of sequences with a matrix would become one with a copy of the matrix for each place
    products = aten.linear.default, aten.matmul.default
    for kept in (detach, aten.hardsigmoid.default, *products):
        table.pop(kept, None)
    table.update(torch._decomp.get_decompositions([torch.ops.aten.grid_sampler_2d]))
    return program.run_decompositions(table)


def _read(program: Any, name: str, module: Module, occurs: Callable[[int, int], bool]) -> Graph:
    """Convert an exported program to a `Graph`."""
    signature = program.graph_signature
    own = {id(p): path for path, p in module.named_parameters()}
    paths = {
        f"module.{path}": own[id(p)] for path, p in module.named_parameters(remove_duplicate=False)
    }
    buffers = {id(b): path for path, b in module.named_buffers()}
    paths |= {
        f"module.{path}": buffers[id(b)] for path, b in module.named_buffers(remove_duplicate=False)
    }
    constants = {
        at: program.constants[path]
        for at, path in signature.inputs_to_lifted_tensor_constants.items()
    }
    nodes = [_node(node, name) for node in program.graph.nodes if node.op == "call_function"]
    used = {
        str(node.name) for node in program.graph.nodes if node.op == "placeholder" and node.users
    }
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    changed, value = {}, None
    for spec, result in zip(signature.output_specs, output.args[0], strict=True):
        kind = spec.kind.name
        if kind == "BUFFER_MUTATION":
            changed[paths[spec.target]] = _argument(result)
        elif kind == "USER_OUTPUT":
            value = _argument(result)
        else:
            raise InputError(
                f"{name}(module, batch) changes its batch or a parameter in place; make a copy "
                "first"
            )
    return Graph(
        nodes=_without_absent(
            tuple(node for node in nodes if node is not None), signature.user_inputs, occurs
        ),
        parameters={
            at: paths[path] for at, path in signature.inputs_to_parameters.items() if at in used
        },
        buffers={at: paths[path] for at, path in signature.inputs_to_buffers.items()},
        constants={at: tensor.detach().numpy() for at, tensor in constants.items()},
        leaves=tuple(signature.user_inputs),
        value=value,
        changed=changed,
    )


def _always(x: Array, _: int) -> Array:
    return jnp.ones(jnp.shape(x), bool)


def _without_absent(
    nodes: Sequence[Node], leaves: Sequence[str], occurs: Callable[[int, int], bool]
) -> Any:
    """Replace comparisons with labels that no record has, such as cross_entropy's ignore_index.

    A mean over the records that are not ignored is a ratio of sums; where none is, it is a mean
    over records.
    """
    labels = {name: place for place, name in enumerate(leaves)}
    found = []
    for node in nodes:
        first = node.args[0] if node.args else None
        leaf = labels.get(first.name) if isinstance(first, Reference) else None
        if leaf is not None and node.function in [OPERATORS[name] for name in RESHAPING]:
            labels[node.name] = leaf
        compared = node.function is OPERATORS["ne"] and isinstance(node.args[1], int)
        if leaf is not None and compared and not occurs(leaf, node.args[1]):
            node = node._replace(function=_always)
        found.append(node)
    return tuple(found)


def _node(node: Any, name: str) -> Node | None:
    """Convert a node; None for assertions."""
    target = node.target
    overloaded = hasattr(target, "_schema")
    short = (
        target._schema.name.removeprefix("aten::").removeprefix(f"{NAMESPACE}::")
        if overloaded
        else getattr(target, "__name__", str(target))
    )
    if short in IGNORED:
        return None
    by_name = {
        key: _argument(value) for key, value in node.kwargs.items() if key not in ABOUT_STORAGE
    }
    args = tuple(_argument(value) for value in node.args)
    where = f"the operator {target} of {name}(module, batch){_line(node)}"
    if not overloaded and not hasattr(target, "namespace"):
        function = _item if short == "getitem" else target  # on results, or on sizes
        return Node(str(node.name), function, args, by_name, None, False, where)
    rule = _SIZES.get(short) or OPERATORS.get(short)
    if rule is None or str(target) in ("aten.view.dtype",):
        raise InputError(f"{where} has no rule in JAX: {WAY_OUT}")
    args, random = _drawing(short, args)
    return Node(str(node.name), rule, args, by_name, _results(node.meta.get("val")), random, where)


def _drawing(short: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    """Return an operator's arguments, and whether it draws random numbers.

    Dropout with p = 0 does not.
    """
    if short in WHOLE:  # dropout, train
        draws = args[5] > 0 and args[6]
        return (*args[:6], draws, *args[7:]), draws
    if short in ("native_dropout", "_scaled_dot_product_flash_attention_for_cpu"):
        place = 1 if short == "native_dropout" else 3
        return args, len(args) > place and args[place] > 0
    return args, short in RANDOM


_SIZES: dict[str, Callable[..., Any]] = {
    "sym_size": lambda x, dim: jnp.shape(x)[dim],
    "sym_numel": jnp.size,
}


def _item(values: Any, place: int) -> Any:
    if values[place] is None:
        raise Unsupported("of a result such as the indices of a maximum")
    return values[place]


def _argument(given: Any) -> Any:
    """Replace nodes in arguments by references, and torch's dtypes by JAX's."""
    if type(given).__name__ == "dtype":
        return Precision(str(given).removeprefix("torch."))
    if isinstance(given, (list, tuple)):
        return [_argument(one) for one in given]
    return Reference(str(given.name)) if hasattr(given, "meta") else given


def _results(value: Any) -> Any:
    """Return dtypes and shapes of a node's results."""
    if isinstance(value, (list, tuple)):
        return [_results(one) for one in value]
    if not hasattr(value, "dtype"):
        return None
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return Result(str(value.dtype).removeprefix("torch."), shape)


def _line(node: Any) -> str:
    """Return " (file:line, layer)" of the user's code, where torch knows it."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    layers = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    layer = layers[-1].removeprefix("module").removeprefix(".") if layers else ""
    said = [*_own(frames), *([f"layer {layer}"] if layer else [])]
    return f" ({', '.join(said)})" if said else ""


def _raised_at(error: BaseException) -> str:
    """Return " (file:line)" of the user's code that an error came through."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return "".join(f" ({place})" for place in _own(frames))


def _own(frames: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the last place in code that is neither torch's nor of this package's exports."""
    import torch

    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(libraries)]
    return [one for one in own if not one.startswith(sys.prefix)][-1:]


def _cause(error: BaseException) -> str:
    """Return what kept torch from recording a function, in words where they are known."""
    through = {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
    if "rnn.py" in through and "FakeTensor" in str(error):
        return "the size of a packed sequence depends on the data; pad, and gather the last states"
    if "fake tensor in the exported program constant" in str(error):
        return "a derivative inside of a loss (torch.autograd.grad) is not recorded"
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return (
            "a branch or a number (if, int, item) depends on the data; torch.where writes a branch"
        )
    return first_line(error)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}".rstrip(" .;:")
