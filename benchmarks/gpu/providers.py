"""One adapter for each way to compute the case, each used as its users would; loaded only when it is asked for.

An adapter takes the inputs and returns a step: forward and backward, the gradients left in the leaves. One that cannot
run here raises `Absence` with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.cases import EPSILON, Inputs, policy_loss
from benchmarks.gpu.events import Absence
from benchmarks.gpu.reference import Outcome

Step = Callable[[], Outcome]
TRL_OUTPUTS = ("log_probs", "entropy")  # what its GRPO trainer asks for
LIGER_IGNORE = -100


def build(name: str, inputs: Inputs, our_backend: str = "auto") -> Step:
    """The step of the provider `name`.

    Raises:
        Absence: it is not installed, or does not do this case.
    """
    if name == "ours" or name.startswith("ours/"):
        return _ours(inputs, name.partition("/")[2] or "auto", our_backend)
    try:
        return {
            "products": _products,
            "eager": _eager,
            "trl": _trl,
            "liger": _liger,
            "liger_torch": _liger_torch,
            "liger_grpo": _liger_grpo,
            "verl_triton": _verl_triton,
            "verl_torch": _verl_torch,
        }[name](inputs)
    except ImportError as error:
        raise Absence(f"{type(error).__name__}: {error}") from error


def _from_logps(inputs: Inputs, logps: Callable[[], Tensor], note: str = "") -> Step:
    """A step around a differentiable log-probability (B, T)."""
    if inputs.case.score:

        def score() -> Outcome:
            with torch.no_grad():
                return Outcome(None, logps(), note)

        return score

    def step() -> Outcome:
        lp = logps()
        loss = policy_loss(inputs, lp)
        loss.backward()
        return Outcome(loss, lp, note)

    return step


def _ours(inputs: Inputs, variant: str, backend: str) -> Step:
    """`variant`: an engine; "torch", its backend; "no_mask"; "expected", with a trainer's own loss behind it."""
    from grpo_kernels import GRPOLoss, linear_logprob

    hidden, weight, ids = inputs.hidden, inputs.weight, inputs.ids
    engine = "auto" if variant in ("torch", "no_mask", "expected") else variant
    backend = "torch" if variant == "torch" else backend
    mask = None if variant == "no_mask" else inputs.mask
    if inputs.case.score:

        def score() -> Tensor:
            return linear_logprob(hidden, weight, ids, entropy=False, engine=engine, backend=backend)[0]

        return _from_logps(inputs, score, note=engine)
    if variant == "expected":  # what the TRL integration does: the loss stays the trainer's
        expected = (inputs.advantages[:, None] * inputs.mask).neg()

        def logps() -> Tensor:
            return linear_logprob(hidden, weight, ids, expected=expected, backend=backend)[0]

        return _from_logps(inputs, logps, note=variant)
    loss_fn = GRPOLoss(epsilon=EPSILON, engine=engine, backend=backend)

    def step() -> Outcome:
        out = loss_fn(hidden, weight, ids, mask, inputs.advantages, old_per_token_logps=inputs.old)
        out.loss.backward()
        return Outcome(out.loss, out.per_token_logps, out.engine)

    return step


def _eager(inputs: Inputs) -> Step:
    """All logits: a bf16 product, log_softmax in fp32, autograd."""

    def logps() -> Tensor:
        logits = torch.nn.functional.linear(inputs.hidden, inputs.weight).float()
        return torch.log_softmax(logits, dim=-1).gather(-1, inputs.ids[..., None])[..., 0]

    return _from_logps(inputs, logps)


def _products(inputs: Inputs) -> Step:
    """Only the matrix products that the case needs, whole, by the vendor's library: the limit we compare with."""
    case = inputs.case
    hidden, weight = inputs.hidden.detach().reshape(-1, case.h), inputs.weight.detach()
    graded = round(case.n * (1.0 - case.zero_share))
    logits = hidden.new_empty(case.n, case.v, dtype=torch.float32)
    _mm(hidden, weight.t(), logits)
    if case.score:

        def score() -> Outcome:
            _mm(hidden, weight.t(), logits)
            return Outcome()

        return score
    d_logits = hidden.new_empty(graded, case.v)  # of realistic values: an easy operand would run at higher clocks
    for rows in range(0, graded, 1024):
        part = slice(rows, min(rows + 1024, graded))
        d_logits[part] = torch.softmax(logits[part], dim=1) / case.n
    d_hidden = hidden.new_empty(graded, case.h)
    d_weight = None if case.frozen else weight.new_empty(case.v, case.h, dtype=torch.float32)

    def step() -> Outcome:
        _mm(hidden, weight.t(), logits)
        _mm(d_logits, weight, d_hidden)
        if d_weight is not None:
            _mm(d_logits.t(), hidden[-graded:], d_weight)
        return Outcome()

    return step


def _mm(left: Tensor, right: Tensor, out: Tensor) -> None:
    if left.is_cuda and out.dtype != left.dtype:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out=out)
    else:  # the CPU library has no product that keeps its fp32 accumulator
        out.copy_(left.float() @ right.float())


