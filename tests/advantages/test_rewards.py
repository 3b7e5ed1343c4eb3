"""`compute_rewards`: functions, async functions, reward models; names, and what is refused."""

from __future__ import annotations

import asyncio
import functools
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
    """The rewards of one function."""
    return compute_rewards(func, PROMPTS, COMPLETIONS, **options)[:, 0].tolist()


@pytest.fixture(scope="module")
def tokenizer():
    transformers, tokenizers = (
        pytest.importorskip("transformers"),
        pytest.importorskip("tokenizers"),
    )
    vocab = {word: i for i, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, pad_token_id=0, attention_dropout=0.5,
    )  # fmt: skip
    return transformers.Qwen2ForSequenceClassification(config).eval()


def scores_alone(model, texts):
    """Of unpadded rows, tokenised by hand, one by one."""
    ids = [torch.tensor([[WORDS.index(word) for word in text.split()]]) for text in texts]
    with torch.no_grad():
        return pytest.approx([model(input_ids=row).logits[0, 0].item() for row in ids], abs=1e-6)


def test_matrix_of_several_functions_and_columns():
    def right(prompts, completions, completion_ids, answer):
        assert prompts is PROMPTS
        assert completion_ids == [[1], [2], [3]]
        return [float(int(c.split()[0]) == a) for c, a in zip(completions, answer, strict=True)]

    rewards = compute_rewards(
        [right, lengths], PROMPTS, COMPLETIONS, [[1], [2], [3]], answer=[2, 4, 6]
    )
    assert rewards.dtype == torch.float32
    assert rewards.is_contiguous()
    assert rewards.tolist() == [[1.0, 2.0], [1.0, 6.0], [0.0, 2.0]]


def test_a_single_function_without_ids_gives_one_column():
    def reward(completion_ids, completions, **kwargs):
        return [1.0 if completion_ids is None else 0.0] * len(completions)

    assert compute_rewards(reward, PROMPTS, COMPLETIONS).tolist() == [[1.0]] * 3


@pytest.mark.parametrize(
    "values",
    [
        [1, 0.5, True],
        (1, 0.5, True),
        torch.tensor([1, 0.5, 1.0]),
        torch.tensor([1, 0.5, 1.0], dtype=torch.bfloat16, requires_grad=True),
        np.array([1, 0.5, 1.0]),
        [np.float32(1), torch.tensor(0.5), torch.tensor([1.0])],
    ],
    ids=["list", "tuple", "tensor", "attached", "array", "scalars"],
)
def test_kinds_of_returned_values(values):
    rewards = compute_rewards(lambda **kwargs: values, PROMPTS, COMPLETIONS)
    assert rewards[:, 0].tolist() == [1.0, 0.5, 1.0]
    assert not rewards.requires_grad


def test_none_becomes_nan_without_warning_where_another_function_scored():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewards = compute_rewards(
            [lambda **kwargs: [1.0, None, 2.0], lengths], PROMPTS, COMPLETIONS
        )
    assert torch.equal(
        rewards.isnan(), torch.tensor([[False, False], [True, False], [False, False]])
    )


def test_warning_names_the_rows_nobody_scored():
    funcs = [nothing, lambda **kwargs: [None, 3.0, None]]
    prompts = [*PROMPTS[:2], "x" * 500]
    with pytest.warns(
        UserWarning, match="rows 0, 2; row 0: prompt '1 . 1 =', completion ' 2'"
    ) as caught:
        compute_rewards(funcs, prompts, COMPLETIONS)
    assert caught[0].filename == __file__
    with pytest.warns(
        UserWarning, match=r"for row 0; row 0: prompt 'x{50,90}, completion"
    ) as caught:
        compute_rewards(nothing, ["x" * 500], ["y"])
    assert len(str(caught[0].message)) < 250


def test_empty_batch_and_device():
    torch.set_default_dtype(torch.float16)
    try:
        empty = compute_rewards([lengths, nothing], [], [])
    finally:
        torch.set_default_dtype(torch.float32)
    assert (empty.shape, empty.dtype) == ((0, 2), torch.float32)
    assert compute_rewards(lengths, PROMPTS, COMPLETIONS, device="meta").device.type == "meta"


def test_what_trl_hands_on_besides_columns_is_not_measured():
    def reward(completions, trainer_state, log_metric, **kwargs):
        log_metric("seen", trainer_state.step)
        return lengths(completions)

    seen = {}
    column(reward, trainer_state=SimpleNamespace(step=3), log_metric=seen.__setitem__)
    assert seen == {"seen": 3}


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


def test_async_functions_under_a_running_loop():
    async def notebook_cell():
        return column(async_lengths)

    assert asyncio.run(notebook_cell()) == LENGTHS


