"""Find the rows of the head that a micro-batch's loss reads, and the gradient to expect there.

verl's engines pass packed ids to a model: prompts, responses, padding. The loss reads predictions
only of response tokens, and only at unmasked positions. `head_task` finds the rows that predict
these tokens in verl's packed order, from the fields of the micro-batch. A rank gives its head only
a part of that order, padded and sharded. So `head_task` sends row numbers through the engine's own
layout, and selects rows by these numbers. The expected gradient comes from verl's own loss
(`_slopes`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_kernels.base import BatchLayout
from grpo_kernels.objective.expected import Expectation
from grpo_kernels.scores import linear_logps

# losses whose inputs are known -> their modules
LOSSES = {
    **dict.fromkeys(("ppo_loss", "sft_loss"), "verl.workers.utils.losses"),
    "distillation_ppo_loss": "verl.trainer.distillation.losses",
}
# what ``ppo_loss`` reads from a micro-batch: fields per token, and constants
FIELDS = {"response_mask", "old_log_probs", "advantages", "rollout_is_weights", "ref_log_prob"}
CONSTANTS = ("dp_size", "batch_num_tokens", "global_batch_size")

# turns (N,) in verl's packed order into the order of a call's ids; padding is 0
Reorder = Callable[[Tensor], Tensor]


class HeadTask:
    """Rows and results that a call needs from the head, in the call's order of rows.

    This is not a dataclass: FSDP would round the tensors of a dataclass on their way into a model.
    """

    counted: Tensor | None = None  # True for rows whose results are read; None: all rows
    fill: Tensor | None = None  # log-probabilities to report for rows that do not count; None: 0
    expected: Expectation | None = None  # the gradient; None: unknown, or none
    entropy: bool = True  # True: entropies are read
    layout: BatchLayout = "padded"  # of the trunk
    # in distillation: ids and log-probabilities (1, N, K) for the packed tokens of this rank
    teacher: tuple[Tensor, Tensor] | None = None
    log_prob_min_clamp: float | None = None  # as in `topk_divergence`
    only_teacher: bool = False  # True: no log-probabilities or entropies are needed


class Mode(NamedTuple):
    """Properties of a ``loss_mode`` of verl; `MODES` lists the known modes."""

    by_token: bool = False  # a token's gradient depends only on its log-probability and entropy
    by_advantage: bool = False  # it is 0 where the advantage is 0, in any micro-batch
    by_weight: bool = False  # it is 0 where ``rollout_is_weights`` are 0


ALL = ("vanilla", "dppo_tv", "dppo_kl", "sapo", "gpg", "cispo")
MODES = {
    **dict.fromkeys(ALL, Mode(by_token=True, by_advantage=True, by_weight=True)),
    "gspo": Mode(by_advantage=True, by_weight=True),
    "dro": Mode(by_token=True, by_weight=True),  # penalizes the log-ratio at any advantage
}  # other modes read the whole micro-batch


def mode_of(config: Any) -> Mode:
    """Look up the properties of the loss mode in an actor's `config`."""
    name = config.policy_loss.get("loss_mode", "vanilla")
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    function = algorithms.POLICY_LOSS_REGISTRY.get(name)
    if getattr(function, "__globals__", None) is not vars(algorithms):
        return Mode()  # not verl's own function of this name
    if name != "bypass_mode":
        return MODES.get(name, Mode())
    correction = config.policy_loss.get("rollout_correction", None) or {}
    # weights are normalized by a mean over the ranks' micro-batches
    if correction.get("rollout_is_batch_normalize", False):
        return Mode()
    rejections = (correction.get("rollout_rs", None) or "").split(",")
    by_token = correction.get("rollout_is", None) != "sequence" and all(
        not rule.strip() or rule.strip().startswith("token") for rule in rejections
    )
    return Mode(by_token, by_advantage=True)  # the mode computes its own weights


def name_of(loss_function: Any) -> str:
    """Name of the verl loss that `loss_function` is a partial of, or ""."""
    function = getattr(loss_function, "func", None)
    name = getattr(function, "__name__", "")
    theirs = getattr(importlib.import_module(LOSSES[name]), name) if name in LOSSES else None
    return name if function is theirs else ""


