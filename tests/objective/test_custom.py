"""Custom objectives: without gradient, as methods, and held to their declarations."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import GRPOLoss, LossOutput, Run, TokenInputs, grpo_loss, objectives, token_level
from grpo_kernels.testing import check_token_level
from tests.support.small_batch import small_batch


class Scaled:
    def loss(self, tokens: TokenInputs) -> Tensor:
        return -2 * tokens.advantages * tokens.logps


def training_batch(rows: int = 4, columns: int = 6) -> dict[str, Any]:
    mask = torch.ones(rows, columns, dtype=torch.bool)
    given = small_batch(rows, columns, completion_mask=mask, trains=("hidden", "weight"))
    return given | {"head": given.pop("weight")}


def run(inputs: dict[str, Any], objective: Any) -> tuple[LossOutput, list[Tensor]]:
    """The output, and the loss with its gradients in hidden states and head."""
    out = grpo_loss(**inputs, objective=objective)
    gradients = torch.autograd.grad(out.loss, (inputs["hidden"], inputs["head"]))
    return out, [out.loss.detach(), *gradients]


def test_a_method_and_no_gradient() -> None:
    """no_grad and inference_mode give the value, of a coupled function too; a method can be
    declared token-level."""
    inputs = training_batch()
    want = grpo_loss(**inputs, objective=Scaled().loss)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found = grpo_loss(**inputs, objective=Scaled().loss).loss
            torch.testing.assert_close(found, want.loss.detach())
    declared = grpo_loss(**inputs, objective=token_level(Scaled().loss))
    assert (want.engine, declared.engine) == ("two_pass", "one_pass")
    assert not hasattr(Scaled.loss, "token_level")  # the user's own function is left as it was
    torch.testing.assert_close(declared.loss, want.loss)


@pytest.mark.parametrize("declare", [token_level, lambda function: function])
def test_a_function_may_write_into_its_inputs(declare: Any) -> None:
    def writes(tokens: TokenInputs) -> Tensor:
        old, advantages = tokens.old_per_token_logps, tokens.advantages
        old += 0.1
        advantages[advantages < 0] *= 0.5
        return -advantages * (tokens.logps - old).exp()

    def copies(tokens: TokenInputs) -> Tensor:
        advantages = torch.where(tokens.advantages < 0, 0.5, 1.0) * tokens.advantages
        return -advantages * (tokens.logps - tokens.old_per_token_logps - 0.1).exp()

    inputs = training_batch()
    (one, found), (other, want) = (run(inputs, declare(x)) for x in (writes, copies))
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(dict(one.metrics), dict(other.metrics))


def test_a_parameter_of_its_own_is_refused() -> None:
    """It would get no gradient; also where it is reached through a module, or trains together with
    `logps`."""
    scale, layer = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Linear(1, 1)
    for function in (
        lambda tokens: -scale * tokens.advantages * tokens.logps,
        lambda tokens: tokens.logps + layer(tokens.advantages[..., None])[..., 0],
        token_level(lambda tokens: tokens.logps * scale.exp()),
    ):
        message = r"objective: expected no tensor that trains but tokens\.logps"
        with pytest.raises(ValueError, match=message):
            grpo_loss(**training_batch(), objective=function)
    grpo_loss(**training_batch(), objective=lambda tokens: -scale.detach() * tokens.logps)


@pytest.mark.parametrize("lengths", [(6, 6, 6, 6), (5, 6, 13)], ids=["padded", "packed"])
def test_tokens_know_their_place(lengths: tuple[int, ...]) -> None:
    """Numbers of a sequence, a column or a token reach their tokens, as the same numbers do as
    advantages."""
    inputs = training_batch()
    inputs["completion_mask"] = torch.rand(4, 6) > 0.3
    of_sequence, of_column = torch.randn(len(lengths)), torch.randn(max(lengths))
    of_token = torch.cat([of_sequence[i] * of_column[:n] for i, n in enumerate(lengths)])
    inputs["advantages"] = of_token.view(4, 6)
    if len(set(lengths)) > 1:
        for name in ("hidden", "completion_ids", "advantages", "completion_mask"):
            x = inputs[name]
            inputs[name] = x.detach().flatten(0, 1).requires_grad_(x.requires_grad)
        inputs["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)

    def by_place(tokens: TokenInputs) -> Tensor:
        return -of_sequence[tokens.sequence] * of_column[tokens.position] * tokens.logps

    def by_index(tokens: TokenInputs) -> Tensor:
        assert tokens.index.shape == tokens.logps.shape
        assert tokens.index.dtype == torch.int64
        return -of_token[tokens.index] * tokens.logps

    _, want = run(inputs, lambda tokens: -tokens.advantages * tokens.logps)
    for objective in (by_place, by_index, token_level(by_place), token_level(by_index)):
        torch.testing.assert_close(run(inputs, objective)[1], want)


def test_a_token_level_function_is_told_what_it_gets() -> None:
    bonus = torch.arange(6.0)
    message = r"objective: expected a function of .* tokens, .*\(T,\)\[tokens.position\]"
    with pytest.raises(ValueError, match=message):
        grpo_loss(**training_batch(), objective=token_level(lambda x: -x.logps * bonus))


REPLACED: dict[str, Any] = {
    "epsilon": 0.1, "epsilon_high": 0.28, "importance_sampling_level": "sequence",
    "kl_estimator": "k1", "vllm_importance_sampling_clip_max": 2.0, "sapo_temperature_pos": 2.0,
    "beta": 0.1, "delta": 2.0, "entropy_coef": 0.1, "top_entropy_quantile": 0.5,
}  # fmt: skip


def test_fields_without_use_are_refused() -> None:
    """Those of the config's own loss, unless the function reads it; two of a whole call, always."""
    inputs = training_batch() | {"ref_per_token_logps": -torch.ones(4, 6)}
    reads = lambda tokens: tokens.loss  # noqa: E731
    for name, value in REPLACED.items():
        message = f"^{name}: expected .* with an objective.*, got {value!r}"
        with pytest.raises(ValueError, match=message):
            grpo_loss(**inputs, objective=Scaled().loss, **{name: value})
        if name != "entropy_coef":
            grpo_loss(**inputs, objective=reads, **{name: value})
    for options in ({"entropy_coef": 0.1}, {"kl_estimator": "full", "beta": 0.1}):
        named = r"^(entropy_coef|kl_estimator): expected .* with an objective"
        with pytest.raises(ValueError, match=named):
            GRPOLoss(objective=reads, **options)