def test_an_async_client_survives_from_call_to_call():
    loops = []

    async def judge(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return lengths(completions)

    for _ in range(2):
        compute_rewards(judge, PROMPTS, COMPLETIONS)
    assert loops[0] is loops[1]
    assert not loops[0].is_closed()


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        return await async_lengths(completions)


@pytest.mark.parametrize(
    "func",
    [
        functools.partial(async_lengths, extra=1),
        AsyncJudge(),
        lambda **kwargs: async_lengths(**kwargs),
    ],
    ids=["partial", "object", "lambda"],
)
def test_async_in_disguise(func):
    assert column(func) == LENGTHS


async def fails(**kwargs):
    raise ConnectionError("no answer")


async def exits(**kwargs):
    sys.exit(3)


async def interrupts(**kwargs):
    raise KeyboardInterrupt


async def cancels(**kwargs):
    raise asyncio.CancelledError


async def stops_its_loop(**kwargs):
    asyncio.get_running_loop().stop()
    return [1.0] * len(PROMPTS)


async def stops_its_loop_and_waits(**kwargs):
    asyncio.get_running_loop().stop()
    await asyncio.Event().wait()


ENDS = {
    fails: ("raised ConnectionError: no answer", ConnectionError),
    exits: ("raised SystemExit: 3", SystemExit),
    interrupts: ("raised KeyboardInterrupt", KeyboardInterrupt),
    cancels: ("raised CancelledError", asyncio.CancelledError),
    stops_its_loop: ("one of them ended the event loop", None),
    stops_its_loop_and_waits: ("one of them ended the event loop", None),
}


@pytest.mark.parametrize("disguised", [False, True])
@pytest.mark.parametrize("func", ENDS, ids=lambda func: func.__name__)
def test_every_end_of_an_async_function_reaches_the_caller(func, disguised):
    """In another thread, so that a caller who waits for ever is a failure and not the end of the test run."""
    given = functools.wraps(func)(lambda **kwargs: func(**kwargs)) if disguised else func
    caught = []

    def call():
        try:
            compute_rewards([given, async_lengths], PROMPTS, COMPLETIONS)
        except BaseException as error:
            caught.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(120)
    assert not caller.is_alive()
    how, cause = ENDS[func]
    assert type(caught[0]) is RuntimeError
    assert re.match(f"reward functions? '{func.__name__}'.*{how}", str(caught[0]))
    assert type(caught[0].__cause__) is (cause or type(None))
    assert column(async_lengths) == LENGTHS


def test_an_interrupted_caller_cancels_its_functions():
    cancelled = threading.Event()

    async def judge(**kwargs):
        for _ in range(60_000):  # until the caller waits
            if sys._current_frames()[threading.main_thread().ident].f_code.co_name == "wait":
                break
            await asyncio.sleep(0.001)
        signal.pthread_kill(
            threading.main_thread().ident, signal.SIGUSR1
        )  # SIGINT may be ignored here
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


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_signal_during_a_python_function_ends_the_process(error):
    def judge(**kwargs):
        raise error

    with pytest.raises(error):
        compute_rewards(judge, PROMPTS, COMPLETIONS)


def test_nested_async_calls_raise_instead_of_waiting_for_themselves():
    async def outer(**kwargs):
        return compute_rewards(async_lengths, PROMPTS, COMPLETIONS)

    with pytest.raises(RuntimeError, match="called inside an async reward function"):
        compute_rewards(outer, PROMPTS, COMPLETIONS)


def test_model_scores_prompt_plus_completion_whatever_the_padding(model, tokenizer):
    rewards = compute_rewards(
        [lengths, model], PROMPTS, COMPLETIONS, processing_classes=[None, tokenizer]
    )
    assert rewards[:, 1].tolist() == scores_alone(
        model, [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    )
    assert (
        len({round(score, 4) for score in rewards[:, 1].tolist()}) == 3
    )  # or a constant would pass
    assert rewards[:, 0].tolist() == LENGTHS


def test_model_reads_conversations_through_the_chat_template(model, tokenizer):
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    completions = [[{"role": "assistant", "content": completion}] for completion in COMPLETIONS]
    rewards = compute_rewards(model, prompts, completions, processing_classes=tokenizer)
    texts = [f"<user> {p} <assistant> {c}" for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert rewards[:, 0].tolist() == scores_alone(model, texts)


def test_model_is_evaluated_and_left_in_the_mode_it_was_in(model, tokenizer):
    expected = compute_rewards(model, PROMPTS, COMPLETIONS, processing_classes=tokenizer)
    assert not expected.is_inference()
    model.train()
    model.model.embed_tokens.eval()
    try:
        for _ in range(2):  # attention dropout of 0.5 would show
            assert torch.equal(
                compute_rewards(model, PROMPTS, COMPLETIONS, processing_classes=tokenizer), expected
            )
        assert (model.training, model.model.embed_tokens.training) == (True, False)
    finally:
        model.eval()


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, r"processing_classes\[0\]: expected the tokenizer .*'Qwen2For.*', got None",
         {"processing_classes": None}),
        (ValueError, "processing_classes: expected one per reward function, 2, got 1", {"more": [lengths]}),
        (ValueError, r"processing_classes\[0\]: expected a tokenizer with a pad token",
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


def test_what_a_model_is_given(tokenizer):
    class Recorder(nn.Module):
        def forward(self, input_ids, attention_mask, **kwargs):
            self.seen = input_ids, attention_mask
            return SimpleNamespace(logits=torch.ones(len(input_ids), 2, dtype=torch.bfloat16) / 4)

    model = Recorder()
    rewards = compute_rewards(model, PROMPTS[:2], COMPLETIONS[:2], processing_classes=tokenizer)
    words = [["1", "+", "1", "=", "2", "<pad>", "<pad>"], ["2", "+", "2", "=", "4", "4", "4"]]
    assert model.seen[0].tolist() == [[WORDS.index(word) for word in row] for row in words]
    assert model.seen[1].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    assert rewards.tolist() == [[0.25], [0.25]]


@pytest.mark.parametrize("shape", [(3,), (3, 0), (2, 1)])
def test_model_with_logits_of_another_shape(shape, tokenizer):
    class Wrong(nn.Module):
        def forward(self, **inputs):
            return SimpleNamespace(logits=torch.zeros(shape))

    with pytest.raises((RuntimeError, ValueError), match="reward function 'Wrong'"):
        compute_rewards(Wrong(), PROMPTS, COMPLETIONS, processing_classes=tokenizer)


def test_names(model):
    class Judge:
        def __call__(self, **kwargs):
            return None

    named = nn.Linear(1, 1)
    named.config = SimpleNamespace(_name_or_path="someone/their-reward-model/")
    funcs = [
        lengths,
        functools.partial(functools.partial(lengths, a=1), b=2),
        Judge(),
        lambda: None,
        model,
        named,
    ]
    expected = [
        "lengths",
        "lengths",
        "Judge",
        "<lambda>",
        "Qwen2ForSequenceClassification",
        "their-reward-model",
    ]
    assert reward_names(funcs) == expected
    assert reward_names(lengths) == ["lengths"]


@pytest.mark.parametrize("error", [KeyError("answer"), StopIteration("answer")], ids=repr)
def test_a_failing_function_is_named_and_its_error_chained(error):
    def judge(**kwargs):
        raise error

    with pytest.raises(
        RuntimeError, match=f"reward function 'judge' raised {type(error).__name__}: '?answer"
    ) as caught:
        compute_rewards([lengths, judge], PROMPTS, COMPLETIONS)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "expected 3 rewards, one per completion, got 1"),
        (torch.zeros(4), "expected 3 rewards, one per completion, got 4"),
        (None, "expected a list of 3 rewards, got NoneType"),
        (1.0, "expected a list of 3 rewards, got float"),
        (torch.tensor(1.0), "expected a list of 3 rewards, got Tensor"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "expected a list of 3 rewards, got dict"),
        ("123", "expected a list of 3 rewards, got str"),
        ([1.0, "2", 3.0], "expected a number or None for row 1, got '2'"),
        ([1.0, 2.0, 3j], "expected a number or None for row 2, got 3j"),
        (torch.zeros(3, 2), r"expected a number or None for row 0, got \[0.0, 0.0\]"),
        ([torch.zeros(2), 0.0, 0.0], "expected a number or None for row 0, got tensor"),
        (
            [1.0, 10**400, 1.0],
            "expected a number within float32's range or None for row 1, got 1000",
        ),
        (
            [1.0, 1.0, -1e39],
            r"expected a number within float32's range or None for row 2, got -1e\+39",
        ),
        ([torch.zeros((), device="meta")] * 3, "expected a number or None for row 0, got tensor"),
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
        (
            TypeError,
            r"reward_funcs\[1\]: .* got the name 'org/rm'; load",
            {"reward_funcs": [lengths, "org/rm"]},
        ),
        (TypeError, r"reward_funcs\[0\]: .* got int", {"reward_funcs": 3}),
        (ValueError, "reward_funcs: expected at least one function", {"reward_funcs": []}),
        (TypeError, "prompts: expected a list, got str", {"prompts": "abc"}),
        (TypeError, "completions: expected a list .* got str", {"completions": "abc"}),
        (ValueError, "completions: expected length 3, .* got 2", {"completions": COMPLETIONS[:2]}),
        (ValueError, "completion_ids: expected length 3, .* got 1", {"completion_ids": [[1]]}),
        (ValueError, "answer: expected length 3, .* got 2", {"answer": [1, 2]}),
        (ValueError, "answer: expected length 3, .* got 4", {"answer": torch.zeros(4)}),
        (TypeError, "answer: expected a list .* got str", {"answer": "abc"}),
        (TypeError, "answer: expected a list .* got int", {"answer": 3}),
        (TypeError, "answer: expected a list .* got NoneType", {"answer": None}),
    ],
)
def test_wrong_arguments(error, message, arguments):
    good = {"reward_funcs": lengths, "prompts": PROMPTS, "completions": COMPLETIONS}
    with pytest.raises(error, match=message):
        compute_rewards(**{**good, **arguments})
