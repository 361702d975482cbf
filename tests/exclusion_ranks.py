"""Updates of several ranks, in each of which two trajectories are not finite.

    torchrun --nproc-per-node 2 tests/exclusion_ranks.py FOLDER

`FOLDER/cases.json` has settings by name, over `base.yaml`; rank 0 writes `<name>.pt`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from poison import poison

from leangrpo.config import load_config
from leangrpo.exclusion import until_finite
from leangrpo.parallel import leave, whole
from leangrpo.setup import set_up
from leangrpo.train import one_update


def main(folder: Path) -> None:
    for name, case in json.loads((folder / "cases.json").read_text(encoding="utf-8")).items():
        more = [*case["settings"], "optimizer.max_grad_norm=1e9", f"run.dir={folder / name}"]
        s = set_up(load_config(folder / "base.yaml", more), quiet=True)
        poison(s.policy, [(0, 1), (1, 2)], case["kind"])
        gradients: list[torch.Tensor] = []

        def look(*_: Any, s: Any = s, gradients: list[torch.Tensor] = gradients) -> None:
            gradients.extend(whole(p.grad).flatten().double() for p in s.policy.parameters)

        s.optimizer.register_step_pre_hook(look)
        with s.scorer, s.judge:
            line = until_finite(one_update, s, 0)
        if s.world.is_main:
            result = {"gradient": torch.cat(gradients), "excluded": line["excluded"]}
            torch.save(result, folder / f"{name}.pt")
            s.record.close()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
