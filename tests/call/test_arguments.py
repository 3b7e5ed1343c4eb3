"""Wrong arguments: each is refused by name, before any product, and nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import Expectation, LossConfig, grpo_loss, linear_logps, policy_expectation
from tests.support.flat import flat
from tests.support.ranks import one_rank
from tests.support.row_cases import same
from tests.support.small_batch import OPTIONAL, small_batch

B, T, H, V = 3, 5, 8, 11
NAN, INF = float("nan"), float("inf")
HEAD = ("hidden", "weight", "bias")


def valid(call: str) -> dict[str, Any]:
    """Arguments that `call` takes; "packed" is `grpo_loss` with cu_seqlens."""
    inputs = small_batch(B, T, H, V, OPTIONAL, trains=HEAD, num_items_in_batch=9)
    inputs["completion_mask"][1, 3:] = 0
    head, ids = {name: inputs.pop(name) for name in HEAD}, inputs.pop("completion_ids")
    if call == "logprob":
        given = {"completion_ids": ids, "completion_mask": inputs["completion_mask"]}
        given |= {"temperature": inputs["importance_sampling_ratio"]}
        return {**head, **given, "expected": inputs["old_per_token_logps"]}
    if call == "expectation":
        return {"config": LossConfig(beta=0.1), **inputs}
    config = LossConfig(beta=0.1, off_policy_mask_threshold=0.5, entropy_coef=0.01)
    given = {**head, "completion_ids": ids, **inputs, "config": config}
    if call == "packed":
        for name, x in given.items():
            if isinstance(x, Tensor) and x.shape[:2] == (B, T):
                given[name] = x.detach().flatten(0, 1).requires_grad_(x.requires_grad)
        given["cu_seqlens"] = torch.arange(0, B * T + 1, T, dtype=torch.int32)
    return given


CALLS: dict[str, Callable[..., Any]] = {
    "loss": flat(grpo_loss),
    "packed": flat(grpo_loss),
    "logprob": flat(linear_logps),
    "expectation": policy_expectation,
}

# what is made of a valid tensor, the error that it is, and what the message says that came, if not
# a tensor's looks
KINDS: dict[str, tuple[Any, ...]] = {
    "none": (lambda x: None, TypeError, "NoneType"),
    "list": (lambda x: x.tolist(), TypeError, "list"),
    "number": (lambda x: 0.5, TypeError, "float"),
    "int": (lambda x: x.detach().long(), TypeError),
    "bool": (lambda x: x > 0, TypeError),
    "float": (lambda x: x.float(), TypeError),
    "complex": (lambda x: x.detach().to(torch.complex64), TypeError),
    "sparse": (lambda x: x.detach().to_sparse(), TypeError),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x.detach()), layout=torch.jagged),
     TypeError),
    "meta": (lambda x: x.detach().to("meta"), ValueError),
    "first": (lambda x: x[0], ValueError),
    "first_column": (lambda x: x[:, :1], ValueError),
    "per_sequence": (lambda x: x[:, 0], ValueError),
    "per_token": (lambda x: x[:, None].expand(-1, T), ValueError),
    "scalar": (lambda x: x.flatten()[0], ValueError),
    "nested": (lambda x: x[None], ValueError),
    "column": (lambda x: x[:, None], ValueError),
    "fewer": (lambda x: x[:-1], ValueError),
    "shorter": (lambda x: x[..., :-1], ValueError),
    "flat": (lambda x: x.flatten(), ValueError),
    "padded": (lambda x: x.view(B, T, *x.shape[1:]), ValueError),
    "transposed": (lambda x: x.detach().T, ValueError),
}  # fmt: skip
# call, argument, and the kinds that it must not be
TENSORS = [
    ("loss", "hidden", "none first nested int complex sparse jagged meta"),
    ("loss", "weight", "list transposed shorter first int meta"),
    ("loss", "bias", "shorter number"),
    ("loss", "completion_ids", "float bool list shorter meta"),
    ("loss", "completion_mask", "list per_sequence complex sparse"),
    ("loss", "advantages", "fewer column scalar number meta"),
    ("loss", "old_per_token_logps", "shorter int"),
    ("loss", "sampling_per_token_logps", "flat"),
    ("loss", "importance_sampling_ratio", "shorter bool"),
    ("packed", "hidden", "nested padded"),
    ("packed", "advantages", "per_token"),
    ("packed", "ref_per_token_logps", "padded"),
    ("packed", "cu_seqlens", "list nested meta"),
    ("logprob", "completion_ids", "float transposed"),
    ("logprob", "completion_mask", "shorter"),
    ("logprob", "temperature", "first_column scalar int"),
    ("logprob", "expected", "shorter scalar number complex"),
    ("expectation", "completion_mask", "list first"),
]


def with_id(value: int) -> Callable[[Tensor], Tensor]:
    return lambda ids: ids.flatten().index_fill(0, torch.tensor([2]), value).view(ids.shape)


# call, argument, the value or a function of the valid one, the error, and what the message says
# that came, if not the value
Wrong = tuple[Any, ...]
OF_A_KIND: list[Wrong] = [
    (call, argument, *KINDS[kind]) for call, argument, kinds in TENSORS for kind in kinds.split()
]
VALUES: list[Wrong] = [
    ("loss", "weight", lambda x: x.detach().new_empty(0), ValueError, "ZeRO-3"),
    ("logprob", "hidden", lambda x: x[0, 0], ValueError),
    *(("loss", "completion_ids", with_id(x), ValueError, str(x)) for x in (-1, V)),
    ("packed", "completion_ids", with_id(2**40), ValueError, str(2**40)),
    *((x, "ref_per_token_logps", None, ValueError, "None") for x in ("loss", "expectation")),
    ("packed", "cu_seqlens", lambda x: x.float(), ValueError),
    ("packed", "cu_seqlens", lambda x: x[:0], ValueError),
    ("packed", "cu_seqlens", lambda x: x + 1, ValueError, "[1, 6, 11, 16]"),
    ("packed", "cu_seqlens", lambda x: x[:-1], ValueError, "[0, 5, 10]"),
    ("packed", "cu_seqlens", torch.tensor([0, 9, 4, 15]), ValueError, "[0, 9, 4, 15]"),
    ("loss", "num_items_in_batch", -1, ValueError),
    ("loss", "num_items_in_batch", torch.tensor(INF), ValueError, "inf"),
    ("loss", "num_items_in_batch", torch.ones(2), ValueError),
    ("loss", "num_items_in_batch", "9", TypeError),
    ("loss", "num_items_in_batch", True, TypeError),
    ("loss", "objective", 3, TypeError, "int"),
    ("logprob", "temperature", 0.0, ValueError),
    ("logprob", "temperature", NAN, ValueError),
    ("logprob", "temperature", lambda x: x - 50.0, ValueError, "-"),
    ("logprob", "vocab_size", 0, ValueError),
    ("logprob", "extras", ("is_top1", "top1"), ValueError, "['top1']"),
    ("logprob", "expected", lambda x: (x, x, x), ValueError),
    ("logprob", "expected[1]", lambda x: (x, x[:, 1:]), ValueError, str((B, T - 1))),
    ("logprob", "expected[1]", lambda x: (x, 1.0), TypeError, "float"),
    ("logprob", "expected.live", lambda x: Expectation(lambda x: x, live=x[:1] > 0), ValueError,
     str((1, T))),
    ("expectation", "config", None, TypeError, "NoneType"),
]  # fmt: skip

CONFIG: list[tuple[str, type[Exception], tuple[Any, ...]]] = [
    ("loss_type", ValueError, ("ppo", None, 3)),
    ("epsilon", ValueError, (-0.1, NAN, INF)),
    ("epsilon", TypeError, (None, "0.2", True, torch.tensor(0.2), np.array([0.25]))),
    ("epsilon_high", ValueError, (-1.0,)),
    ("delta", ValueError, (0.0, NAN)),
    ("beta", ValueError, (-0.04, NAN, INF)),
    ("beta", TypeError, (None,)),
    ("use_bias_correction_kl", TypeError, (1,)),
    ("temperature", ValueError, (0, -1.0, NAN)),
    ("top_entropy_quantile", ValueError, (1.1, -0.1, NAN)),
    ("entropy_coef", ValueError, (NAN,)),
    ("off_policy_mask_threshold", ValueError, (INF,)),
    ("max_completion_length", ValueError, (0,)),
    ("max_completion_length", TypeError, (5.0,)),
    ("sapo_temperature_pos", ValueError, (0.0,)),
    ("vespo_k_neg", ValueError, (-1.0,)),
]


def tensors(given: dict[str, Any]) -> dict[str, Tensor]:
    plain = {name: x for name, x in given.items() if type(x) is Tensor and not x.is_meta}
    return {name: x for name, x in plain.items() if x.layout is torch.strided}


def refuse(call, argument, given, error, got):
    """`given` raises `error`, which names the argument; nothing was done."""
    before = {name: x.detach().clone() for name, x in tensors(given).items()}
    counter = FlopCounterMode(display=False)
    with pytest.raises((TypeError, ValueError)) as raised, counter:
        CALLS[call](**given)
    assert type(raised.value) is error
    message, value = str(raised.value), given.get(argument)
    name = rf"(head\.)?{re.escape(argument)}" if argument in HEAD[1:] else re.escape(argument)
    assert re.search(rf"^{name}: .*expected .+, got .+", message), message
    came = message.split(", got ", 1)[1]
    if got is not None:
        assert got in message, message
    elif isinstance(value, Tensor):
        looks = [str(value.dtype), value.device.type, str(value.layout)]
        looks += [] if value.is_nested else [str(tuple(value.shape))]
        assert any(x in came for x in looks), message
    else:
        assert repr(value) in came or type(value).__name__ in came, message
    assert counter.get_total_flops() == 0
    for name, x in tensors(given).items():
        assert same(x.detach(), before[name]), name
        assert not x.is_leaf or x.grad is None, name


@pytest.mark.parametrize("wrong", [*OF_A_KIND, *VALUES], ids=lambda x: f"{x[0]}-{x[1]}")
def test_wrong_argument(wrong: Wrong) -> None:
    call, argument, value, error, got = (*wrong, None)[:5]
    given = valid(call)
    field = re.split(r"[.\[]", argument)[0]
    given[field] = value(given[field]) if callable(value) else value
    refuse(call, argument, given, error, got)


@pytest.mark.parametrize(("field", "error", "values"), CONFIG, ids=lambda x: str(x)[:30])
def test_wrong_config(field: str, error: type[Exception], values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(error, match=rf"^{field}: expected .+, got ") as raised:
            LossConfig(**{field: value})
        assert repr(value) in str(raised.value)


def test_dtensor() -> None:
    with one_rank():
        mesh = DeviceMesh("cpu", [0])
        for argument in (*HEAD, "completion_ids", "completion_mask", "advantages"):
            given = valid("loss")
            given[argument] = distribute_tensor(given[argument].detach(), mesh, [Shard(0)])
            refuse("loss", argument, given, ValueError, "DTensor")


@pytest.mark.parametrize("engine", ["score", "one_pass", "frozen"])
def test_engine_that_cannot_score_with_a_gradient(engine: str) -> None:
    given = {**valid("logprob"), "expected": None, "engine": engine}
    refuse("logprob", "engine", given, ValueError, f"'{engine}', which needs ")


OBJECTIVES = {
    "a scalar": lambda tokens: tokens.logps.sum(),
    "None": lambda tokens: None,
    "a constant": lambda tokens: torch.ones_like(tokens.logps),
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_wrong_objective(kind: str) -> None:
    given = valid("loss") | {"config": LossConfig()}
    with pytest.raises(ValueError, match=r"^objective: expected .+ tokens\.logps"):
        flat(grpo_loss)(**given, objective=OBJECTIVES[kind])
