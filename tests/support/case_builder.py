"""One test case (`Case`) and the builder that makes it from a name: every tensor is seeded by the
name alone."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.reference import head, on_grid

DEFAULT_WORKSPACE = 512 * 2**20
PER_TOKEN = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


@dataclass(frozen=True)
class Case:
    """Arguments of a call, and nothing of the library: `config` holds LossConfig fields by name."""

    name: str
    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    completion_ids: Tensor  # (B, T)
    completion_mask: Tensor  # (B, T)
    advantages: Tensor  # (B,) or (B, T)
    bias: Tensor | None = None  # (V,)
    old_per_token_logps: Tensor | None = None  # (B, T), as the next two
    ref_per_token_logps: Tensor | None = None
    sampling_per_token_logps: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None  # (B, T), (B, 1) or (B,)
    num_items_in_batch: float | Tensor | None = None
    config: dict[str, Any] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()  # of LEAVES
    workspace_bytes: int = DEFAULT_WORKSPACE
    # settings that are no fields of LossConfig
    others: dict[str, Any] = field(default_factory=dict)
    # (B, T, H'), of a case with another head, and so are the next ones
    teacher_hidden: Tensor | None = None
    teacher_weight: Tensor | None = None  # (V, H')
    teacher_bias: Tensor | None = None  # (V,)
    lora_a: Tensor | None = None  # (r, H), of a case with an adapter, and so are the next ones
    lora_b: Tensor | None = None  # (V, r)
    lora_input: Tensor | None = None  # (B, T, H); None: hidden
    temperature: Tensor | None = None  # (B, T), instead of the one in config
    kept_ids: Tensor | None = None  # (B, T, K), padded with -1
    # (B, T, K), a teacher's most likely ones, padded with -1, and the next one
    listed_ids: Tensor | None = None
    listed_logps: Tensor | None = None  # (B, T, K)
    # (B, T, K), the sampler's most likely ones, padded with -1, and the next one
    sampling_topk_ids: Tensor | None = None
    sampling_topk_logps: Tensor | None = None  # (B, T, K)

    @property
    def diverges(self) -> bool:
        """Whether its scores have a divergence."""
        return self.teacher_hidden is not None or self.listed_ids is not None

    def but(self, **changes: Any) -> Case:
        """A copy with some fields replaced; `config` and `others` are merged."""
        config, others = ({**getattr(self, x), **changes.pop(x, {})} for x in ("config", "others"))
        return replace(self, config=config, others=others, **changes)

    def to(self, dtype: torch.dtype) -> Case:
        """All floating-point tensors in `dtype`, whatever they were."""
        named = self.tensors().items()
        return replace(self, **{k: x.to(dtype) for k, x in named if x.is_floating_point()})

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def seeded(name: str) -> torch.Generator:
    """A generator that depends on the name alone, on every machine and in every process."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def make_mask(kind: str, b: int, t: int, g: torch.Generator) -> Tensor:
    """(b, t) int64: "ragged" right padding, "holes" (tool output), "full", "none", "left", "one",
    "first_empty"."""
    lengths = torch.randint(1, max(t, 1) + 1, (b, 1), generator=g)
    steps = torch.arange(t)
    mask = (steps < lengths).long()
    if kind == "holes":
        return mask * ((torch.rand(b, t, generator=g) > 0.3) | (steps == lengths - 1))
    if kind == "left":
        return mask.flip(1)
    if kind == "first_empty":
        mask[0] = 0
    if kind in ("full", "none", "one"):
        mask = torch.full((b, t), int(kind == "full"))
    if kind == "one":
        mask[b // 2, t // 2] = 1
    return mask


def make_ratio(kind: str | None, b: int, t: int, g: torch.Generator) -> Tensor | None:
    """vLLM's importance ratios: "token", "masked" (some of them 0), both (b, t), "sequence" (b, 1),
    "batch" (b,)."""
    if kind is None:
        return None
    shape = {"token": (b, t), "masked": (b, t), "sequence": (b, 1), "batch": (b,)}[kind]
    ratio = (0.4 * torch.randn(shape, generator=g)).exp().clamp(max=3.0)
    return torch.where(ratio > 1.3, 0.0, ratio) if kind == "masked" else ratio


def make_case(
    name: str,
    *,
    b: int = 3,
    t: int = 7,
    h: int = 16,
    v: int = 50,
    dtype: torch.dtype = torch.float32,
    spread: float = 2.0,  # standard deviation of the logits
    mask: str = "holes",
    adv: str = "sequence",
    zero_adv: bool = False,  # half of the sequences get advantage 0
    old: bool = True,  # False: on-policy
    noise: float = 0.25,  # of old against new, per token
    shift: float = 0.25,  # of old against new, per sequence
    sampling: bool = False,
    ratio: str | None = None,
    bias: bool = False,
    num_items: float | None = None,
    frozen: tuple[str, ...] = (),
    workspace: int = DEFAULT_WORKSPACE,
    # how far another head's logits lie from the policy's; None: there is no other
    teacher: float | None = None,
    # its width; None: h, the same weight, and hidden states that differ
    teacher_h: int | None = None,
    lora: int | None = None,  # rank of an adapter
    lora_input: bool = False,  # the adapter has an input of its own
    lora_dtype: torch.dtype | None = None,  # None: dtype
    temperatures: bool = False,  # one per position
    # ids in the largest kept set; with on_missing_set = "full" some positions lack one
    kept: int | None = None,
    listed: int | None = None,  # ids of a teacher that lists its most likely ones
    others: dict[str, Any] | None = None,
    **config: Any,
) -> Case:
    """A case around a policy of known logits: old, reference and sampling logps lie near its
    own."""
    g = seeded(name)
    normal = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    case = Case(
        name,
        normal(b, t, h).to(dtype),
        (normal(v, h) * spread / h**0.5).to(dtype),
        torch.randint(0, v, (b, t), generator=g),
        make_mask(mask, b, t, g),
        normal(b, t) if adv == "token" else normal(b),
        bias=normal(v).to(dtype) if bias else None,
        config=config,
        others=others or {},
        frozen=frozenset(frozen),
        num_items_in_batch=num_items,
        workspace_bytes=workspace,
    )
    if lora is not None:
        case = with_lora(case, lora, lora_input, lora_dtype or dtype)
    if temperatures:
        drawn = torch.rand(b, t, generator=seeded(f"{name} temperatures"))
        case = case.but(temperature=0.5 + drawn)
    # Two thirds of the ids are sampled from the policy itself, the others are any.
    everywhere = case.but(completion_mask=torch.ones(b, t, dtype=torch.long))
    probs = head(everywhere).log_probs.detach().exp()
    if len(probs):
        drawn = torch.multinomial(probs, 1, generator=g).reshape(b, t)
        ids = torch.where(torch.rand(b, t, generator=g) < 0.67, drawn, case.completion_ids)
        case = case.but(completion_ids=ids)
    if kept is not None:
        case = with_kept(case, kept)
    if listed is not None:
        case = with_listed(case, listed)
    everywhere = case.but(completion_mask=everywhere.completion_mask)
    h64 = head(everywhere)
    logps = on_grid(h64.logps.detach(), h64.counted)
    old_logps = (logps + noise * normal(b, t) + shift * normal(b, 1)).float()
    keep = (torch.arange(b) % 2 == 0).reshape(b, *[1] * (case.advantages.dim() - 1))
    ref = (logps + 0.5 * normal(b, t)).float()
    wide = dtype if dtype == torch.float64 else torch.float32
    sampling_logps = (old_logps if old else logps) + 0.3 * normal(b, t) + 0.3 * normal(b, 1)
    # an id alone in its set is certain to every policy
    certain = logps == 0 if kept is not None else torch.zeros(b, t, dtype=torch.bool)
    old_logps, ref, sampling_logps = (
        x.clamp(max=-1e-3).masked_fill(certain, 0.0) for x in (old_logps, ref, sampling_logps)
    )
    if teacher is not None:
        case = with_teacher(case, teacher, teacher_h, g)
    return case.but(
        advantages=(torch.where(keep, case.advantages, 0.0) if zero_adv else case.advantages).to(
            wide
        ),
        old_per_token_logps=old_logps.to(wide) if old else None,
        ref_per_token_logps=ref.to(wide) if config.get("beta") else None,
        sampling_per_token_logps=sampling_logps.to(wide) if sampling else None,
        importance_sampling_ratio=make_ratio(ratio, b, t, g),
    )


def with_teacher(case: Case, distance: float, width: int | None, g: torch.Generator) -> Case:
    """`case` with another head, of the policy's dtype: near it where the widths are the same, else
    anything."""
    b, t, h = case.hidden.shape
    normal = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    if width is not None:
        vocab, dtype = case.weight.shape[0], case.weight.dtype
        hidden = normal(b, t, width).to(dtype)
        weight = (normal(vocab, width) * distance / width**0.5).to(dtype)
        bias = None if case.bias is None else normal(vocab).to(dtype)
        return case.but(teacher_hidden=hidden, teacher_weight=weight, teacher_bias=bias)
    size = case.weight.float().norm(dim=1).mean().clamp(min=1e-3)
    hidden = (case.hidden.float() + normal(b, t, h) * distance / size).to(case.hidden.dtype)
    weight, bias = case.weight.clone(), case.bias
    return case.but(teacher_hidden=hidden, teacher_weight=weight, teacher_bias=bias)


def with_lora(case: Case, rank: int, own_input: bool, dtype: torch.dtype) -> Case:
    """`case` with an adapter."""
    g, (vocab, width) = seeded(f"{case.name} lora"), case.weight.shape
    a, b = (torch.randn(shape, generator=g) * 0.4 for shape in ((rank, width), (vocab, rank)))
    own = torch.randn(case.hidden.shape, generator=g).to(dtype) if own_input else None
    others = {"lora_scaling": 0.6}
    return case.but(lora_a=a.to(dtype), lora_b=b.to(dtype), lora_input=own, others=others)


def with_kept(case: Case, most: int) -> Case:
    """`case` with ragged sets in any order, padding among the ids; the sampled id is one of them.

    The first sets have one id and all of them. With on_missing_set = "full" some are empty, and
    some lack the sampled id.
    """
    g, ids = seeded(f"{case.name} kept"), case.completion_ids
    b, t = ids.shape
    order = torch.rand(b, t, case.weight.shape[0], generator=g)
    shuffled = order.scatter(-1, ids[..., None], -1.0).argsort(-1)
    sizes = torch.randint(1, most + 1, (b, t, 1), generator=g)
    sizes[0, 0], sizes[0, 1] = 1, most
    kept = torch.where(torch.arange(most) < sizes, shuffled[..., :most], -1)
    if case.others.get("on_missing_set") == "full":
        kind = torch.arange(b * t).view(b, t, 1) % 5
        kept = torch.where((kind == 3) | ((kind == 4) & (kept == ids[..., None])), -1, kept)
    kept = kept.gather(-1, torch.rand(b, t, most, generator=g).argsort(-1))
    return case.but(kept_ids=kept)


def with_listed(case: Case, k: int) -> Case:
    """`case` with a teacher's ids; some entries are padding, one has no mass, a position lists
    nothing."""
    g = seeded(f"{case.name} listed")
    b, t = case.completion_ids.shape
    vocab = case.weight.shape[0]
    ids = torch.rand(b, t, vocab, generator=g).argsort(-1)[..., :k]
    logps = (2 * torch.randn(b, t, vocab, generator=g)).log_softmax(-1).gather(-1, ids)
    ids[0, 0, 2], ids[0, 2], logps[0, 1, 1] = -1, -1, -torch.inf
    return case.but(listed_ids=ids, listed_logps=logps.to(case.hidden.dtype))
