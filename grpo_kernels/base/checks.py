"""Argument checks, which raise TypeError or ValueError before any work is done.

Errors name the argument, what was expected and what it got. Checks that would have to wait for the
device run only on a CPU.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HIGHEST_LOGP = 1e-3  # rounding may lift a log-probability above 0
LOWEST_ENTROPY = -0.5  # rounding may push an entropy from 16-bit logits below 0
HIGHEST_MASS = 1.05  # a sum of 16-bit probabilities may be a little above 1
HIGHEST_MEAN_LOG_RATIO = math.log(20)  # of the mean over a batch's tokens
HIGHEST_LOG_RATIO = 1.5  # of the mean size over a batch's tokens: policies of one run are closer


WARNED: set[tuple[str, str, int]] = set()  # (message, file, line of the user's call)


def warn_once(message: str, category: type[Warning] = UserWarning, key: str = "") -> None:
    """Warn of a likely mistake, once for each line of user code that makes it.

    A message that holds numbers of a batch needs a `key`, which counts as the message.

    A RuntimeWarning is about the machine and is issued once per process. If a filter turns the
    warning into an error, every call raises.

    Python's own registry of warnings is cleared whenever any code enters `catch_warnings`, which
    torch does in many steps. So this function keeps a registry itself.
    """
    # skip frames of libraries that call our functions: `nn.Module`, a model's forward, a trainer
    inner = ("grpo_kernels", "torch.", "transformers.", "peft.", "accelerate.", "trl.")
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inner):
        level, frame = level + 1, frame.f_back
    place = key or message, frame.f_code.co_filename, frame.f_lineno
    if category is RuntimeWarning:
        place = key or message, "", 0
    if place not in WARNED:
        warnings.warn(f"grpo_kernels: {message}", category, stacklevel=level)
        WARNED.add(place)


# names that other libraries use -> ours; several names if functions of ours call it differently
_SYNONYMS = {
    "kl_coef": "beta", "kl_beta": "beta", "clip_high": "epsilon_high", "clip_low": "epsilon",
    "rollout_log_probs": "sampling_per_token_logps", "clip_ratio": "epsilon",
    "norm_adv_by_std_in_grpo": "scale_rewards", "index": "group_ids", "uid": "group_ids",
    "clip_ratio_high": "epsilon_high", "clip_ratio_low": "epsilon", "eps_clip": "epsilon",
    "softcap": "final_logit_softcapping", "logit_softcap": "final_logit_softcapping",
    "logit_softcapping": "final_logit_softcapping", "group_size": "num_generations",
    "n_generations": "num_generations", "labels": "completion_ids", "ids": "completion_ids",
    "weight": "head", "lm_head": "head", "clip_eps": "epsilon", "targets": "completion_ids",
    "kl": "divergence beta", "kl_penalty": "kl_estimator", "clip": "epsilon",
    "mask": "completion_mask", "reduction": "loss_type",
    "target": "completion_ids", "input_ids": "completion_ids", "attention_mask": "completion_mask",
    "chunk_size": "workspace_bytes run", "num_chunks": "workspace_bytes run",
    "without_set": "on_missing_set", "process_rewards": "process_advantages",
    "per_token_logps": "logps", "kind": "divergence",
    "loss_fn": "objective config", "engine": "run", "backend": "run", "workspace_bytes": "run",
    "clip_range": "epsilon", "temp": "temperature", "memory": "workspace_bytes run",
    "old_logp": "old_per_token_logps", "ref_logp": "ref_per_token_logps",
    "group_index": "group_ids", "normalize": "normalize_advantages scale_rewards", "epsilon": "eps",
    "bias": "head", "ref_model": "ref_per_token_logps reference teacher", "ref_hidden": "reference",
    "ref_weight": "reference", "ref_head": "reference", "return_entropy": "entropy",
    "penalty": "objective", "extra_loss": "objective", "response_mask": "completion_mask",
    "loss_mask": "completion_mask", "selected_token_ids": "completion_ids", "rkl": "reverse_kl",
    "fkl": "forward_kl", "loss": "divergence", "rollout_is_weights": "importance_sampling_ratio",
    "causal_lm_scores": "causal_lm_logps",
    "get_per_token_logps": "causal_lm_logps", "selective_log_softmax": "linear_logps",
    "reward_to_go": "process_advantages", "rewards_to_go": "process_advantages",
    "process_supervision": "process_advantages", "compute_advantages": "group_advantages",
    "compute_grpo_outcome_advantage": "group_advantages", "token_penalty": "objective",
    "linear_cross_entropy": "linear_logps", "linear_entropy": "linear_logps",
    "kl_divergence": "linear_divergence", "generalized_jsd_loss": "linear_divergence",
    "distillation_loss": "linear_divergence", "causal_lm_distillation": "causal_lm_divergence",
    "compute_policy_loss": "policy_loss_from_logps", "per_token_penalty": "objective",
    "policy_loss": "objective",
    "alpha": "beta", "kl_type": "kl_estimator", "kl_loss_coef": "beta",
    "kl_loss_type": "kl_estimator", "use_kl_loss": "beta", "clip_ratio_c": "delta",
    "ref_input": "reference", "cliprange": "epsilon", "cliprange_low": "epsilon",
    "cliprange_high": "epsilon_high", "loss_agg_mode": "loss_type", "rewards": "advantages",
    "lambda_": "lam", "lambd": "lam", "gae_lambda": "lam", "compute_entropy": "entropy",
    "calculate_entropy": "entropy", "tis_imp_ratio_cap": "clip_max", "reference": "teacher",
    # values of verl's loss_agg_mode
    "token-mean": "bnpo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}  # fmt: skip

_OF_GROUPS = "it is an argument of grpo_kernels.advantages.group_advantages"
_OF_HEAD = "it is an option of the head: Head(weight, {}=...), which whole models bring along"
_OF_MODELS = "it is an argument of grpo_kernels.transformers.causal_lm_loss"
# what to do with a name that other calls or libraries have, if no argument here corresponds to it
INSTEAD = {
    "use_adaptive_entropy": "the trainer controls it: change the coefficient between steps, "
    "replace(config, entropy_coef=...)",
    "mask_truncated_completions": "set completion_mask to 0 in every completion without an end "
    "token",
    "cast_lm_head_to_fp32": "use a head whose weight is in float32",
    "router_aux_loss_coef": "pass it to causal_lm_loss",
    "adv_estimator": "grpo_kernels.advantages has a function for each",
    "num_iterations": "call the loss once per step, with the first step's logps as "
    "old_per_token_logps",
    "use_ref_model": "a KL term needs beta above 0, and ref_per_token_logps in the call",
    "tis_imp_ratio_cap": "presets.TIS is that loss; its cap is vllm_importance_sampling_clip_max",
    "loss_fn": "calls with a temperature= take loss_fn.config.temperature",
    "ignore_index": "set completion_mask to 0 at these ids",
    "objective": "it is an argument of GRPOLoss, grpo_loss and policy_loss_from_logps",
    "model": "for a whole model, grpo_kernels.transformers has causal_lm_loss, "
    "causal_lm_logps and causal_lm_divergence",
    **dict.fromkeys(("scale_rewards", "num_generations", "group_ids"), _OF_GROUPS),
    **dict.fromkeys(("layout", "zero_advantage"), _OF_MODELS),
    **dict.fromkeys(
        (
            *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
            *("importance_sampling_ratio", "num_items_in_batch", "reference"),
        ),
        "it is an argument of a loss's call, such as grpo_loss",
    ),
    **{
        name: _OF_HEAD.format(name)
        for name in (
            *("final_logit_softcapping", "logit_scale", "logits_dtype"),
            *("lora", "process_group", "vocab_size"),
        )
    },
}


def _plain(name: str) -> str:
    return name.replace("log_prob", "logp").replace("logprob", "logp")


def _synonym(name: str, names: Iterable[str]) -> list[str]:
    """The first of `names` that another library calls `name`, if there is one."""
    candidates = [*names]
    synonyms = (_SYNONYMS.get(name) or _SYNONYMS.get(_plain(name), "")).split()
    return [x for x in synonyms if x in candidates][:1]


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    """The names in `names` that `name` probably means."""
    candidates = [*names]
    if same := _synonym(name, candidates):
        return same
    if name in INSTEAD:
        return []
    name = _plain(name)
    parts = {*name.split("_")}
    # `longer`: old_per_token_logps for old_logps
    longer = [x for x in candidates if parts <= {*x.split("_")}]
    near = longer if len(parts) > 1 else []
    alike = {x.lower(): x for x in candidates if x[:1].lower() == name[:1].lower()}
    near = near or [alike[x] for x in difflib.get_close_matches(name.lower(), alike, 1, 0.7)]
    near = near or [x for x in candidates if x.endswith(f"_{name}")] or longer
    return near or [x for x in candidates if len(name) > 2 and x.startswith(name)]


def did_you_mean(
    name: str, names: Iterable[str], elsewhere: str = "", others: Iterable[str] = ()
) -> str:
    """Suggest the nearest of `names` as "; did you mean ...?", or say what to do instead.

    "" if nothing is known. If the nearest name is one of `others`, the suggestion adds that it is
    `elsewhere`.
    """
    names, others = [*names], [*others]
    groups = [
        (find(name, x), x is others) for find in (_synonym, _nearest) for x in (names, others)
    ]
    near, of_others = next((x for x in groups if x[0]), ([], False))
    if not near:
        known = (x for x in (name, *_SYNONYMS.get(name, "").split()) if x in INSTEAD)
        return next((f"; {INSTEAD[x]}" for x in known), "")
    *first, last = near
    if last == "run" != name:
        option = name if name in ("engine", "backend") else "workspace_bytes"
        last = f"run=Run({option}=...)"
    meant = f"{', '.join(first)} or {last}" if first else last
    return f"; did you mean {meant}?{f' It is {elsewhere}' if of_others and elsewhere else ''}"


def hints_names(function: F, name: str = "", *, leaves_graph: bool = False) -> F:
    """Decorate a public function or class so that errors about its arguments are helpful.

    An unknown keyword argument raises TypeError with the name that was probably meant. A missing
    argument, or too many positional ones, raises TypeError with the function's own name.

    If it `leaves_graph`, torch.compile breaks its graph at a call, which runs eagerly.
    """
    name = name or function.__name__
    if isinstance(function, type):
        function.__init__ = hints_names(function.__init__, name)  # type: ignore[misc]
        return function
    parameters = inspect.signature(function).parameters
    of_self = int("self" in parameters)
    own = [x for x in parameters.values() if x.name != "self" and x.kind is not x.VAR_KEYWORD]
    by_position = [x.name for x in own if x.kind is x.POSITIONAL_OR_KEYWORD]
    names = [x.name for x in own]
    needed = [x.name for x in own if x.default is x.empty]
    takes_more = len(own) + of_self < len(parameters)  # the function checks these names

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if leaves_graph and torch.compiler.is_compiling():
            from grpo_kernels.base.eagerly import eagerly

            return eagerly(call, *args, **options)
        unknown, count = [x for x in options if x not in names], len(args) - of_self
        if unknown and not takes_more:
            hint = did_you_mean(unknown[0], names) or f"; it has {', '.join(names)}"
            raise TypeError(f"{unknown[0]}: {name} has no such argument{hint}")
        if count > len(by_position):
            most = ", ".join(by_position) or "nothing"
            others = "; pass the others by name" if len(names) > len(by_position) else ""
            raise TypeError(
                f"{name}: expected at most {most} by position, got {count} arguments{others}"
            )
        absent = [x for x in needed if x not in options and x not in by_position[:count]]
        if absent:
            meant = [x for x in unknown if _nearest(x, absent[:1])]
            hint = f"; did you mean it by {meant[0]}?" if meant else ""
            wrong = next((x for x in unknown if _nearest(x, needed)), None)
            if wrong and not hint:
                hint = f", but {wrong}{did_you_mean(wrong, needed)}"
            by_place = f", got {count} by position" if count > 0 else ""
            hint = hint or f"; it requires {', '.join(needed)}{by_place}"
            raise TypeError(f"{absent[0]}: expected by {name}, got none{hint}")
        return function(*args, **options)

    # help() shows names and defaults; the docstring has the types
    plain_parameters = [x.replace(annotation=x.empty) for x in parameters.values()]
    call.__signature__ = inspect.Signature(plain_parameters)  # type: ignore[attr-defined]
    return cast(F, call)


def outside_graphs(function: F) -> F:
    """Decorate a public call by `hints_names`; torch.compile runs it outside of its graphs."""
    return hints_names(function, leaves_graph=True)


def no_attribute(of: Any, name: str, names: Iterable[str], hint: str = "") -> AttributeError:
    """Make the error for a missing attribute, with `hint` or else the nearest of `names`."""
    names = [*names]
    hint = hint or did_you_mean(name, names) or f"; it has {', '.join(names)}"
    if hasattr(Tensor, name):
        hint = f": it is not a tensor, but has some: {', '.join(names)}"
    return AttributeError(f"{type(of).__name__!r} object has no attribute {name!r}{hint}", obj=of)


def no_name(module: str, name: str, hint: str) -> Exception:
    """Make the error for a name that a module's ``__getattr__`` does not find."""
    # `from package import name` asks first, and would hide an AttributeError
    imports = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    is_module = imports and importlib.util.find_spec(f"{module}.{name}") is not None
    kind = ImportError if imports and not is_module else AttributeError
    return kind(f"module {module!r} has no attribute {name!r}{hint}")


