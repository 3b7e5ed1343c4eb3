"""Score a batch of completions with Python functions (sync or async) and reward models.

Functions are called as TRL calls them: ``f(prompts=..., completions=..., completion_ids=...,
**columns)`` returns one number per completion, or None for "not scored". None becomes NaN, which
``advantages`` leaves out.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import hints_names, only_public
from grpo_kernels.base.modes import evaluating

__all__ = ["compute_rewards", "reward_names"]

only_public(__name__)

RewardFunc = Callable[..., Any]  # includes nn.Module
_NO_COLUMNS = ("trainer_state", "log_extra", "log_metric")  # TRL passes these besides columns


@hints_names
def compute_rewards(
    reward_funcs: RewardFunc | Sequence[RewardFunc],
    prompts: Sequence[Any],  # B strings or lists of messages
    completions: Sequence[Any],  # B, of the same kind
    completion_ids: Sequence[Any] | Tensor | None = None,  # B lists of token ids
    *,
    processing_classes: Any = None,
    device: torch.device | str | None = None,
    **columns: Any,
) -> Tensor:
    """Score each of B completions with each of F reward functions.

    ::

        rewards = compute_rewards([accuracy, length], prompts, completions, answer=answers)
        advantages = group_advantages(rewards, num_generations=8)

    An nn.Module counts as a reward model for sequence classification; its score is
    ``outputs.logits[:, 0]``. The model reads prompt + completion, in evaluation and inference mode.
    Lists of messages are formatted with the tokenizer's chat template.

    Async functions run concurrently on a separate event loop, which lives as long as the process.
    They also work while another event loop is running, as in a notebook, and may keep clients (HTTP
    sessions, say) open between calls.

    Args:
        reward_funcs: one function or reward model, or a list of F.
        prompts, completions: B strings each, or B lists of messages each.
        completion_ids: B lists of token ids, passed to the functions.
        processing_classes: tokenizers of the reward models: one for all, or a list with one entry
            per function (None for Python functions).
        device: device of the result.
        columns: lists of length B, passed to the functions by name. TRL's ``trainer_state``,
            ``log_extra`` and ``log_metric`` are passed unchanged.

    Returns:
        (B, F) float32 on `device`, NaN where a function returned None.

    Raises:
        TypeError, ValueError: an argument is invalid, a function did not return B numbers, or a
            finite number exceeds float32's range.
        RuntimeError: an async function stopped the event loop, or a function raised an error. That
            error is chained, and the message names the function.
        SystemExit, KeyboardInterrupt: a sync function raised this exception, which is passed on
            unchanged because it may come from a signal to the process. From async functions, both
            become RuntimeError, since signals do not reach them.

    Warns:
        UserWarning: every function returned None for a row; the message names the row.
    """
    funcs = _as_list(reward_funcs)
    names = [_name(func) for func in funcs]
    tokenizers = _tokenizers(processing_classes, funcs)
    inputs: dict[str, Any] = {"prompts": prompts, "completions": completions}
    inputs |= {"completion_ids": completion_ids, **columns}
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts: expected a list, got {type(prompts).__name__}")
    for name, values in inputs.items():
        if name in _NO_COLUMNS or (name == "completion_ids" and values is None):
            continue
        if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__"):
            got = type(values).__name__
            raise TypeError(f"{name}: expected a list with one entry per prompt, got {got}")
        if len(values) != len(prompts):
            expected = f"length {len(prompts)}, one entry per prompt"
            raise ValueError(f"{name}: expected {expected}, got {len(values)}")
    if len(prompts) == 0:
        return torch.empty(0, len(funcs), dtype=torch.float32, device=device)
    returned: list[Any] = []
    for func, name, tokenizer in zip(funcs, names, tokenizers, strict=True):
        try:
            if isinstance(func, nn.Module):
                returned.append(_model_rewards(func, tokenizer, prompts, completions))
            else:
                returned.append(func(**inputs))
        except Exception as error:
            raise _failure(name, error) from error
    if any(inspect.isawaitable(x) for x in returned):
        returned = _awaited(returned, names)
    table = [_column(x, name, len(prompts)) for x, name in zip(returned, names, strict=True)]
    rewards = torch.tensor(table, dtype=torch.float32).T.contiguous()
    rows = rewards.isnan().all(dim=1).nonzero()[:, 0].tolist()
    if rows:
        warnings.warn(
            f"every reward function returned None for {'rows' if rows[1:] else 'row'} "
            f"{', '.join(map(str, rows))}; row {rows[0]}: prompt {prompts[rows[0]]!r:.80}, "
            f"completion {completions[rows[0]]!r:.80}",
            stacklevel=3,  # `hints_names` is between
        )
    return rewards.to(device)


def reward_names(reward_funcs: RewardFunc | Sequence[RewardFunc]) -> list[str]:
    """List the names of reward functions, in order.

    A function is named by its own name, a reward model by its checkpoint, any other callable by its
    class.
    """
    return [_name(func) for func in _as_list(reward_funcs)]


def _name(func: Any) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    checkpoint = getattr(getattr(func, "config", None), "_name_or_path", None)
    if isinstance(func, nn.Module) and checkpoint:
        return str(checkpoint).rstrip("/").split("/")[-1]
    return str(getattr(func, "__name__", type(func).__name__))


def _failure(name: str, error: BaseException) -> RuntimeError:
    return RuntimeError(f"reward function {name!r} raised {type(error).__name__}: {error}")


@torch.inference_mode()
def _model_rewards(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Any], completions: Sequence[Any]
) -> Tensor:
    """``logits[:, 0]`` (B,) for prompt + completion, with all rows in one batch."""
    plain, texts = isinstance(prompts[0], str), []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for part in (prompt, completion):
            if isinstance(part, str) != plain:
                kind, got = "strings" if plain else "lists of messages", type(part).__name__
                raise TypeError(f"row {row}: expected {kind}, as in row 0's prompt, got {got}")
        chat = prompt + completion if plain else [*prompt, *completion]
        texts.append(chat if plain else tokenizer.apply_chat_template(chat, tokenize=False))
    padded = {"return_tensors": "pt", "padding": True, "padding_side": "right"}
    batch = tokenizer(text=texts, add_special_tokens=False, **padded)
    device = next(model.parameters(), torch.empty(0)).device
    with evaluating(model):
        logits: Tensor = model(**batch.to(device)).logits
    if logits.dim() != 2 or logits.shape[1] == 0:
        wanted = f"(B, 1) = ({len(texts)}, 1)"
        raise ValueError(f"logits: expected shape {wanted}, got {tuple(logits.shape)}")
    return logits[:, 0].float()


# Async functions run on one event loop, in a thread that lives as long as the process.

_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_starting = threading.Lock()


def _awaited(returned: list[Any], names: list[str]) -> list[Any]:
    """Run the awaitables in `returned` together, and put their results in place of them."""
    global _loop, _thread
    failures: list[tuple[str, BaseException]] = []

    async def one(x: Any, name: str) -> Any:
        try:
            return await x if inspect.isawaitable(x) else x
        except BaseException as error:  # SystemExit would end the loop
            failures.append((name, error))

    async def together() -> list[Any]:
        return await asyncio.gather(*map(one, returned, names))

    if threading.current_thread() is _thread:
        raise RuntimeError(
            "compute_rewards: called inside an async reward function, it would wait for itself"
        )
    with _starting:
        if _loop is None or _thread is None or not _thread.is_alive():  # also after a fork
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name=__name__, daemon=True)
            _thread.start()
        thread, future = _thread, asyncio.run_coroutine_threadsafe(together(), _loop)
    try:
        while not wait([future], timeout=1.0).done:
            if not thread.is_alive():
                pairs = zip(returned, names, strict=True)
                which = ", ".join(repr(name) for x, name in pairs if inspect.isawaitable(x))
                raise RuntimeError(f"reward functions {which}: one of them stopped the event loop")
    except BaseException:  # the caller was interrupted
        future.cancel()
        raise
    for name, error in failures:
        raise _failure(name, error) from error
    return future.result()


# Arguments and results


def _as_list(reward_funcs: Any) -> list[Any]:
    funcs = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if not funcs:
        raise ValueError("reward_funcs: expected at least one function, got an empty list")
    for i, func in enumerate(funcs):
        if not callable(func):
            got = type(func).__name__
            if isinstance(func, str):
                got = f"the name {func!r}; load the model first, with transformers."
                got += "AutoModelForSequenceClassification.from_pretrained, and pass it"
            raise TypeError(f"reward_funcs[{i}]: expected a callable or an nn.Module, got {got}")
    return funcs


def _tokenizers(classes: Any, funcs: list[Any]) -> list[Any]:
    """One tokenizer per function; those of reward models are checked."""
    tokenizers = [*classes] if isinstance(classes, (list, tuple)) else [classes] * len(funcs)
    if len(tokenizers) != len(funcs):
        expected = f"one per reward function, {len(funcs)}"
        raise ValueError(f"processing_classes: expected {expected}, got {len(tokenizers)}")
    for i, (func, tokenizer) in enumerate(zip(funcs, tokenizers, strict=True)):
        if not isinstance(func, nn.Module):
            continue
        pad = getattr(tokenizer, "pad_token_id", None)
        if pad is None:
            got = "None" if tokenizer is None else "pad_token_id None"
            expected = f"the tokenizer of reward model {_name(func)!r}, with a pad token"
            raise ValueError(f"processing_classes[{i}]: expected {expected}, got {got}")
        # A decoder scores the last token that is not config.pad_token_id. If that id is wrong, it
        # scores a wrong token.
        wrong = getattr(getattr(func, "config", None), "pad_token_id", pad)
        if wrong != pad:
            expected = f"config.pad_token_id of {_name(func)!r} to be its tokenizer's, {pad}"
            raise ValueError(f"reward_funcs[{i}]: expected {expected}, got {wrong}")
    return tokenizers


def _column(values: Any, name: str, length: int) -> list[float]:
    returned, where = type(values).__name__, f"reward function {name!r}"
    if hasattr(values, "tolist"):  # tensors, arrays, series
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{where}: expected a list of {length} rewards, got {returned}")
    if len(values) != length:
        expected = f"{length} rewards, one per completion"
        raise ValueError(f"{where}: expected {expected}, got {len(values)}")
    numbers = []
    for row, value in enumerate(values):
        number = None
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan if value is None else float(value)
        most = torch.finfo(torch.float32).max
        if number is None or isinstance(value, str) or most < abs(number) < math.inf:
            expected = f"a number within float32's range or None for row {row}"
            raise ValueError(f"{where}: expected {expected}, got {value!r:.80}")
        numbers.append(number)
    return numbers
