"""Local combines of gathered or received partials ``O`` [N, T, h, D] with LSEs ``L``
[N, T, h].
"""

# ruff: noqa: E741  (l, L and O are the letters of the formulas)

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def c_softmax(O: Tensor, L: Tensor) -> Tensor:
    return (torch.softmax(L, 0)[..., None] * O).sum(0)


def c_logsumexp(O: Tensor, L: Tensor) -> Tensor:
    return (torch.exp(L - torch.logsumexp(L, 0))[..., None] * O).sum(0)


def c_max_exp_div(O: Tensor, L: Tensor) -> Tensor:
    e = torch.exp(L - L.amax(0, keepdim=True))[..., None]
    return (O * e).sum(0) / e.sum(0)


def c_max_pair_div(O: Tensor, L: Tensor) -> Tensor:
    m, _ = L.max(dim=0)
    e = (L - m).exp()
    return torch.sum(O * e.unsqueeze(-1), dim=0) / torch.sum(e, dim=0).unsqueeze(-1)


def c_einsum(O: Tensor, L: Tensor) -> Tensor:
    return torch.einsum("nth,nthd->thd", torch.softmax(L, 0).to(O.dtype), O)


def c_matmul(O: Tensor, L: Tensor) -> Tensor:
    w = torch.softmax(L, 0).to(O.dtype).permute(1, 2, 0)[:, :, None]  # [T, h, 1, N]
    return torch.matmul(w, O.permute(1, 2, 0, 3))[:, :, 0]


def c_python_sum(O: Tensor, L: Tensor) -> Tensor:
    g = torch.logsumexp(L, 0)
    return sum(O[n] * torch.exp(L[n] - g)[..., None] for n in range(O.shape[0]))


def c_python_loop(O: Tensor, L: Tensor) -> Tensor:
    m = L.amax(0)
    num, den = torch.zeros_like(O[0]), torch.zeros_like(L[0])
    for n in range(O.shape[0]):
        e = torch.exp(L[n] - m)
        num = num + O[n] * e[..., None]
        den = den + e
    return num / den[..., None]


def c_sigmoid_fold(O: Tensor, L: Tensor) -> Tensor:
    a, z = O[0], L[0]
    for n in range(1, O.shape[0]):
        b = L[n]
        a = a - torch.sigmoid(b - z)[..., None] * (a - O[n])
        z = z - torch.nn.functional.logsigmoid(z - b)
    return a


def c_log1p_fold(O: Tensor, L: Tensor) -> Tensor:
    a, z = O[0], L[0]
    for n in range(1, O.shape[0]):
        new = z + torch.log1p(torch.exp(L[n] - z))
        a = torch.exp(z - new)[..., None] * a + torch.exp(L[n] - new)[..., None] * O[n]
        z = new
    return a


def c_max_min_fold(O: Tensor, L: Tensor) -> Tensor:
    a, z = O[0], L[0]
    for n in range(1, O.shape[0]):
        top, low = torch.maximum(z, L[n]), torch.minimum(z, L[n])
        new = top + torch.log1p(torch.exp(low - top))
        a = a * torch.exp(z - new)[..., None] + O[n] * torch.exp(L[n] - new)[..., None]
        z = new
    return a


def c_maximum_fold(O: Tensor, L: Tensor) -> Tensor:
    a, z = O[0], L[0]
    for n in range(1, O.shape[0]):
        top = torch.maximum(z, L[n])
        p, q = torch.exp(z - top), torch.exp(L[n] - top)
        a = (a * p[..., None] + O[n] * q[..., None]) / (p + q)[..., None]
        z = top + torch.log(p + q)
    return a


def c_logaddexp_fold(O: Tensor, L: Tensor) -> Tensor:
    a, z = O[0], L[0]
    for n in range(1, O.shape[0]):
        new = torch.logaddexp(z, L[n])
        a = torch.exp(z - new)[..., None] * a + torch.exp(L[n] - new)[..., None] * O[n]
        z = new
    return a


def c_softplus_fold(O: Tensor, L: Tensor) -> Tensor:
    a, z = O[0], L[0]
    for n in range(1, O.shape[0]):
        new = z + torch.nn.functional.softplus(L[n] - z)
        a = torch.exp(z - new)[..., None] * a + torch.exp(L[n] - new)[..., None] * O[n]
        z = new
    return a


def c_log_exp_fold(O: Tensor, L: Tensor) -> Tensor:
    a, z = O[0], L[0]
    for n in range(1, O.shape[0]):
        new = z + torch.log(1 + torch.exp(L[n] - z))
        a = torch.exp(z - new)[..., None] * a + torch.exp(L[n] - new)[..., None] * O[n]
        z = new
    return a


def c_online_max(O: Tensor, L: Tensor) -> Tensor:
    """Running max, sum and accumulator from an empty start."""
    m = torch.full_like(L[0], float("-inf"))
    s, a = torch.zeros_like(L[0]), torch.zeros_like(O[0])
    for n in range(O.shape[0]):
        top = torch.maximum(m, L[n])
        old, new = torch.exp(m - top), torch.exp(L[n] - top)
        a = a * old[..., None] + O[n] * new[..., None]
        s = s * old + new
        m = top
    return a / s[..., None]


def c_tree_fold(O: Tensor, L: Tensor) -> Tensor:
    """Neighbours first, then pairs of pairs."""
    parts = [(O[n], L[n]) for n in range(O.shape[0])]
    while len(parts) > 1:
        merged = []
        for (o1, l1), (o2, l2) in zip(parts[::2], parts[1::2], strict=True):
            z = torch.logaddexp(l1, l2)
            o = o1 * torch.exp(l1 - z)[..., None] + o2 * torch.exp(l2 - z)[..., None]
            merged.append((o, z))
        parts = merged
    return parts[0][0]


COMBINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": c_softmax,
    "logsumexp": c_logsumexp,
    "max exp div": c_max_exp_div,
    "max pair div": c_max_pair_div,
    "einsum": c_einsum,
    "matmul": c_matmul,
    "python sum": c_python_sum,
    "python loop": c_python_loop,
    "sigmoid fold": c_sigmoid_fold,
    "log1p fold": c_log1p_fold,
    "max min fold": c_max_min_fold,
    "maximum fold": c_maximum_fold,
    "logaddexp fold": c_logaddexp_fold,
    "softplus fold": c_softplus_fold,
    "log exp fold": c_log_exp_fold,
    "online max": c_online_max,
    "tree fold": c_tree_fold,
}
