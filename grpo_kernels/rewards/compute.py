"""Rewards of a batch of completions, from Python functions (sync or async) and reward models: a (B, F) matrix.

Functions are called as TRL calls them: ``f(prompts=..., completions=..., completion_ids=..., **columns)`` returns one
number, or None for "not scored", per completion. None becomes NaN, which ``advantages`` leaves out.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.modes import evaluating
from grpo_kernels.rewards.loop_thread import failure, run_together

__all__ = ["compute_rewards", "reward_names"]

RewardFunc = Callable[..., Any]  # an nn.Module is one too
_AS_THEY_ARE = (
    "trainer_state",
    "log_extra",
    "log_metric",
)  # arguments that TRL passes beside the columns
_SHOWN = 80  # characters of a prompt or completion in a warning
_LARGEST = torch.finfo(torch.float32).max


def compute_rewards(
    reward_funcs: RewardFunc | Sequence[RewardFunc],
    prompts: Sequence[Any],  # B strings or lists of messages
    completions: Sequence[Any],  # B, of the same kind
    completion_ids: Sequence[Any] | Tensor | None = None,  # B lists of token ids; handed on
    *,
    processing_classes: Any = None,
    device: torch.device | str | None = None,
    **columns: Any,
) -> Tensor:
    """The reward of each completion by each of F functions: (B, F) float32 on ``device``, NaN where not scored.

    An nn.Module is a reward model (sequence classification: ``outputs.logits[:, 0]``) and needs its tokenizer in
    ``processing_classes``: one for all, or a list with one entry per function (None for Python functions). It reads
    prompt + completion, through its chat template if they are lists of messages, in evaluation and inference mode.
    Async functions run concurrently, on an event loop of their own that lives as long as the process: it works under a
    running loop (a notebook) too, and their clients may stay open between calls. ``columns`` are lists of length B,
    except TRL's ``trainer_state``, ``log_extra`` and ``log_metric``, which are handed on as they are.

    Warns, naming the row, where every function returned None. Raises RuntimeError naming the function if one raises
    (its own error chained), ValueError if it does not return B numbers within float32's range, TypeError or ValueError
    for wrong arguments. SystemExit and KeyboardInterrupt from a sync function are raised as they are: they may
    come from a signal to the process. No signal reaches an async function, so from there they are errors like any
    other. So is stopping the event loop; the next call starts a new one.
    """
    funcs = _as_list(reward_funcs)
    names = reward_names(funcs)
    _check_batch(prompts, completions, completion_ids, columns)
    tokenizers = _tokenizers(processing_classes, funcs, names)
    inputs = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        **columns,
    }

    def score(func: RewardFunc, name: str, tokenizer: Any) -> Any:
        with _named(name):
            if isinstance(func, nn.Module):
                return _model_rewards(func, tokenizer, inputs)
            value = func(**inputs)
        return run_together([(name, lambda: value)])[0] if inspect.isawaitable(value) else value

    if len(prompts) == 0:
        return torch.empty(0, len(funcs), dtype=torch.float32, device=device)
    is_async = [_is_async(func) for func in funcs]
    returned = [
        None if is_async[i] else score(funcs[i], names[i], tokenizers[i]) for i in range(len(funcs))
    ]
    concurrent = [i for i in range(len(funcs)) if is_async[i]]
    if concurrent:
        values = run_together(
            [(names[i], functools.partial(funcs[i], **inputs)) for i in concurrent]
        )
        for i, value in zip(concurrent, values, strict=True):
            returned[i] = value
    table = [
        _column(value, name, len(prompts)) for value, name in zip(returned, names, strict=True)
    ]
    rewards = torch.tensor(table, dtype=torch.float32).T.contiguous()
    _warn_unscored(rewards, prompts, completions)
    return rewards.to(device)


def reward_names(reward_funcs: RewardFunc | Sequence[RewardFunc]) -> list[str]:
    """Return names for metrics and messages: a function's own, a model's checkpoint or an object's class."""
    return [_name(func) for func in _as_list(reward_funcs)]


def _name(func: Any) -> str:
    if isinstance(func, functools.partial):
        return _name(func.func)
    if isinstance(func, nn.Module):
        checkpoint = getattr(getattr(func, "config", None), "_name_or_path", None)
        return str(checkpoint).rstrip("/").split("/")[-1] if checkpoint else type(func).__name__
    return str(getattr(func, "__name__", type(func).__name__))


def _as_list(reward_funcs: Any) -> list[Any]:
    funcs = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if not funcs:
        raise ValueError("reward_funcs: expected at least one function, got an empty list")
    for i, func in enumerate(funcs):
        if isinstance(func, str):
            raise TypeError(
                f"reward_funcs[{i}]: expected a callable or an nn.Module, got the name {func!r}; load the model first, "
                "with transformers.AutoModelForSequenceClassification.from_pretrained, and pass it"
            )
        if not callable(func):
            raise TypeError(
                f"reward_funcs[{i}]: expected a callable or an nn.Module, got {type(func).__name__}"
            )
    return funcs


