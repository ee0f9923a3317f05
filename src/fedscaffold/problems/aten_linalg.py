"""ATen operators of linear algebra: determinants, inverses, factorisations.

Where a matrix is singular or not positive definite torch raises; here the results are not finite.
Factors that torch keeps for derivatives are None: nothing else reads them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax

from fedscaffold.problems.aten import operator

__all__: list[str] = []

Array: TypeAlias = Any


def _succeeded(a: Array) -> Array:
    """Return torch's sign of success for each matrix."""
    return jnp.zeros(a.shape[:-2], jnp.int32)


@operator("_linalg_det")
def _det(a: Array) -> tuple[Array, None, None]:
    return jnp.linalg.det(a), None, None


@operator("_linalg_slogdet")
def _slogdet(a: Array) -> tuple[Array, Array, None, None]:
    sign, log = jnp.linalg.slogdet(a)
    return sign, log, None, None


@operator("linalg_inv_ex")
def _inv(a: Array, check_errors: bool = False) -> tuple[Array, Array]:
    return jnp.linalg.inv(a), _succeeded(a)


@operator("_linalg_solve_ex")
def _solve(
    a: Array, b: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, None, None, Array]:
    a = a if left else a.mT
    if b.ndim == 1 or b.shape == a.shape[:-1]:
        return jnp.linalg.solve(a, b[..., None])[..., 0], None, None, _succeeded(a)
    x = jnp.linalg.solve(a, b if left else b.mT)
    return (x if left else x.mT), None, None, _succeeded(a)


@operator("linalg_cholesky_ex")
def _cholesky(a: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    half = jnp.tril(a.mT if upper else a)  # torch reads one triangle
    factor = lax.linalg.cholesky(half + jnp.tril(half, -1).mT, symmetrize_input=False)
    return (factor.mT if upper else factor), _succeeded(a)


@operator("linalg_solve_triangular")
def _solve_triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    front = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(one, (*front, *one.shape[-2:])) for one in (a, b))
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@operator("cholesky_solve")
def _cholesky_solve(b: Array, factor: Array, upper: bool = False) -> Array:
    lower = factor.mT if upper else factor
    half = _solve_triangular(lower, b, upper=False)
    return _solve_triangular(lower.mT, half, upper=True)


@operator("cholesky_inverse")
def _cholesky_inverse(factor: Array, upper: bool = False) -> Array:
    one = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return _cholesky_solve(one, factor, upper)


@operator("_linalg_eigh")
def _eigh(a: Array, half: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(a, UPLO=half)
    return values, vectors


@operator("_linalg_svd")
def _svd(
    a: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Array, Array, Array]:
    u, s, vh = jnp.linalg.svd(a, full_matrices=full_matrices)
    return u, s, vh