def only_public(module: str, hint: Callable[[str], str] = lambda name: "") -> None:
    """Limit `dir` of a module to its ``__all__``, and make unknown names raise `no_name`.

    `hint` maps the unknown name to a hint; "" means the default one.
    """
    own: Any = sys.modules[module]

    def missing(name: str) -> Any:
        raise no_name(module, name, hint(name) or did_you_mean(name, own.__all__))

    own.__dir__, own.__getattr__ = lambda: [*own.__all__], missing


def check_number(
    name: str,
    value: Any,
    lowest: float = -math.inf,
    inclusive: bool = False,
    highest: float = math.inf,
) -> None:
    """Require a finite number above `lowest`, or equal to it if `inclusive`; at most `highest`."""
    if isinstance(value, Tensor):
        got = f"a tensor of shape {tuple(value.shape)}"
        if value.numel() == 1:
            got = f"{value!r}; pass its .item()"
        raise TypeError(f"{name}: expected a number, got {got}")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not math.isfinite(value) or value < lowest or (value == lowest and not inclusive):
        limit = "" if lowest == -math.inf else f" {'>=' if inclusive else '>'} {lowest:g}"
        raise ValueError(f"{name}: expected a finite number{limit}, got {value!r}")
    if not value <= highest:
        interval = f"{'[' if inclusive else '('}{lowest:g}, {highest:g}]"
        raise ValueError(f"{name}: expected a number in {interval}, got {value!r}")