def test_a_loss_type_of_which_only_the_normalizer_is_used_warns(forget_warnings: Any) -> None:
    for name, plain in (("sapo", "grpo"), ("vespo", "dapo"), ("gmpo", "grpo")):
        message = rf"loss_type: '{name}' only sets the normalizer .*; pass '{plain}'"
        with pytest.warns(UserWarning, match=message):
            grpo_loss(**training_batch(), objective=Scaled().loss, loss_type=name)
    with pytest.warns(UserWarning, match=r"max_completion_length: not used by loss_type = 'dapo'"):
        grpo_loss(**training_batch(), objective=Scaled().loss, max_completion_length=9)


OWN: dict[str, dict[str, Any]] = {
    "dapo": {}, "kl": {"beta": 0.1}, "paper": {"loss_type": "grpo", "beta": 0.04},
    "sapo": {"loss_type": "sapo"}, "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sampled tokens": {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
    },
}  # fmt: skip
COUPLED_CONFIGS: dict[str, dict[str, Any]] = {
    "sequence": {"importance_sampling_level": "sequence", "epsilon": 0.01},
    "gmpo": {"loss_type": "gmpo"}, "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.01},
    "off-policy": {"off_policy_mask_threshold": 0.1}, "entropy": {"top_entropy_quantile": 0.5},
}  # fmt: skip
OF_SAMPLES = {"sampled sequences": {"vllm_importance_sampling_correction": True}}
CONFIGS = OWN | COUPLED_CONFIGS | OF_SAMPLES
WITH_SAMPLER = {"off-policy", "sampled tokens", "sampled sequences"}


def options_of(name: str, *, on_policy: bool, shape: tuple[int, int]) -> dict[str, Any]:
    old, ref, sampling = -2.0 - torch.rand(3, *shape)
    given = {"ref_per_token_logps": ref}
    if not on_policy:
        given["old_per_token_logps"] = old
    if name in WITH_SAMPLER:
        given["sampling_per_token_logps"] = sampling
    return given | CONFIGS[name]


