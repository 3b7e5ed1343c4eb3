"""Other people's heads. Each notes the release that it was tested with, and what it computes."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import providers
from benchmarks.cases import EPSILON, Absence, Inputs
from benchmarks.providers import IGNORE, Forward, Outcome, Scored, from_logps, from_rows

OUTPUTS = ("log_probs", "entropy")  # what its GRPO trainer asks for
TEMPERATURE, TILES = 1.0, 1  # as verl passes them
APART = "verl_apart"  # stays in sys.modules, where verl does not

# TRL 1.16's fused head: the op its GRPO trainer calls through `add_fused_lm_head`, with its chunk
# size and outputs. Where the trainer cannot be imported, whose needs are many, its op is used by
# itself, whose needs are few.


def trl(inputs: Inputs) -> Forward:
    """The op, with the policy loss in torch behind it; packed where TRL packs."""
    note, case = "", inputs.case
    try:
        from trl.trainer import utils

        op, chunk = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE
    except Exception as error:
        op, chunk = _alone().ChunkedLogProbFunction, 32768
        note = f"trl.kernels alone, without the trainer ({type(error).__name__}: {error})"[:300]
    outputs = OUTPUTS[:1] if case.score and not case.wants_entropy else OUTPUTS

    def rows(hidden: Tensor, ids: Tensor) -> Scored:
        found = op.apply(hidden, inputs.weight, None, ids, 1.0, chunk, case.softcap, 1.0, outputs)
        return found[0], found[1] if "entropy" in outputs else None

    packs = importlib.import_module("trl.kernels.chunked_logprob")._use_triton(inputs.ids.device)
    return from_rows(inputs, rows, note, packs=packs)


def _alone() -> Any:
    providers.without_init("trl", "trl.kernels", "trl.trainer")
    utils = types.ModuleType("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *_: nullcontext()
    sys.modules["trl.trainer.utils"] = utils
    return importlib.import_module("trl.kernels.chunked_logprob")


# Liger's heads. Tested with 0.8.5.
#
# `liger_grpo` is its own GRPO loss in chunks of a sequence: 8 NVH, 6 with a frozen head. By default
# its mathematics is compiled, here on a GPU alone: on a CPU it gains nothing.
#
# `liger_ce` is its per-token cross-entropy, which verl calls with ``impl_backend="liger"``: packed,
# always with the entropy. 8 NVH, with a frozen head too. On Hopper it is a CuTe DSL kernel for
# bf16; elsewhere torch, 512 tokens at a time, entropies in the dtype of the operands.


def liger_grpo(inputs: Inputs, *, compiled: str = "on a GPU") -> Forward:
    """`LigerFusedLinearGRPOLoss` as it comes; not `compiled`, it needs no compiler."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    case, compiles = inputs.case, bool(compiled) and inputs.hidden.is_cuda
    loss_fn = LigerFusedLinearGRPOLoss(
        beta=case.beta, compiled=compiles, use_ref_model=inputs.ref is not None, loss_type="dapo",
        importance_sampling_level="sequence" if case.sequence else "token", epsilon_low=EPSILON,
        epsilon_high=EPSILON,
    )  # fmt: skip

    def forward() -> Outcome:
        given = inputs.hidden, inputs.weight, inputs.ids, inputs.mask, inputs.advantages
        more = {"old_per_token_logps": inputs.old, "ref_per_token_logps": inputs.ref}
        loss, _ = loss_fn(*given, **more)
        return Outcome(loss, note=f"chunk_size={loss_fn.chunk_size}, compiled={compiles}")

    return forward


def liger_ce(inputs: Inputs) -> Forward:
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    # on Hopper: its CuTe DSL kernel, or ImportError
    chosen = module._resolve_implementation(inputs.hidden.device)
    function = module.LigerFusedLinearScaledCrossEntropyFunction
    return _scaled_ce(inputs, function, chosen.__name__, TILES)


def liger_torch(inputs: Inputs) -> Forward:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        _FusedLinearPPOFallbackFunction as function,
    )

    return _scaled_ce(inputs, function, function.__name__)


def _scaled_ce(inputs: Inputs, function: Any, note: str, *tiles: int) -> Forward:
    wants_entropy = inputs.case.wants_entropy or not inputs.case.score

    def rows(hidden: Tensor, ids: Tensor) -> Scored:
        given = hidden, inputs.weight, ids, TEMPERATURE, IGNORE
        found = function.apply(*given, *tiles, wants_entropy)
        nll, entropies = found if isinstance(found, tuple) else (found, None)
        return -nll, entropies

    return from_rows(inputs, rows, note)


# verl's two fused heads, which always give log-probabilities and entropies. For 0.9.1; Triton not
# yet run. Used packed, as its trainers do by default (``use_remove_padding``). Both compute the
# gradient of a frozen weight and drop it: 8 NVH always. verl's own ``__init__`` wants Ray and more:
# the heads' files are imported into a package of our own, with their siblings, since the Triton
# head says ``from . import kernels`` in every call.


