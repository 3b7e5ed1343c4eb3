"""Lightning's Fabric, which is not installed here: `Wrapper` does what its module does around a
forward.

As read in Fabric 2.x (`fabric/wrappers.py`) and lightning-utilities (`core/apply_func.py`): inputs
and outputs are gone through by type, floating tensors converted, mappings rebuilt by
``type(x)(items)``, dataclasses copied deeply but for their fields, which are then set. Older
lightning-utilities refuse a frozen dataclass there."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
    if isinstance(data, Mapping):
        kind: Any = type(data)
        return kind(OrderedDict((key, applied(x, convert)) for key, x in data.items()))
    if isinstance(data, Sequence) and not isinstance(data, str):
        sequence: Any = type(data)
        return sequence([applied(x, convert) for x in data])
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
        self._original_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def to(dtype: torch.dtype) -> Convert:
            return lambda x: x.to(dtype) if x.is_floating_point() else x

        args, kwargs = applied((args, kwargs), to(torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            output = self._forward_module(*args, **kwargs)
        return applied(output, to(torch.get_default_dtype()))


class Scores(nn.Module):
    """A model that returns what the loss returned."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(H, V, bias=False)
        self.loss = GRPOLoss(loss_type="grpo", beta=0.1)

    def forward(self, hidden: Tensor, ids: Tensor, mask: Tensor, **others: Tensor) -> LossOutput:
        return self.loss(hidden, self.head.weight, ids, mask, torch.tensor([1.0, -0.5]), **others)


def test_a_module_may_return_what_the_loss_returned() -> None:
    torch.manual_seed(0)
    model = Scores()
    hidden = torch.randn(2, 5, H)
    ids = torch.randint(V, (2, 5))
    mask = torch.ones(2, 5)
    given = {
        "old_per_token_logps": -3 + torch.rand(2, 5),
        "ref_per_token_logps": -3 + torch.rand(2, 5),
    }
    out = Wrapper(model)(hidden, ids, mask, **given)
    d_weight = torch.autograd.grad(out.loss, model.head.weight)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(
            hidden.bfloat16(), ids, mask, **{name: x.bfloat16() for name, x in given.items()}
        )
    assert isinstance(out, LossOutput)
    assert_close(
        (out.loss, out.logps, out.entropies),
        (want.loss, want.logps, want.entropies),
    )
    assert_close(d_weight, torch.autograd.grad(want.loss, model.head.weight))
    assert out.engine == want.engine
    assert_close(dict(out.metrics), dict(want.metrics))
    with pytest.raises(
        RuntimeError, match=r"metrics: .*return out\.metrics\.pairs beside the loss"
    ):
        _ = out.metrics.pairs
    assert_close(applied(want.metrics.pairs, torch.clone), want.metrics.pairs)


def test_causal_lm_loss_of_a_wrapped_model() -> None:
    pytest.importorskip("transformers")
    from grpo_kernels.transformers import causal_lm_loss, completion_logprobs
    from tests.support import tiny_architectures as tiny
    from tests.support.model_checks import last_columns, text_batch

    model = tiny.text_model("gemma3_text", torch.float32)
    ids, attention_mask = text_batch()
    batch = (ids, attention_mask, last_columns(attention_mask))
    with torch.autocast("cpu", torch.bfloat16):
        want = causal_lm_loss(model, GRPOLoss(), *batch, torch.tensor([1.0, -1.0, 0.5]))
    out = causal_lm_loss(Wrapper(model), GRPOLoss(), *batch, torch.tensor([1.0, -1.0, 0.5]))
    assert_close(out.loss, want.loss)
    assert_close(out.logps, want.logps)
    parameter = model.model.embed_tokens.weight
    assert_close(
        torch.autograd.grad(out.loss, parameter), torch.autograd.grad(want.loss, parameter)
    )
    with pytest.raises(TypeError, match=r"old_logps: .* did you mean old_per_token_logps\?"):
        causal_lm_loss(Wrapper(model), GRPOLoss(), *batch, torch.ones(3), old_logps=None)
    with pytest.raises(
        ValueError, match=r"expected results of torch\.float64, .* has cast them to torch\.float32"
    ):
        completion_logprobs(Wrapper(tiny.text_model("llama")).double(), *batch)
