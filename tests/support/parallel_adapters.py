"""PEFT's adapters on body or head of the model of `parallel_cases`, and their gradients from one
process in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support import parallel_cases as cases
from tests.support.case_builder import Case
from tests.support.parallel_cases import LOSSES
from tests.support.reference import reference_loss

PLACES = ("mid", "lm_head")


def adapted(where: str) -> cases.TinyModel:
    """PEFT's adapters on `where`, both factors random, and everything else frozen."""
    import peft

    model = cases.make_model(torch.float64, LOSSES["off-policy"])
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=4, target_modules=[where]), model)
    model.double()
    with torch.no_grad():
        for i, (name, x) in enumerate(model.named_parameters()):
            x.requires_grad_("lora_" in name)
            if "lora_" in name:
                values = torch.randn(
                    x.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64
                )
                x.copy_(values * 0.5)
    return model


def adapted_truth(where: str, loss: cases.Loss) -> dict[str, Tensor]:
    """With the adapter of the head multiplied out, which the library never does."""
    model, items = adapted(where), cases.items_per_rank(2, last_empty=False)
    for rank in range(2):
        batch = cases.make_batch(rank, 2, torch.float64, last_empty=False)
        hidden, weight, head = model(batch.tokens), model.lm_head.weight, model.lm_head
        if where == "lm_head":
            factors = head.lora_B["default"].weight @ head.lora_A["default"].weight
            weight = weight + head.scaling["default"] * factors
        given = cases.arguments(loss, batch, items)
        case = Case("", hidden.detach(), weight.detach(), config=loss.config, **given)
        want = reference_loss(case)
        for x, grad in ((hidden, want.d_hidden), (weight, want.d_weight)):
            if x.requires_grad:
                x.backward(0.5 * grad, retain_graph=True)
    return cases.gradients_of(model)


def adapted_loss(where: str, loss: str) -> cases.Loss:
    """One of `LOSSES` and the engine that serves it here: a head of which nothing trains has one of
    its own."""
    return cases.Loss(
        LOSSES[loss].config, serves="frozen" if where == "mid" else LOSSES[loss].serves
    )
