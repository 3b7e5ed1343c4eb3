"""Description of a head for the subcommands: sizes, dtype, bias, and the scale and soft-cap of its logits."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.head.config_numbers import scale_and_cap

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


def add_arguments(parser: argparse.ArgumentParser, models: Any = None) -> None:
    """Add the options that describe a head; add ``--config`` to the group `models`, if there is one."""
    (models or parser).add_argument(
        "--config", type=Path, metavar="DIR", help="take the head of any model from its config.json, in DIR"
    )
    parser.add_argument("--vocab", type=int, help="V: the size of the vocabulary")
    parser.add_argument("--hidden", type=int, help="H: the size of the hidden states")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of hidden states and weight; default: bf16")


def configured(parser: argparse.ArgumentParser, options: argparse.Namespace) -> HeadShape:
    """Read the head of the model whose config.json is in ``--config``, or exit with the reason why it cannot be read.

    Fields that the file leaves out have transformers' defaults.
    """
    folder: Path = options.config
    if not (folder / "config.json").is_file():
        parser.error(f"--config: expected a folder with config.json, got {folder}")
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
        sizes = config.vocab_size, config.hidden_size
    except (ImportError, OSError, ValueError, AttributeError) as error:
        parser.error(f"--config: {folder / 'config.json'} cannot be read ({error}); give --vocab and --hidden")
    return HeadShape(*sizes, DTYPES[options.dtype], *scale_and_cap(lambda name: getattr(config, name, None)))
