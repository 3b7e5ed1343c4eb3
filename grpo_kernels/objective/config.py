"""Options of the loss: one frozen config, one field per option of TRL 1.16's ``GRPOConfig``, checked once.

Every name and default is TRL's, except those marked *ours*. Published algorithms are presets (`grpo_kernels.presets`).
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any

from grpo_kernels.base.checks import check_number
from grpo_kernels.base.choices import (
    PRESETS,
    ImportanceSamplingLevel,
    KLEstimator,
    LossTypeName,
    SamplingMode,
    choices,
)
from grpo_kernels.base.trl_args import check_args, loss_fields
from grpo_kernels.objective.losses import loss_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from grpo_kernels.objective.keywords import LossFields


def _one_of(names: Any) -> dict[str, Any]:
    """Rule of a field that takes one of the names of a `base.choices` type."""
    return {"one_of": choices(names)}


def _above(lowest: float) -> dict[str, Any]:
    """Rule of a field that takes finite numbers > `lowest`; a field without a rule takes any finite number."""
    return {"range": (lowest, False)}


def _at_least(lowest: float) -> dict[str, Any]:
    """Rule of a field that takes finite numbers >= `lowest`."""
    return {"range": (lowest, True)}


@dataclass(frozen=True)
class LossConfig:
    """The loss, as TRL's ``GRPOConfig`` names it.

    Args:
        loss_type: surrogate (the policy term of a token's loss) and normaliser, one of ``"grpo"``
            (https://arxiv.org/abs/2402.03300), ``"bnpo"``, ``"dr_grpo"`` (https://arxiv.org/abs/2503.20783), ``"dapo"``
            (https://arxiv.org/abs/2503.14476), ``"cispo"`` (https://arxiv.org/abs/2506.13585), ``"sapo"``
            (https://arxiv.org/abs/2511.20347), ``"luspo"`` (https://arxiv.org/abs/2602.05261), ``"vespo"``
            (https://arxiv.org/abs/2602.10693) and, *ours*, ``"gmpo"`` (https://arxiv.org/abs/2507.20673; its ratio is
            always per sequence, its top-entropy mask chooses the tokens of that ratio, and neither off-policy mask nor
            importance sampling ratio applies to it).
        importance_sampling_level: ``"token"``: one ratio per token; ``"sequence"``: the ratio is exp of the sequence's
            mean log-ratio (GSPO, https://arxiv.org/abs/2507.18071).
        epsilon, epsilon_high: clip range ``[1 - epsilon, 1 + epsilon_high]``; ``epsilon_high=None`` means ``epsilon``.
            For ``"cispo"`` `epsilon_high` is the cap on the ratio itself, so set it (5 is usual): without it the cap is
            `epsilon`, as in TRL. For ``"gmpo"`` the range is in log space.
        delta: upper bound of the unclipped ratio (two-sided clipping); the clipped loss types only.
        beta: weight of the KL term to the reference model; 0 turns it off.
        use_bias_correction_kl: multiply the KL estimate by the ratio, as TRL does by default and the GRPO paper does
            not: ``loss_type="grpo", beta=0.04`` is TRL's GRPO, `presets.GRPO` the paper's. Not for
            ``"gmpo"``; and ``"full"`` needs no correction: over the old policy's tokens the expectation
            of the corrected estimate, sum_v old_v (p_v / old_v) log(p_v / q_v), is the full KL itself.
        kl_estimator: *ours*; with d = ref - logp: ``"k3"`` exp(d) - d - 1 (TRL's), ``"k2"`` d^2 / 2, ``"k1"`` -d.
            ``"full"``: no estimate, but sum_v p_v log(p_v / q_v) over the vocabulary, with q from `reference`.
        temperature: the logits are divided by it.
        top_entropy_quantile: share of the tokens that carry the policy loss, those of highest entropy; 1 means all.
        entropy_coef: weight of the entropy bonus, the mean entropy of the tokens that `top_entropy_quantile` keeps,
            which is subtracted from the loss.
        off_policy_mask_threshold: tokens of negative advantage are dropped from the policy loss if the mean of
            (sampling logp - logp) over their sequence is above this; without sampling logps, of (old logp - logp).
        vllm_importance_sampling_correction: compute the importance sampling ratio in the loss, of the old
            log-probabilities (absent: the current ones, held constant) to `sampling_per_token_logps`, which must then
            be given. Off by default; TRL has it on, and its trainer computes the ratio. Not for ``"gmpo"``.
        vllm_importance_sampling_mode: ``"token_*"``: one ratio per token; ``"sequence_*"``: one per sequence, from its
            summed differences; ``"*_truncate"``: clamped to the bounds; ``"*_mask"``: set to 0 outside of them.
            ``"sequence_mean_mask"`` (not TRL's): one per token, set to 0 in sequences whose geometric mean ratio is
            outside of the bounds.
        vllm_importance_sampling_clip_max, vllm_importance_sampling_clip_min: the bounds of that ratio; None: no bound.
        max_completion_length: the constant in ``"dr_grpo"``'s normaliser, in tokens.
        sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: shape
            of the SAPO and VESPO surrogates for positive and negative advantages.

    Soft-cap, scale and precision of the logits are the head's: `grpo_kernels.Head`.

    Raises:
        TypeError, ValueError: a field of the wrong type, or out of its range; the message names it.
    """

    loss_type: LossTypeName = field(default="dapo", metadata=_one_of(LossTypeName))
    importance_sampling_level: ImportanceSamplingLevel = field(
        default="token", metadata=_one_of(ImportanceSamplingLevel)
    )
    epsilon: float = field(default=0.2, metadata=_at_least(0.0))
    epsilon_high: float | None = field(default=None, metadata=_at_least(0.0))
    delta: float | None = field(default=None, metadata=_above(0.0))
    beta: float = field(default=0.0, metadata=_at_least(0.0))
    use_bias_correction_kl: bool = True
    kl_estimator: KLEstimator = field(default="k3", metadata=_one_of(KLEstimator))
    temperature: float = field(default=1.0, metadata=_above(0.0))
    top_entropy_quantile: float = field(default=1.0, metadata=_at_least(0.0))
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    vllm_importance_sampling_correction: bool = False
    vllm_importance_sampling_mode: SamplingMode = field(
        default="sequence_mask", metadata=_one_of(SamplingMode)
    )
    vllm_importance_sampling_clip_max: float | None = field(default=3.0, metadata=_above(0.0))
    vllm_importance_sampling_clip_min: float | None = field(default=None, metadata=_at_least(0.0))
    max_completion_length: int = field(default=512, metadata=_at_least(1))
    sapo_temperature_pos: float = field(default=1.0, metadata=_above(0.0))
    sapo_temperature_neg: float = field(default=1.05, metadata=_above(0.0))
    vespo_k_pos: float = field(default=2.0, metadata=_at_least(0.0))
    vespo_lambda_pos: float = field(default=3.0, metadata=_at_least(0.0))
    vespo_k_neg: float = field(default=3.0, metadata=_at_least(0.0))
    vespo_lambda_neg: float = field(default=2.0, metadata=_at_least(0.0))

    def __post_init__(self) -> None:
        for option in fields(self):  # stored as Python's types, from numpy's or enums
            object.__setattr__(self, option.name, _checked(option, getattr(self, option.name)))
        if self.top_entropy_quantile > 1.0:
            raise ValueError(
                f"top_entropy_quantile: expected a number in [0, 1], got {self.top_entropy_quantile!r}"
            )
        self._check_sampling_bounds()

    def _check_sampling_bounds(self) -> None:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                "vllm_importance_sampling_clip_min: expected a number below vllm_importance_sampling_clip_max = "
                f"{high}, got {low}"
            )
        if (
            self.vllm_importance_sampling_correction
            and self.truncates_sampling_ratio
            and low is high is None
        ):
            raise ValueError(
                "vllm_importance_sampling_clip_max: expected a number, or one for vllm_importance_sampling_clip_min, "
                f"since vllm_importance_sampling_mode = {self.vllm_importance_sampling_mode!r}, got None for both"
            )

    @property
    def clip_high(self) -> float:
        """`epsilon_high`, or `epsilon` where it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def corrects_kl(self) -> bool:
        """True if the KL estimate is multiplied by the ratio."""
        return self.estimates_kl and self.use_bias_correction_kl and loss_of(self).corrects_kl

    @property
    def estimates_kl(self) -> bool:
        """True if the loss has a KL term that is estimated from the sampled tokens' log-probabilities."""
        return self.beta != 0.0 and self.kl_estimator != "full"

    @property
    def needs_reference_head(self) -> bool:
        """True if the loss has a KL term over the whole vocabulary."""
        return self.beta != 0.0 and self.kl_estimator == "full"

    @property
    def ratio_is_per_sequence(self) -> bool:
        """True if the policy term has one ratio per sequence, which couples the tokens of a sequence."""
        return self.importance_sampling_level == "sequence" or loss_of(self).shares_ratio

    @property
    def masks_off_policy(self) -> bool:
        """True if off-policy sequences are dropped."""
        return self.off_policy_mask_threshold is not None and loss_of(self).masks

    @property
    def multiplies_by_importance_ratio(self) -> bool:
        """True if an importance sampling ratio multiplies the policy term."""
        return loss_of(self).importance_ratio == "factor"

    @property
    def corrects_sampling(self) -> bool:
        """True if the importance sampling ratio is computed within the loss."""
        return (
            self.vllm_importance_sampling_correction and loss_of(self).importance_ratio is not None
        )

    @property
    def sampling_ratio_is_per_sequence(self) -> bool:
        """True if a ratio that is computed within the loss is one per sequence."""
        return self.vllm_importance_sampling_mode in ("sequence_truncate", "sequence_mask")

    @property
    def truncates_sampling_ratio(self) -> bool:
        """True if a ratio that is computed within the loss is clamped to its bounds; else it is 0 outside of them."""
        return self.vllm_importance_sampling_mode.endswith("_truncate")

    def couples_tokens(self, *, on_policy: bool, sampled: bool) -> bool:
        """True if a token's gradient depends on other tokens' log-probabilities or entropies.

        Args:
            on_policy: True without old log-probabilities.
            sampled: True with the sampler's log-probabilities.
        """
        if self.top_entropy_quantile < 1.0 or (
            self.masks_off_policy and (sampled or not on_policy)
        ):
            return True
        reads_sequence = self.vllm_importance_sampling_mode.startswith("sequence_")
        if on_policy and self.corrects_sampling and (reads_sequence or self.ratio_is_per_sequence):
            return True
        if on_policy:
            return self.corrects_kl and self.importance_sampling_level == "sequence"
        return self.ratio_is_per_sequence

    def knows_gradient(self, *, on_policy: bool, sampled: bool) -> bool:
        """True if the whole gradient is known before any log-probability; arguments as in `couples_tokens`."""
        unknown = not on_policy or self.estimates_kl or self.corrects_sampling
        return not unknown and not self.couples_tokens(on_policy=on_policy, sampled=sampled)

    @classmethod
    def from_trl(cls, args: Any, **overrides: Unpack[LossFields]) -> LossConfig:
        """The loss that a ``trl.GRPOConfig`` (or any object with its fields) describes.

        Fields that `args` does not have keep their default; `overrides` win. Soft-cap and scale, which TRL reads from
        the model, are the head's: `Head`. ``vllm_importance_sampling_correction`` is not
        taken over: TRL's trainer makes the ratio beforehand, and a second one would be wrong. To pass only
        `sampling_per_token_logps`, turn it on: ``from_trl(args, vllm_importance_sampling_correction=True)``. The
        deprecated ``vllm_importance_sampling_cap`` stands for ``vllm_importance_sampling_clip_max``, as in TRL.

        Raises:
            ValueError: `args` asks for a loss type this library does not know, or turns on what a `LossConfig` cannot
                hold: ``use_adaptive_entropy``, ``mask_truncated_completions``, ``cast_lm_head_to_fp32``,
                ``router_aux_loss_coef``. The message says what to do instead.
            TypeError: `args` are those of a TRL trainer with another loss (``RLOOConfig``, ``DistillationConfig``), or
                have none of the fields, such as None or a mapping (whose misspelt keys would go unnoticed).
        """
        check_args(args, overrides.keys())
        return config_of_trainer(args, **overrides)


def config_of_trainer(args: Any, **overrides: Any) -> LossConfig:
    """Like `LossConfig.from_trl`, for TRL's trainer, which itself serves the options that are refused there."""
    names = {option.name for option in fields(LossConfig)}
    optional = {option.name for option in fields(LossConfig) if _is_optional(option)}
    return LossConfig(**{**loss_fields(args, names, optional), **overrides})


def _is_optional(option: Field[Any]) -> bool:
    return str(option.type).endswith("| None")


def _checked(option: Field[Any], value: Any) -> Any:
    """Return `value` as a Python type.

    Raises:
        TypeError, ValueError: `value` does not fit the field's annotation or its rule.
    """
    name = option.name
    if "one_of" in option.metadata:
        allowed = option.metadata["one_of"]
        if value not in allowed:
            hint = preset_hint(value) if name == "loss_type" else ""
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}{hint}")
        return allowed[allowed.index(value)]
    if option.type == "bool":
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")
        return value
    if value is None and _is_optional(option):
        return None
    check_number(name, value, *option.metadata.get("range", ()))
    if isinstance(value, Integral):
        return int(value)
    if option.type == "int":
        raise TypeError(f"{name}: expected an int, got {value!r}")
    return float(value)


def preset_hint(name: Any) -> str:
    """Return a hint that points to the preset of this `name`, or nothing."""
    preset = str(name).upper().replace("-", "_")
    return (
        f"; grpo_kernels.presets.{preset} is that loss: GRPOLoss(presets.{preset})"
        if preset in PRESETS
        else ""
    )
