"""`compute_rewards`: functions, async functions, reward models; names, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import signal
import sys
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from grpo_kernels.rewards import compute_rewards, reward_names

PROMPTS = ["1 + 1 =", "2 + 2 =", "3 + 3 ="]
COMPLETIONS = [" 2", " 4 4 4", " 7"]
WORDS = ["<pad>", "<unk>", "<user>", "<assistant>", *"0123456789+="]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
LENGTHS = [2.0, 6.0, 2.0]  # of the completions


def lengths(completions, **kwargs):
    return [len(completion) for completion in completions]


async def async_lengths(completions, **kwargs):
    await asyncio.sleep(0)
    return lengths(completions)


def nothing(completions, **kwargs):
    return [None] * len(completions)


def column(func, **options):
    return compute_rewards(func, PROMPTS, COMPLETIONS, **options)[:, 0].tolist()


def test_matrix_of_several_functions_and_columns():
    def right(prompts, completions, completion_ids, answer, trainer_state, log_metric):
        assert prompts is PROMPTS
        assert completion_ids == [[1], [2], [3]]
        log_metric("seen", trainer_state.step)
        return [float(int(c.split()[0]) == a) for c, a in zip(completions, answer, strict=True)]

    seen = {}
    columns = {"answer": [2, 4, 6], "log_metric": seen.__setitem__}  # TRL's are not measured
    columns["trainer_state"] = SimpleNamespace(step=3)
    rewards = compute_rewards([right, lengths], PROMPTS, COMPLETIONS, [[1], [2], [3]], **columns)
    assert rewards.dtype == torch.float32 and rewards.is_contiguous()
    assert rewards.tolist() == [[1.0, 2.0], [1.0, 6.0], [0.0, 2.0]]
    assert seen == {"seen": 3}
    assert column(lambda completion_ids, **kwargs: [completion_ids is None] * 3) == [1.0] * 3
    empty = compute_rewards([lengths, nothing], [], [])
    assert (empty.shape, empty.dtype) == ((0, 2), torch.float32)
    assert compute_rewards(lengths, PROMPTS, COMPLETIONS, device="meta").device.type == "meta"


def test_kinds_of_returned_values():
    kinds = (
        (1, 0.5, True),
        torch.tensor([1, 0.5, 1.0], dtype=torch.bfloat16, requires_grad=True),
        np.array([1, 0.5, 1.0]),
        [np.float32(1), torch.tensor(0.5), torch.tensor([1.0])],
    )
    for values in kinds:
        rewards = compute_rewards(lambda values=values, **kwargs: values, PROMPTS, COMPLETIONS)
        assert rewards[:, 0].tolist() == [1.0, 0.5, 1.0]
        assert not rewards.requires_grad
    assert column(lambda **kwargs: [math.inf, -math.inf, 1.0]) == [math.inf, -math.inf, 1.0]


def test_none_becomes_nan_and_a_warning_names_the_rows_nobody_scored():
    with warnings.catch_warnings(action="error"):
        some = [lambda **kwargs: [1.0, None, 2.0], lengths]
        rewards = compute_rewards(some, PROMPTS, COMPLETIONS)
    assert rewards.isnan().tolist() == [[False, False], [True, False], [False, False]]
    funcs = [nothing, lambda **kwargs: [None, 3.0, None]]
    message = "rows 0, 2; row 0: prompt '1 . 1 =', completion ' 2'"
    with pytest.warns(UserWarning, match=message) as caught:
        compute_rewards(funcs, PROMPTS, COMPLETIONS)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"for row 0; row 0: prompt 'x{50,90}, comp") as caught:
        compute_rewards(nothing, ["x" * 500], ["y"])
    assert len(str(caught[0].message)) < 250


@pytest.mark.parametrize("error", [KeyError, StopIteration, SystemExit, KeyboardInterrupt])
def test_a_failing_function_is_named_but_a_signal_ends_the_process(error):
    def judge(**kwargs):
        raise raised

    raised, ends = error("answer"), not issubclass(error, Exception)
    message = None if ends else f"reward function 'judge' raised {error.__name__}: '?answer"
    with pytest.raises(error if ends else RuntimeError, match=message) as caught:
        compute_rewards([lengths, judge], PROMPTS, COMPLETIONS)
    assert ends or caught.value.__cause__ is raised


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        return await async_lengths(completions)


def test_async_functions_run_concurrently_and_keep_their_columns():
    meeting = asyncio.Event()

    async def waits(**kwargs):
        await asyncio.wait_for(meeting.wait(), timeout=120)
        return [1.0] * 3

    async def arrives(**kwargs):
        meeting.set()
        return [2.0] * 3

    rewards = compute_rewards([waits, lengths, arrives], PROMPTS, COMPLETIONS)
    assert rewards.T.tolist() == [[1.0] * 3, LENGTHS, [2.0] * 3]
    partial = functools.partial(async_lengths, extra=1)
    for func in (partial, AsyncJudge(), lambda **kwargs: async_lengths(**kwargs)):
        assert column(func) == LENGTHS


def test_under_a_running_loop_and_with_a_client_that_survives_from_call_to_call():
    loops = []

    async def judge(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return lengths(completions)

    async def notebook_cell():
        return column(judge)

    assert asyncio.run(notebook_cell()) == column(judge) == LENGTHS
    assert loops[0] is loops[1]
    assert not loops[0].is_closed()


@pytest.mark.parametrize(
    "error", [ConnectionError, SystemExit, KeyboardInterrupt, asyncio.CancelledError]
)
def test_every_end_of_an_async_function_reaches_the_caller(error):
    """In another thread, so that a caller who waits for ever is a failure of this test alone."""
    caught = []

    async def ends(**kwargs):
        raise error("no answer")

    def call():
        with pytest.raises(RuntimeError) as info:
            compute_rewards([ends, async_lengths], PROMPTS, COMPLETIONS)
        caught.append(info.value)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(120)
    assert re.match(f"reward function 'ends' raised {error.__name__}: no answer", str(caught[0]))
    assert type(caught[0].__cause__) is error
    assert column(async_lengths) == LENGTHS


def test_an_interrupted_caller_cancels_its_functions():
    cancelled, main = threading.Event(), threading.main_thread().ident

    async def judge(**kwargs):
        for _ in range(60_000):  # until the caller waits
            if sys._current_frames()[main].f_code.co_name == "wait":
                break
            await asyncio.sleep(0.001)
        signal.pthread_kill(main, signal.SIGUSR1)  # SIGINT may be ignored here
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compute_rewards(judge, PROMPTS, COMPLETIONS)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert cancelled.wait(120)
    assert column(async_lengths) == LENGTHS


def test_nested_async_calls_raise_instead_of_waiting_for_themselves():
    async def outer(**kwargs):
        return compute_rewards(async_lengths, PROMPTS, COMPLETIONS)

    with pytest.raises(RuntimeError, match="called inside an async reward function"):
        compute_rewards(outer, PROMPTS, COMPLETIONS)


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {word: i for i, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "padding_side": "left"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=0,
        attention_dropout=0.5,
    )  # fmt: skip
    return transformers.Qwen2ForSequenceClassification(config).eval()


def scores_alone(model, texts):
    """Of unpadded rows, tokenised by hand, one by one."""
    ids = [torch.tensor([[WORDS.index(word) for word in text.split()]]) for text in texts]
    with torch.no_grad():
        return pytest.approx([model(input_ids=row).logits[0, 0].item() for row in ids], abs=1e-6)


def test_model_scores_texts_and_conversations_whatever_the_padding(model, tokenizer):
    pairs = [*zip(PROMPTS, COMPLETIONS, strict=True)]
    given = {"processing_classes": [None, tokenizer]}
    rewards = compute_rewards([lengths, model], PROMPTS, COMPLETIONS, **given)
    assert rewards[:, 1].tolist() == scores_alone(model, [p + c for p, c in pairs])
    assert len({round(x, 4) for x in rewards[:, 1].tolist()}) == 3  # or a constant would pass
    assert rewards[:, 0].tolist() == LENGTHS
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    replies = [[{"role": "assistant", "content": completion}] for completion in COMPLETIONS]
    chats = compute_rewards(model, prompts, replies, processing_classes=tokenizer)
    texts = [f"<user> {p} <assistant> {c}" for p, c in pairs]
    assert chats[:, 0].tolist() == scores_alone(model, texts)


def test_model_is_evaluated_and_left_in_the_mode_it_was_in(model, tokenizer):
    expected = compute_rewards(model, PROMPTS, COMPLETIONS, processing_classes=tokenizer)
    assert not expected.is_inference()
    model.train()
    model.model.embed_tokens.eval()
    try:
        for _ in range(2):  # attention dropout of 0.5 would show
            found = compute_rewards(model, PROMPTS, COMPLETIONS, processing_classes=tokenizer)
            assert torch.equal(found, expected)
        assert (model.training, model.model.embed_tokens.training) == (True, False)
    finally:
        model.eval()


def test_what_a_model_is_given_and_logits_of_another_shape(tokenizer):
    class Recorder(nn.Module):
        def forward(self, input_ids, attention_mask, **kwargs):
            self.seen = input_ids, attention_mask
            return SimpleNamespace(logits=self.logits)

    model, given = Recorder(), (PROMPTS[:2], COMPLETIONS[:2])
    model.logits = torch.ones(2, 2, dtype=torch.bfloat16) / 4
    assert compute_rewards(model, *given, processing_classes=tokenizer).tolist() == [[0.25]] * 2
    words = [["1", "+", "1", "=", "2", "<pad>", "<pad>"], ["2", "+", "2", "=", "4", "4", "4"]]
    assert model.seen[0].tolist() == [[WORDS.index(word) for word in row] for row in words]
    assert model.seen[1].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    for shape in ((2,), (2, 0), (3, 1)):
        model.logits = torch.zeros(shape)
        with pytest.raises((RuntimeError, ValueError), match="reward function 'Recorder'"):
            compute_rewards(model, *given, processing_classes=tokenizer)


def test_names(model):
    named = nn.Linear(1, 1)
    named.config = SimpleNamespace(_name_or_path="someone/their-reward-model/")
    twice = functools.partial(functools.partial(lengths, a=1), b=2)
    assert reward_names([lengths, twice, AsyncJudge(), lambda: None, model, named]) == [
        "lengths", "lengths", "AsyncJudge", "<lambda>", "Qwen2ForSequenceClassification",
        "their-reward-model",
    ]  # fmt: skip
    assert reward_names(lengths) == ["lengths"]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, r"processing_classes\[0\]: expected the tokenizer .*'Qwen2For.*, got None",
         {"processing_classes": None}),
        (ValueError, "processing_classes: expected one per reward function, 2, got 1",
         {"more": [lengths]}),
        (ValueError, r"processing_classes\[0\]: expected .*, with a pad token, got pad_token_id N",
         {"processing_classes": SimpleNamespace(pad_token_id=None)}),
        (RuntimeError, "row 0: expected lists of messages",
         {"prompts": [[{"role": "user", "content": "1"}], "2", "3"]}),
        (ValueError, r"reward_funcs\[0\]: expected config.pad_token_id .* 0, got 5", {"pad": 5}),
    ],
)  # fmt: skip
def test_model_errors(model, tokenizer, monkeypatch, error, message, changes):
    given = {"prompts": PROMPTS, "processing_classes": [tokenizer], "more": [], "pad": 0, **changes}
    monkeypatch.setattr(model.config, "pad_token_id", given.pop("pad"))
    funcs = [model, *given.pop("more")]
    with pytest.raises(error, match=message):
        compute_rewards(funcs, given.pop("prompts"), COMPLETIONS, **given)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(4), "expected 3 rewards, one per completion, got 4"),
        (1.0, "expected a list of 3 rewards, got float"),
        ([1.0, "2", 3.0], "expected a number .* or None for row 1, got '2'"),
        ([1.0, torch.zeros(2), 1.0], r"expected a number .* for row 1, got tensor\(\[0., 0.\]\)"),
        ([1.0, 1.0, -1e39], r"expected a number within float32's range .* row 2, got -1e\+39"),
    ],
)
def test_wrong_returns_name_the_function(returned, message):
    def judge(**kwargs):
        return returned

    with pytest.raises(ValueError, match=f"reward function 'judge': {message}"):
        compute_rewards([lengths, judge], PROMPTS, COMPLETIONS)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, r"reward_funcs\[1\]: .* got the name 'org/rm'; load",
         {"reward_funcs": [lengths, "org/rm"]}),
        (TypeError, r"reward_funcs\[0\]: .* got int", {"reward_funcs": 3}),
        (ValueError, "reward_funcs: expected at least one function", {"reward_funcs": []}),
        (TypeError, "prompts: expected a list, got str", {"prompts": "abc"}),
        (ValueError, "answer: expected length 3, .* got 4", {"answer": torch.zeros(4)}),
        (TypeError, "answer: expected a list .* got str", {"answer": "abc"}),
    ],
)  # fmt: skip
def test_wrong_arguments(error, message, arguments):
    good = {"reward_funcs": lengths, "prompts": PROMPTS, "completions": COMPLETIONS}
    with pytest.raises(error, match=message):
        compute_rewards(**{**good, **arguments})


def test_a_function_that_ends_the_event_loop_is_an_error_and_the_next_call_has_another():
    async def stops_its_loop(**kwargs):
        asyncio.get_running_loop().stop()
        await asyncio.Event().wait()

    names = "reward functions 'async_lengths', 'stops_its_loop': "
    with pytest.raises(RuntimeError, match=f"{names}one of them stopped the event loop"):
        compute_rewards([async_lengths, lengths, stops_its_loop], PROMPTS, COMPLETIONS)
    assert column(async_lengths) == LENGTHS
