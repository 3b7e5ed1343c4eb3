"""The table of tiles, `tuned.json`: entries from winners, merged into what is there, checked, written whole."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from grpo_kernels.backends.triton_rows import INTERPRETED, configs
from grpo_kernels.backends.triton_rows.configs import DotConfig, RowConfig, family
from grpo_kernels.backends.triton_rows.device import arch_of

Entry = dict[str, Any]
Config = RowConfig | DotConfig
SPLITS_AT_MOST = 256


def own_table() -> Path:
    return Path(str(resources.files(configs.__package__).joinpath(configs.TABLE)))


def write(table: dict[str, list[Entry]], out: Path) -> None:
    """Write the table whole: whoever reads it sees the old one or the new one."""
    beside = out.with_name(out.name + ".part")
    beside.write_text(text_of(table))
    assert json.loads(beside.read_text()) == table
    os.replace(beside, out)


def entries(fixed: Entry, winners: dict[int | None, dict[int, Config]], device: torch.device) -> list[Entry]:
    """The winners by width and vocabulary: neighbours that agree as one entry, the last of each without a bound."""
    measured = False if INTERPRETED else {
        "device": torch.cuda.get_device_name(device), "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    by_width = [(width, joined(sorted(by_vocab.items()))) for width, by_vocab in winners.items()]
    found = []
    for width, by_vocab in joined(by_width):
        for vocab, config in by_vocab:
            values = asdict(config)
            bounds: Entry = {"vocab_at_most": vocab}
            if isinstance(config, DotConfig):
                del values["splits"]
                bounds = {"hidden_width_at_most": width, **bounds, "splits_at_most": SPLITS_AT_MOST}
            found.append({"family": family(arch_of(device)), **fixed, **bounds, **values, "measured": measured})
    return found


def joined(steps: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(bound, what holds up to it), without the steps that the next one repeats; the last has no bound."""
    kept = [step for step, after in zip(steps, [*steps[1:], (None, None)], strict=True) if step[1] != after[1]]
    return [*kept[:-1], (None, kept[-1][1])]


def merged(table: dict[str, list[Entry]], new: list[Entry]) -> dict[str, list[Entry]]:
    """The table with the new entries in the place of those that they make out of date."""
    for kind, names in (("rows", ("kernels",)), ("dot", ("operand_bits", "aligned"))):
        fresh = [e for e in new if ("kernels" in e) == (kind == "rows")]
        replaced = {(e["family"], *(str(e[name]) for name in names)) for e in fresh}
        kept = [e for e in table[kind] if (e["family"], *(str(e[name]) for name in names)) not in replaced]
        table = {**table, kind: [*fresh, *kept]}
    return table


def check_table(table: dict[str, list[Entry]]) -> None:
    """Every family finds tiles for every kernel, whatever the sizes."""
    for name in configs.FAMILIES:
        rows = [e for e in table["rows"] if e["family"] == name]
        for kernel in configs.ROW_KERNELS:
            assert any(kernel in e["kernels"] and e["vocab_at_most"] is None for e in rows), (name, kernel)
        assert all(("stats" in e["kernels"]) == ("fused" in e["kernels"]) for e in rows), name
        for wanted in product((16, 32), (True, False), (True, False)):
            fits = [
                e
                for e in table["dot"]
                if e["family"] == name
                and e["vocab_at_most"] is e["hidden_width_at_most"] is None
                and all(e[k] in (x, None) for k, x in zip(("operand_bits", "aligned", "softcap"), wanted, strict=True))
            ]
            assert fits, (name, wanted)


def text_of(table: dict[str, list[Entry]]) -> str:
    """JSON with an entry a line."""
    kinds = (
        f'  "{kind}": [\n' + ",\n".join(f"    {json.dumps(e)}" for e in found) + "\n  ]"
        for kind, found in table.items()
    )
    return "{\n" + ",\n".join(kinds) + "\n}\n"