def check_choice(name: str, value: Any, allowed: Iterable[str], hint: str = "") -> None:
    """Require one of `allowed`. The error ends with `hint`, or else with the nearest name."""
    if value not in allowed:
        hint = hint or did_you_mean(str(value), allowed)
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}{hint}")


Shape = tuple[str, tuple[int | None, ...]]  # (text, sizes); a size of None may be any


def check_tensor(
    name: str, x: Any, *shapes: Shape, like: Tensor | None = None, floating: bool = False
) -> None:
    """Require a plain dense real tensor with data.

    Args:
        shapes: require one of these shapes.
        like: a tensor on the required device.
        floating: require a floating-point dtype.
    """
    if not isinstance(x, Tensor):
        hint = "; pass a tensor of it, such as its logps" if hasattr(x, "logps") else ""
        if name == "hidden" and isinstance(x, torch.nn.Module):
            hint = f"; {INSTEAD['model']}"
        if isinstance(x, tuple) and any(isinstance(part, Tensor) for part in x):
            hint = "; pass one of its tensors"
        if name == "hidden" and (isinstance(x, tuple) or hasattr(x, "hidden_states")):
            hint = "; pass the last layer's hidden states, output.hidden_states[-1]"
        if isinstance(x, list) and not any(isinstance(part, Tensor) for part in x):
            hint = "; pass torch.tensor(...)"
        if hasattr(x, "__array__"):
            hint = "; pass torch.as_tensor(...)"
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}{hint}")
    if is_dtensor(x):
        raise ValueError(
            f"{name}: expected a plain tensor, got a DTensor. Under FSDP2, pass the head's module "
            "instead of its weight, or call inside the forward of the module that owns it. Under "
            "tensor parallelism (rows of the vocabulary), pass Head(weight, process_group=group)"
        )
    if floating and x.dtype not in FLOATING:
        raise TypeError(
            f"{name}: expected a floating-point tensor of 16, 32 or 64 bits, got {x.dtype}"
        )
    if x.is_complex() or x.is_quantized or x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense real tensor, got {x.dtype}, {x.layout}")
    if x.device.type == "meta":
        raise ValueError(f"{name}: expected a tensor with data, got one on the meta device")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {x.device}")
    if shapes:
        check_shape(name, x, *shapes)


