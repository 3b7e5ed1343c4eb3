"""The scoring kernel against float64 within the tolerance of tests/support/tolerance.py, and against itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.interface import LogitTransform, RowStats
from grpo_kernels.base.records import take

pytest.importorskip("triton")

from grpo_kernels.backends.triton_rows.configs import DotConfig
from grpo_kernels.backends.triton_rows.dot import GROUP, score_dot
from tests.support.dot_truth import check, operands, want_of
from tests.support.row_cases import DEVICE, FIELDS, PLAIN, make_transform

# 6 x 5 x 7 shapes: a tile has 16 rows, 16 or 32 ids and 16 columns of the hidden states.
NS = (1, 2, 15, 16, 17, 33)
WIDTHS = (1, 8, 15, 33, 48)
VOCABS = (1, 15, 16, 17, 33, 65, 97)
TILE = DotConfig(
    block_n=16, block_v=16, block_h=16, splits=2, num_warps=4, num_stages=1, use_tma=False
)


def score(
    hidden: Tensor, weight: Tensor, ids: Tensor, transform: LogitTransform = PLAIN, **tile: object
) -> RowStats:
    return score_dot(hidden, weight, ids, transform, entropy=True, config=replace(TILE, **tile))


def assert_same(left: RowStats, right: RowStats, rows: Tensor | slice = slice(None)) -> None:
    for name in FIELDS:
        a, b = getattr(left, name)[rows], getattr(right, name)
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("n", NS)
def test_every_shape(n: int, dtype: torch.dtype) -> None:
    """A shape is of one of the two, in turn."""
    for kind, (width, vocab) in [*enumerate(product(WIDTHS, VOCABS), n)][
        (n // 2 + (dtype == torch.float16)) % 2 :: 2
    ]:
        hidden, weight, ids = operands(n, width, vocab, dtype)
        transform = make_transform(n, vocab, kind, None)
        tile = {
            "block_v": 16 if vocab < 40 else 32,
            "splits": (1, 2, 3)[kind % 3],
            "use_tma": kind % 5 < 2,
        }
        stats = score(hidden, weight, ids, transform, **tile)
        check(stats, want_of(hidden, weight, ids, transform), (n, width, vocab, tile))


@pytest.mark.parametrize("rounded_to", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", range(4))
def test_rounded_logits_and_bfloat16(kind: int, rounded_to: torch.dtype) -> None:
    hidden, weight, ids = operands(9, 24, 50, rounded_to)
    transform = make_transform(9, 50, kind, rounded_to)
    check(score(hidden, weight, ids, transform), want_of(hidden, weight, ids, transform))


@pytest.mark.parametrize("rounded_to", [torch.bfloat16, torch.float16])
def test_logits_are_rounded_once_with_the_bias_in(rounded_to: torch.dtype) -> None:
    hidden, weight, ids = operands(5, 1, 40, torch.float32)
    bias = torch.randn(40, device=DEVICE)
    stats = score(
        torch.ones_like(hidden), weight, ids, LogitTransform(bias=bias, rounded_to=rounded_to)
    )
    rounded = (weight + bias[:, None]).to(rounded_to).float()
    assert_same(stats, score(torch.ones_like(hidden), rounded, ids))


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_columns_past_the_vocabulary_do_not_count(softcap: float | None, use_tma: bool) -> None:
    """They would be logits of 0 (of what is read past the weight, or of none), next to which -15 is nothing."""
    hidden = torch.ones(3, 16, device=DEVICE)
    weight = torch.full((37, 16), -15 / 16, device=DEVICE)
    weight[5] = 3 / 16
    ids = torch.tensor([5, 0, 36], device=DEVICE)
    stats = score(hidden, weight, ids, LogitTransform(softcap=softcap), use_tma=use_tma)
    want = want_of(hidden, weight, ids, LogitTransform(softcap=softcap))
    check(stats, want)
    torch.testing.assert_close(
        stats.logps[0].double(), want.values["logps"][0], rtol=1e-4, atol=0.0
    )
    torch.testing.assert_close(
        stats.entropies.double(), want.values["entropies"], rtol=1e-4, atol=0.0
    )


def test_a_certain_token_keeps_its_digits() -> None:
    """log p = -37 e^-20, far below half a unit in the last place of 1."""
    hidden, weight = torch.ones(1, 16, device=DEVICE), torch.zeros(38, 16, device=DEVICE)
    weight[20] = 20 / 16
    stats = score(hidden, weight, torch.tensor([20], device=DEVICE), splits=3)
    rest = 37 * torch.exp(torch.tensor([-20.0], dtype=torch.float64, device=DEVICE))
    torch.testing.assert_close(stats.logps.double(), -rest, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(stats.log_sum.double(), rest, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(stats.entropies.double(), 21 * rest, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("vocab", [16, 17, 40])
def test_equal_logits(vocab: int) -> None:
    hidden, weight, ids = operands(4, 8, vocab, torch.float32)
    weight[:] = weight[:1]
    check(score(hidden, weight, ids), want_of(hidden, weight, ids))


def test_ids_that_cannot_be() -> None:
    """Parts of the vocabulary, or all of a tile, at -inf; the target among them."""
    hidden, weight, _ = operands(4, 8, 70, torch.float32)
    bias = torch.randn(70, device=DEVICE)
    bias[:32], bias[64:] = -torch.inf, -torch.inf
    ids = torch.tensor([3, 40, 69, 63], device=DEVICE)
    want = want_of(hidden, weight, ids, LogitTransform(bias=bias))
    for splits in (1, 2, 5):
        stats = score(hidden, weight, ids, LogitTransform(bias=bias), splits=splits)
        check(stats, want)
        assert stats.logps[[0, 2]].tolist() == [-torch.inf, -torch.inf]


def test_no_id_can_be() -> None:
    hidden, weight, ids = operands(2, 8, 40, torch.float32)
    bias = torch.full((40,), -torch.inf, device=DEVICE)
    stats = score(hidden, weight, ids, LogitTransform(bias=bias))
    assert stats.max_logit.tolist() == [-torch.inf] * 2
    assert all(getattr(stats, name).isnan().all() for name in ("logps", "log_sum", "entropies"))


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -3e38])
def test_ids_at_the_lowest_number(lowest: float) -> None:
    hidden, weight = torch.zeros(2, 8, device=DEVICE), torch.zeros(40, 8, device=DEVICE)
    ids, bias = torch.tensor([0, 39], device=DEVICE), torch.full((40,), lowest, device=DEVICE)
    transform = LogitTransform(bias=bias)
    for first in (lowest, 0.0):
        bias[0] = first
        check(score(hidden, weight, ids, transform), want_of(hidden, weight, ids, transform))


@pytest.mark.parametrize("at", [0, 20, 39])
def test_nan_surfaces_in_its_row_only(at: int) -> None:
    hidden, weight, ids = operands(5, 8, 40, torch.float32)
    clean = score(hidden, weight, ids)
    hidden[3, 2] = torch.nan
    stats = score(hidden, weight, ids)
    assert all(getattr(stats, name)[3].isnan() for name in FIELDS)
    others = torch.tensor([0, 1, 2, 4], device=DEVICE)
    assert_same(stats, take(clean, others), others)
    bias = torch.zeros(40, device=DEVICE)
    bias[at] = torch.nan
    stats = score(hidden, weight, ids, LogitTransform(bias=bias))
    assert all(getattr(stats, name).isnan().all() for name in FIELDS)


def test_an_infinite_logit() -> None:
    """It is certain, and the others cannot be; as in the torch backend only the entropy is NaN, and its own logp."""
    hidden, weight, _ = operands(2, 8, 40, torch.float32)
    bias = torch.zeros(40, device=DEVICE)
    bias[17] = torch.inf
    stats = score(
        hidden, weight, torch.tensor([3, 30], device=DEVICE), LogitTransform(bias=bias), splits=3
    )
    assert stats.logps.tolist() == [-torch.inf] * 2
    assert stats.max_logit.tolist() == [torch.inf] * 2
    assert stats.entropies.isnan().all()


@pytest.mark.parametrize("outside", [-1, 40, 2**31, 2**32 + 3])
def test_an_id_outside_of_the_vocabulary_gives_nan(outside: int) -> None:
    hidden, weight, ids = operands(5, 8, 40, torch.float32)
    clean = score(hidden, weight, ids)
    ids[2] = outside
    stats = score(hidden, weight, ids)
    assert stats.logps.isnan().nonzero().tolist() == [[2]]
    for name in FIELDS[1:]:
        assert torch.equal(getattr(stats, name), getattr(clean, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    hidden, weight, ids = operands(37, 40, 75, dtype)
    inv_t = torch.rand(37, 1, device=DEVICE) + 0.5
    bias = torch.randn(75, device=DEVICE)

    def of(rows: Tensor) -> RowStats:
        transform = LogitTransform(softcap=9.0, inv_temperature=inv_t[rows], bias=bias)
        return score(hidden[rows], weight, ids[rows], transform)

    everything = torch.arange(37, device=DEVICE)
    batch = of(everything)
    assert_same(batch, of(everything))
    order = torch.randperm(37, device=DEVICE)
    assert_same(batch, of(order), order)
    for row in (0, 15, 16, 36):
        assert_same(batch, of(everything[row : row + 1]), slice(row, row + 1))
    padded = torch.cat([everything[:20], everything[:1].expand(29)])
    assert_same(batch, take(of(padded), slice(20)), slice(20))


def test_more_rows_than_a_group() -> None:
    """Every pair of a block of rows and a part of the vocabulary has its program, also in the last, smaller group."""
    n = 16 * GROUP + 20
    hidden, weight, ids = operands(n, 4, 40, torch.float32)
    check(score(hidden, weight, ids, block_v=32), want_of(hidden, weight, ids))


def test_the_entropy_does_not_depend_on_the_target() -> None:
    hidden, weight, _ = operands(1, 24, 75, torch.float32)
    stats = score(hidden.expand(75, -1).contiguous(), weight, torch.arange(75, device=DEVICE))
    for name in FIELDS[1:]:
        assert len(set(getattr(stats, name).tolist())) == 1, name
    assert float(stats.logps.double().exp().sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("use_tma", [False, True])
def test_strides(use_tma: bool) -> None:
    """Rows further apart than they are long, columns apart, rows that repeat, and addresses no descriptor can have."""
    hidden, weight, ids = operands(20, 16, 40, torch.float32)
    want = score(hidden, weight, ids)
    wide = torch.full((20, 21), torch.nan, device=DEVICE)
    wide[:, 1:17] = hidden
    assert_same(want, score(wide[:, 1:17], weight, ids, use_tma=use_tma))
    assert_same(want, score(hidden.T.contiguous().T, weight.T.contiguous().T, ids, use_tma=use_tma))
    wide = torch.full((20, 32), torch.nan, device=DEVICE)
    wide[:, :16] = hidden
    assert_same(want, score(wide[:, :16], weight, ids, use_tma=use_tma))
    spread = torch.full((40, 32), torch.nan, device=DEVICE)
    spread[:, ::2] = weight
    assert_same(want, score(hidden, spread[:, ::2], ids, use_tma=use_tma))
    repeated = score(hidden[:1].expand(20, -1), weight, ids, use_tma=use_tma)
    assert_same(repeated, score(hidden[[0] * 20], weight, ids))
    assert_same(
        want,
        score(hidden[:1].as_strided((1, 16), (3, 1)), weight, ids[:1], use_tma=use_tma),
        slice(1),
    )


def test_no_rows() -> None:
    hidden, weight, ids = operands(0, 8, 40, torch.float32)
    stats = score(hidden, weight, ids)
    assert all(getattr(stats, name).shape == (0,) for name in FIELDS)


def test_without_entropy_and_by_the_table() -> None:
    hidden, weight, ids = operands(5, 24, 300, torch.bfloat16)
    stats = score_dot(hidden, weight, ids, PLAIN, entropy=False)
    assert stats.entropies is None
    with_entropy = score_dot(hidden, weight, ids, PLAIN, entropy=True)
    check(with_entropy, want_of(hidden, weight, ids))
    assert torch.equal(stats.logps, with_entropy.logps)


def test_what_it_refuses() -> None:
    hidden, weight, ids = operands(5, 8, 40, torch.float32)
    with pytest.raises(ValueError, match="weight: expected the dtype of hidden"):
        score_dot(hidden, weight.half(), ids, PLAIN, entropy=True)
    with pytest.raises(
        ValueError, match=r"hidden: expected float32, bfloat16 or float16, got torch\.float64"
    ):
        score_dot(hidden.double(), weight.double(), ids, PLAIN, entropy=True)
