"""Options of the loss: a frozen config with the options of TRL 1.16's ``GRPOConfig``.

The config is checked once, when it is made. Further checks here are of the inputs that a config
needs. Every name and default is TRL's, except those marked *not in TRL*. Published algorithms are
presets (`grpo_kernels.presets`).
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import torch.distributed as dist
from torch import Tensor, nn

from grpo_kernels.base import ImportanceSamplingLevel, KLEstimator, LossTypeName, SamplingMode
from grpo_kernels.base.checks import (
    INSTEAD,
    check_choice,
    check_number,
    check_tensor,
    did_you_mean,
    hints_names,
    warn_once,
)
from grpo_kernels.objective.loss_types import LOSSES, LossType
from grpo_kernels.tokens import Tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack


# The range of a number, as metadata of its field; without one, any finite number is allowed


def _above(lowest: float) -> dict[str, Any]:
    return {"range": (lowest, False)}


def _at_least(lowest: float, highest: float = math.inf) -> dict[str, Any]:
    return {"range": (lowest, True, highest)}


# name -> the value that turns it off; INSTEAD says what to do instead
REFUSED: dict[str, Any] = {
    "use_adaptive_entropy": False,
    "mask_truncated_completions": False,
    "cast_lm_head_to_fp32": False,
    "router_aux_loss_coef": None,
}


class LossFields(TypedDict, total=False):
    """Fields of `LossConfig` as keyword arguments, each optional, for type checkers."""

    loss_type: LossTypeName
    importance_sampling_level: ImportanceSamplingLevel
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    beta: float
    use_bias_correction_kl: bool
    kl_estimator: KLEstimator
    temperature: float
    top_entropy_quantile: float
    entropy_coef: float
    off_policy_mask_threshold: float | None
    vllm_importance_sampling_correction: bool
    vllm_importance_sampling_mode: SamplingMode
    vllm_importance_sampling_clip_max: float | None
    vllm_importance_sampling_clip_min: float | None
    max_completion_length: int | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float


@hints_names
@dataclass(frozen=True)
class LossConfig:
    """Settings of a policy loss, with the names and defaults of TRL's ``GRPOConfig``.

    ::

        LossConfig()                                   # DAPO, clip range 0.2, no KL term
        LossConfig(loss_type="grpo", beta=0.04)
        LossConfig.from_trl(trainer.args)

    ``help(grpo_kernels.presets)`` lists the published algorithms.

    Args:
        loss_type: sets two things: the surrogate (the policy term of a token's loss) and the
            normalizer. One of ``"grpo"`` (https://arxiv.org/abs/2402.03300), ``"bnpo"``,
            ``"dr_grpo"`` (https://arxiv.org/abs/2503.20783), ``"dapo"``
            (https://arxiv.org/abs/2503.14476), ``"cispo"`` (https://arxiv.org/abs/2506.13585),
            ``"sapo"`` (https://arxiv.org/abs/2511.20347), ``"luspo"``
            (https://arxiv.org/abs/2602.05261), ``"vespo"`` (https://arxiv.org/abs/2602.10693) and
            ``"gmpo"`` (*not in TRL*, https://arxiv.org/abs/2507.20673). In ``"gmpo"``, the ratio is
            always per sequence, and `top_entropy_quantile` selects the tokens that enter this
            ratio. ``"gmpo"`` ignores the off-policy mask and any importance sampling ratio.
        importance_sampling_level: ``"token"``: one ratio per token. ``"sequence"``: one ratio per
            sequence, the exp of the sequence's mean log-ratio (GSPO,
            https://arxiv.org/abs/2507.18071).
        epsilon, epsilon_high: clip range ``[1 - epsilon, 1 + epsilon_high]``; ``epsilon_high=None``
            means ``epsilon``. For ``"cispo"``, `epsilon_high` is the cap on the ratio itself, so
            set it, usually to 5; with None, the cap is `epsilon`, as in TRL. For ``"gmpo"``, the
            range is in log space.
        delta: upper bound of the unclipped ratio (two-sided clipping) in ``"grpo"``, ``"bnpo"``,
            ``"dr_grpo"``, ``"dapo"`` and ``"luspo"``. The other loss types ignore it, with a
            warning.

        KL term:

        beta: weight of the KL term to the reference model; 0 turns it off.
        use_bias_correction_kl: multiply the KL estimate by the ratio. TRL does so by default; the
            GRPO paper does not. Therefore ``loss_type="grpo", beta=0.04`` is TRL's GRPO, and
            `presets.GRPO` is the paper's GRPO. ``"gmpo"`` ignores this option.
            ``kl_estimator="full"`` needs no correction: it is the expectation of the corrected
            estimate over the old policy's tokens, sum_v old_v (p_v / old_v) log(p_v / q_v).
        kl_estimator: *not in TRL*. With d = ref - logp, ``"k3"`` is exp(d) - d - 1 (as in TRL),
            ``"k2"`` is d^2 / 2, and ``"k1"`` is -d. ``"full"`` is the exact KL instead of an
            estimate: sum_v p_v log(p_v / q_v) over the vocabulary, with q from `reference`.

        Temperature and entropy:

        temperature: divisor of the logits.
        top_entropy_quantile: share of the tokens that carry the policy term; these are the tokens
            with the highest entropy. 1 means all tokens; 0 keeps only the tokens that have the
            highest entropy, as in TRL.
        entropy_coef: weight of the entropy bonus, which is subtracted from the loss. The bonus is
            the mean entropy of the tokens that `top_entropy_quantile` keeps. As in TRL, the weight
            may be negative: the loss then lowers the entropy.

        The sampler:

        off_policy_mask_threshold: the policy term drops a sequence's tokens with a negative
            advantage if the sequence's mean of (sampling logp - logp) is above this threshold.
            Without sampling log-probabilities, the mean of (old logp - logp) decides.
        vllm_importance_sampling_correction: compute the importance sampling ratio in the loss, from
            the old log-probabilities and `sampling_per_token_logps`, which you must pass. Without
            old log-probabilities, the loss uses the current log-probabilities, held constant. Off
            by default; in TRL, this option is on, and the trainer computes the ratio. ``"gmpo"``
            ignores it, and needs no sampling log-probabilities.
        vllm_importance_sampling_mode: ``"token_*"`` computes one ratio per token; ``"sequence_*"``
            computes one per sequence, from the sum of its tokens' log-ratios. ``"*_truncate"``
            clamps the ratio to the bounds; ``"*_mask"`` sets it to 0 outside the bounds.
            ``"sequence_mean_mask"`` (*not in TRL*) computes one ratio per token, and sets it to 0
            in sequences whose geometric mean ratio is outside the bounds.
        vllm_importance_sampling_clip_max, vllm_importance_sampling_clip_min: bounds of this ratio;
            None means no bound.

        Single loss types:

        max_completion_length: the most tokens that you generate in a completion, by which
            ``"dr_grpo"`` divides. Required for ``"dr_grpo"``, and not used otherwise. (TRL's
            default is 512, which is also its default for generation.)
        sapo_temperature_pos, sapo_temperature_neg: temperature of the SAPO surrogate for positive
            and negative advantages.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: shape of the VESPO surrogate
            for positive and negative advantages.

    The call warns if you set a field that only other loss types read, or a field of the sampler
    correction while the correction is off. To change fields of a config or of a preset, use
    `dataclasses.replace`, or pass the fields after the config: ``GRPOLoss(presets.DAPO,
    beta=0.1)``. Soft-cap, scale and precision of the logits are options of the head,
    `grpo_kernels.Head`.

    Raises:
        TypeError, ValueError: a field has the wrong type or is out of range; the message names the
            field.
    """

    loss_type: LossTypeName = "dapo"
    importance_sampling_level: ImportanceSamplingLevel = "token"
    epsilon: float = field(default=0.2, metadata=_at_least(0.0))
    epsilon_high: float | None = field(default=None, metadata=_at_least(0.0))
    delta: float | None = field(default=None, metadata=_above(0.0))
    beta: float = field(default=0.0, metadata=_at_least(0.0))
    use_bias_correction_kl: bool = True
    kl_estimator: KLEstimator = "k3"
    temperature: float = field(default=1.0, metadata=_above(0.0))
    top_entropy_quantile: float = field(default=1.0, metadata=_at_least(0.0, 1.0))
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    vllm_importance_sampling_correction: bool = False
    vllm_importance_sampling_mode: SamplingMode = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = field(default=3.0, metadata=_above(0.0))
    vllm_importance_sampling_clip_min: float | None = field(default=None, metadata=_at_least(0.0))
    max_completion_length: int | None = field(default=None, metadata=_at_least(1))
    sapo_temperature_pos: float = field(default=1.0, metadata=_above(0.0))
    sapo_temperature_neg: float = field(default=1.05, metadata=_above(0.0))
    vespo_k_pos: float = field(default=2.0, metadata=_at_least(0.0))
    vespo_lambda_pos: float = field(default=3.0, metadata=_at_least(0.0))
    vespo_k_neg: float = field(default=3.0, metadata=_at_least(0.0))
    vespo_lambda_neg: float = field(default=2.0, metadata=_at_least(0.0))

    def __post_init__(self) -> None:
        for option in fields(self):  # convert numpy's types and enums to Python's types
            if option.name in FIELDS:  # a subclass may have more
                value = _checked(option.name, getattr(self, option.name), option.metadata)
                object.__setattr__(self, option.name, value)
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                "vllm_importance_sampling_clip_min: expected a number below "
                f"vllm_importance_sampling_clip_max = {high}, got {low}"
            )
        corrects = self.vllm_importance_sampling_correction
        if corrects and self.truncates_sampling_ratio and low is high is None:
            raise ValueError(
                "vllm_importance_sampling_clip_max: expected a number here or in "
                "vllm_importance_sampling_clip_min, which vllm_importance_sampling_mode = "
                f"{self.vllm_importance_sampling_mode!r} needs, got None for both"
            )

    def __repr__(self) -> str:
        values = ((x, getattr(self, x.name)) for x in fields(self))
        always = ["loss_type", *(["use_bias_correction_kl"] if self.estimates_kl else [])]
        told = [f"{x.name}={v!r}" for x, v in values if x.name in always or v != x.default]
        return f"{type(self).__name__}({', '.join(told)})"

    if not TYPE_CHECKING:  # otherwise type checkers would accept the call

        def __call__(self, *_: object, **fields: object) -> LossConfig:
            """Raise TypeError: fields are changed by `dataclasses.replace`."""
            changes = ", ".join(f"{name}={x!r:.40}" for name, x in fields.items()) or "beta=0.1"
            raise TypeError(
                "config: a LossConfig is not a function; to change fields of it: "
                f"dataclasses.replace(config, {changes}), or GRPOLoss(config, {changes})"
            )

        def __getattr__(self, name: str) -> Any:
            hint = did_you_mean(name, FIELDS)
            if name in ("replace", "_replace", "copy", "update"):
                hint = "; to change fields of it: dataclasses.replace(config, ...)"
            message = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(message, name=name, obj=self)

    @property
    def clip_high(self) -> float:
        """The upper width of the clip range: `epsilon_high`, or `epsilon` if that is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def estimates_kl(self) -> bool:
        """True if the loss reads `ref_per_token_logps`, for an estimate of the KL."""
        return self.beta != 0.0 and self.kl_estimator != "full"

    @property
    def needs_reference_head(self) -> bool:
        """True if the loss reads `reference`, for the KL over the whole vocabulary."""
        return self.beta != 0.0 and self.kl_estimator == "full"

    @property
    def corrects_kl(self) -> bool:
        """True if the KL estimate is multiplied by the ratio."""
        return self.estimates_kl and self.use_bias_correction_kl and self.definition.has_gate

    @property
    def shares_ratio(self) -> bool:
        """True if one R serves all tokens of a sequence."""
        is_shared = self.definition.log_ratio is not None
        return is_shared or self.importance_sampling_level == "sequence"

    @property
    def reads_sequence(self) -> bool:
        """True if a token's policy term depends on the log-ratios of its sequence."""
        return self.shares_ratio or self.definition.surrogate_input is not None

    @property
    def corrects_sampling(self) -> bool:
        """True if the loss computes the ratio to the sampler, from `sampling_per_token_logps`."""
        return self.vllm_importance_sampling_correction and self.definition.has_gate

    @property
    def sampling_ratio_is_per_sequence(self) -> bool:
        """True if the importance sampling ratio that the loss computes is per sequence."""
        return self.vllm_importance_sampling_mode in ("sequence_truncate", "sequence_mask")

    @property
    def truncates_sampling_ratio(self) -> bool:
        """True if the ratio is clamped to its bounds, False if it is 0 outside them."""
        return self.vllm_importance_sampling_mode.endswith("_truncate")

    @property
    def masks_off_policy(self) -> bool:
        """True if off-policy sequences are dropped."""
        return self.off_policy_mask_threshold is not None and self.definition.has_gate

    @property
    def divides_by_length(self) -> bool:
        """True if the loss is divided by `max_completion_length`."""
        return self.definition.normalizer == "max_length"

    @property
    def definition(self) -> LossType:
        """The definition of its loss type."""
        return LOSSES[self.loss_type]

    @classmethod
    def from_trl(cls, args: Any, **overrides: Unpack[LossFields]) -> LossConfig:
        """Convert a ``trl.GRPOConfig``, or a similar object, to the config of its loss.

        Fields that `args` lacks keep their defaults; `overrides` take precedence over `args`.
        Soft-cap and scale, which TRL reads from the model, belong to the `Head`.
        ``max_completion_length`` is copied only with ``loss_type="dr_grpo"``, which reads it.
        ``vllm_importance_sampling_correction`` is not copied: TRL's trainer computes the ratio
        beforehand, and a second ratio would be wrong. If you pass `sampling_per_token_logps` but no
        ratio, turn the correction on: ``from_trl(args, vllm_importance_sampling_correction=True)``.
        The deprecated ``vllm_importance_sampling_cap`` sets ``vllm_importance_sampling_clip_max``,
        as in TRL.

        Raises:
            ValueError: `args` has a loss type that this library does not know, or turns on an
                option that a `LossConfig` cannot hold: ``use_adaptive_entropy``,
                ``mask_truncated_completions``, ``cast_lm_head_to_fp32``, ``router_aux_loss_coef``.
                The message says what to do instead.
            TypeError: `args` is the config of a TRL trainer with a different loss (``RLOOConfig``,
                ``DistillationConfig``), or has none of the fields. A mapping raises this error too,
                because misspelled keys of a mapping would go unnoticed.
        """
        trl_names = [
            x.__name__ for x in type(args).__mro__ if x.__module__.partition(".")[0] == "trl"
        ]
        is_like = "GRPOConfig" in trl_names
        if (
            trl_names
            and trl_names[0] != "GRPOConfig"
            and not (is_like and "loss_type" in overrides)
        ):
            hint = "; to keep its fields: from_trl(args, loss_type=...)" if is_like else ""
            raise TypeError(
                f"args: expected trl.GRPOConfig or similar, got {type(args).__name__}, which "
                f"belongs to a trainer with a different loss{hint}"
            )
        for name, neutral in REFUSED.items():
            value = getattr(args, name, neutral)
            if value != neutral:
                raise ValueError(
                    f"{name}: expected {neutral}, since a LossConfig cannot hold it, got "
                    f"{value!r}; {INSTEAD[name]}, and turn it off in a copy: args = "
                    f"copy.copy(args); args.{name} = {neutral}"
                )
        return config_of_trainer(args, **overrides)


FIELDS = tuple(x.name for x in fields(LossConfig))
_TYPES = get_type_hints(LossConfig)
# Fields that apply to a custom objective that does not read tokens.loss: the normalizer's, and the
# temperature.
_BESIDE_AN_OBJECTIVE = ("loss_type", "max_completion_length", "temperature")


def config_of_trainer(args: Any, **overrides: Any) -> LossConfig:
    """Do as `LossConfig.from_trl`, but accept the options that TRL's trainer handles itself."""
    options = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
    # the trainer computes the ratio, so the loss must not
    options.pop("vllm_importance_sampling_correction", None)
    if not options:
        # nobody would notice a misspelled key of a mapping
        is_mapping = isinstance(args, Mapping)
        hint = "; for a mapping, trl.GRPOConfig(**args) or LossConfig(**args)" if is_mapping else ""
        raise TypeError(
            f"args: expected trl.GRPOConfig or similar, got {type(args).__name__}{hint}"
        )
    options = {name: x for name, x in options.items() if x is not None or _is_optional(name)}
    if getattr(args, "vllm_importance_sampling_cap", None) is not None:
        options["vllm_importance_sampling_clip_max"] = args.vllm_importance_sampling_cap
    config = LossConfig(**{**options, **overrides})
    if "max_completion_length" in overrides or config.divides_by_length:
        return config
    return replace(config, max_completion_length=None)  # it only limits the generation


def _is_optional(name: str) -> bool:
    return NoneType in get_args(_TYPES[name])


def _checked(name: str, value: Any, rule: Mapping[str, Any]) -> Any:
    """Convert `value` to a Python type; raise unless it fits the field's annotation and `rule`."""
    kind = _TYPES[name]
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        hint = preset_hint(value) if name == "loss_type" else ""
        if name == "loss_type" and isinstance(value, LossConfig):
            hint = "; pass it as config="
        if name == "kl_estimator" and value in ("low_var_kl", "low_var_kl+"):
            hint = "; verl's low_var_kl is 'k3'"
        check_choice(name, value, allowed, hint)
        return allowed[allowed.index(value)]
    if kind is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")
        return value
    if value is None and _is_optional(name):
        return None
    if name == "epsilon" and isinstance(value, tuple | list):
        raise TypeError(f"{name}: expected a number, got {value!r}; the upper one is epsilon_high")
    check_number(name, value, *rule.get("range", ()))
    if isinstance(value, Integral):
        return int(value)
    if kind is int or int in get_args(kind):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    return float(value)


def preset_hint(name: Any) -> str:
    """Hint at the preset of this `name`; "" if there is none."""
    preset = str(name).upper().replace("-", "_").removesuffix("_LOSS")
    presets = sys.modules.get("grpo_kernels.presets")  # it imports this module
    if preset not in getattr(presets, "__all__", ()):
        return ""
    if preset.lower() in LOSSES:
        default = f"loss_type={preset.lower()!r}"
        return f"; config=presets.{preset} has the paper's settings, {default} the defaults"
    return f"; grpo_kernels.presets.{preset} is that loss: config=presets.{preset}"


def check_kind(config: Any) -> None:
    """Require a LossConfig, not the name of a preset."""
    if not isinstance(config, LossConfig):
        hint = "; pass it as objective=" if inspect.isfunction(config) else preset_hint(config)
        if isinstance(config, Mapping):
            hint = "; pass LossConfig(**config)"
        if hasattr(config, "loss_type") and not isinstance(config, type):
            hint = "; pass LossConfig.from_trl(args)"
        if isinstance(getattr(config, "config", None), LossConfig):  # a GRPOLoss
            hint = "; pass its config"
        got = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
        raise TypeError(f"config: expected a LossConfig, got {got}{hint}")


def check_config(config: Any) -> None:
    """Require a LossConfig with every field that its loss needs."""
    check_kind(config)
    if config.divides_by_length and config.max_completion_length is None:
        raise ValueError(
            "max_completion_length: expected the most tokens that you generate in a completion, by "
            f"which loss_type = {config.loss_type!r} divides, got None: set it in the config, "
            "replace(config, max_completion_length=...)"
        )


_DEFAULT = LossConfig()


def with_fields(arguments: Mapping[str, Any], function: str) -> tuple[LossConfig, dict[str, Any]]:
    """Take the `fields` of a call's `arguments`, by name, into its config.

    Returns the config, and the arguments with it. Errors call the public call `function`.
    """
    fields = arguments["fields"]
    arguments = {name: x for name, x in arguments.items() if name != "fields"}
    config: LossConfig = _DEFAULT if arguments["config"] is None else arguments["config"]
    if fields:
        check_kind(config)
        for name in fields:
            if name not in FIELDS:
                hint = did_you_mean(name, [*FIELDS, *arguments])
                missing = f"not an argument of {function}, nor a field of LossConfig"
                raise TypeError(f"{name}: {missing}{hint}")
        config = replace(config, **fields)
    return config, {**arguments, "config": config}


def check_names(
    names: Iterable[str],
    owner: str,
    allowed: Collection[str],
    elsewhere: str,
    others: Collection[str],
) -> None:
    """Require all `names` to be `allowed` arguments of `owner`.

    The error suggests one of them, or of the arguments `others`, which are `elsewhere`.
    """
    for name in names:
        if name not in allowed:
            hint = did_you_mean(name, allowed, elsewhere, others)
            if name in others:
                hint = f"; it is {elsewhere}"
            raise TypeError(f"{name}: {owner} has no such argument{hint}")


def check_objective(config: LossConfig, objective: Any) -> None:
    """Require a function, and only terms in `config` that it can read as `tokens.loss`."""
    if objective is None:
        return
    is_config = isinstance(objective, LossConfig)
    if is_config or not callable(objective) or isinstance(objective, type):
        hint = "; pass it as config=" if is_config else ""
        got = objective.__name__ if isinstance(objective, type) else type(objective).__name__
        raise TypeError(f"objective: expected a function of TokenInputs, got {got}{hint}")
    function = objective.forward if isinstance(objective, nn.Module) else objective
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # some builtins have no signature
        pass
    except TypeError:
        raise TypeError(
            "objective: expected a function of one argument, TokenInputs, got "
            f"{inspect.signature(function)}; functools.partial fills in others"
        ) from None
    if config.entropy_coef != 0.0:
        raise ValueError(
            "entropy_coef: expected 0 with an objective, which can add its own term of "
            f"tokens.entropies, got {config.entropy_coef!r}"
        )
    _refuse_full_kl(config, "with an objective")


def _refuse_full_kl(config: LossConfig, why: str) -> None:
    if config.needs_reference_head:
        raise ValueError(
            f"kl_estimator: expected 'k1', 'k2' or 'k3' {why}, got 'full', the divergence over "
            "the whole vocabulary"
        )


def check_loss_is_read(config: LossConfig) -> None:
    """Refuse terms, and warn of names, that an objective without `tokens.loss` leaves unused."""
    definition = config.definition
    plain = next(x.name for x in LOSSES.values() if x.normalizer == definition.normalizer)
    for option in fields(LossConfig):
        value, default = getattr(config, option.name), option.default
        if option.name not in _BESIDE_AN_OBJECTIVE and value != default:
            raise ValueError(
                f"{option.name}: expected {default!r} with an objective that does not read "
                f"tokens.loss, and so replaces the config's loss, got {value!r}; pass loss_type = "
                f"{plain!r} alone, without a preset, or build on tokens.loss"
            )
    if definition.surrogate != "clipped":
        warn_once(
            f"loss_type: {config.loss_type!r} only sets the normalizer with an objective that does "
            f"not read tokens.loss; pass {plain!r}, which has the same, or build on tokens.loss"
        )
    if config.max_completion_length is not None and not config.divides_by_length:
        warn_once(f"max_completion_length: {_UNUSED.format(config.loss_type)}")


def check_inputs(inputs: Mapping[str, Any], *, has_reference: bool = False) -> None:
    """Check the config, and require the inputs that its loss reads, and no contradicting ones.

    `inputs` are the arguments of a public call by name, as passed. Not every call has all of them.
    `read_tokens` checks their shapes.
    """
    config = inputs["config"]
    check_config(config)
    objective, kept_ids = inputs.get("objective"), inputs.get("kept_ids")
    check_objective(config, objective)
    ref_per_token_logps = inputs["ref_per_token_logps"]
    # an objective may not read it: `PolicyLoss.per_token_loss` checks if it does
    if config.estimates_kl and ref_per_token_logps is None and objective is None:
        hint = "causal_lm_logps or linear_logps compute it"
        if has_reference:
            hint = "`reference` is read only with kl_estimator = 'full'"
        raise ValueError(
            f"ref_per_token_logps: expected a tensor since beta = {config.beta}, got None; {hint}"
        )
    if config.needs_reference_head and not has_reference:
        raise ValueError(
            "reference: expected (hidden, head), which grpo_loss takes, since kl_estimator = "
            f"'full' and beta = {config.beta}, got None"
        )
    if has_reference and (objective is not None or config.kl_estimator != "full"):
        why = f"with kl_estimator = {config.kl_estimator!r}"
        why = why if objective is None else "with an objective"
        raise ValueError(
            f"reference: expected None {why}, which does not read it, got one; pass "
            "ref_per_token_logps, from linear_logps, instead, or leave it out"
        )
    if ref_per_token_logps is not None and objective is None and not config.estimates_kl:
        why, instead = "beta = 0, so there is no KL term", "give beta a value"
        if config.needs_reference_head:
            why = "kl_estimator = 'full', which reads `reference`"
            instead = "choose another kl_estimator"
        warn_once(f"ref_per_token_logps: not used with {why}; {instead}, or leave it out")
    why = "since vllm_importance_sampling_correction = True"
    ratio = inputs["importance_sampling_ratio"]
    if config.vllm_importance_sampling_correction and ratio is not None:
        got = type(ratio).__name__
        raise ValueError(f"importance_sampling_ratio: expected None {why} computes it, got {got}")
    if config.corrects_sampling and inputs["sampling_per_token_logps"] is None:
        raise ValueError(f"sampling_per_token_logps: expected a tensor {why}, got None")
    _check_num_items(inputs["num_items_in_batch"])
    if kept_ids is not None:
        _refuse_full_kl(config, "with kept_ids, which truncate the policy")
    if "sampling_topk_ids" in inputs:
        _check_centering(inputs)


def _check_num_items(num_items_in_batch: Any) -> None:
    """Require None, a finite number >= 0 or a tensor of one element."""
    if isinstance(num_items_in_batch, Tensor):
        if num_items_in_batch.numel() != 1:
            got = f"a tensor of shape {tuple(num_items_in_batch.shape)}"
            got += "; pass completion_mask.sum()" if num_items_in_batch.dim() == 2 else ""
            raise ValueError(f"num_items_in_batch: expected one number, got {got}")
        check_tensor("num_items_in_batch", num_items_in_batch)
        if num_items_in_batch.device.type != "cpu":
            return  # looking at it would wait for the device
        num_items_in_batch = num_items_in_batch.item()
    if num_items_in_batch is not None:
        check_number("num_items_in_batch", num_items_in_batch, 0.0, True)


def _check_centering(inputs: Mapping[str, Any]) -> None:
    """If the call has a sampler's top-K ids, require a loss whose score they can center.

    That is a policy term -A w logp, where w is a constant known for every id.
    """
    config, names = inputs["config"], ("sampling_topk_ids", "sampling_topk_logps")
    absent = [name for name in names if inputs[name] is None]
    if len(absent) == 2:
        return
    if absent:
        raise ValueError(f"{absent[0]}: expected a tensor, like its partner, got None")
    why = "with sampling_topk_ids, which center the score"
    for name in ("objective", "kept_ids", "old_per_token_logps", "importance_sampling_ratio"):
        if inputs[name] is not None:
            raise ValueError(f"{name}: expected None {why}, got {type(inputs[name]).__name__}")
    if config.definition.surrogate != "clipped" or config.importance_sampling_level != "token":
        *first, last = (repr(x.name) for x in LOSSES.values() if x.surrogate == "clipped")
        raise ValueError(
            f"loss_type: expected {', '.join(first)} or {last} {why}, with "
            f"importance_sampling_level = 'token', got {config.loss_type!r} with "
            f"{config.importance_sampling_level!r}"
        )
    _refuse_full_kl(config, why)
    mode = config.vllm_importance_sampling_mode
    if config.corrects_sampling and mode not in ("token_truncate", "token_mask"):
        raise ValueError(
            "vllm_importance_sampling_mode: expected 'token_truncate' or 'token_mask' "
            f"{why}, got {mode!r}"
        )


def warn_of_inputs(tokens: Tokens, inputs: Mapping[str, Any]) -> None:
    """Warn, once each, of inputs that nothing reads or that are too coarse.

    `inputs` are as in `check_inputs`, and `tokens` what was read of them.
    """
    config, objective = inputs["config"], inputs["objective"]
    old = inputs["old_per_token_logps"]
    sampling = inputs["sampling_per_token_logps"]
    definition, layout = config.definition, tokens.layout
    on_cpu = tokens.advantages.device.type == "cpu"  # elsewhere, reading them would wait
    most = config.max_completion_length if config.divides_by_length and on_cpu else None
    if most is not None and layout.batch and int(layout.lengths.max()) > most:
        warn_once(
            f"max_completion_length: loss_type = {config.loss_type!r} divides by it, and {most} is "
            "less than the tokens of a completion; pass the longest length that you generate"
        )
    items = inputs["num_items_in_batch"]
    is_known = items is not None and not (isinstance(items, Tensor) and items.device.type != "cpu")
    if is_known and definition.normalizer == "num_items" and layout.total:
        # with data parallelism, trainers divide it by the number of ranks
        is_divided = dist.is_available() and dist.is_initialized()
        if float(items) < (1 if is_divided else layout.total):
            counts = f"is less than the {layout.total} tokens of this call"
            counts = "counts as 1" if float(items) < 1.0 else counts
            warn_once(
                f"num_items_in_batch: {float(items):g} {counts}; pass the number of counted tokens "
                "of the whole batch, such as completion_mask.sum()",
                key="num_items_in_batch: few",
            )
    if items is not None and definition.normalizer != "num_items":
        warn_once(
            f"num_items_in_batch: not used by loss_type = {config.loss_type!r}, a mean over the "
            "call. Under gradient accumulation divide the loss by the number of steps, and leave "
            "num_items_in_batch out"
        )
    reads_sampling = objective is not None or config.masks_off_policy or config.corrects_sampling
    if sampling is not None and not reads_sampling:
        warn_once(
            "sampling_per_token_logps: used for a metric only; set off_policy_mask_threshold or "
            "vllm_importance_sampling_correction (not available for loss_type = 'gmpo'), or "
            "leave them out"
        )
    for name in ("old_per_token_logps", "logps"):
        if old is not None and name in inputs and inputs[name].dtype.itemsize < 4:
            warn_once(
                f"{name}: rounded to {inputs[name].dtype}, so ratios that should be 1 are off "
                "(in bf16 by up to 1.6% down to -8); keep them in torch.float32"
            )
    if objective is None:  # else it may not read the config's loss
        warn_of_loss(config, tokens)


_UNUSED = "not used by loss_type = {!r}; leave it out"


@functools.cache
def _unread(config: LossConfig) -> tuple[str, ...]:
    """The fields that are set and that only other loss types read."""
    read = {*config.definition.reads}
    if "epsilon_high" in read and config.epsilon_high is None:
        read.add("epsilon")
    unread = {name for x in LOSSES.values() for name in x.reads} - read
    if not config.definition.has_gate:
        unread |= {"off_policy_mask_threshold", "vllm_importance_sampling_correction"}
    if config.definition.surrogate_input is not None and not config.corrects_kl:
        unread.add("importance_sampling_level")  # no term has R
    if not config.divides_by_length:
        unread.add("max_completion_length")
    is_set = {x.name: getattr(config, x.name) != x.default for x in fields(config)}
    return tuple(name for name in is_set if is_set[name] and name in unread)


def warn_of_loss(config: LossConfig, tokens: Tokens) -> None:
    """Warn, once each, of options and inputs without effect on the config's loss of all `tokens`.

    Warn of a clip range that is likely a mistake, too. As in TRL, these are not errors.
    """
    definition, layout, old = config.definition, tokens.layout, tokens.old_per_token_logps
    if tokens.advantages.device.type == "cpu" and config.importance_sampling_level == "sequence":
        is_next = layout.sequence.diff() == 0
        if bool(((tokens.advantages.diff() != 0) & is_next).any()):
            warn_once(
                "advantages: they differ within a sequence, whose tokens share one ratio, so a "
                "token's gradient is that of its sequence's mean advantage. "
                "objectives.gspo_token has gradients by token"
            )
    options = [f"vllm_importance_sampling_{x}" for x in ("mode", "clip_max", "clip_min")]
    is_set = [x for x in options if getattr(config, x) != getattr(_DEFAULT, x)]
    if tokens.importance_sampling_ratio is not None:  # may come from a trainer with these options
        if not definition.has_gate:
            warn_once(f"importance_sampling_ratio: {_UNUSED.format(config.loss_type)}")
    elif is_set and not config.vllm_importance_sampling_correction:
        warn_once(
            f"{', '.join(is_set)}: not used without an importance sampling ratio; turn on "
            "vllm_importance_sampling_correction, pass importance_sampling_ratio, or leave "
            f"{'it' if len(is_set) == 1 else 'them'} out"
        )
    if config.masks_off_policy and old is tokens.sampling_per_token_logps is None:
        warn_once(
            "off_policy_mask_threshold: drops nothing without sampling_per_token_logps or "
            "old_per_token_logps; pass one of them, or leave it out"
        )
    if config.kl_estimator != "k3" and config.beta == 0.0:
        warn_once(
            f"kl_estimator: {config.kl_estimator!r} has no effect in a loss with beta = 0; give "
            "beta a value, or leave it out"
        )
    unread = _unread(config)
    for name in unread:
        warn_once(f"{name}: {_UNUSED.format(config.loss_type)}")
    low, high = config.epsilon, config.clip_high
    if definition.surrogate == "cispo" and high < 1.0:
        warn_once(
            f"epsilon_high: in {config.loss_type!r} it is the cap on the ratio itself, so {high:g} "
            "caps nearly every token; pass 5 (presets.CISPO)"
        )
    if "delta" not in unread and config.delta is not None and config.delta < 1.0 + high:
        warn_once(
            f"delta: {config.delta:g} is below the clip range's bound, 1 + epsilon_high = "
            f"{1.0 + high:g}, and lowers ratios within it; INTELLECT-2's is 4"
        )
    if old is None or definition.surrogate != "clipped":
        return
    if config.epsilon_high is not None and high >= 1.0:
        warn_once(
            f"epsilon_high: the upper bound of the ratio is 1 + epsilon_high, so {high:g} "
            "hardly clips; DAPO's is 0.28 (presets.DAPO)"
        )
    if low >= 1.0:
        warn_once(
            f"epsilon: ratios are clipped to [1 - epsilon, 1 + epsilon_high], so {low:g} "
            "never clips from below; published values are 0.2 for a ratio per token, 3e-4 "
            "(presets.GSPO) for one per sequence"
        )
    elif config.importance_sampling_level == "token" and max(low, high) < 0.01:
        warn_once(
            f"epsilon: {low:g} with importance_sampling_level = 'token' clips most tokens; "
            "published values are 0.2 for a ratio per token, 3e-4 for one per sequence"
        )
    elif config.importance_sampling_level == "sequence" and min(low, high) >= 0.05:
        # far above all published values for a ratio per sequence
        warn_once(
            f"epsilon: {low:g} with importance_sampling_level = 'sequence' hardly ever clips, "
            "since the mean over a sequence moves little; GSPO's are epsilon = 3e-4 and "
            "epsilon_high = 4e-4 (presets.GSPO)"
        )