def _check_batch(
    prompts: Any, completions: Any, completion_ids: Any, columns: dict[str, Any]
) -> None:
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts: expected a list, got {type(prompts).__name__}")
    rest = {"completions": completions, "completion_ids": completion_ids, **columns}
    for name, values in rest.items():
        if name in _AS_THEY_ARE or (name == "completion_ids" and values is None):
            continue
        if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__"):
            raise TypeError(
                f"{name}: expected a list with one entry per prompt, got {type(values).__name__}"
            )
        if len(values) != len(prompts):
            raise ValueError(
                f"{name}: expected length {len(prompts)}, one entry per prompt, got {len(values)}"
            )


def _tokenizers(processing_classes: Any, funcs: list[Any], names: list[str]) -> list[Any]:
    """Check and return the tokenizers, one per function."""
    if not isinstance(processing_classes, (list, tuple)):
        processing_classes = [processing_classes] * len(funcs)
    if len(processing_classes) != len(funcs):
        raise ValueError(
            f"processing_classes: expected one per reward function, {len(funcs)}, got {len(processing_classes)}"
        )
    for i, (func, tokenizer) in enumerate(zip(funcs, processing_classes, strict=True)):
        if not isinstance(func, nn.Module):
            continue
        if tokenizer is None:
            raise ValueError(
                f"processing_classes[{i}]: expected the tokenizer of reward model {names[i]!r}, got None"
            )
        pad = getattr(tokenizer, "pad_token_id", None)
        if pad is None:
            raise ValueError(
                f"processing_classes[{i}]: expected a tokenizer with a pad token, got pad_token_id None"
            )
        config = getattr(func, "config", None)
        # A decoder's score is that of the last token other than config.pad_token_id: with a wrong id, of a wrong token.
        if config is not None and getattr(config, "pad_token_id", pad) != pad:
            raise ValueError(
                f"reward_funcs[{i}]: expected config.pad_token_id of {names[i]!r} to be its tokenizer's, {pad}, "
                f"got {config.pad_token_id}"
            )
    return list(processing_classes)


@torch.inference_mode()
def _model_rewards(model: nn.Module, tokenizer: Any, inputs: dict[str, Any]) -> Tensor:
    """``logits[:, 0]`` (B,) of prompt + completion, all rows in one batch."""
    pairs = list(zip(inputs["prompts"], inputs["completions"], strict=True))
    plain = isinstance(pairs[0][0], str)
    for row, pair in enumerate(pairs):
        if any(isinstance(part, str) != plain for part in pair):
            raise TypeError(
                f"row {row}: expected {'strings' if plain else 'lists of messages'} as in row 0's prompt"
            )
    if plain:
        texts = [prompt + completion for prompt, completion in pairs]
    else:
        texts = [
            tokenizer.apply_chat_template([*prompt, *reply], tokenize=False)
            for prompt, reply in pairs
        ]
    batch = tokenizer(
        text=texts,
        return_tensors="pt",
        padding=True,
        padding_side="right",
        add_special_tokens=False,
    )
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    with evaluating(model):
        logits: Tensor = model(**{name: values.to(device) for name, values in batch.items()}).logits
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"logits: expected shape (B, 1) = ({len(pairs)}, 1), got {tuple(logits.shape)}"
        )
    return logits[:, 0].float()


class _named:
    """Name the reward function in any error raised inside. (A `contextmanager` would let a StopIteration through.)"""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (Exception, asyncio.CancelledError)):
            raise failure(self._name, error) from error


def _is_async(func: Any) -> bool:
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


def _column(values: Any, name: str, length: int) -> list[float]:
    """Convert the result of a reward function to ``length`` floats."""
    returned = type(values).__name__
    if hasattr(values, "tolist"):  # tensors, arrays, series
        try:
            values = values.tolist()
        except Exception as error:  # a meta tensor, a sparse one
            raise ValueError(
                f"reward function {name!r}: expected a list of {length} rewards, got a {returned} without them: {error}"
            ) from error
    if not isinstance(values, (list, tuple)):
        raise ValueError(
            f"reward function {name!r}: expected a list of {length} rewards, got {returned}"
        )
    if len(values) != length:
        raise ValueError(
            f"reward function {name!r}: expected {length} rewards, one per completion, got {len(values)}"
        )
    return [_number(value, name, row) for row, value in enumerate(values)]


def _number(value: Any, name: str, row: int) -> float:
    if value is None:
        return float("nan")
    expected = "a number or None"
    try:
        if not isinstance(value, (str, bytes)):
            number = float(value)
            if abs(number) <= _LARGEST or not math.isfinite(number):
                return number
            expected = "a number within float32's range or None"
    except OverflowError:
        expected = "a number within float32's range or None"
    except Exception:  # whatever an object's __float__ raises
        pass
    raise ValueError(
        f"reward function {name!r}: expected {expected} for row {row}, got {_shortened(value)}"
    )


def _warn_unscored(rewards: Tensor, prompts: Sequence[Any], completions: Sequence[Any]) -> None:
    rows = rewards.isnan().all(dim=1).nonzero()[:, 0].tolist()
    if rows:
        first = rows[0]
        warnings.warn(
            f"every reward function returned None for {'rows' if rows[1:] else 'row'} {', '.join(map(str, rows))}; "
            f"row {first}: prompt {_shortened(prompts[first])}, completion {_shortened(completions[first])}",
            stacklevel=3,
        )


def _shortened(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # an int with more digits than Python writes, for example
        text = f"{type(value).__name__} that cannot be written"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
