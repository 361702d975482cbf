"""docs/run-folder.md names everything a run writes, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

from synthetic_run import synthetic_run

from leangrpo.report import read_run


def test_every_field_is_documented(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "run-folder.md").read_text(encoding="utf-8")
    folder = synthetic_run(tmp_path, updates=1, every=1)
    run = read_run(folder)
    assert run.summary is not None
    fields = {*run.metrics[0], *run.metrics[0]["memory"], *run.evaluations[0]}
    fields |= {*run.metrics[0]["time"], *run.evaluations[0]["per_prompt"][0]}
    fields |= {name for name in run.summary if not name.endswith("_after")}
    fields |= {path.name for path in folder.iterdir() if path.is_file()}
    assert {name for name in fields if f"`{name}`" not in text} == set()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code.replace("runs/mine", str(folder)), {})
