"""Description of a head for the subcommands: sizes, dtype, bias, and the scale and soft-cap of its logits."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.head.config_numbers import CAPS, DIVISORS, FACTORS, scale_and_cap

MODELS = {  # V, H, from the models' published configurations
    "Qwen3-0.6B": (151936, 1024),
    "Qwen3-1.7B": (151936, 2048),
    "Qwen3-8B": (151936, 4096),
    "Llama-3-8B": (128256, 4096),
    "Gemma-2-2B": (256000, 2304),
    "gpt-oss-20B": (201088, 2880),
}
SOFTCAPS = {"Gemma-2-2B": 30.0}
MOST = 10**9  # upper bound of a plausible size
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class HeadShape:
    """Shapes, dtype and constants of a head, without its tensors."""

    vocab: int  # V
    hidden: int  # H
    dtype: torch.dtype = torch.float32  # of hidden states and weight
    logit_scale: float = 1.0
    softcap: float | None = None
    bias: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element of hidden states and weight."""
        return self.dtype.itemsize

    def __str__(self) -> str:
        return f"V {self.vocab:,}, H {self.hidden:,}, {str(self.dtype).removeprefix('torch.')}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a head."""
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--model",
        type=_model,
        metavar="NAME",
        help=f"take the head of this model: {', '.join(MODELS)}",
    )
    models.add_argument(
        "--config",
        type=Path,
        metavar="DIR",
        help="take the head of any model from its config.json, in DIR",
    )
    parser.add_argument("--vocab", type=int, help="V: the size of the vocabulary")
    parser.add_argument("--hidden", type=int, help="H: the size of the hidden states")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of hidden states and weight; default: bf16"
    )


def described(parser: argparse.ArgumentParser, options: argparse.Namespace) -> HeadShape:
    """Return the head of ``--model``, ``--config``, or ``--vocab`` and ``--hidden``; or exit with an error."""
    sizes, dtype = (options.vocab, options.hidden), DTYPES[options.dtype]
    named = options.model is not None or options.config is not None
    if named == (sizes != (None, None)):
        parser.error("expected --model NAME, --config DIR, or both --vocab V and --hidden H")
    if options.config is not None:
        return _configured(parser, options.config, dtype)
    if options.model is not None:
        return HeadShape(*MODELS[options.model], dtype, softcap=SOFTCAPS.get(options.model))
    for name, value in zip(("vocab", "hidden"), sizes, strict=True):
        if value is None or not 1 <= value <= MOST:
            parser.error(f"--{name}: expected 1 to {MOST:,}, got {value}")
    return HeadShape(*sizes, dtype)


def _model(argument: str) -> str:
    """Return the model's name as in `MODELS`, whatever the case, with or without the organisation before it."""
    name = argument.rpartition("/")[2].casefold()
    model = next((x for x in MODELS if x.casefold() == name), None)
    if model is None:
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(MODELS)}, or --config DIR for another, got {argument}"
        )
    return model


def _configured(parser: argparse.ArgumentParser, folder: Path, dtype: torch.dtype) -> HeadShape:
    """Read the head of the model whose config.json is in `folder`, or exit with the reason why it cannot be read.

    Fields that the file leaves out have transformers' defaults. No code of the folder is run.
    """
    if not (folder / "config.json").is_file():
        parser.error(f"--config: expected a folder with config.json, got {folder}")
    try:
        from transformers import AutoConfig

        read = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config: Any = read.get_text_config(decoder=True)
        sizes: dict[str, Any] = {
            name: getattr(config, name, None) for name in ("vocab_size", "hidden_size")
        }
    except Exception as error:  # the checks of a config may raise anything
        reason = (str(error).splitlines() or [""])[0]
        parser.error(
            f"--config: {folder / 'config.json'} cannot be read ({reason}); give --vocab and --hidden"
        )
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            parser.error(
                f"--config: expected a {name} of 1 to {MOST:,}, got {value!r}; give --vocab and --hidden"
            )
    for name in (*FACTORS, *DIVISORS, *CAPS):
        value = getattr(config, name, None)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
        ):
            parser.error(
                f"--config: expected a {name} above 0, got {value!r}; give --vocab and --hidden"
            )
    constants = scale_and_cap(lambda name: getattr(config, name, None))
    return HeadShape(sizes["vocab_size"], sizes["hidden_size"], dtype, *constants)
