"""A head as the subcommands know it: its sizes, its precision, and what its model makes of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_kernels.head.config_numbers import scale_and_cap

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class HeadShape:
    """A head without its numbers."""

    vocab: int  # V
    hidden: int  # H
    dtype: torch.dtype = torch.float32  # of hidden states and weight
    logit_scale: float = 1.0
    softcap: float | None = None
    bias: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a number of hidden states and weight."""
        return self.dtype.itemsize

    def __str__(self) -> str:
        return f"V {self.vocab:,}, H {self.hidden:,}, {str(self.dtype).removeprefix('torch.')}"


def read_config(folder: Path, dtype: torch.dtype) -> HeadShape:
    """Read the head of the model whose config.json is in `folder`; transformers knows the fields that it leaves out.

    Raises:
        ValueError: no config.json there, or none that the installed transformers knows, if it is installed at all.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"expected a folder with config.json, got {folder}")
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
        sizes = config.vocab_size, config.hidden_size
    except (ImportError, OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read ({error}); give --vocab and --hidden") from error
    return HeadShape(*sizes, dtype, *scale_and_cap(lambda name: getattr(config, name, None)))