def verl_torch(inputs: Inputs) -> Forward:
    function = module("experimental", "torch_functional").FusedLinearForPPO()

    def rows(hidden: Tensor, ids: Tensor) -> Scored:
        return function(hidden, inputs.weight, ids, temperature=TEMPERATURE)

    return from_rows(inputs, rows, f"chunk_size={function.chunk_size}")


def verl_triton(inputs: Inputs) -> Forward:
    function = module("kernel", "linear_cross_entropy").linear_cross_entropy

    def rows(hidden: Tensor, ids: Tensor) -> Scored:
        return function(hidden, inputs.weight, ids, TEMPERATURE, "none")

    return from_rows(inputs, rows, "linear_cross_entropy")


@functools.cache
def module(folder: str, name: str) -> ModuleType:
    """verl/utils/<folder>/<name>.py, with its siblings; verl itself is as it was afterwards."""
    with providers.forgotten("verl"):
        providers.without_init("verl", "verl.utils", f"verl.utils.{folder}")
        providers.empty_package(APART, [])
        providers.empty_package(
            f"{APART}.{folder}", list(sys.modules[f"verl.utils.{folder}"].__path__)
        )
        if name == "linear_cross_entropy":
            importlib.import_module(f"{APART}.{folder}.kernels")  # else only when it is called
        return importlib.import_module(f"{APART}.{folder}.{name}")


# Unsloth's fused head, which its GRPO trainer calls. Tested with 2026.10.9. 8 NVH; a frozen head 4,
# the gradient of the hidden states being made in the forward. Masked positions are left out by its
# own `mask`, as its preference trainers pass it; its GRPO trainer does not. On a GPU cuBLAS and
# Triton, logits in fp32; on a CPU torch. A dispatch mode does not see its products, inside custom
# operators. AGPL: called, never copied.


def unsloth(inputs: Inputs) -> Forward:
    providers.without_init("unsloth_zoo", "unsloth_zoo.fused_losses")
    module = importlib.import_module("unsloth_zoo.fused_losses.fused_linear")
    case = inputs.case
    options = {
        "mask": inputs.mask.bool() if case.padding else None,
        "logit_softcapping": case.softcap or 0.0,
        "return_entropy": case.wants_entropy,
        "entropy_requires_grad": False,
    }

    def logps() -> Scored:
        found = module.fused_linear_logprobs(inputs.hidden, inputs.weight, inputs.ids, **options)
        return found if isinstance(found, tuple) else (found, None)

    note = "Triton" if module._use_triton(inputs.hidden.device) else "torch"
    return from_logps(inputs, logps, note if case.wants_entropy else f"{note}, no entropy")


# Per-token cross-entropies, -logp: torch's and Apple's. Neither gives an entropy; masked tokens are
# `IGNORE`.
#
# torch, tested with 2.13.0: in chunks (``options=``) its backward recomputes the logits: 8 NVH, 6
# with a frozen head; without, it is all logits at once: 6 and 4. Its documentation says that chunks
# pay from as many tokens as the head's H. Masked tokens are computed. Log-probabilities come in the
# dtype of the operands. In chunks a dispatch mode does not see its products.
#
# Apple's cut cross-entropy, written for 25.1.1, the latest on PyPI: gradients are summed in the
# dtype of the operands. Masked tokens are left out. 8 NVH, less the tiles that its gradient filter
# drops, by default those whose probabilities are all below eps / 32 of the dtype. Its Triton
# kernels have not been run. Apple's licence: called, never copied.


def linear_ce(inputs: Inputs) -> Forward:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise Absence(f"torch {torch.__version__} has no F.linear_cross_entropy")
    in_chunks = inputs.case.n >= inputs.case.h
    options = torch.nn.LinearCrossEntropyOptions() if in_chunks else None

    def nll(hidden: Tensor, ids: Tensor) -> Tensor:
        more = {"reduction": "none", "ignore_index": IGNORE, "options": options}
        return function(hidden, inputs.weight, ids, **more).float()

    note = "in chunks, LinearCrossEntropyOptions()" if in_chunks else "options=None"
    return providers.from_nll(inputs, nll, note)


def cce(inputs: Inputs) -> Forward:
    import cut_cross_entropy as package
    from cut_cross_entropy.linear_cross_entropy import LCE_IMPL_DEFAULT as CHOSEN

    if package.LinearCrossEntropyImpl.CCE == CHOSEN and not inputs.hidden.is_cuda:
        raise Absence("the Triton kernels it chooses serve GPUs only")
    options = {"ignore_index": IGNORE, "softcap": inputs.case.softcap, "reduction": "none"}
    options["impl"] = CHOSEN

    def nll(hidden: Tensor, ids: Tensor) -> Tensor:
        return package.linear_cross_entropy(hidden, inputs.weight, ids, **options)

    return providers.from_nll(inputs, nll, f"{package.__version__}, impl={CHOSEN.name.lower()}")
