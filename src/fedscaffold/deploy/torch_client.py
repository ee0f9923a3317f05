"""Learner for torch: any `nn.Module`, loss, batched data and optimiser, on CPU or CUDA.

    def learner(settings):
        return TorchLearner(model, loss, data, precision=settings.precision)

`model()` creates the module. `loss(module, batch)` returns the mean loss over a batch, or None to
skip it. `data(site)` returns the site's records: tensors (a tuple, a dict, nested) or a `Dataset`,
batched by the settings, or a `DataLoader`, used as is (`torch_data`).

The local model is one flat vector y; each step adds the flat shift to the flat gradient, for all
layers at once. After every backward pass the gradients are copied from the parameters, and after
every step the parameters are copied to y, so nothing depends on what a loss does to `.grad` or on
the tensors' storage. A loss that changes the parameters is refused.

Parameters with `requires_grad=False` keep their values and must be identical at every site. Buffers
(running means of BatchNorm) get no correction and are sent separately, by name. Only steps that the
optimiser performed count: one that a `GradScaler` skipped is left out of the mean direction.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from fedscaffold import checks
from fedscaffold.algorithms.round import each
from fedscaffold.checks import InputError, one_number
from fedscaffold.deploy.client import Site, Trained, Work, make_walk
from fedscaffold.deploy.errors import Hint
from fedscaffold.deploy.schema import Array, Schema, fingerprint
from fedscaffold.deploy.torch_data import Part, Records, map_leaves, move, open_records
from fedscaffold.privacy.site_steps import PrivateSteps

__all__ = ["TorchLearner"]

log = logging.getLogger("fedscaffold")
CHUNK = 256  # records of a batch where the mean over batches is taken
COMPARED = 24  # records on which a function is compared with the mean over pairs of them
ONE_RECORD = "Expected more than 1 value per channel when training"  # torch's words

Module: TypeAlias = Any
Tensor: TypeAlias = Any
Batch: TypeAlias = Any
Metrics: TypeAlias = Callable[[Module, Batch], dict[str, float]] | None


class TorchLearner:
    """Local training of a torch model; see the module's documentation.

    >>> def loss(module, batch):
    ...     return ((module(batch[0]) - batch[1]) ** 2).mean()
    >>> data = lambda site: (torch.ones(4, 3), torch.zeros(4, 1))
    >>> TorchLearner(lambda: torch.nn.Linear(3, 1), loss, data).schema.names
    ('weight', 'bias')
    """

    def __init__(
        self,
        model: Callable[[], Module],
        loss: Callable[[Module, Batch], Tensor | None],
        data: Callable[[str], Any],
        *,
        metrics: Metrics = None,
        test: Callable[[str], Any] | None = None,
        optimizer: Callable[..., Any] | None = None,
        scaler: Callable[[], Any] | None = None,
        accumulate: int = 1,
        coupled: bool | None = None,
        evaluation_batch: int = CHUNK,
        example: Callable[[], Batch] | None = None,
        precision: str = "float32",
        device: str = "auto",
        seed: int = 0,
    ) -> None:
        """Create a learner.

        Args:
            model: creates the module; called with torch's random seed set to `seed`, so that all
                sites agree.
            loss: (module, batch) -> mean loss over the batch, or None to skip it.
            data: site -> the site's records.
            metrics: (module, batch) -> further metrics, as means over the batch; called in eval
                mode.
            test: site -> the records to evaluate on; `data` by default.
            optimizer: module -> a torch optimiser, created anew every round; used with
                `local.optimizer = "own"`. It may take `lr`, the step size of the round, and
                `round`, from 1, by these names, and may return a pair of the optimiser and a
                scheduler, whose `step()` is called after every local step.
            scaler: creates a `torch.amp.GradScaler` for mixed precision (use autocast in `loss`).
            accumulate: number of batches of a local step, whose gradient is the mean over their
                records.
            coupled: whether the loss or a metric is no mean over records; then all records are
                measured at once. By default it is compared on some records.
            evaluation_batch: number of records that are measured at once otherwise.
            example: creates a batch as `loss` takes it, for `deploy export` where no site's records
                can be read.
            precision: float32 or float64.
            device: cpu, cuda, cuda:1 ... or auto.
            seed: seed of the initial model.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.loss, self.data, self.test, self.metrics = loss, data, test or data, metrics
        self.optimizer, self.scaler, self.device = optimizer, scaler, torch.device(device)
        self.accumulate = checks.whole("accumulate", accumulate)
        self.evaluation_batch = checks.whole("evaluation_batch", evaluation_batch)
        self.coupled, self.example = coupled, example
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = model()
        _check_module(module)
        kinds = {
            name: t.dtype for name, t in module.state_dict().items() if isinstance(t, torch.Tensor)
        }
        self.module = module.to(device=self.device, dtype=self.dtype)
        self.parameters = dict(self.module.named_parameters(remove_duplicate=False))
        self.trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.kept = tuple(name for name, _ in self.module.named_buffers() if name in kinds)
        self.passing = {  # buffers that no state_dict has, which begin each round as they are now
            name: buffer.clone()
            for name, buffer in self.module.named_buffers()
            if name not in kinds
        }
        frozen = self._frozen_parameters()
        self.buffers = {**self._read_buffers(), **frozen}
        arrays = {name: p.detach().cpu().numpy() for name, p in self.trained.items()}
        stored = _state_dict_rows(self.module, kinds)
        buffers = {name: self.buffers[name] for name in self.kept}
        self.schema = Schema.of(arrays, precision, buffers, frozen, stored)
        self.start = self.schema.flatten(arrays)
        self.y = torch.from_numpy(self.start.copy()).to(self.device)
        self.g = torch.zeros_like(self.y)
        self.whole = _Loss(self.module, self._loss)
        self.at_once = True  # whether torch.func takes the gradients of several records together

    def site(self, name: str) -> Site:
        """Open a site's data."""
        records = open_records(name, self.data(name))

        def train(work: Work) -> Trained:
            return self._train(work, records)

        @cache
        def held_out() -> Records:
            return records if self.test is self.data else open_records(name, self.test(name))

        def evaluate(x: Array, buffers: dict[str, Array]) -> dict[str, float]:
            return self._evaluate(x, buffers, held_out())

        return Site(
            records.number,
            train,
            evaluate,
            lambda: self._not_private(records),
            reusable=records.held is not None,  # a Dataset may have a state of its own
        )

    def _not_private(self, records: Records) -> str | None:
        """Return why a record has no gradient of its own; None if it has."""
        norms = torch.nn.modules.batchnorm._NormBase  # batch normalisation, running instance means
        for name, module in self.module.named_modules():
            if isinstance(module, norms) and (
                isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
                or module.track_running_stats
            ):
                kind = type(module).__name__
                return f"{name or 'its model'} is {kind}, which mixes records; take GroupNorm"
        if records.take is None or records.loader is not None:
            return "a DataLoader's batches are no Poisson samples; give its tensors or Dataset"
        if self.scaler is not None or self.accumulate > 1:
            given = "scaler" if self.scaler is not None else "accumulate"
            return f"TorchLearner's {given} is for whole batches; leave it out"
        self.module.eval()  # without dropout, which differs between batches
        with torch.no_grad():
            couples = self.coupled if self.coupled is not None else self._couples(records, 2, None)
        return "its loss is no mean over records; take one that is" if couples else None

    def _read_parameters(self) -> None:
        """Copy the module's parameters into y."""
        for name, values in self.schema.unflatten(self.y).items():
            values.copy_(self.trained[name].detach())

    def _read_buffers(self) -> dict[str, Array]:
        """Return copies of the current buffers, looked up by name as a module may rebind them."""
        now = dict(self.module.named_buffers())
        return {name: now[name].detach().cpu().numpy().copy() for name in self.kept}

    def _frozen_parameters(self) -> dict[str, Array]:
        """Return the parameters that are not trained; views of them on CPU."""
        return {
            name: p.detach().cpu().numpy()
            for name, p in self.module.named_parameters()
            if not p.requires_grad
        }

    def _check_frozen(self) -> None:
        """Raise if training changed a frozen parameter: the change would stay at this site."""
        now = self._frozen_parameters()
        for name, _, _, print_ in self.schema.frozen:
            if fingerprint(now[name]) != print_:
                raise InputError(
                    f"the frozen parameter {name!r} was changed in training; requires_grad_(True) "
                    "trains it"
                )

    def _load(self, x: Array, buffers: dict[str, Array]) -> None:
        """Copy a model and its buffers into y and the module."""
        self.y.copy_(torch.from_numpy(x.copy()))
        now = dict(self.module.named_buffers())
        with torch.no_grad():
            for name, values in self.schema.unflatten(self.y).items():
                self.trained[name].copy_(values)
            for name in self.kept:
                if name in buffers:
                    now[name].copy_(torch.from_numpy(buffers[name].copy()))
            for name, values in self.passing.items():
                if name in now and now[name].shape == values.shape:
                    now[name].copy_(values)
                else:  # the module has put another in its place
                    owner, _, leaf = name.rpartition(".")
                    self.module.get_submodule(owner).register_buffer(
                        leaf, values.clone(), persistent=False
                    )

    def _train(self, work: Work, records: Records) -> Trained:
        """Run the local steps of a round."""
        if isinstance(work.start, tuple):
            raise InputError(
                f"{work.algorithm.name} trains several models at once, and a torch module is one: "
                "deploy it with ArraysLearner or JaxLearner"
            )
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(work.seed)
            at_x = None
            if work.at_x:
                self._load(work.x, work.buffers)
                self.module.train()
                with _telling(0):
                    at_x = self._full_gradient(records).cpu().numpy()
            self._load(work.start, work.buffers)  # again: the full gradient updated running means
            self.module.train()
            total, steps = self._descend(work, records)
        self._check_frozen()
        mean = (total / max(steps, 1)).cpu().numpy() if work.collect else None
        return Trained(
            make_walk(work, self.y.cpu().numpy().copy(), steps, mean, at_x),
            steps,
            self._read_buffers(),
        )

    def _descend(self, work: Work, records: Records) -> tuple[Tensor, int]:
        """Perform the local steps.

        Returns:
            The sum of the directions, if it is collected, and the number of steps.
        """
        x = torch.from_numpy(work.x.copy()).to(self.device)
        shift = (
            None
            if work.shift is None
            else each(lambda part: torch.tensor(part, device=self.device), work.shift)
        )
        optimizer, scheduler = self._make_optimizer(work)
        scaler = None if self.scaler is None else self.scaler()
        total, d, steps = torch.zeros_like(self.y), self.g, 0

        def performed(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if work.collect:
                total.add_(d)

        optimizer.register_step_post_hook(performed)
        private = work.private
        batches: Iterable[list[Part] | None] = records.steps(work, self.accumulate)
        for tried, parts in enumerate(batches if private is None else [None] * private.steps):
            scales = None if parts is None else scaler
            with _telling(tried):
                if private is not None:
                    self._private_gradient(private, tried, records)
                elif parts is None:
                    self.g.copy_(self._full_gradient(records))
                elif not self._mean_gradient(parts, scales):
                    continue
            if scales is not None:
                given = self._set_gradients(self.g)
                scales.unscale_(optimizer)
                self.g.copy_(torch.cat([grad.reshape(-1) for grad in given.values()]))
            d = work.algorithm.direction(self._batch_gradient, self.y, x, shift)
            given, before = self._set_gradients(_clipped(d, work.local.clip_norm)), steps
            if scales is None:
                optimizer.step()
            else:
                scales.step(optimizer)
                scales.update()
            if scheduler is not None and steps > before:
                scheduler.step()
            self._check_gradients_used(given)
            self._read_parameters()
        return total, steps

    def _batch_gradient(self, z: Tensor) -> Tensor:
        """Return the gradient of the current batch at z, which must be y."""
        if z is not self.y:
            raise InputError(
                "a torch model has its batch's gradient at y alone; deploy such an algorithm with "
                "arrays"
            )
        return self.g

    def _set_gradients(self, d: Tensor) -> dict[str, Tensor]:
        """Set copies of d as the parameters' gradients, as the optimiser may modify them."""
        given = {name: part.clone() for name, part in self.schema.unflatten(d).items()}
        for name, grad in given.items():
            self.trained[name].grad = grad
        return given

    def _check_gradients_used(self, given: dict[str, Tensor]) -> None:
        """Raise if the optimiser replaced the gradients, and with them the correction."""
        for name, grad in given.items():
            now = self.trained[name].grad
            if now is not None and now is not grad:
                raise InputError(
                    f"the optimiser replaced the gradient of {name!r} by one of its own, without "
                    "the correction; take one that steps along .grad as it finds it"
                )

    def _loss(self, batch: Batch) -> Tensor | None:
        """Return the loss of a batch, None if it is skipped; raise unless it is one number."""
        value = self.loss(self.module, batch)
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise InputError(
                "loss(module, batch) must return a tensor, or None to skip a batch, got "
                f"{type(value).__name__}"
            )
        one_number("loss(module, batch)", value)
        return value

    def _gradient(self, batch: Batch, scaler: Any = None) -> bool:
        """Compute the gradient of a batch into `self.g`, scaled by `scaler`.

        Returns:
            Whether there is one: False if the loss skips the batch.
        """
        value = self._loss(move(batch, self.device, self.dtype))
        if value is None:
            return False
        for parameter in self.trained.values():
            parameter.grad = None  # discard anything the loss left there
        if value.requires_grad:
            (value if scaler is None else scaler.scale(value)).backward()
        self._check_untouched()
        grads = {name: parameter.grad for name, parameter in self.trained.items()}
        if all(grad is None for grad in grads.values()):
            raise InputError(
                "loss(module, batch) has no gradient in any trained parameter: it was detached, "
                "or made of something else than the module; return None to skip a batch"
            )
        for name, part in self.schema.unflatten(self.g).items():
            grad = grads[name]
            part.zero_() if grad is None else part.copy_(
                grad.to_dense() if grad.is_sparse else grad
            )
        return True

    def _check_untouched(self) -> None:
        """Raise if the loss changed the parameters: x - y must be the sum of the steps."""
        now = dict(self.module.named_parameters(remove_duplicate=False))
        values, moved = self.schema.unflatten(self.y), {id(p) for p in self.trained.values()}
        for name, parameter in (self.parameters | now).items():
            if now.get(name) is not self.parameters.get(name):
                done = "replaced"
            elif parameter.requires_grad != (id(parameter) in moved):
                done = "froze or unfroze"
            elif name in values and not _same_bits(parameter.detach(), values[name]):
                done = "changed"
            else:
                continue
            raise InputError(
                f"loss(module, batch) {done} the parameter {name!r}; only the optimiser may: "
                "write a constraint as a function in forward, or as torch.nn.utils.parametrize"
            )

    def _mean_gradient(self, parts: Iterable[Part], scaler: Any = None) -> bool:
        """Compute the mean gradient over the records of some batches into `self.g`.

        Returns:
            Whether there is one: False if the loss skips all batches.
        """
        total, number = torch.zeros_like(self.g), 0
        for batch, rows in parts:
            if self._gradient(batch, scaler):
                total.add_(self.g, alpha=rows)
                number += rows
                only = rows
        if number:
            self.g.copy_(self.g if number == only else total / number)
        return number > 0

    def _private_gradient(self, private: PrivateSteps, step: int, records: Records) -> None:
        """Compute the private gradient of a step into `self.g`."""
        assert records.take is not None
        take = records.take

        def of_records(rows: Array, places: Array) -> Array:
            batch = move(take(rows.tolist()), self.device, self.dtype)
            gradients: Array = self._record_gradients(batch, len(rows)).cpu().numpy()
            return gradients

        before, like = self._read_buffers(), self.y.cpu().numpy()
        made = private.gradient(step, records.number, like, of_records)
        self.g.copy_(torch.from_numpy(made))
        for name, now in self._read_buffers().items():
            if not np.array_equal(now, before[name]):
                raise InputError(f"training changed the buffer {name!r}, which nothing noises")

    def _record_gradients(self, batch: Batch, rows: int) -> Tensor:
        """Return the gradients of the records of a batch, one row each."""

        def loss(parameters: dict[str, Tensor], record: Batch) -> Tensor:
            alone = map_leaves(lambda leaf: leaf.unsqueeze(0), record)
            return torch.func.functional_call(self.whole, parameters, (alone,))

        parameters = {f"module.{name}": p.detach() for name, p in self.trained.items()}
        if self.at_once:
            try:
                slope = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")
                slopes = slope(parameters, batch)
                self._check_untouched()
                return torch.cat([slopes[name].reshape(rows, -1) for name in parameters], dim=1)
            except (RuntimeError, NotImplementedError) as error:  # of what vmap does not support
                self.at_once = False
                log.warning("gradients are taken record by record: %s", type(error).__name__)
        made = torch.empty(rows, self.y.numel(), device=self.device, dtype=self.dtype)
        for row in range(rows):
            alone = map_leaves(operator.itemgetter(slice(row, row + 1)), batch)
            if not self._gradient(alone):
                raise InputError("loss(module, batch) skips a record, and privacy takes them all")
            made[row] = self.g
        return made

    def _full_gradient(self, records: Records) -> Tensor:
        """Return the mean gradient over all records, in batches.

        Tensors in memory are one batch if the loss couples records in training, as with batch
        normalisation.
        """
        parts: Iterable[Part] = records.parts(records.usual(CHUNK))
        if records.held is not None:
            cuda = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices=cuda), torch.no_grad():
                couples = (
                    self._couples(records, CHUNK, None) if self.coupled is None else self.coupled
                )
            parts = [Part(records.held, records.number)] if couples else parts
        if not self._mean_gradient(parts):
            self.g.zero_()
        return self.g.clone()

    def _make_optimizer(self, work: Work) -> tuple[Any, Any]:
        """Create the optimiser of a round (SGD, momentum, Adam or the app's), and a scheduler."""
        local = work.local
        if local.optimizer == "own":
            if self.optimizer is None:
                raise InputError(
                    'local.optimizer = "own" needs TorchLearner(..., optimizer=module -> optimiser)'
                )
            taken = inspect.signature(self.optimizer).parameters
            given = {"lr": local.lr, "round": work.round}
            own = self.optimizer(
                self.module, **{name: value for name, value in given.items() if name in taken}
            )
            own, scheduler = own if isinstance(own, tuple) and len(own) == 2 else (own, None)
            _check_optimizer(own, self.trained, self.parameters)
            return own, scheduler
        if local.optimizer == "adam":
            return torch.optim.Adam(self.trained.values(), lr=local.lr), None
        if local.optimizer == "sgd" and self.scaler is None:
            return PlainSGD(list(self.trained.values()), local.lr), None
        momentum = local.momentum if local.optimizer == "momentum" else 0.0
        return torch.optim.SGD(self.trained.values(), lr=local.lr, momentum=momentum), None

    def _evaluate(self, x: Array, buffers: dict[str, Array], records: Records) -> dict[str, float]:
        """Return the means of the loss and the metrics over the records, in eval mode."""
        self._load(x, buffers)
        self.module.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)  # fixes the order of a shuffling loader, and so the rounding
            most = min(records.usual(self.evaluation_batch), self.evaluation_batch)
            couples: str | bool | None = self.coupled
            if couples is None:
                couples = self._couples(records, most, self.metrics)
            if couples and records.number > most:
                where = (
                    "on the batches of its DataLoader" if records.take is None else "all at once"
                )
                log.warning(
                    "the loss or a metric is no mean over records (%s): %d records are measured %s",
                    couples,
                    records.number,
                    where,
                )
            size = records.number if couples else most
            return self._means(records.parts(size), self.metrics)

    def _means(self, parts: Iterable[Part], metrics: Metrics) -> dict[str, float]:
        """Return the means of the loss and the metrics over the records of some batches."""
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for batch, rows in parts:
            moved = move(batch, self.device, self.dtype)
            value = self._loss(moved)
            means = {} if metrics is None else dict(metrics(self.module, moved))
            means |= {} if value is None else {"loss": float(value)}
            for name, mean in means.items():
                sums[name] = sums.get(name, 0.0) + rows * float(mean)
                counts[name] = counts.get(name, 0) + rows
        return {name: total / counts[name] for name, total in sums.items()}

    def _couples(self, records: Records, most: int, metrics: Metrics) -> str:
        """Return the first of the loss and metrics that is no mean over records; "" if all are.

        Each is compared, on some records, with its mean over pairs of them; it also counts if that
        fails. At most `most` records are not compared, as they are one batch.
        """
        if records.take is None or records.number <= max(2, most):
            return ""
        order = np.random.default_rng(0).permutation(records.number)[:COMPARED].tolist()
        pairs = [order[at : at + 2] for at in range(0, len(order), 2)]
        try:
            whole = self._means([Part(records.take(order), len(order))], metrics)
            apart = self._means((Part(records.take(pair), len(pair)) for pair in pairs), metrics)
        except Exception as error:
            return f"some records fail by {type(error).__name__}"
        close = float(torch.finfo(self.dtype).eps) ** 0.5
        for name, value in whole.items():
            other = apart.get(name, float("nan"))
            if np.isfinite(value) and not abs(value - other) <= close * max(abs(value), abs(other)):
                return name
        return ""