def check_shape(name: str, x: Tensor, *shapes: Shape, hint: str = "") -> None:
    """Require one of `shapes`. The error ends with `hint`."""
    got = tuple(x.shape)
    for _, sizes in shapes:
        if len(sizes) == len(got) and all(a in (None, b) for a, b in zip(sizes, got, strict=True)):
            return
    texts = (text if None in sizes else f"{text} = {tuple(sizes)}" for text, sizes in shapes)
    raise ValueError(f"{name}: expected shape {' or '.join(texts)}, got {got}{hint}")


def check_ids(name: str, ids: Any, hidden: Tensor) -> None:
    """Require integers of the shape of `hidden` without its last dimension."""
    check_tensor(name, ids, like=hidden)
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name}: expected integer ids, got {ids.dtype}")
    shape, got, hint = tuple(hidden.shape[:-1]), tuple(ids.shape), ""
    if len(shape) == len(got) > 0 and shape[:-1] == got[:-1]:
        # this library does not shift ids
        count = got[-1]
        hint = {
            1: "; position t - 1 predicts token t: drop the last position, hidden[..., :-1, :], if "
            "the first one predicts the first id",
            -1: "; position t - 1 predicts token t: drop the first id, [..., 1:], if hidden begins "
            "with the position of that id",
        }.get(shape[-1] - count, "")
        if shape[-1] > count + 1:
            hint = "; position t - 1 predicts token t: for the last tokens, pass "
            hint += f"hidden[..., -{count + 1}:-1, :]"
    check_shape(name, ids, ("hidden.shape[:-1]", shape), hint=hint)


