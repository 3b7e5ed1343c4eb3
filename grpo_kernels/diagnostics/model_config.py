"""The head of a model of transformers, from its config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_kernels.head.config_numbers import scale_and_cap


@dataclass(frozen=True)
class ConfiguredHead:
    """Facts about the head that a config holds."""

    vocab: int
    hidden: int
    logit_scale: float
    softcap: float | None


def read_config(folder: Path) -> ConfiguredHead:
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
    return ConfiguredHead(*sizes, *scale_and_cap(lambda name: getattr(config, name, None)))