class PlainSGD:
    """Steps of plain SGD, with the bits of `torch.optim.SGD`.

    The first optimiser of `torch.optim` in a process imports torch's compiler, which takes two
    seconds of CPU time; at a site every message is a process.

    Args:
        parameters: The tensors to step.
        lr: The step size.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> weight.grad = torch.tensor([2.0])
    >>> PlainSGD([weight], 0.25).step()
    >>> weight.tolist()
    [0.5]
    """

    def __init__(self, parameters: Sequence[Tensor], lr: float) -> None:
        self.parameters, self.lr = parameters, lr
        self.hooks: list[Callable[..., None]] = []

    def register_step_post_hook(self, hook: Callable[..., None]) -> None:
        """Call `hook` after each step."""
        self.hooks.append(hook)

    def step(self) -> None:
        """Step along the negative of the gradients."""
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(parameter.grad, alpha=-self.lr)
        for hook in self.hooks:
            hook()


class _Loss(torch.nn.Module):  # type: ignore[misc]
    """The loss of a module as a module, which `torch.func` calls with other parameters."""

    def __init__(self, module: Module, loss: Callable[[Batch], Tensor | None]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: Batch) -> Tensor:
        value = self.loss(batch)
        if value is None:
            raise InputError("loss(module, batch) skips a record, and privacy takes them all")
        return value


