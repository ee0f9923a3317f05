"""A torch model for adapters: its backward pass returns the gradient of the case.

A batch contains the index of its client, `batch(i)`. The model's output is the loss, which the
criterion `loss` returns unchanged. Parameters are the case's tensors w0, w1, ...; there is a buffer
`statistics` if the case has buffers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedscaffold.conformance.case import Case

__all__ = ["Quadratic", "batch", "loss", "vector"]


class Asked:
    """Reference to a model's case that deep copies share, so that they call the same case."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __deepcopy__(self, memo: Any) -> Asked:
        return self


class Gradient(torch.autograd.Function):  # type: ignore[misc]
    """Loss of client i, with the gradient of the case."""

    @staticmethod
    def forward(ctx: Any, asked: Asked, i: int, *tensors: Any) -> Any:
        """Return f_i times the case's `loss_scale`."""
        case = asked.case
        y = vector(tensors)
        g = case.gradient(i, y)
        ctx.save_for_backward(*(torch.as_tensor(np.array(one)) for one in case.split(g)))
        return torch.as_tensor(y @ (g - case.loss_scale * case.linear[i].astype(g.dtype)) / 2)

    @staticmethod
    def backward(ctx: Any, *up: Any) -> Any:
        """Return the saved gradient times the incoming one."""
        return None, None, *(up[0] * saved for saved in ctx.saved_tensors)


class Quadratic(torch.nn.Module):  # type: ignore[misc]
    """Model of a case, initialised at x0 in the case's precision.

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
        """Return the loss of the batch's client; in training mode, update running statistics."""
        i, case = int(numbers.reshape(-1)[0]), self.asked.case
        if self.training and case.buffers is not None:
            self.statistics = torch.as_tensor(case.forward(i, self.statistics))
        return Gradient.apply(self.asked, i, *self.parameters())


def batch(i: int, records: int = 1) -> Any:
    """Return the data of client i: records that contain its index. One record makes a batch."""
    return torch.full((records, 1), float(i))


def loss(output: Any, _target: Any = None) -> Any:
    """Return the model's output, which is the loss already."""
    return output


def vector(tensors: Any) -> Any:
    """Concatenate tensors, such as parameters, into one NumPy vector for a `Trace`."""
    return np.concatenate([one.detach().cpu().numpy().reshape(-1) for one in tensors])