@pytest.mark.parametrize("on_policy", [False, True], ids=["old", "on-policy"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_own_loss_can_be_built_on(name: str, on_policy: bool) -> None:
    """`tokens.loss` alone is the config's loss, with its gradient and metrics; a term beside it, or
    a factor that is not constant, adds its own."""
    inputs = training_batch(8, 16) | {"run": Run(workspace_bytes=2**11)}
    inputs |= options_of(name, on_policy=on_policy, shape=(8, 16))

    want, of_config = run(inputs, None)
    found, same = run(inputs, lambda tokens: tokens.loss)
    torch.testing.assert_close(same, of_config)
    assert {*found.metrics} == {*want.metrics}
    for k, x in want.metrics.items():
        if k != "rows/gradient":  # of a custom loss no token is known to have none
            torch.testing.assert_close(found.metrics[k], x, equal_nan=True)

    def penalty(tokens: TokenInputs) -> Tensor:
        return 0.5 * tokens.logps.square()

    _, both = run(inputs, lambda tokens: 2 * tokens.loss + penalty(tokens))
    for k in CONFIGS[name].keys() - {"loss_type"}:
        del inputs[k]
    _, alone = run(inputs, penalty)
    want_sum = [2 * x + y for x, y in zip(of_config, alone, strict=True)]
    torch.testing.assert_close(both, want_sum)


def penalized(tokens: TokenInputs, sizes: list[int] | None = None) -> Tensor:
    if sizes is not None:
        sizes.append(len(tokens.logps))
    return tokens.loss + 0.01 * tokens.logps.square()


@pytest.mark.parametrize("on_policy", [False, True], ids=["old", "on-policy"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_token_level_function_reads_no_loss_of_several_tokens(name: str, on_policy: bool) -> None:
    """One of a token alone in one pass of several chunks, also beside ratios of whole sequences
    that are constants."""
    inputs = training_batch(8, 16) | {"run": Run(workspace_bytes=2**11)}
    inputs |= options_of(name, on_policy=on_policy, shape=(8, 16))
    sizes = list[int]()
    objective = token_level(partial(penalized, sizes=sizes))
    if name in COUPLED_CONFIGS or (name in OF_SAMPLES and on_policy):
        with pytest.raises(ValueError, match=r"^tokens.loss: expected a loss of each token alone"):
            grpo_loss(**inputs, objective=objective)
        return
    (_, want), (out, found) = (run(inputs, each) for each in (penalized, objective))
    assert out.engine == "one_pass"
    assert sizes == [32, 32, 32, 32, 128]  # for the gradients, and for the loss
    torch.testing.assert_close(found, want)


def test_its_gradient_cannot_be_differentiated() -> None:
    inputs = training_batch() | {"old_per_token_logps": -2.0 - torch.rand(4, 6)}

    def with_its_norm(tokens: TokenInputs) -> Tensor:
        (gradient,) = torch.autograd.grad(tokens.loss.sum(), tokens.logps, create_graph=True)
        return tokens.loss + gradient.square()

    with pytest.raises(RuntimeError, match=r"^tokens\.loss: expected to be differentiated once"):
        grpo_loss(**inputs, objective=with_its_norm)


def test_options_without_use_or_out_of_range_are_named_where_the_loss_is_read(
    forget_warnings: Any,
) -> None:
    ratio, level = {"importance_sampling_ratio": torch.ones(4, 6)}, "importance_sampling_level"
    apart = {"advantages": torch.randn(4, 6), level: "sequence"}
    wide = {"old_per_token_logps": -2.0 - torch.rand(4, 6), "epsilon_high": 1.28}
    for options, message in (
        ({"vllm_importance_sampling_mode": "token_mask"}, "vllm_importance_sampling_mode: not"),
        ({"loss_type": "gmpo", **ratio}, "importance_sampling_ratio: not used by loss_type"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold: drops nothing"),
        (apart, "advantages: they differ within a sequence"),
        (wide, "epsilon_high: the upper bound of the ratio"),
    ):
        with pytest.warns(UserWarning, match=message):
            grpo_loss(**{**training_batch(), **options}, objective=lambda tokens: tokens.loss)


def test_a_chunk_without_a_gradient_is_found() -> None:
    """One sequence per chunk: its advantages are equal, so their deviation is 0."""

    @token_level
    def normalized(tokens: TokenInputs) -> Tensor:
        deviation = tokens.advantages - tokens.advantages.mean()
        return -tokens.logps * deviation / tokens.advantages.std()

    given = training_batch(64, 64)
    with pytest.raises(ValueError, match=r"^objective: expected a loss of each token alone"):
        grpo_loss(**given, objective=normalized, run=Run(workspace_bytes=2**14))


def test_inputs_that_the_function_does_not_read_are_named(forget_warnings: Any) -> None:
    ones = torch.ones(4, 6)
    for name in ("ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"):
        given = {**training_batch(), name: ones if name.endswith("ratio") else -ones}
        with pytest.warns(UserWarning, match=f"{name}: not used by the objective"):
            grpo_loss(**given, objective=lambda tokens: -tokens.logps)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not used by the objective")
            reads = lambda tokens, name=name: -tokens.logps * getattr(tokens, name)  # noqa: E731
            grpo_loss(**given, objective=reads)


def test_the_loss_is_read_from_the_tokens_of_the_call() -> None:
    def of_a_copy(tokens: TokenInputs) -> Tensor:
        assert repr(tokens).startswith("TokenInputs(logps=(4, 6), entropies=(4, 6), "), "no numbers"
        return replace(tokens, mask=tokens.mask).loss

    with pytest.raises(ValueError, match=r"^tokens\.loss: expected to be read from the"):
        grpo_loss(**training_batch(), objective=of_a_copy)


def coupled_by_mean(tokens: TokenInputs) -> Tensor:
    return -tokens.advantages * (tokens.logps - tokens.logps.mean())


def coupled_by_gradient(tokens: TokenInputs) -> Tensor:
    ratio = torch.exp(tokens.logps - tokens.old_per_token_logps)
    return -tokens.advantages * (ratio / ratio.mean())  # whose value is 0 on-policy


COUPLED = {
    "mean": coupled_by_mean,
    "gradient": coupled_by_gradient,
    "entropies": lambda tokens: -tokens.logps + tokens.entropies * tokens.entropies.sum(),
    "random": lambda tokens: torch.rand_like(tokens.logps) * tokens.logps,
}


@pytest.mark.parametrize("by", COUPLED)
def test_a_function_that_couples_tokens_is_found(by: str) -> None:
    message, function = "^check_token_level: expected each token's loss to depend", COUPLED[by]
    with pytest.raises(AssertionError, match=message):
        check_token_level(token_level(function))
    few = torch.tensor([[-1.0, -2.0], [0.5, 0.7], [1, 1], [2, -1], [-1.5, -1]])
    with pytest.raises(AssertionError, match=message):
        check_token_level(function, TokenInputs(*few, *[None] * 3))


@pytest.mark.filterwarnings("ignore:.*workspace_bytes is in bytes")
def test_a_declaration_that_chunks_contradict_is_refused_on_a_cpu() -> None:
    batch = {**training_batch(30, 100), "run": Run(workspace_bytes=16384)}
    for function in COUPLED.values():
        with pytest.raises(ValueError, match=r"^objective: expected a loss of each token alone"):
            grpo_loss(**batch, objective=token_level(function))
    old = -torch.rand(30, 100, generator=torch.Generator().manual_seed(0))
    for function in (penalized, objectives.ipo, objectives.dppo_kl, objectives.cispo_two_sided):
        given = {"old_per_token_logps": old, "sampling_per_token_logps": old}
        grpo_loss(**batch, **given, objective=function)


def test_functions_of_a_token_alone_pass() -> None:
    for name in ("ipo", "icepop_prime_rl", "kpop", "topr", "dppo_tv", "cispo_two_sided"):
        check_token_level(getattr(objectives, name))
    check_token_level(partial(objectives.topr, scores=torch.arange(99) % 7 - 3))
    bonus = torch.arange(9.0)
    check_token_level(token_level(lambda tokens: -tokens.logps * bonus[tokens.sequence]))
    check_token_level(penalized)
    check_token_level(coupled_by_mean, tolerance=1e9)
    with pytest.raises(AssertionError, match="expected a gradient, got 0 at every token"):
        check_token_level(lambda tokens: 0.0 * tokens.logps)
    with pytest.raises(AssertionError, match=r"of the shape of tokens.logps = \(99,\), got \(\)"):
        check_token_level(lambda tokens: tokens.logps.sum())
    with pytest.raises(AssertionError, match=r"a loss that depends on tokens.logps"):
        check_token_level(lambda tokens: tokens.advantages)
    alone = torch.full((1,), -0.5)
    with pytest.raises(ValueError, match=r"^tokens: expected at least two"):
        check_token_level(penalized, TokenInputs(*[alone] * 5, *[None] * 3))


def test_a_declaration_is_believed_and_nothing_is_run_twice() -> None:
    seen = []

    @token_level
    def counted(tokens: TokenInputs) -> Tensor:
        seen.append(len(tokens.logps))
        return coupled_by_mean(tokens)

    assert grpo_loss(**training_batch(), objective=counted).engine == "one_pass"
    assert len(seen) == 2  # a chunk's coefficients, and the loss
    declared = partial(token_level(Scaled().loss))  # what a partial is of decides
    assert grpo_loss(**training_batch(), objective=declared).engine == "one_pass"


def test_wrong_options_are_refused_when_a_loss_is_made() -> None:
    for wrong in (token_level, lambda x: GRPOLoss(objective=x)):
        message = r"^objective: expected a function of TokenInputs, got int"
        with pytest.raises(TypeError, match=message):
            wrong(3)  # type: ignore[arg-type, no-untyped-call]
