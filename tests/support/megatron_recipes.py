"""The recipe for Megatron-Core of docs/start/other-trainers.md, on ranks with its GPT model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from tests.support import megatron_peer
from tests.support.megatron_peer import TEMPERATURE, TOKENS, scores_of
from tests.support.verl_peer import draw

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "my_megatron.py"


def differences(tensor: int) -> dict[str, float]:
    """Largest relative difference of results and gradients to the model without recipe, by case."""
    megatron_peer.start(tensor=tensor)
    names: dict[str, Any] = {"__name__": "my_megatron"}
    exec(compile(RECIPE.read_text(), str(RECIPE), "exec"), names)
    ids, fuse, found = draw((2, 8))[0], names["fuse"], {}
    for sequence_parallel, tied in itertools.product((False, True)[:tensor], (False, True)):
        for case in (scores, loss):
            models = tuple(megatron_peer.megatron_model(sequence_parallel, tied) for _ in range(2))
            name = f"{case.__name__}, sequence_parallel={sequence_parallel}, tied={tied}"
            found[name] = difference(models, *case(fuse, models, ids))
    model = megatron_peer.megatron_model(False, False)
    model.config.mtp_num_layers = 1
    with pytest.raises(NotImplementedError, match="multi-token prediction"):
        fuse(model)
    return found


def scores(fuse: Any, models: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """Over the rows that are tokens, 30 of 32."""
    fused, stock = models
    score, labels = fuse(fused, TOKENS), ids.roll(-1, 1)
    logits = gather_from_tensor_model_parallel_region(stock(ids, None, None))
    logits = logits[..., :TOKENS] / TEMPERATURE
    found = score(fused(ids, None, None), labels, temperature=TEMPERATURE)
    return found, scores_of(logits, labels)


def loss(fuse: Any, models: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """Megatron-Core's own cross entropy, which counts the padding and computes in float32."""
    fuse(models[0])
    fused, stock = ((x(ids, None, None, labels=ids.roll(-1, 1)),) for x in models)
    return fused, stock


def difference(models: Any, *results: Any) -> float:
    for values in results:
        torch.manual_seed(4)
        sum((x * torch.randn(x.shape, dtype=torch.float64)).sum() for x in values).backward()
    parameters = zip(*(model.parameters() for model in models), strict=True)
    pairs = [*zip(*results, strict=True), *((x.grad, y.grad) for x, y in parameters)]
    return max(float(((x - y).norm() / y.norm()).detach()) for x, y in pairs)