def actor_config(loss_function: Any) -> Any:
    """The actor's config if `loss_function` is verl's ``ppo_loss``, else None."""
    return loss_function.keywords["config"] if name_of(loss_function) == "ppo_loss" else None


def has_other_terms(data: Any, config: Any) -> bool:
    """True if a KL or (computed) entropy term gives every counted token a gradient."""
    entropy = flag(data, "calculate_entropy") and config.entropy_coeff != 0
    return bool((config.use_kl_loss and config.kl_loss_coef != 0) or entropy)


def may_move(config: Any) -> bool:
    """True if the actor's loss is the same sum however sequences are grouped."""
    return mode_of(config) != Mode() and not is_by_width(config)


def is_by_width(config: Any) -> bool:
    """True if the loss divides by the width of a micro-batch."""
    norm = config.loss_agg_mode == "seq-mean-token-sum-norm"
    return norm and config.loss_scale_factor is None


def flag(data: Any, name: str, default: Any = False) -> Any:
    """Read a non-tensor entry of `data`, one of verl's TensorDicts."""
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
    return tensordict_utils.get_non_tensor_data(data=data, key=name, default=default)


def head_task(data: Any, loss_function: Any, dp_group: Any, reorder: Reorder) -> HeadTask:
    """Find what `loss_function` reads from the head in micro-batch `data`; None: what verl reads.

    All rows count for an unknown loss, or if log-probabilities are returned to the caller.
    """
    task, name, names = HeadTask(), name_of(loss_function), set(data.keys())
    task.entropy = bool(flag(data, "calculate_entropy"))
    if flag(data, "return_model_output") or (loss_function is not None and not name):
        return task
    packed = data["input_ids"].values()
    numbers = reorder(torch.arange(1, len(packed) + 1, device=packed.device))

    def in_call(x: Tensor) -> Tensor:
        return F.pad(x, (1, 0))[numbers]

    if name == "sft_loss":
        weights = in_call(data["loss_mask"].values().roll(-1, 0).float())  # as in the loss
        task.counted = weights != 0
        task.expected = Expectation(
            lambda index, *_: weights.view(-1)[index], task.counted, has_entropy_gradient=False
        )
    elif {"responses", "response_mask"} <= names:
        places = Places(data)
        task.counted = in_call(places.packed(data["response_mask"])) != 0
        if "old_log_probs" not in names:
            return task
        # Losses compare log-probabilities of all tokens with the old ones, and mask the result.
        task.fill = in_call(places.packed(data["old_log_probs"]))
        config = actor_config(loss_function)
        if config is None or not mode_of(config).by_token:
            return task
        # b * T + t of the response token that a row of the call predicts
        cells = torch.arange(len(data) * places.width, device=packed.device)
        cells = in_call(places.packed(cells.view(len(data), places.width))).flatten()
        task.expected = Expectation(
            _slopes(loss_function, data, places.width, cells, dp_group),
            live=in_call(live_rows(data, config, places)),
            has_entropy_gradient=task.entropy and config.entropy_coeff != 0,
        )
    return task


def live_rows(data: Any, config: Any, places: Places) -> Tensor:
    """(N,) bool, the packed rows that may get a gradient from an actor's loss."""
    mode, names = mode_of(config), ["response_mask"]
    if mode.by_advantage and not has_other_terms(data, config):
        names.append("advantages")
        if mode.by_weight and "rollout_is_weights" in data.keys():  # noqa: SIM118
            names.append("rollout_is_weights")
    return torch.stack([places.packed(data[name]) != 0 for name in names]).all(dim=0)