def _trl(inputs: Inputs) -> Step:
    """The op that TRL's GRPO trainer calls through `add_fused_lm_head`, with its chunk size and outputs."""
    note = "trl.trainer.utils"
    try:
        from trl.trainer import utils

        op, chunk = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE
    except Exception as error:  # the trainer's needs are many; the op's are few
        op, chunk = _trl_op_alone(), 32768
        note = f"trl.kernels alone, without the trainer ({type(error).__name__}: {error})"[:300]
    outputs = TRL_OUTPUTS[:1] if inputs.case.score else TRL_OUTPUTS
    ids = inputs.ids.reshape(-1)

    def logps() -> Tensor:
        flat = inputs.hidden.reshape(-1, inputs.case.h)
        return op.apply(flat, inputs.weight, None, ids, 1.0, chunk, None, 1.0, outputs)[0].view(inputs.ids.shape)

    return _from_logps(inputs, logps, note)


def _trl_op_alone() -> type[torch.autograd.Function]:
    from contextlib import nullcontext

    without_init("trl", "trl.kernels", "trl.trainer")
    utils = types.ModuleType("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *_: nullcontext()  # type: ignore[attr-defined]
    sys.modules["trl.trainer.utils"] = utils
    return importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction


def _liger_logps(inputs: Inputs, apply: Callable[..., object], note: str) -> Step:
    ids = inputs.ids.reshape(-1)

    def logps() -> Tensor:
        nll = apply(inputs.hidden.reshape(-1, inputs.case.h), ids)
        first = nll[0] if isinstance(nll, tuple) else nll
        assert isinstance(first, Tensor)
        return -first.view(inputs.ids.shape)

    return _from_logps(inputs, logps, note)


def _liger(inputs: Inputs) -> Step:
    """Liger's per-token cross-entropy by its own choice of kernel, with the entropy that GRPO trainers log."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    chosen = module._resolve_implementation(inputs.hidden.device)  # on Hopper: its CuTe DSL kernel, or ImportError
    function, entropy = module.LigerFusedLinearScaledCrossEntropyFunction, not inputs.case.score

    def apply(hidden: Tensor, ids: Tensor) -> object:
        return function.apply(hidden, inputs.weight, ids, 1.0, LIGER_IGNORE, 1, entropy)

    return _liger_logps(inputs, apply, chosen.__name__)


def _liger_torch(inputs: Inputs) -> Step:
    """What Liger runs where it has no kernel of its own: torch, 512 tokens at a time."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import _FusedLinearPPOFallbackFunction as function

    entropy = not inputs.case.score

    def apply(hidden: Tensor, ids: Tensor) -> object:
        return function.apply(hidden, inputs.weight, ids, 1.0, LIGER_IGNORE, entropy)

    return _liger_logps(inputs, apply, function.__name__)


def _liger_grpo(inputs: Inputs) -> Step:
    """Liger's GRPO loss, a sequence at a time; its loss mathematics not compiled, which would take minutes."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    if inputs.case.score:
        raise Absence("it has no log-probabilities to give")
    loss_fn = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo", epsilon_low=EPSILON, epsilon_high=EPSILON
    )

    def step() -> Outcome:
        loss, _ = loss_fn(
            inputs.hidden, inputs.weight, inputs.ids, inputs.mask, inputs.advantages, old_per_token_logps=inputs.old
        )
        loss.backward()
        return Outcome(loss, note="chunk_size=1, compiled=False")

    return step


def _verl_triton(inputs: Inputs) -> Step:
    if not inputs.hidden.is_cuda:
        raise Absence("its Triton kernel serves GPUs only")
    without_init("verl", "verl.utils", "verl.utils.kernel")
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    ids = inputs.ids.reshape(-1)

    def logps() -> Tensor:
        flat = inputs.hidden.reshape(-1, inputs.case.h)
        return function(flat, inputs.weight, ids, 1.0, "none", None)[0].view(inputs.ids.shape)

    return _from_logps(inputs, logps, "linear_cross_entropy")


def _verl_torch(inputs: Inputs) -> Step:
    without_init("verl", "verl.utils", "verl.utils.experimental")
    module = importlib.import_module("verl.utils.experimental.torch_functional")
    function = module.FusedLinearForPPO()

    def logps() -> Tensor:
        return function(inputs.hidden, inputs.weight, inputs.ids, temperature=1.0)[0]

    return _from_logps(inputs, logps, f"chunk_size={function.chunk_size}")


def without_init(*names: str) -> None:
    """Make packages importable without running their ``__init__``, which wants what a kernel does not (Ray, ...).

    Raises:
        ImportError: the first of them is not installed.
    """
    for name in names:
        parent, _, last = name.rpartition(".")
        if name in sys.modules:
            continue
        if parent:
            paths = [f"{path}/{last}" for path in sys.modules[parent].__path__]
        else:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError(f"{name} is not installed")
            paths = list(spec.submodule_search_locations)
        module = types.ModuleType(name)
        module.__path__ = paths
        sys.modules[name] = module
