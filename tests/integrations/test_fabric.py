"""Lightning's Fabric, which is not installed here: `Wrapper` does what `fabric/wrappers.py` of 2.x
does around a forward, by `core/apply_func.py` of lightning-utilities."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from grpo_kernels import GRPOLoss, LossOutput

Convert = Callable[[Tensor], Tensor]
H, V = 8, 19


def applied(data: Any, convert: Convert) -> Any:
    """``apply_to_collection(data, dtype=Tensor, function=convert)``."""
    if isinstance(data, Tensor):
        return convert(data)
    kind: Any = type(data)
    if isinstance(data, Mapping):
        return kind(OrderedDict((key, applied(x, convert)) for key, x in data.items()))
    if isinstance(data, list | tuple):
        return kind([applied(x, convert) for x in data])
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
        result: Any = copy.deepcopy(data, memo={id(x): x for x in fields.values()})
        for name, x in fields.items():
            setattr(result, name, applied(x, convert))
        return result
    return data


class Wrapper(nn.Module):
    """Fabric's module in 'bf16-mixed': autocast, floating inputs in bf16, floating outputs in
    torch's default dtype."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def to(dtype: torch.dtype) -> Convert:
            return lambda x: x.to(dtype) if x.is_floating_point() else x

        args, kwargs = applied((args, kwargs), to(torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            output = self._forward_module(*args, **kwargs)
        return applied(output, to(torch.get_default_dtype()))


class ReturnsTheOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(H, V, bias=False)
        self.loss = GRPOLoss(loss_type="grpo", beta=0.1)

    def forward(self, hidden: Tensor, ids: Tensor, **others: Tensor) -> LossOutput:
        return self.loss(hidden, self.head.weight, ids, None, torch.tensor([1.0, -0.5]), **others)


def test_a_module_may_return_what_the_loss_returned() -> None:
    model, hidden, ids = ReturnsTheOutput(), torch.randn(2, 5, H), torch.randint(V, (2, 5))
    names = ("old_per_token_logps", "ref_per_token_logps")
    given = {name: -3 + torch.rand(2, 5) for name in names}
    out = Wrapper(model)(hidden, ids, **given)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(hidden.bfloat16(), ids, **{name: x.bfloat16() for name, x in given.items()})
    assert isinstance(out, LossOutput)
    assert_close((out.loss, out.logps, out.entropies), (want.loss, want.logps, want.entropies))
    assert_close(*(torch.autograd.grad(x.loss, model.head.weight) for x in (out, want)))
    assert out.engine == want.engine
    assert_close(dict(out.metrics), dict(want.metrics))
    with pytest.raises(RuntimeError, match=r"metrics: .*return out\.metrics\.pairs"):
        _ = out.metrics.pairs
    assert_close(applied(want.metrics.pairs, torch.clone), want.metrics.pairs)


def test_causal_lm_loss_of_a_wrapped_model() -> None:
    pytest.importorskip("transformers")
    from grpo_kernels.transformers import causal_lm_loss
    from tests.support.model_checks import scene

    model, *batch = scene("gemma3_text", torch.float32)
    given = GRPOLoss(), *batch, torch.tensor([1.0, -1.0, 0.5])
    with torch.autocast("cpu", torch.bfloat16):
        want = causal_lm_loss(model, *given)
    out = causal_lm_loss(Wrapper(model), *given)
    assert_close((out.loss, out.logps), (want.loss, want.logps))
    weight = model.model.embed_tokens.weight
    assert_close(*(torch.autograd.grad(x.loss, weight) for x in (out, want)))
