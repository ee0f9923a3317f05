"""`deploy export`: the trained model as a file for use, with torch, ONNX or MLflow.

    .safetensors   the named arrays of the model, of any app
    .onnx          the module of a torch app, for ONNX runtimes
    .pt2           the same for torch.export.load, without the app's code
    a folder       an MLflow model that holds the ONNX file

A module is exported as it is used: in eval mode, so without dropout and with the running means of
batch normalisation, with its frozen parameters, in the precision of the training. Its inputs are
found by calling the app's loss. What was written is loaded again and compared with the module.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.deploy.client import Learner
from fedscaffold.deploy.schema import Array, Schema
from fedscaffold.deploy.server_loop import write_model
from fedscaffold.deploy.server_state import peek_state
from fedscaffold.deploy.settings import Settings
from fedscaffold.state import safetensors_io

__all__ = ["Exported", "export_model"]

NEEDS = {
    "onnx": ("onnx", "onnxscript"),
    "mlflow": ("mlflow", "onnx", "onnxscript"),
}
"""Packages that a format needs beside torch."""
SUFFIXES = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "pt2", "": "mlflow"}
RECORDS = 3  # of an example; torch.export takes batches of 1 for something special
LARGEST = 2**31 - 2**24  # bytes of an ONNX file; the numbers of larger models lie beside it


class Exported(NamedTuple):
    """What was exported."""

    path: Path
    format: str
    round: int
    """Number of rounds that the model was trained for."""
    difference: float | None
    """Largest difference between outputs of the file and of the module; None if not compared."""
    any_batch: bool
    """Whether it takes batches of any size, or only of that of the example."""


class Trained(NamedTuple):
    """A trained model, with what it was trained for."""

    arrays: dict[str, Array]
    round: int
    run: str


def export_model(home: Path, settings: Settings, learner: Learner, out: Path) -> Exported:
    """Export the model of a deployment: the last one that was committed.

    Args:
        home: The server's folder, with its `state` or with `model.safetensors`.
        settings: The deployment's settings.
        learner: The app's learner.
        out: The file to write, whose suffix is the format, or a new folder for MLflow.

    Raises:
        InputError: If there is no model, or it cannot be exported to this format.
    """
    kind = SUFFIXES.get(out.suffix)
    if kind is None:
        raise InputError(f"{out} must end in .safetensors, .onnx or .pt2, or be a folder (MLflow)")
    if out.exists():
        raise InputError(f"{out} exists; give another --out")
    model = read_trained(home, learner)
    if kind == "safetensors":
        write_model(out, model.arrays, {"round": str(model.round), "run": model.run})
        return Exported(out, kind, model.round, None, True)
    if not hasattr(learner, "module"):
        raise InputError(f"{kind} is for torch modules; export this app's model as .safetensors")
    lacking = [name for name in NEEDS.get(kind, ()) if importlib.util.find_spec(name) is None]
    if lacking:
        raise InputError(f"{kind} needs {' and '.join(lacking)}: pip install {' '.join(lacking)}")
    return _export_module(learner, settings, model, out, kind)


def read_trained(home: Path, learner: Learner) -> Trained:
    """Return the committed model of a server's folder, or that of a run in the simulator."""
    kept = peek_state(home / "state")
    if kept is not None:
        _check_size(learner.schema, kept.state.x.size)
        untrained = {**learner.buffers, **kept.state.buffers}
        arrays = learner.schema.filed(np.asarray(kept.state.x), untrained)
        return Trained(arrays, kept.state.round, kept.run)
    path = home / "model.safetensors"
    if not path.is_file():
        raise InputError(f"{home} holds no model yet")
    arrays, facts, _ = safetensors_io.read(path)
    return Trained(arrays, int(facts.get("round", "0")), facts.get("run", ""))


def _check_size(schema: Schema, size: int) -> None:
    if size != schema.size:
        raise InputError(
            f"the state has {size} weights where the app's model has {schema.size}; give the app "
            "that was trained with --app"
        )


def _export_module(
    learner: Any, settings: Settings, model: Trained, out: Path, kind: str
) -> Exported:
    """Export the module of a torch app and compare what was written with it."""
    import torch

    module = learner.module
    try:
        module.load_state_dict({name: _tensor(value) for name, value in model.arrays.items()})
    except RuntimeError as error:
        raise InputError(f"the model does not fit the app's module: {error}"[:300]) from None
    module.eval().cpu()
    args, kwargs = example_inputs(learner, settings)
    with torch.no_grad(), _quiet():
        wanted = _flat_outputs(module(*args, **kwargs))
        program = _trace(module, args, kwargs)
        found = _write(program, out, kind, args, kwargs)
    difference = None
    if found is not None:
        pairs = zip(wanted, found, strict=True)
        difference = max(float(np.abs(a - b).max(initial=0.0)) for a, b in pairs)
    sizes = {str(size) for spec in _input_shapes(program) for size in spec[:1]}
    any_batch = not any(size.isdigit() for size in sizes)
    return Exported(out, kind, model.round, difference, any_batch)