def check_signed_ids(name: str, ids: Any, like: Tensor) -> None:
    """Require integers that can be -1, for padding."""
    check_tensor(name, ids, like=like)
    if ids.dtype not in (torch.int64, torch.int32, torch.int16):
        wanted = "signed integer ids of 16, 32 or 64 bits"
        raise TypeError(f"{name}: expected {wanted}, got {ids.dtype}")


def check_mask(name: str, mask: Any, ids: Tensor) -> None:
    """Require a real tensor of the shape of `ids`; `check_mask_values` checks its values."""
    check_tensor(name, mask, like=ids)
    shape, got, hint = tuple(ids.shape), tuple(mask.shape), ""
    if len(shape) == 2 and got[:1] == shape[:1]:
        if len(got) == 1:
            hint = f"; for one value per sequence, expand it: {name}[:, None].expand(B, T)"
            hint += "; if it is the advantages, pass them after the mask"
        elif len(got) == 2 and got[1] > shape[1]:
            hint = f"; take the columns of these tokens, such as {name}[:, -T:]"
    check_shape(name, mask, ("of the tokens", shape), hint=hint)


def check_not_swapped(first: str, ids: Tensor, second: str, mask: Tensor) -> None:
    """Raise if only the mask has values above 1, on a CPU; floating-point tensors pass."""
    if {ids.device.type, mask.device.type} != {"cpu"} or ids.numel() == 0 or mask.numel() == 0:
        return
    if mask.is_floating_point() or ids.is_floating_point():
        return
    most, highest, lowest = int(mask.max()), int(ids.max()), int(ids.min())
    if most > highest == 1 and lowest >= 0:
        raise ValueError(
            f"{first}, {second}: expected the ids, then their mask; the ids are "
            f"all 0 or 1 and the mask goes up to {most}: are they swapped?"
        )


def warn_of_graph(name: str, x: Any, more: str = "") -> None:
    """Warn once of a tensor with a gradient that the call would not give it."""
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        warn_once(
            f"{name}: counted as constants, so they get no gradient; pass {name}.detach(){more}"
        )


def read_mask(mask: Tensor) -> Tensor:
    """Mark the unmasked positions of a completion mask, as bool, and check the mask's values.

    For a mask other than bool, this waits for the device.
    """
    counts = mask != 0
    if mask.dtype != torch.bool and bool(mask.ne(counts).any()):
        check_mask_values(mask)
    return counts


