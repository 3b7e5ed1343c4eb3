"""The autograd contract: upstream gradients, frozen tensors, modes, checkpoints, hooks."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Expectation, LossConfig, grpo_loss, linear_logps, token_level
from tests.support.case_builder import make_case, seeded
from tests.support.flat import flat
from tests.support.measure import count_flops
from tests.support.on_device import same_bits
from tests.support.run_case import run

# 16 rows: a multiple of 4, as is every part of them below, so that no product is padded
N, H, V = 16, 6, 11
HEAD = ("hidden", "weight", "bias")
F64 = torch.float64
ENGINES = ("one_pass", "two_pass", "frozen")
IDS = torch.arange(N) * 7 % V
on_every_backend = pytest.mark.usefixtures("every_backend")


def head(dtype: torch.dtype = F64, frozen: str = "") -> dict[str, Tensor]:
    """The same leaves in every call; those in `frozen` want no gradient."""
    g = seeded("head")
    leaves = {}
    for name, shape in {"hidden": (N, H), "weight": (V, H), "bias": (V,)}.items():
        x = torch.randn(shape, generator=g, dtype=F64).to(dtype)
        leaves[name] = x.requires_grad_(name not in frozen)
    return leaves


def batch(given: dict[str, Tensor], **changes: Any) -> dict[str, Any]:
    """Arguments of `grpo_loss` around `head`'s tensors: 2 sequences of 8, everything counted."""
    dtype = F64 if given["hidden"].dtype == F64 else torch.float32
    noise = torch.randn(2, N // 2, generator=seeded("old"), dtype=dtype)
    return {
        **given,
        "hidden": given["hidden"].view(2, N // 2, -1),
        "completion_ids": IDS.view(2, -1),
        "completion_mask": torch.ones(2, N // 2),
        "advantages": torch.tensor([1.3, -0.7], dtype=dtype),
        "old_per_token_logps": -2.5 + 0.3 * noise,
        **changes,
    }


def both(given: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    scores = flat(linear_logps)(**given, completion_ids=IDS, **options)
    return scores.logps, scores.entropies


def grads(given: dict[str, Tensor]) -> dict[str, Tensor | None]:
    taken = {name: given[name].grad for name in HEAD}
    for name in HEAD:
        given[name].grad = None
    return taken


def engine_options(engine: str) -> tuple[str, dict[str, Any]]:
    """What has to be frozen for `engine`, and the options of `linear_logps` that choose it."""
    expected = torch.linspace(-1, 2, N, dtype=F64) if engine == "one_pass" else None
    return "weight bias" if engine == "frozen" else "", {"engine": engine, "expected": expected}


def losses(engine: str, given: dict[str, Tensor], **changes: Any) -> Tensor:
    return flat(grpo_loss)(**batch(given, **changes), loss_type="dapo", engine=engine).loss


def test_results_beside_the_loss_may_be_changed_in_place() -> None:
    """They are tensors of their own: of a view, FSDP2 warns, and autograd refuses the change."""
    out = flat(grpo_loss)(**batch(head()))
    for x in (out.logps, out.entropies):
        assert not x._is_view()
        x.mul_(2.0)
    out.loss.backward()


@on_every_backend
@pytest.mark.parametrize("engine", ENGINES)
def test_upstream_scale(engine: str) -> None:
    given = head(torch.float32, engine_options(engine)[0])
    losses(engine, given).backward()
    one = grads(given)
    for scale in (0.0, 1.0, 0.25, -3.0, 65536.0):
        close = {"rtol": 1e-6, "atol": 1e-7} if scale == -3.0 else {"rtol": 0.0, "atol": 0.0}
        (losses(engine, given) * scale).backward()
        for name, grad in grads(given).items():
            if grad is not None:
                assert_close(grad, one[name] * scale, **close)


@on_every_backend
@pytest.mark.parametrize("engine", ENGINES)
def test_retain_graph_gives_the_same_bits_three_times(engine: str) -> None:
    """Nothing stored is overwritten, nor changed by another upstream gradient."""
    frozen, options = engine_options(engine)
    given = head(torch.float32, frozen)
    upstream = [torch.randn(N), torch.randn(N), torch.linspace(-1, 2, N)]
    loss, (logps, _) = losses(engine, given), both(given, **options)
    fresh = [grads(given) for g in upstream for _ in (both(given, **options)[0].backward(g),)]
    losses(engine, given).backward()
    fresh_loss = grads(given)
    for _ in range(3):
        for g, want in zip(upstream, fresh, strict=True):
            logps.backward(g, retain_graph=True)
            found = grads(given)
            assert same_bits(found, want)
            for x in found.values():  # they are the caller's, and share no memory with the next
                if x is not None:
                    x.zero_()
        loss.backward(retain_graph=True)
        assert same_bits(grads(given), fresh_loss)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_does_forward_work_only(mode: Any, every_backend: str) -> None:
    """One product, the same bits, no graph; also where an expectation or an objective is given."""
    given, config = head(torch.float32), LossConfig(loss_type="vespo", entropy_coef=0.1)
    trained = flat(grpo_loss)(**batch(given), config=config)
    asked: list[int] = []
    expectation = Expectation(lambda index, logps, entropies: asked.append(1) or logps)
    objective = token_level(lambda tokens: -tokens.advantages * tokens.logps)
    calls = (
        lambda: flat(grpo_loss)(**batch(given), config=config),
        lambda: both(given, expected=expectation),
    )
    with mode():
        out, (logps, _) = (call() for call in calls)
        custom = flat(grpo_loss)(**batch(given), objective=objective)
        assert [count_flops(call) for call in calls] == [2 * N * H * V] * 2
    assert not asked
    assert not (out.loss.requires_grad or logps.requires_grad or custom.loss.requires_grad)
    # Triton's fused kernel rounds the ratio otherwise than what evaluates
    rtol = 2e-6 if every_backend == "triton" else 0
    assert_close(out.loss, trained.loss.detach(), rtol=rtol, atol=0)
    assert torch.equal(out.logps, trained.logps)


@on_every_backend
@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoint_and_saved_tensor_hooks(engine: str) -> None:
    frozen, options = engine_options(engine)
    given = head(torch.float32, frozen)

    def call(*leaves: Tensor) -> Tensor:
        named = dict(zip(HEAD, leaves, strict=True))
        logps, _ = both(named, expected=options["expected"])
        logps.mul_(0.5)  # the caller may
        return losses(engine, named) + logps.dot(torch.linspace(-1, 2, N))

    call(*given.values()).backward()
    want = grads(given)
    for reentrant in (False, True):
        checkpoint(call, *given.values(), use_reentrant=reentrant).backward()
        assert same_bits(grads(given), want)
    for hooks in (save_on_cpu(), saved_tensors_hooks(torch.clone, torch.clone)):
        with hooks:
            loss = call(*given.values())
        loss.backward()
        assert same_bits(grads(given), want)


@pytest.mark.parametrize("engine", ENGINES)
def test_head_changed_in_place_after_the_forward(engine: str) -> None:
    """An error where the backward needs the old values, else the gradient of the forward."""
    for name in HEAD:
        given = head(torch.float32, engine_options(engine)[0])
        losses(engine, given).backward()
        want = grads(given)
        loss = losses(engine, given)
        with torch.no_grad():
            given[name].add_(1.0)
        if engine == "two_pass":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:  # whose gradient was stored
            loss.backward()
            assert same_bits(grads(given), want)


@on_every_backend
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_of_the_callers_is_written_or_read_again(engine: str) -> None:
    given = head(torch.float32, engine_options(engine)[0])
    inputs = batch(given, importance_sampling_ratio=torch.rand(2, N // 2))
    inputs["completion_ids"] = inputs["completion_ids"].clone()
    before = {name: x.detach().clone() for name, x in inputs.items()}

    def call() -> Tensor:
        return flat(grpo_loss)(**inputs, engine=engine).loss

    call().backward()
    want = grads(given)
    assert all(torch.equal(x, before[name]) for name, x in inputs.items())
    loss = call()
    for name in inputs.keys() - {*HEAD}:
        inputs[name].zero_()
    loss.backward()
    assert same_bits(grads(given), want)


TWICE: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "logps": lambda given: both(given)[0].square().sum(),
    "kept sets": lambda given: both(given, kept_ids=torch.stack([IDS, (IDS + 1) % V], 1))[0].sum(),
    **{x: partial(losses, x) for x in ("one_pass", "two_pass", "frozen")},
}


@pytest.mark.parametrize("of", TWICE)
def test_double_backward_and_several_gradients_at_once_raise(of: str) -> None:
    """A penalty on a gradient is an error, whichever input it is differentiated by."""
    given = head(frozen="weight bias" if of == "frozen" else "")
    scale = torch.tensor(2.0).requires_grad_()
    loss, leaves = TWICE[of](given) * scale, [x for x in given.values() if x.requires_grad]
    several, ones = {"is_grads_batched": True, "retain_graph": True}, torch.ones(3).to(loss.dtype)
    with pytest.raises(RuntimeError, match=r"grpo_kernels: several gradients at once"):
        torch.autograd.grad(loss, leaves, ones, **several)
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    for gradient, asked in itertools.product(gradients, (*leaves, scale)):
        whole = gradient.square().sum() + asked.square().sum()
        with pytest.raises(RuntimeError, match="twice"):
            torch.autograd.grad(whole, asked, allow_unused=True, retain_graph=True)


def test_a_term_of_the_results_beside_the_loss_raises() -> None:
    """They have no gradient, and hold no graph of the loss."""
    given = head()
    out = flat(grpo_loss)(**batch(given))
    with pytest.raises(RuntimeError, match=r"out.entropies: .* set entropy_coef"):
        (out.loss - 0.1 * out.entropies.mean()).backward()
    given = head()
    old, hidden = flat(grpo_loss)(**batch(given)).logps, weakref.ref(given.pop("hidden"))
    gc.collect()
    assert hidden() is None and old.isfinite().all()
    with torch.no_grad():
        assert not flat(grpo_loss)(**batch(head())).logps.requires_grad


@pytest.mark.parametrize("engine", ["one_pass", "two_pass"])
def test_an_upstream_gradient_that_is_nan(engine: str) -> None:
    """It reaches what counts, and no masked position."""
    tensors, mask = head(), torch.arange(N) % 3 > 0
    given = batch(tensors, completion_mask=mask.view(2, -1))
    (flat(grpo_loss)(**given, engine=engine).loss * torch.nan).backward()
    assert torch.equal(tensors["hidden"].grad.isnan().any(-1), mask)


def far(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


@pytest.mark.parametrize("engine", ["one_pass", "two_pass"])
def test_fp16_gradients_survive_under_a_loss_scale(engine: str) -> None:
    """The scale enters before the rounding: what would be flushed without it is not with it."""
    options = {"dtype": torch.float16, "num_items": 2e5, "bias": True, "entropy_coef": 1e-4}
    case, scale = make_case("fp16", b=8, t=16, **options), 65536.0
    want = run(case.to(torch.float32))[1]
    scaled, unscaled = run(case, engine, scale)[1], run(case, engine)[1]
    for name in HEAD:
        assert far(scaled[name].double() / scale, want[name]) < 1e-3
    assert far(unscaled["hidden"], want["hidden"]) > 1e-2  # the case is a hard one
    assert int((scaled["hidden"] == 0).sum()) == int((want["hidden"] == 0).sum())


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["one_pass", "two_pass"])
def test_autocast(engine: str, lower: torch.dtype) -> None:
    """The bits of explicit casts; gradients come in each tensor's own dtype."""
    case = make_case("autocast", b=3, bias=True, beta=0.1, entropy_coef=0.01)
    for kinds in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        given = case.but(hidden=case.hidden.to(kinds[0]), weight=case.weight.to(kinds[1]))
        cast = given.but(hidden=given.hidden.to(lower), weight=given.weight.to(lower))
        with torch.autocast("cpu", dtype=lower):
            out, grads = run(given, engine)
        want, want_grads = run(cast, engine)
        assert torch.equal(out.loss, want.loss) and torch.equal(out.logps, want.logps)
        assert out.loss.dtype == torch.float32
        for name in HEAD:
            assert grads[name].dtype == getattr(given, name).dtype
            dtypes = grads[name].dtype, want_grads[name].dtype
            coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
            assert far(grads[name], want_grads[name]) < max(coarsest, 1e-6)
