"""Divergences of one distribution from another, term by term, written so that nothing cancels.

With p the student's probabilities, q the reference's, d = log p - log q, m = (1 - beta) p + beta q,
over the vocabulary::

    beta = 0    D = KL(q || p) = sum q log(q / p)                        forward
    beta = 1    D = KL(p || q) = sum p log(p / q)                        reverse
    between     D = (1 - beta) KL(p || m) + beta KL(q || m)              Jensen-Shannon

(orientation and mixture of TRL's `beta`; https://arxiv.org/abs/2306.13649). The terms of these sums
have both signs: where p and q nearly agree, terms as large as d cancel to a sum as small as d^2.
Both distributions sum to 1, so any multiple of ``q - p`` may be added to the terms; the right
multiple makes each term >= 0, and as small as d^2::

    reverse     p log(p / q) + q - p    = p phi(d)       phi(d) = e^-d - 1 + d
    forward     q log(q / p) + p - q    = q phi(-d)

and likewise between. An error that all d share, such as an error of a normalizer, then changes D in
second order only. The functions compute with x = |d| and the larger of p and q; p phi(-x) is
written q chi(x), chi(x) = 1 - e^-x (1 + x), so that nothing overflows.

The gradient is ``d D / d z_v = k_v - p_v sum k``, with k_v = p_v d D / d p_v up to a multiple of
p_v::

    reverse  k = p d        forward  k = p - q        between  k = (1 - beta) p log(p / m)

sum k is `DivergenceStats.sum_k`. It is computed from the same d, so that an error that all d share
drops out.

torch and Triton share these functions (csrc/divergence.inl is a translation by hand). Hence they
are elementwise, call only the functions imported here, and write numbers as floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, clamp_max, exp, full_like, log1p, where
from torch import abs as magnitude

NEAR = 0.5  # below: e^-x - 1 + x from its series; above: as written
NEAR_MIXTURE = -0.125  # the same limit for (1 + w) log(1 + w) - w
PHI = tuple(1.0 / math.factorial(k + 2) for k in range(18))
MIXTURE = tuple(1.0 / ((k + 1) * (k + 2)) for k in range(18))
# terms of a series that leave out less than a unit in the last place
SERIES_LENGTH = {torch.float32: 7, torch.float64: 18}


def reverse(d, lead, beta):
    """The terms of KL(p || q), and k; `lead` is the larger of p and q.

    The value is infinite where q = 0 and p > 0.
    """
    x, e, _less, phi, chi = powers(d)
    ahead = d >= 0.0  # p >= q
    p = where(ahead, lead, lead * e)
    value = lead * where(ahead, phi, chi)
    k = p * where(ahead, x, -x)
    return where(d == INF, INF, value), where(d == INF, INF, k)


def forward(d, lead, beta):
    """The terms of KL(q || p), and k; `lead` is as in `reverse`. Infinite where p = 0 and q > 0."""
    _x, _e, less, phi, chi = powers(d)
    ahead = d >= 0.0
    value = lead * where(ahead, chi, phi)
    return where(d == -INF, INF, value), lead * where(ahead, -less, less)


def mixed(d, lead, beta):
    """The terms of the generalized Jensen-Shannon divergence, and k; finite for all p and q.

    With s the mixture's share of the smaller of the two, m = lead (1 + w), w = s (e^-x - 1), and
    the term is ``lead (s chi(x) - g(w))``, g(w) = (1 + w) log(1 + w) - w.
    """
    x, e, less, _phi, chi = powers(d)
    ahead = d >= 0.0
    share = where(ahead, full_like(d, beta), full_like(d, 1.0 - beta))
    w = share * less
    # the share rounds to 1 and e^-x to 0: keep the logarithm finite
    w = where(w == -1.0, ALMOST, w)
    log_m = log1p(w)  # log(m / lead)
    g = where(w > NEAR_MIXTURE, w * w * mixture_series(-w), (1.0 + w) * log_m - w)
    p = where(ahead, lead, lead * e)
    log_p = where(ahead, -log_m, -x - log_m)  # log(p / m)
    return lead * (share * chi - g), (1.0 - beta) * p * log_p


def powers(d):
    """x = |d|, with inf as a large number; e^-x, e^-x - 1, phi(x) and chi(x)."""
    x = clamp_max(magnitude(d), FAR)
    e = exp(-x)
    near = x < NEAR
    phi = where(near, x * x * phi_series(x), (e - 1.0) + x)
    less = where(near, phi - x, e - 1.0)
    chi = where(near, -less * x - phi, -less - e * x)
    return x, e, less, phi, chi


INF, FAR, ALMOST = float("inf"), 1e30, -(1.0 - 2.0**-24)

Terms = Callable[..., tuple[Tensor, Tensor]]


def terms_function(beta: float) -> Terms:
    """Choose the function of (d, lead, beta) that computes the terms of this divergence."""
    return forward if beta == 0.0 else reverse if beta == 1.0 else mixed


def phi_series(x: Tensor) -> Tensor:
    """``(e^-x - 1 + x) / x^2`` for small x >= 0."""
    return _series(-x, PHI)


def mixture_series(x: Tensor) -> Tensor:
    """``((1 - x) log(1 - x) + x) / x^2`` for small x >= 0."""
    return _series(x, MIXTURE)


def _series(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    terms = coefficients[: SERIES_LENGTH[x.dtype]]
    total = torch.full_like(x, terms[-1])
    for coefficient in terms[-2::-1]:
        total.mul_(x).add_(coefficient)
    return total
