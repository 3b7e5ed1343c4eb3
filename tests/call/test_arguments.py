"""Wrong arguments: each is refused by name, before any product, and nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import (
    Expectation,
    GRPOLoss,
    LossConfig,
    Run,
    grpo_loss,
    linear_logprob,
    policy_expectation,
    policy_loss_from_logps,
)
from tests.support.flat import flat
from tests.support.small_batch import OPTIONAL, small_batch

B, T, H, V = 3, 5, 8, 11
NAN, INF = float("nan"), float("inf")


def valid(call: str) -> dict[str, Any]:
    """Arguments that `call` takes; "packed" is `grpo_loss` with cu_seqlens."""
    names = ("hidden", "weight", "bias")
    inputs = small_batch(B, T, H, V, OPTIONAL, trains=names, num_items_in_batch=9)
    inputs["completion_mask"][1, 3:] = 0
    head, ids = {name: inputs.pop(name) for name in names}, inputs.pop("completion_ids")
    if call == "logprob":
        mask, temperature = inputs["completion_mask"], inputs["importance_sampling_ratio"]
        expected = inputs["old_per_token_logps"]
        return {**head, "ids": ids, "mask": mask, "temperature": temperature, "expected": expected}
    config = LossConfig(beta=0.1, off_policy_mask_threshold=0.5, entropy_coef=0.01)
    if call == "expectation":
        return {"config": LossConfig(beta=0.1), **inputs}
    if call != "packed":
        return {**head, "completion_ids": ids, **inputs, "config": config}
    packed = {
        name: x.detach().flatten(0, 1)
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.dim() == 2
    }
    hidden = head["hidden"].detach().reshape(B * T, H).requires_grad_()
    bounds = torch.arange(0, B * T + 1, T, dtype=torch.int32)
    return {
        **head, "hidden": hidden, "completion_ids": ids.flatten(), **inputs, **packed,
        "config": config, "cu_seqlens": bounds,
    }  # fmt: skip


CALLS: dict[str, Callable[..., Any]] = {
    "loss": flat(grpo_loss),
    "packed": flat(grpo_loss),
    "module": lambda config, engine="auto", **inputs: flat(GRPOLoss(config, run=Run(engine)))(
        **inputs
    ),
    "logprob": flat(linear_logprob),
    "expectation": policy_expectation,
}


# what is made of a valid tensor, the error that it is, and what the message says that came, if not
# a tensor's looks
KINDS: dict[str, tuple[Any, ...]] = {
    "none": (lambda x: None, TypeError, "NoneType"),
    "list": (lambda x: x.tolist(), TypeError, "list"),
    "array": (lambda x: x.detach().numpy(), TypeError, "ndarray"),
    "number": (lambda x: 0.5, TypeError, "float"),
    "text": (lambda x: "vllm", TypeError, "str"),
    "int": (lambda x: x.detach().long(), TypeError),
    "int32": (lambda x: x.detach().int(), TypeError),
    "bool": (lambda x: x > 0, TypeError),
    "float": (lambda x: x.float(), TypeError),
    "float8": (lambda x: x.detach().to(torch.float8_e4m3fn), TypeError),
    "complex": (lambda x: x.detach().to(torch.complex64), TypeError),
    "sparse": (lambda x: x.detach().to_sparse(), TypeError),
    "csr": (lambda x: x.detach().to_sparse_csr(), TypeError),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x.detach()), layout=torch.jagged),
     TypeError),
    "meta": (lambda x: x.detach().to("meta"), ValueError),
    "first": (lambda x: x[0], ValueError),
    "first_row": (lambda x: x[:1], ValueError),
    "first_column": (lambda x: x[:, :1], ValueError),
    "per_sequence": (lambda x: x[:, 0], ValueError),
    "per_token": (lambda x: x[:, None].expand(-1, T), ValueError),
    "scalar": (lambda x: x.flatten()[0], ValueError),
    "nested": (lambda x: x[None], ValueError),
    "column": (lambda x: x[:, None], ValueError),
    "columns": (lambda x: x[:, :2], ValueError),
    "fewer": (lambda x: x[:-1], ValueError),
    "shorter": (lambda x: x[..., :-1], ValueError),
    "flat": (lambda x: x.flatten(), ValueError),
    "padded": (lambda x: x.view(B, T, *x.shape[1:]), ValueError),
    "transposed": (lambda x: x.detach().T, ValueError),
    "empty": (lambda x: x.detach().new_empty(0), ValueError),
}  # fmt: skip
# call, argument, and the kinds that it must not be
TENSORS = [
    ("loss", "hidden", "none array first nested int float8 complex sparse jagged meta"),
    ("loss", "weight", "list transposed shorter first int32 sparse csr meta"),
    ("loss", "bias", "shorter number empty"),
    ("loss", "completion_ids", "float bool list shorter flat meta"),
    ("loss", "completion_mask", "list per_sequence complex sparse meta"),
    ("loss", "advantages", "fewer column scalar number meta"),
    ("loss", "old_per_token_logps", "shorter int"),
    ("loss", "ref_per_token_logps", "meta"),
    ("loss", "sampling_per_token_logps", "flat text"),
    ("loss", "importance_sampling_ratio", "columns first_row bool"),
    ("packed", "hidden", "nested padded"),
    ("packed", "advantages", "per_token"),
    ("packed", "ref_per_token_logps", "padded"),
    ("packed", "importance_sampling_ratio", "padded"),
    ("packed", "cu_seqlens", "list nested meta"),
    ("logprob", "hidden", "meta"),
    ("logprob", "weight", "complex"),
    ("logprob", "bias", "int meta"),
    ("logprob", "ids", "float transposed"),
    ("logprob", "mask", "shorter list"),
    ("logprob", "temperature", "first_column scalar int32 meta"),
    ("logprob", "expected", "shorter scalar number complex meta"),
    ("expectation", "completion_mask", "list first"),
    ("expectation", "advantages", "fewer"),
    ("expectation", "old_per_token_logps", "int"),
    ("expectation", "ref_per_token_logps", "shorter"),
    ("expectation", "importance_sampling_ratio", "columns"),
]


@dataclass(frozen=True)
class Wrong:
    """`change`: the value, or a function of the valid one; `also` goes with it."""

    call: str
    argument: str
    change: Any
    error: type[Exception] = ValueError
    # what the message says that came, if not a tensor's shape, dtype, device or the value
    got: str | None = None
    also: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.call}-{self.argument}"


def with_id(value: int) -> Callable[[Tensor], Tensor]:
    """The ids with `value` at a counted position."""

    def change(ids: Tensor) -> Tensor:
        ids = ids.clone()
        ids.view(-1)[2] = value
        return ids

    return change


never_called = lambda x: x  # noqa: E731
OF_A_KIND = [
    Wrong(call, argument, *KINDS[kind])
    for call, argument, kinds in TENSORS
    for kind in kinds.split()
]
VALUES = [
    Wrong("loss", "weight", lambda x: x.detach().new_empty(0), got="ZeRO-3"),
    Wrong("logprob", "weight", lambda x: x.detach().new_empty(0, H), got="ZeRO-3"),
    Wrong("logprob", "hidden", lambda x: x[0, 0], also={"ids": torch.tensor(1)}),
    *(Wrong("loss", "completion_ids", with_id(x), got=str(x)) for x in (-1, V, -100)),
    Wrong("packed", "completion_ids", with_id(2**40), got=str(2**40)),
    Wrong("logprob", "ids", with_id(V), got=str(V)),
    Wrong("logprob", "ids", with_id(-100), got="-100", also={"mask": None}),
    *(Wrong(call, "ref_per_token_logps", None, got="None") for call in ("loss", "module",
     "expectation")),
    Wrong("packed", "cu_seqlens", lambda x: x.float()),
    Wrong("packed", "cu_seqlens", lambda x: x[:0]),
    Wrong("packed", "cu_seqlens", lambda x: x + 1, got="[1, 6, 11, 16]"),
    Wrong("packed", "cu_seqlens", lambda x: x[:-1], got="[0, 5, 10]"),
    Wrong("packed", "cu_seqlens", torch.tensor([0, 9, 4, 15]), got="[0, 9, 4, 15]"),
]  # fmt: skip

SETTINGS = [
    Wrong("loss", "num_items_in_batch", -1),
    Wrong("loss", "num_items_in_batch", torch.tensor(INF), got="inf"),
    Wrong("loss", "num_items_in_batch", torch.ones(2)),
    Wrong("loss", "num_items_in_batch", "9", TypeError),
    Wrong("loss", "num_items_in_batch", True, TypeError),
    Wrong("loss", "num_items_in_batch", torch.tensor(9.0, device="meta")),
    Wrong("loss", "config", {"loss_type": "grpo"}, TypeError, "dict"),
    Wrong("loss", "objective", 3, TypeError, "int"),
    Wrong("loss", "engine", "fast"),
    Wrong("loss", "engine", None),
    Wrong("loss", "backend", "cuda"),
    Wrong("loss", "workspace_bytes", 0),
    Wrong("loss", "workspace_bytes", 2.0**20, TypeError),
    Wrong("loss", "workspace_bytes", True, TypeError),
    Wrong("module", "engine", "fast"),
    Wrong("logprob", "engine", "one-pass"),
    Wrong("logprob", "workspace_bytes", "1GB", TypeError),
    Wrong("logprob", "temperature", 0.0),
    Wrong("logprob", "temperature", NAN),
    Wrong("logprob", "temperature", "1", TypeError),
    Wrong("logprob", "temperature", lambda x: x - 50.0, got="-"),
    Wrong("logprob", "temperature", lambda x: x * NAN, got="nan"),
    Wrong("logprob", "final_logit_softcapping", 0.0),
    Wrong("logprob", "logit_scale", INF),
    Wrong("logprob", "logits_dtype", "bfloat16"),
    Wrong("logprob", "logits_dtype", torch.float32),
    Wrong("logprob", "vocab_size", 0),
    Wrong("logprob", "vocab_size", 2.0),
    Wrong("logprob", "extras", ("is_top1", "top1"), got="['top1']"),
    Wrong("logprob", "expected", lambda x: (x, x, x)),
    Wrong("logprob", "expected[1]", lambda x: (x, x[:, 1:]), got=str((B, T - 1))),
    Wrong("logprob", "expected[1]", lambda x: (x, 1.0), TypeError, "float"),
    Wrong("logprob", "expected.graded", lambda x: Expectation(never_called, graded=x[:1] > 0),
     got=str((1, T))),
    Wrong("expectation", "config", None, TypeError, "NoneType"),
    Wrong("expectation", "num_items_in_batch", -1),
]  # fmt: skip

CONFIG: list[tuple[str, Any, type[Exception]]] = [
    *[("loss_type", x, ValueError) for x in ("ppo", None, 3)],
    ("importance_sampling_level", "batch", ValueError),
    ("kl_estimator", "k4", ValueError),
    *[("epsilon", x, ValueError) for x in (-0.1, NAN, INF)],
    *[("epsilon", x, TypeError) for x in (None, "0.2", True, torch.tensor(0.2))],
    *[("epsilon_high", x, ValueError) for x in (-1.0, NAN)],
    *[("delta", x, ValueError) for x in (0.0, NAN)],
    *[("beta", x, ValueError) for x in (-0.04, NAN, INF)],
    ("beta", None, TypeError),
    ("use_bias_correction_kl", 1, TypeError),
    *[("temperature", x, ValueError) for x in (0, -1.0, NAN)],
    ("temperature", None, TypeError),
    *[("top_entropy_quantile", x, ValueError) for x in (1.1, -0.1, NAN)],
    ("entropy_coef", NAN, ValueError),
    ("off_policy_mask_threshold", INF, ValueError),
    ("off_policy_mask_threshold", [0.1], TypeError),
    ("max_completion_length", 0, ValueError),
    ("max_completion_length", 5.0, TypeError),
    ("sapo_temperature_pos", 0.0, ValueError),
    ("sapo_temperature_neg", -1.0, ValueError),
    ("vespo_k_neg", -1.0, ValueError),
    ("vespo_lambda_pos", NAN, ValueError),
]


def tensors(given: dict[str, Any]) -> dict[str, Tensor]:
    """The plain tensors among the arguments, whose bits can be looked at."""
    return {
        k: x
        for k, x in given.items()
        if type(x) is Tensor and x.layout is torch.strided and not x.is_meta
    }


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, whatever its strides: NaN equals NaN, 0 is not -0."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def refuse(
    call: str, argument: str, given: dict[str, Any], error: type[Exception], got: str | None
) -> None:
    """`given` raises `error`, which names the argument; nothing was done."""
    before = {name: x.detach().clone() for name, x in tensors(given).items()}
    with (
        pytest.raises((TypeError, ValueError)) as raised,
        FlopCounterMode(display=False) as counter,
    ):
        CALLS[call](**given)
    assert type(raised.value) is error
    message, value = str(raised.value), given.get(argument)
    assert message.startswith(f"{argument}: "), message
    assert re.search(r"expected .+, got .+", message), message
    came = message.split(", got ", 1)[1]
    if got is not None:
        assert got in message, message
    elif isinstance(value, Tensor):
        shape = "" if value.is_nested else str(tuple(value.shape))
        assert any(
            x and x in came for x in (shape, str(value.dtype), value.device.type, str(value.layout))
        ), message
    else:
        assert repr(value) in came or type(value).__name__ in came, message
    assert counter.get_total_flops() == 0
    for name, x in tensors(given).items():
        assert torch.equal(bits(x), bits(before[name])), name
        assert not x.is_leaf or x.grad is None, name


def good() -> list[Tensor]:
    """All results of one good call, `grpo_loss` and `linear_logprob`."""
    given, other = valid("loss"), valid("logprob")
    out = flat(grpo_loss)(**given)
    scores = flat(linear_logprob)(**other)
    logps, entropies = scores.logps, scores.entropies
    (out.loss + (logps * logps.detach()).sum() + entropies.sum()).backward()
    grads = [x[name].grad for x in (given, other) for name in ("hidden", "weight", "bias")]
    return [
        out.loss,
        out.per_token_logps,
        out.entropies,
        *dict(out.metrics).values(),
        logps,
        entropies,
        *grads,
    ]


@pytest.fixture(scope="module")
def first() -> list[Tensor]:
    return good()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("wrong", [*OF_A_KIND, *VALUES, *SETTINGS], ids=str)
def test_wrong_argument(wrong: Wrong, first: list[Tensor]) -> None:
    given = valid(wrong.call)
    field = re.split(r"[.\[]", wrong.argument)[0]
    value = wrong.change
    given[field] = value(given[field]) if callable(value) else value
    refuse(wrong.call, wrong.argument, given | (wrong.also or {}), wrong.error, wrong.got)


@pytest.mark.parametrize(
    ("field", "value", "error"), CONFIG, ids=lambda x: str(getattr(x, "__name__", x))
)
def test_wrong_config(field: str, value: Any, error: type[Exception]) -> None:
    for make in (LossConfig, GRPOLoss):
        with pytest.raises(error, match=rf"^{field}: expected .+, got ") as raised:
            make(**{field: value})
        assert repr(value) in str(raised.value)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if dist.is_initialized():
        pytest.fail("a process group is left over from another test")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "argument", ["hidden", "weight", "bias", "completion_ids", "completion_mask", "advantages"]
)
def test_dtensor(argument: str, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    given = valid("loss")
    given[argument] = distribute_tensor(given[argument].detach(), mesh, [Shard(0)])
    refuse("loss", argument, given, ValueError, "DTensor")


@pytest.mark.parametrize("engine", ["score", "one_pass", "frozen"])
def test_engine_that_cannot(engine: str) -> None:
    for call, extra in (
        ("logprob", {"expected": None}),
        ("loss", {"config": LossConfig(loss_type="vespo")}),
    ):
        given = {**valid(call), **extra, "engine": engine}
        with pytest.raises(ValueError, match=f"^engine: .*{engine}.* needs "):
            CALLS[call](**given)
        assert all(x.grad is None for x in tensors(given).values() if x.is_leaf)


OBJECTIVES = {
    "a scalar": lambda tokens: tokens.logps.sum(),
    "None": lambda tokens: None,
    "a constant": lambda tokens: torch.ones_like(tokens.logps),
    "too long": lambda tokens: tokens.logps[..., None],
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_wrong_objective(kind: str) -> None:
    given = valid("loss")
    with pytest.raises(ValueError, match=r"^objective: expected .+ tokens\.logps"):
        flat(grpo_loss)(**given | {"config": LossConfig()}, objective=OBJECTIVES[kind])


@pytest.mark.parametrize(
    "term", [{"beta": 0.1}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}, {"delta": 2.0}]
)
def test_terms_that_an_objective_replaces(term: dict[str, float]) -> None:
    given = valid("loss") | {"config": LossConfig(**term)}
    with pytest.raises(
        ValueError, match=rf"^{next(iter(term))}: expected .+ beside an objective, .+ got "
    ):
        flat(grpo_loss)(**given, objective=lambda tokens: tokens.logps)
    assert all(x.grad is None for x in tensors(given).values() if x.is_leaf)


def test_next_good_call_gives_the_same_bits(first: list[Tensor]) -> None:
    """After all of the above, and right after a failure in the middle of a forward."""
    for wrong in (*OF_A_KIND[:2], *SETTINGS[:2]):
        test_wrong_argument(wrong, first)
    test_wrong_objective("a scalar")
    assert all(torch.equal(x, y) for x, y in zip(first, good(), strict=True))


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_the_output_says_which_backend_it_was(backend: str) -> None:
    out = flat(grpo_loss)(**small_batch(), backend=backend)
    assert out.backend == backend
    given = out.per_token_logps, out.entropies, torch.ones(2, 5), torch.ones(2)
    assert policy_loss_from_logps(*given).backend == "torch"
