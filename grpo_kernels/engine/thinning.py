"""How the gradient of a call is thinned out, and what that cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels.backends.sparse import row_keys
from grpo_kernels.engine.device import device_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ENTRY_BYTES = 48  # of an entry while d weight is made of it: id, value, row, their order, and all once more, sorted
_SUMS = ("rows", "dense", "sparse", "entries", "d_hidden_error")


class Spent:
    """What thinning out has cost: sums over rows, which stay on the device.

    Attributes:
        totals: ``rows``; of these the ``dense`` ones, which are not thinned out, and the ``sparse`` ones; the
            ``entries`` of those, and the predicted root mean square errors of their d hidden, as shares of its length
            (``d_hidden_error``). Where d weight is made of the same entries, likewise the errors of what a row gives to
            that (``d_weight_error``). 0-d tensors, added to in place.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, of_weight: bool) -> None:
        names = (*_SUMS, "d_weight_error") if of_weight else _SUMS
        self.totals = {name: torch.zeros((), dtype=dtype, device=device) for name in names}

    def add(self, more: dict[str, Tensor]) -> None:
        """More rows."""
        for name, x in more.items():
            self.totals[name] += x.to(self.totals[name])

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Metric -> (sum, count): the tensors to which a backward that is still to come will add."""
        sums = self.totals
        found = {"gradient/dense_rows": (sums["dense"], sums["rows"])}
        names = [name for name in sums if name not in ("rows", "dense", "sparse")]
        return found | {f"gradient/{name}": (sums[name], sums["sparse"]) for name in names}


@dataclass(frozen=True)
class Thinning:
    """How the gradient of one call is thinned out.

    Attributes:
        tolerance: root mean square error of a row of d hidden, as a share of its length.
        seed: of the draws.
        spent: what is added to, all of them.
        of_weight: whether d weight is made of the entries as well; else it is exact.
        most: entries that a row may have on average before it goes through the dense product; None: the device's share
            of the vocabulary.
    """

    tolerance: float
    seed: int
    spent: tuple[Spent, ...] = field(default=(), compare=False)
    of_weight: bool = False
    most: int | None = None

    def entries(self, vocab: int, device: torch.device) -> int:
        """`most` of a row of `vocab` ids."""
        return max(16, vocab // device_of(device).entry_cost) if self.most is None else self.most

    def row_bytes(self, vocab: int, device: torch.device) -> int:
        """What a row's entries take until d weight has them."""
        return ENTRY_BYTES * self.entries(vocab, device) if self.of_weight else 0

    def note(self, **more: Tensor) -> None:
        """That so much has been spent."""
        for spent in self.spent:
            spent.add(more)


def seed_of(seed: int, call: int, process_group: ProcessGroup | None) -> int:
    """That of the draws of a call: no two calls, and no two ranks with rows of their own, have the same.

    Ranks that divide the columns of the same rows do.
    """
    rank = 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        import torch.distributed as dist

        rank = dist.get_rank() if process_group is None else dist.get_global_rank(process_group, 0)
    of_call = int(row_keys(seed, torch.tensor([call])))
    return int(row_keys(of_call, torch.tensor([rank])))
