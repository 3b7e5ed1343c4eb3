"""docs/start/other-trainers.md on ranks of `run_ranks`: Megatron-Core's own GPT model, and slime on
it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from tests.support import megatron_peer
from tests.support import trainer_stand_ins as theirs
from tests.support.trainer_stand_ins import module, run, scores_of
from tests.support.verl_peer import TEMPERATURE, draw

ARGS = SimpleNamespace(
    allgather_cp=False,
    rollout_temperature=TEMPERATURE,
    vocab_size=32,
    custom_model_provider_path="x",
)
Models = tuple[Any, ...]  # with a recipe, and without


def differences(tensor: int) -> dict[str, float]:
    """Largest relative difference of results and gradients to the model without recipe, by case."""
    megatron_peer.start(tensor=tensor)
    ids, fuse = draw((2, 8))[0], run("Megatron-Core")["fuse"]
    found = {}
    for sequence_parallel, tied in itertools.product((False, True)[:tensor], (False, True)):
        for case in (scores, loss, slime):
            models = tuple(megatron_peer.megatron_model(sequence_parallel, tied) for _ in range(2))
            name = f"{case.__name__}, sequence_parallel={sequence_parallel}, tied={tied}"
            found[name] = difference(models, *case(fuse, models, ids))
    model = megatron_peer.megatron_model(False, False)
    model.config.mtp_num_layers = 1
    with pytest.raises(NotImplementedError, match="multi-token prediction"):
        fuse(model)
    return found


def scores(fuse: Any, models: Models, ids: Tensor) -> tuple[Any, Any]:
    """Over the rows that are tokens, 30 of 32."""
    fused, stock = models
    score, labels = fuse(fused, megatron_peer.TOKENS), ids.roll(-1, 1)
    logits = gather_from_tensor_model_parallel_region(stock(ids, None, None))
    logits = logits[..., : megatron_peer.TOKENS] / TEMPERATURE
    found = score(fused(ids, None, None), labels, temperature=TEMPERATURE)
    return found, scores_of(logits, labels)


def loss(fuse: Any, models: Models, ids: Tensor) -> tuple[Any, Any]:
    """Megatron-Core's own cross entropy, which counts the padding and computes in float32."""
    fuse(models[0])
    fused, stock = ((x(ids, None, None, labels=ids.roll(-1, 1)),) for x in models)
    return fused, stock


def slime(fuse: Any, models: Models, ids: Tensor) -> tuple[Any, Any]:
    def provider(args: Any) -> Any:
        assert args.custom_model_provider_path is None
        return lambda **stage: models[0]

    names, package = (
        ("_build_shifted_tokens", "_extract_per_sample"),
        "slime.backends.megatron_utils",
    )
    functions = {name: getattr(theirs, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        module(patch, "my_megatron", fuse=fuse)
        module(patch, "megatron.training", get_args=lambda: ARGS)
        module(patch, f"{package}.model_provider", get_model_provider_func=provider)
        actor = module(patch, f"{package}.actor")
        of_loss = module(patch, f"{package}.loss", **functions)
        assert run("slime")["model_provider"]() is models[0]
    assert actor.get_log_probs_and_entropy is of_loss.get_log_probs_and_entropy
    found = []
    passed = {
        "args": ARGS,
        "unconcat_tokens": [*ids],
        "total_lengths": [8, 8],
        "response_lengths": [3, 5],
    }
    for model, owner in zip(models, (actor, theirs), strict=True):
        output = model(ids.view(1, -1), None, None)
        _, values = owner.get_log_probs_and_entropy(output, **passed, with_entropy=True)
        assert [len(x) for x in values["log_probs"]] == [3, 5]
        found.append([torch.cat(values[name]) for name in ("log_probs", "entropy")])
    with pytest.raises(NotImplementedError, match="top_p_token_ids"):
        actor.get_log_probs_and_entropy(found[0][0], **passed, top_p_token_ids=[])
    return found[0], found[1]


def difference(models: Models, *results: Any) -> float:
    """Of all results and gradients."""
    for values in results:
        torch.manual_seed(4)
        sum((x * torch.randn(x.shape, dtype=torch.float64)).sum() for x in values).backward()
    parameters = zip(*(model.parameters() for model in models), strict=True)
    pairs = [*zip(*results, strict=True), *((x.grad, y.grad) for x, y in parameters)]
    return max(float(((x - y).norm() / y.norm()).detach()) for x, y in pairs)