def check_mask_values(mask: Tensor) -> None:
    """Refuse NaN and additive masks; otherwise warn, once, of values other than 0 and 1.

    `mask` has such a value. The host waits for the device.
    """
    if bool(mask.isnan().any()):
        raise ValueError("completion_mask: expected a mask without NaN, got NaN")
    if bool(((mask == 0) | (mask <= -1e4)).all()):
        raise ValueError(
            "completion_mask: expected a value other than 0 at unmasked positions, got an additive "
            "attention mask (0 and large negative numbers); pass mask == 0"
        )
    warn_once(
        "completion_mask: it holds values other than 0 and 1; every non-zero value counts the "
        "same. Multiply token weights into the advantages. If these are ids, swap ids and mask"
    )


def check_counted_ids(name: str, ids: Tensor, vocab: int, *, padded: bool = False) -> Tensor | None:
    """Require ids in [0, V), or -1 too if they are `padded`.

    On a CPU, wrong ids raise and the result is None. Elsewhere the result marks wrong ids as bool;
    the caller sets their results to NaN.
    """
    outside = (ids < (-1 if padded else 0)) | (ids >= vocab)
    if ids.device.type != "cpu":
        return outside
    if bool(outside.any()):
        wanted = f"[0, V) = [0, {vocab})" + (", or -1 for padding," if padded else "")
        got = ids[outside][0].item()
        hint = "; set completion_mask to 0 at labels of -100" if got == -100 else ""
        raise ValueError(f"{name}: expected ids in {wanted} at unmasked positions, got {got}{hint}")
    return None


def _require(ok: Tensor, name: str, rows: Tensor, expected: str, way_out: str = "") -> None:
    """Require that `ok` (n,) is True for all `rows`; the error shows the first wrong one."""
    if not bool(ok.all()):
        wrong = rows[~ok]
        got = f"{wrong[0].item():.4g} for {len(wrong)} of {len(rows)} tokens"
        raise ValueError(f"{name}: expected {expected} at unmasked positions, got {got}{way_out}")


def check_finite(name: str, rows: Tensor) -> None:
    """Require finite numbers (n,), on a CPU. Elsewhere, non-finite numbers make the loss NaN."""
    if rows.device.type == "cpu":
        _require(rows.isfinite(), name, rows, "finite numbers")


def check_logps(name: str, rows: Tensor | None) -> None:
    """Require values (n,) that look like log-probabilities, on a CPU.

    If any value is below 0, others may be above: rounding can lift a token of probability 1. NaN
    passes from a sampler, which could not score the token, and in the policy's own `logps`, where
    it makes the loss NaN. An infinite one passes there, too: a sampler's -inf makes the ratio
    infinite, so that a bound truncates it or drops the token, and warns.
    """
    if rows is None or rows.device.type != "cpu" or rows.numel() == 0:
        return
    if not name.startswith("sampling") and name != "logps":
        way_out = "; mask them, or look for NaN or -inf in the model that scored them"
        _require(rows.isfinite(), name, rows, "finite numbers", way_out)
    if name.startswith("sampling") and bool((never := rows == -math.inf).any()):
        warn_once(
            f"{name}: -inf for {int(never.sum())} of {len(rows)} tokens, so their ratio to the "
            "sampler is infinite; pass NaN for a token that the sampler could not score",
            key=f"{name}: -inf",
        )
    if name.startswith("sampling") and bool(rows.isnan().all()):
        warn_once(f"{name}: NaN for every token, so nothing corrects for the sampler")
    if bool((rows < 0).any()):
        return
    highest = rows.nan_to_num(nan=0.0).amax().item()
    if highest > HIGHEST_LOGP:
        raise ValueError(
            f"{name}: expected log-probabilities, <= 0 at unmasked positions, got none below 0, "
            f"and {highest:.4g}: take the logarithm of probabilities, or negate a negative "
            "log-likelihood (cross entropy)"
        )


