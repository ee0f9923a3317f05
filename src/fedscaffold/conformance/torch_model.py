"""A torch model for adapters: its backward pass asks the case for the gradient, so that any training loop drives it.

A batch holds the number of the client whose data it is, `batch(i)`; the model's output is the loss already, and a
criterion has only to hand it on, `loss`. Parameters are the case's tensors, w0, w1 and so on; the buffer `statistics`
is there where the case has one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedscaffold.conformance.case import Case

__all__ = ["Quadratic", "batch", "loss", "vector"]


class Asked:
    """The case behind a model. Frameworks copy models deeply: the copies must ask, and be counted by, the same case."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __deepcopy__(self, memo: Any) -> Asked:
        return self


class Gradient(torch.autograd.Function):  # type: ignore[misc]
    """The loss of client i, whose gradient is the case's."""

    @staticmethod
    def forward(ctx: Any, asked: Asked, i: int, *tensors: Any) -> Any:
        """f_i, times the case's `loss_scale`."""
        case = asked.case
        y = vector(tensors)
        g = case.gradient(i, y)
        ctx.save_for_backward(*(torch.as_tensor(np.array(one)) for one in case.split(g)))
        return torch.as_tensor(y @ (g - case.loss_scale * case.linear[i].astype(g.dtype)) / 2)

    @staticmethod
    def backward(ctx: Any, *up: Any) -> Any:
        """The gradient asked for, by the chain rule."""
        return None, None, *(up[0] * saved for saved in ctx.saved_tensors)


class Quadratic(torch.nn.Module):  # type: ignore[misc]
    """The model of a case, at x0, in the case's precision.

    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[2.0]]], [[1.0]], [3.0], rounds=1, steps=1, lr=0.5)
    >>> model = Quadratic(case)
    >>> model(batch(0)).backward()
    >>> model.w0.grad
    tensor([5.], dtype=torch.float64)
    """

    statistics: Any

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.asked = Asked(case)
        for k, tensor in enumerate(case.split(case.x0)):
            self.register_parameter(f"w{k}", torch.nn.Parameter(torch.tensor(tensor)))
        if case.buffers is not None:
            self.register_buffer("statistics", torch.tensor(case.buffers.astype(case.precision)))

    def forward(self, numbers: Any) -> Any:
        """The loss of the client whose number the batch holds; in training, its running statistics go on."""
        i, case = int(numbers.reshape(-1)[0]), self.asked.case
        if self.training and case.buffers is not None:
            self.statistics = torch.as_tensor(case.forward(i, self.statistics))
        return Gradient.apply(self.asked, i, *self.parameters())


def batch(i: int, records: int = 1) -> Any:
    """Client i's data: records that hold its number. One of them makes a batch."""
    return torch.full((records, 1), float(i))


def loss(output: Any, _target: Any = None) -> Any:
    """The criterion: the model's output is the loss."""
    return output


def vector(tensors: Any) -> Any:
    """Tensors, such as a model's parameters or a list of control variates, as one NumPy vector for a `Trace`."""
    return np.concatenate([one.detach().cpu().numpy().reshape(-1) for one in tensors])
