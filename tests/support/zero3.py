"""DeepSpeed ZeRO-3 on a CPU: where the package is, and how it is set up."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import parallel_cases as cases

FOLDER = Path(sys.prefix) / "zero3"  # where `make` puts it: requirements/zero3.txt
CONFIG = {
    "train_micro_batch_size_per_gpu": cases.SEQUENCES,
    # small parameters are divided too
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,  # torch's
    "zero_force_ds_cpu_optimizer": False,
}

needs_deepspeed = pytest.mark.skipif(
    not FOLDER.is_dir() and importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed: pip install --no-deps --target .venv/zero3 -r requirements/zero3.txt",
)


def deepspeed() -> Any:
    """The package, on a CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    package = importlib.import_module("deepspeed")
    # else it compiles faster collectives, for a minute
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # on a processor with fp16 it goes by the model's dtype where on others it takes bf16, and
    # refuses float64
    package.accelerator.get_accelerator().is_fp16_supported = lambda: False
    gc.freeze()  # it collects garbage at every start, seconds with all that is imported here
    return package


def divided(model: Any, mesh: None = None) -> Any:
    """The engine, whose optimizer changes nothing."""
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0) if trained else None
    engine = deepspeed().initialize(model=model, config=CONFIG, optimizer=optimizer)[0]
    assert model.lm_head.weight.numel() == 0
    return engine


INSIDE, AFTER = cases.Setup(divided), cases.Setup(divided, inside=False)