def read_sampled(old: Any, sampling: Any, completion_mask: Any, *shapes: Shape) -> Tensor:
    """Check a policy's and its sampler's log-probabilities; mark unmasked positions, as bool.

    `old` has one of `shapes`. The host waits for the device.
    """
    check_tensor("old_per_token_logps", old, *shapes, floating=True)
    shape = "that of old_per_token_logps", old.shape
    check_tensor("sampling_per_token_logps", sampling, shape, like=old, floating=True)
    check_tensor("completion_mask", completion_mask, shape, like=old)
    counts = read_mask(completion_mask)
    check_logps("old_per_token_logps", old[counts].cpu())
    check_logps("sampling_per_token_logps", sampling[counts].cpu())
    return counts


def check_entropies(name: str, rows: Tensor) -> None:
    """Require values (n,) that look like entropies, on a CPU. NaN passes; it makes the loss NaN."""
    if rows.device.type == "cpu":
        way_out = ": negate a sum of p log p; are these log-probabilities?"
        _require(~(rows < LOWEST_ENTROPY), name, rows, "entropies, >= 0", way_out)


def check_ratios(name: str, rows: Tensor | None) -> None:
    """Require finite, non-negative ratios (n,), on a CPU."""
    if rows is None or rows.device.type != "cpu":
        return
    way_out = "; give a token that the sampler could not score a ratio of 1"
    _require(~rows.isnan(), name, rows, "numbers", way_out)
    way_out = ": bound the log-ratios before you take their exponential"
    _require(~rows.isinf(), name, rows, "finite ratios", way_out)
    _require(rows >= 0, name, rows, "ratios >= 0", ": take the exponential of a log-ratio")


def check_masses(name: str, rows: Tensor, *, has_tail: bool = False) -> None:
    """Require log-probabilities (n, K) whose probabilities sum to at most 1 per row, on a CPU.

    If `has_tail`, the ids are a part of the vocabulary, and a sum of 1 in every row warns once.
    """
    if rows.device.type != "cpu" or rows.numel() == 0:
        return
    masses = rows.exp().sum(dim=1).nan_to_num(nan=0.0)
    most = masses.amax().item()
    if most > HIGHEST_MASS:
        raise ValueError(
            f"{name}: expected log-probabilities of one distribution at unmasked positions, got "
            f"probabilities that add up to {most:.4g}"
        )
    if has_tail and bool((masses > 1 - 1e-6).all()):
        warn_once(
            f"{name}: the K ids' probabilities add up to 1 at every position, so the tail is "
            "empty; pass log-probabilities over the whole vocabulary"
        )


def warn_of_ratio(log_ratio: Tensor | None, name: str = "old_per_token_logps") -> None:
    """Warn once if the mean of log-ratios (n,) is too large for policies of one run, on a CPU.

    Values that are not finite do not count.
    """
    if log_ratio is None or log_ratio.device.type != "cpu":
        return
    finite = log_ratio[log_ratio.isfinite()]
    mean, size = finite.mean(), finite.abs().mean().item()
    is_ref = name == "ref_per_token_logps"
    if not is_ref and len(finite) >= 16 and size > HIGHEST_LOG_RATIO:
        warn_once(
            f"{name}: the log-ratios to them have a mean size of {size:.3g}, so they are unlikely "
            "to belong to these tokens. Common causes: values shifted by one token, sequences in "
            "another order, a different temperature or model",
            key=f"{name}: size of ratios",
        )
    elif abs(mean.item()) > HIGHEST_MEAN_LOG_RATIO:
        policy = "policy's reference" if is_ref else "policy that sampled"
        warn_once(
            f"{name}: the geometric mean of the ratios to them is {mean.exp().item():.3g}, outside "
            f"[1/20, 20], so they are unlikely to come from the {policy}. Common causes: a "
            "different temperature, unshifted ids, a different model, sums over the sequence. "
            "causal_lm_logps(..., loss_fn=loss_fn) computes them correctly",
            key=f"{name}: ratios",
        )


def listed(values: Iterable[tuple[str, Any]]) -> str:
    """Names and values; only the shape of a tensor with dimensions, only the class of a module."""

    def told(x: Any) -> str:
        if isinstance(x, torch.nn.Module):
            return type(x).__name__
        has_sizes = isinstance(x, Tensor) and x.dim() > 0
        return f"tensor of shape {tuple(x.shape)}" if has_sizes else repr(x)

    return ", ".join(f"{name}={told(x)}" for name, x in values)


def is_dtensor(x: Any) -> bool:
    """True for a DTensor, without importing `torch.distributed.tensor`."""
    return type(x).__name__ == "DTensor"