@contextlib.contextmanager
def _telling(step: int) -> Iterator[None]:
    """Explain torch's error where batch normalisation is given one record; steps count from 0."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(ONE_RECORD):
            raise Hint("one record", step=step + 1) from error
        raise


def _check_module(module: Module) -> None:
    """Raise if the module's parameters cannot be flattened into one vector."""
    places: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(
                f"parameter {name!r} has no shape yet; let model() send a batch through the "
                "module first"
            )
        if parameter.is_complex() and parameter.requires_grad:
            raise InputError(f"parameter {name!r} is complex; train its real and imaginary parts")
        other = places.setdefault(parameter.data_ptr(), name) if parameter.numel() else name
        if other != name:
            raise InputError(
                f"{name!r} shares the memory of {other!r}; tie them by assigning the Parameter "
                "itself"
            )


def _state_dict_rows(module: Module, kinds: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """Return (name, array, dtype) of each entry of `state_dict()`, for `Schema.stored`."""
    known = {id(t): name for name, t in (*module.named_buffers(), *module.named_parameters())}
    rows = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in known or tensor.is_complex():
            raise InputError(
                f"model() saves {name!r}, which is no parameter or buffer of real numbers; it "
                "cannot be kept"
            )
        narrow = kinds[name] in (torch.float16, torch.bfloat16)
        dtype = kinds[name] if narrow else tensor.dtype
        rows.append((name, known[id(tensor)], str(dtype).removeprefix("torch.")))
    return tuple(rows)


def _check_optimizer(optimizer: Any, trained: dict[str, Any], parameters: dict[str, Any]) -> None:
    """Raise if the optimiser's parameters are not those that the federation trains."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer(module) must return a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in trained.items() if id(p) not in moved]
    if left:
        raise InputError(
            f"the optimiser leaves out {left[0]!r}, which is trained; requires_grad_(False) "
            "freezes it"
        )
    if moved - {id(p) for p in parameters.values()}:
        raise InputError(
            "the optimiser moves parameters that are none of the module's; make them part of the "
            "module"
        )


def _clipped(d: Tensor, most: float | None) -> Tensor:
    """Return a direction scaled to a norm of at most `most`."""
    if most is None or (norm := float(torch.linalg.vector_norm(d))) <= most:
        return d
    return d * (most / norm)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are bitwise equal, so that NaN equals itself."""
    bits = torch.int64 if a.dtype == torch.float64 else torch.int32
    return a.dtype == b.dtype and bool(torch.equal(a.view(bits), b.view(bits)))