def by_sequence(output: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split a model's output, nested tensors, by sequence."""
    rows = zip(*(x.unbind() for x in output.values()), strict=True)
    return [dict(zip(output, row, strict=True)) for row in rows]


def joined(sequences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join outputs of sequences into nested tensors; undoes `by_sequence`."""
    return {
        name: torch.nested.as_nested_tensor([x[name] for x in sequences], layout=torch.jagged)
        for name in sequences[0]
    }


def score_rows(
    hidden: Tensor, head: Any, ids: Tensor, task: HeadTask, temperature: Any
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `ids`, and entropies if they are read."""
    found = linear_logps(
        hidden,
        head,
        ids,
        task.counted,
        temperature=temperature,
        expected=task.expected,
        entropy=task.entropy,
    )
    logps = found.logps
    if task.counted is not None and task.fill is not None:
        logps = torch.where(task.counted, logps, task.fill.to(logps.dtype))
    return logps, found.entropies


class Places:
    """Map response tokens, (B, `width`) with padding, to the packed rows that predict them."""

    def __init__(self, data: Any) -> None:
        ends = data["input_ids"].offsets()[1:]
        prompts, responses = data["prompts"], data["responses"]
        if responses.is_nested:
            lengths = responses.offsets().diff()
            self.width = int(lengths.max())
        else:
            lengths = data["attention_mask"][:, prompts.shape[1] :].sum(dim=1)
            self.width = responses.shape[1]
        self.lengths = lengths  # (B,), number of response tokens
        t = torch.arange(self.width, device=ends.device)
        self._inside = t < lengths[:, None]
        starts = ends - lengths - 1  # a prompt's last token predicts the response's first token
        self._rows = (starts[:, None] + t)[self._inside]
        self._tokens = len(data["input_ids"].values())

    def packed(self, x: Tensor) -> Tensor:
        """Pack `x`, (B, `width`) or nested, into (N,); 0 in rows that predict no response token."""
        values = x.values() if x.is_nested else x[self._inside]
        return values.new_zeros(self._tokens).index_copy(0, self._rows, values)


def _slopes(
    loss_function: Any, data: Any, width: int, cells: Tensor, dp_group: Any
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Make a function that computes derivatives of verl's ``ppo_loss``, for modes with `by_token`.

    The loss is a sum over sequences, with constants of the whole mini-batch. So it is evaluated
    only on the sequences of the requested tokens, as a batch with one-token prompts. All other
    tokens of these sequences have their old log-probabilities. ``cells[i]`` is b * `width` + t of
    the response token that row i of the call predicts.
    """
    from tensordict import TensorDict  # verl's own dependency

    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
    size = len(data)
    there = torch.ones(size, 1 + width, dtype=torch.bool, device=cells.device)
    fields = {"prompts": there[:, :1], "responses": there[:, 1:], "attention_mask": there}
    for name in FIELDS & set(data.keys()):
        x = data[name]
        if x.is_nested:
            x = torch.nested.to_padded_tensor(x, 0, output_size=(size, width))
        fields[name] = x
    whole = TensorDict(fields, batch_size=[size])
    tensordict_utils.assign_non_tensor(whole, **{name: data[name] for name in CONSTANTS})

    def slopes(
        rows: Tensor, logps: Tensor, entropies: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Derivatives (n,) by logps and entropies (None without them) at `rows` (n,)."""
        sequences, here = torch.unique(cells[rows] // width, return_inverse=True)
        batch = whole[sequences]
        at = here * (1 + width) + cells[rows] % width  # a sequence's last token predicts nothing
        others = F.pad(batch["old_log_probs"], (0, 1)).flatten()
        values = {"log_probs": others.to(logps.dtype).index_put((at,), logps)}
        if entropies is not None:
            zeros = torch.zeros_like(values["log_probs"])
            values["entropy"] = zeros.index_put((at,), entropies.to(zeros.dtype))
        found = slopes_of(loss_function, values, batch, dp_group)[2]
        return found["log_probs"][at], None if entropies is None else found["entropy"][at]

    return slopes


def slopes_of(
    loss_function: Any, model_output: dict[str, Tensor], data: Any, dp_group: Any
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """(the loss, its metrics, its derivative by each tensor of `model_output`)."""
    with torch.enable_grad():
        leaves = {name: x.detach().requires_grad_() for name, x in model_output.items()}
        loss, metrics = loss_function(model_output=leaves, data=data, dp_group=dp_group)
        slopes: Sequence[Tensor] = [torch.zeros_like(x) for x in leaves.values()]
        if loss.requires_grad:
            slopes = torch.autograd.grad(
                loss, [*leaves.values()], allow_unused=True, materialize_grads=True
            )
    return loss.detach(), metrics, dict(zip(leaves, slopes, strict=True))
