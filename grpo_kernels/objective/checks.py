"""Checks of a loss's config, and of the inputs that the config needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from grpo_kernels.base.checks import did_you_mean, warn_once
from grpo_kernels.objective.config import LossConfig, preset_hint
from grpo_kernels.objective.losses import loss_of

FIELDS = tuple(x.name for x in fields(LossConfig))
_DEFAULT = LossConfig()
# Fields that apply beside a custom objective: the normaliser's, and the temperature.
_BESIDE_AN_OBJECTIVE = ("loss_type", "max_completion_length", "temperature")


def check_config(config: Any) -> None:
    """Raise unless `config` is a LossConfig."""
    if not isinstance(config, LossConfig):
        raise TypeError(
            f"config: expected a LossConfig, got {type(config).__name__}{preset_hint(config)}"
        )


def config_with(
    config: LossConfig | None, options: Mapping[str, Any], call: Collection[str], function: str
) -> LossConfig:
    """Return `config` (None: the default one) with the fields in `options`, keyword arguments of `function`.

    Args:
        call: the other arguments of `function`, for the message.

    Raises:
        TypeError: a name that is no field. TypeError, ValueError: a wrong value.
    """
    config = _DEFAULT if config is None else config
    if not options:
        return config
    check_config(config)
    check_names(options, f"an argument of {function} or a field of LossConfig", [*FIELDS, *call])
    return replace(config, **options)


def check_names(
    names: Iterable[str],
    what: str,
    allowed: Collection[str],
    elsewhere: str = "",
    others: Collection[str] = (),
) -> None:
    """Raise TypeError unless all `names` are `allowed`; the message suggests one of those, or one of `others`."""
    for name in names:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            if name in others:
                hint = f"; it is {elsewhere}"
            elif not hint and (other := did_you_mean(name, others)):
                hint = f"{other} It is {elsewhere}"
            raise TypeError(f"{name}: expected {what}, got a name that is none{hint}")


def check_objective(config: LossConfig, objective: Any) -> None:
    """Raise unless `objective` is None, or a function beside a config with all terms off."""
    if objective is None:
        return
    if not callable(objective):
        raise TypeError(
            f"objective: expected a function of TokenInputs, got {type(objective).__name__}"
        )
    for option in fields(LossConfig):
        value, default = getattr(config, option.name), option.default
        if option.name not in _BESIDE_AN_OBJECTIVE and value != default:
            raise ValueError(
                f"{option.name}: expected {default!r} beside an objective, which replaces the config's terms, got "
                f"{value!r}"
            )


def check_terms(
    config: LossConfig,
    ref_per_token_logps: Any,
    objective: Any = None,
    *,
    has_reference: bool = False,
) -> None:
    """Raise unless a KL term has its reference, and all terms of the config are off beside a custom `objective`.

    One warning for reference log-probabilities that nothing reads.

    Args:
        has_reference: True if there is a `reference`.
    """
    check_objective(config, objective)
    if config.estimates_kl and ref_per_token_logps is None:
        raise ValueError(
            f"ref_per_token_logps: expected a tensor since beta = {config.beta}, got None"
        )
    if config.needs_reference_head and not has_reference:
        raise ValueError(
            f"reference: expected (hidden, head), which grpo_loss takes, since kl_estimator = 'full' and beta = "
            f"{config.beta}, got None"
        )
    if has_reference and (objective is not None or config.kl_estimator != "full"):
        why = (
            "beside an objective"
            if objective is not None
            else f"with kl_estimator = {config.kl_estimator!r}"
        )
        raise ValueError(f"reference: expected None {why}, which does not read it, got one")
    if ref_per_token_logps is not None and objective is None and not config.estimates_kl:
        why, instead = "beta = 0, so there is no KL term", "give beta a value"
        if config.needs_reference_head:
            why, instead = (
                "kl_estimator = 'full', which reads `reference`",
                "choose another kl_estimator",
            )
        warn_once(f"ref_per_token_logps: not used with {why}; {instead}, or leave it out")


SEQUENCE_EPSILON = 0.05  # far above all published values for a ratio per sequence


def _warn_of_clipping(config: LossConfig) -> None:
    """Warn, once each, of clip ranges that are likely a mistake. They raise no error, as in TRL."""
    if config.loss_type == "gmpo" or loss_of(config).clipped is None:
        return
    low, high = config.epsilon, config.clip_high
    if config.epsilon_high is not None and high >= 1.0:
        warn_once(
            f"epsilon_high: the upper bound of the ratio is 1 + epsilon_high, so that {high:g} hardly clips; DAPO's is "
            "0.28 (presets.DAPO)"
        )
    if low >= 1.0:
        warn_once(
            f"epsilon: ratios are clipped to [1 - epsilon, 1 + epsilon_high], so that {low:g} never clips from below; "
            "published values are 0.2 for a ratio per token, 3e-4 (presets.GSPO) for one per sequence"
        )
    elif config.importance_sampling_level == "sequence" and min(low, high) >= SEQUENCE_EPSILON:
        warn_once(
            f"epsilon: {low:g} with importance_sampling_level = 'sequence' hardly ever clips, since the mean over a "
            "sequence moves little; GSPO's are epsilon = 3e-4 and epsilon_high = 4e-4 (presets.GSPO)"
        )


def warn_of_inputs(
    config: LossConfig,
    objective: Any,
    *,
    num_items_in_batch: Any,
    old_per_token_logps: Any,
    sampling_per_token_logps: Any,
) -> None:
    """Warn, once each, of inputs that nothing reads or that are too coarse for their use. The inputs are checked."""
    if num_items_in_batch is not None and loss_of(config).normaliser != "num_items":
        warn_once(
            f"num_items_in_batch: not used by loss_type = {config.loss_type!r}, a mean over the call. Under gradient "
            "accumulation divide the loss by the number of steps, and leave num_items_in_batch out"
        )
    if config.kl_estimator == "full" and config.beta == 0.0 and objective is None:
        warn_once(
            "kl_estimator: 'full' has no part in a loss with beta = 0; give beta a value, or leave it out"
        )
    if old_per_token_logps is not None and objective is None:
        _warn_of_clipping(config)
    reads_sampling = objective is not None or config.masks_off_policy or config.corrects_sampling
    if sampling_per_token_logps is not None and not reads_sampling:
        warn_once(
            "sampling_per_token_logps: not used, but for a metric: set off_policy_mask_threshold or "
            "vllm_importance_sampling_correction (which loss_type = 'gmpo' does not have), or leave them out"
        )
    if old_per_token_logps is not None and old_per_token_logps.dtype.itemsize < 4:
        warn_once(
            f"old_per_token_logps: rounded to {old_per_token_logps.dtype}, so that ratios which should be 1 are off by "
            "1 % and more: keep them in torch.float32, as they came"
        )