def example_inputs(learner: Any, settings: Settings) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of the module: those of the app's loss on an example, or on some records.

    Raises:
        InputError: If there is neither an example nor a site whose records can be read here.
    """
    batch = _example_batch(learner, settings)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    handle = learner.module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        learner.loss(learner.module, batch)
    finally:
        handle.remove()
    if not calls:
        raise InputError("the loss does not call the module itself, so its inputs are not known")
    return calls[0]


def _example_batch(learner: Any, settings: Settings) -> Any:
    """Return a batch as the app's loss takes it."""
    from fedscaffold.deploy.torch_data import move, open_records

    if learner.example is not None:
        return move(learner.example(), "cpu", learner.dtype)
    causes = []
    for site in settings.deploy.sites:
        try:
            records = open_records(site, learner.data(site))
        except Exception as error:  # of the app: the records are at the site alone
            causes.append(f"{site}: {type(error).__name__}")
            continue
        rows = list(range(min(RECORDS, records.number)))
        batch = next(iter(records.loader)) if records.take is None else records.take(rows)
        return move(batch, "cpu", learner.dtype)
    raise InputError(
        f"no records to find the module's inputs with ({', '.join(causes)[:200]}); give "
        "TorchLearner example=..., a function that returns a batch as the loss takes it"
    )


def _tensor(array: Array) -> Any:
    """Return an array of a model's file as a tensor; pairs of bytes are bfloat16."""
    import torch

    if array.dtype == safetensors_io.BYTES:
        return torch.from_numpy(array.view("<i2")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _trace(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace the module by torch.export, with batches of any size where it allows them."""
    import torch

    def shape_of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {0: torch.export.Dim.AUTO} if value.ndim else None
        if isinstance(value, dict):
            return {key: shape_of(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(shape_of(one) for one in value)
        return None

    shapes = (tuple(shape_of(value) for value in args), shape_of(kwargs))
    try:
        return torch.export.export(
            module, args, kwargs, dynamic_shapes=_by_name(module, shapes), strict=False
        )
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise InputError(
            f"torch.export cannot trace the module: {text}; .safetensors is always possible"
        ) from error


def _by_name(module: Any, shapes: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """Return dynamic shapes by the names of forward's parameters."""
    import inspect

    bound = inspect.signature(module.forward).bind(*shapes[0], **shapes[1])
    return dict(bound.arguments)


def _write(
    program: Any, out: Path, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Array] | None:
    """Write the traced module; return the outputs of what was written, None if it cannot be run."""
    import torch

    if kind == "pt2":
        torch.export.save(program, out)
        return _flat_outputs(torch.export.load(out).module()(*args, **kwargs))
    file = out if kind == "onnx" else out.with_name(f"{out.name}.onnx.part")
    size = sum(value.nbytes for value in program.state_dict.values())
    torch.onnx.export(program, (), str(file), verbose=False, external_data=size > LARGEST)
    if kind == "mlflow":
        try:
            _write_mlflow(file, out)
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise
        finally:
            file.unlink(missing_ok=True)
        file = out / "model.onnx"
    return _run_onnx(file, args, kwargs)


def _write_mlflow(file: Path, out: Path) -> None:
    """Write an MLflow model, with its loader of ONNX files."""
    import mlflow.onnx
    import onnx

    mlflow.onnx.save_model(onnx.load(str(file)), str(out), pip_requirements=["onnxruntime"])


def _run_onnx(file: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array] | None:
    """Return the outputs of an ONNX file; None without onnxruntime."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = [value.numpy() for value in _leaves((args, kwargs))]
    names = [one.name for one in session.get_inputs()]
    return list(session.run(None, dict(zip(names, given, strict=True))))


def _leaves(value: Any) -> list[Any]:
    """Return the tensors of a nested value, in order."""
    import torch

    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def _flat_outputs(outputs: Any) -> list[Array]:
    """Return the tensors that a module returned, as arrays."""
    return [value.detach().numpy() for value in _leaves(outputs)]


def _input_shapes(program: Any) -> list[tuple[Any, ...]]:
    """Return the shapes of the inputs of a traced module."""
    users = set(program.graph_signature.user_inputs)
    nodes = (node for node in program.graph.nodes if node.op == "placeholder")
    return [tuple(n.meta["val"].shape) for n in nodes if n.name in users and "val" in n.meta]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporter from printing advice for its developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
