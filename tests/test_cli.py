"""The command line: what it says and writes, and mistakes: one line each and exit code 2."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image
from test_train import MOOD, SMALL, raising
from torch import Tensor

from leangrpo import __version__, checkpoint
from leangrpo.cli import main
from leangrpo.config import described, load_config, recipe_names, recipe_text
from leangrpo.runfolder import read_lines, read_run

LORA = ("embedded-lora", "model.lora.rank=2", *SMALL)
EXACT = "evaluation.rewards=[{name: ocr_exact}]"
MOODY = ("rewards=[{name: 'test_train:moody'}]", "prompts.heldout=null", "checkpoint.every=9")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def leangrpo(*words: object) -> Ended:
    """What `leangrpo WORDS` does, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = ["leangrpo", *map(str, words)]
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", argv):
        try:
            main()
        except SystemExit as exit:
            code = int(exit.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def complaint(ended: Ended) -> str:
    """The one line of a refusal, without its `error: `."""
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1 and ended.err.endswith("\n")
    return ended.err.removeprefix("error: ").rstrip("\n")


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of a file."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The folder and the output of a small run; `../result.json` is what it was told to write."""
    root = tmp_path_factory.mktemp("trained")
    words = [*LORA, EXACT, "evaluation.every=1", f"run.dir={root / 'run'}"]
    return root / "run", leangrpo("train", *words, "--json", root / "result.json")


@pytest.fixture
def run(trained: tuple[Path, Ended], tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a pipeline fails the test."""
    import leangrpo.setup

    def load(*args: object, **kwargs: object) -> None:
        pytest.fail("a pipeline was loaded")

    monkeypatch.setattr(leangrpo.setup, "load_pipeline", load)


# -- help and version ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("", "--version --help train evaluate sample export bench plan check serve-reward recipes"),
        ("train", "RECIPE|YAML|RUN KEY.PATH=VALUE --resume --quiet -q --json --help"),
        ("evaluate", "RUN --update --ema --no-ema --json"),
        ("sample", "RUN --prompt -p --out -o --num --seed --update --ema --no-ema --json"),
        ("export", "RUN OUT --update --ema --no-ema --json"),
        ("bench", "RECIPE|YAML|RUN --schedules --rounds --json"),
        ("recipes", "--json list show copy"),
        ("recipes list", "--json"),
        ("recipes show", "name"),
        ("recipes copy", "name file"),
    ],
)
def test_help(command: str, named: str) -> None:
    ended = leangrpo(*command.split(), "--help")
    assert (ended.code, ended.err) == (0, "")
    words = set(re.split(r"[\s\[\]{}.…*]+", re.sub(r"\x1b\[[\d;]*m", "", ended.out)))
    assert set(re.split(r"[\s.]+", named)) <= words


def test_nothing_to_do_shows_the_help() -> None:
    assert leangrpo().out.strip() == leangrpo("--help").out.strip() != ""


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-m", "leangrpo"], [str(Path(sys.executable).parent / "leangrpo")]],
    ids=["module", "script"],
)
def test_version(command: list[str]) -> None:
    ended = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == (f"leangrpo {__version__}\n", "")


@pytest.mark.parametrize("words", ["--help", "--version", "recipes list", "train updates=0"])
def test_nothing_heavy_is_imported(words: str) -> None:
    code = (
        "import sys; from leangrpo.cli import main\n"
        "try: main()\n"
        "finally: print('heavy:', sorted({'torch', 'diffusers', 'transformers'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", code, *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.endswith("heavy: []\n"), ended.stderr


# -- recipes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["recipes", "recipes list"])
def test_recipes(command: str, tmp_path: Path) -> None:
    ended = leangrpo(*command.split(), "--json", tmp_path / "recipes.json")
    printed = (line for line in ended.out.splitlines() if line.startswith("  "))
    rows = dict(line.split(maxsplit=1) for line in printed)
    kinds = {k: recipe_names(k) for k in ("runs", "models", "algorithms", "pairs")}
    expected = {kind: {n: described(kind, n) for n in names} for kind, names in kinds.items()}
    assert rows == {n: text for some in expected.values() for n, text in some.items()}
    assert all(rows.values())
    assert read_json(tmp_path / "recipes.json") == expected


@pytest.mark.parametrize("name", recipe_names("algorithms"))
def test_a_combined_recipe_shown_and_copied(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.yaml"
    shown = leangrpo("recipes", "show", name).out
    assert shown == recipe_text(name)
    assert shown.startswith("# ---- recipe embedded ----\n")
    assert leangrpo("recipes", "copy", name, file).code == 0
    assert load_config(file) == load_config(name)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_shown_and_copied(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.yaml"
    assert leangrpo("recipes", "show", name).out == recipe_text(name)
    ended = leangrpo("recipes", "copy", name, file)
    assert (ended.code, ended.err) == (0, "")
    assert f"leangrpo train {file}" in ended.out
    assert load_config(file) == load_config(name)
    file.write_text("updates: 3\n", encoding="utf-8")
    assert complaint(leangrpo("recipes", "copy", name, file)).startswith(f"Cannot write {file}: ")
    assert file.read_text(encoding="utf-8") == "updates: 3\n"


@pytest.mark.parametrize("command", ["train", "bench", "recipes show", "recipes copy"])
def test_the_nearest_recipe_is_named(command: str, no_model: None, tmp_path: Path) -> None:
    file = [tmp_path / "mine.yaml"] if command == "recipes copy" else []
    assert complaint(leangrpo(*command.split(), "embeded", *file)) == (
        "`recipe` is 'embeded': it is neither a recipe nor a YAML file. Did you mean `embedded`?"
    )
    assert list(tmp_path.iterdir()) == []


# -- a run -----------------------------------------------------------------------------------------


def test_train(trained: tuple[Path, Ended]) -> None:
    run, ended = trained
    assert (ended.code, ended.err) == (0, "")
    summary = read_json(run / "summary.json")
    assert read_json(run.parent / "result.json") == summary
    assert (summary["schedule"], summary["updates"], summary["images"]) == ("reweight", 2, 8)
    assert (summary["stopped"], summary["run"]) == ("finished", str(run))
    assert summary["seconds"] > 0
    lines, evaluations = read_lines(run / "metrics.jsonl"), read_lines(run / "evaluations.jsonl")
    assert [line["update"] for line in lines] == [1, 2]
    assert [summary["reward_first"], summary["reward_last"]] == [x["reward_mean"] for x in lines]
    assert [e["update"] for e in evaluations] == [0, 1, 2]
    for when, evaluation in (("before", evaluations[0]), ("after", evaluations[-1])):
        assert summary[f"heldout_reward_{when}"] == evaluation["reward"] < 0
        assert 0 <= summary[f"heldout_exact_{when}"] == evaluation["exact"] <= 1
    for update in ("1/2", "2/2"):
        assert f"update {update}  reward" in ended.out
    assert f"report: {run / 'report.html'}" in ended.out


@pytest.mark.parametrize("update", [None, 1])
def test_evaluate(update: int | None, run: Path, tmp_path: Path) -> None:
    """Scores are those of the evaluation while it was trained, and the run is left as it was."""
    before = contents(run)
    which = [] if update is None else ["--update", update]
    ended = leangrpo("evaluate", run, *which, "--json", tmp_path / "result.json")
    assert (ended.code, ended.err) == (0, "")
    result = read_json(tmp_path / "result.json")
    line = read_lines(run / "evaluations.jsonl")[update or 2]
    assert {**line, "seconds": 0, "grid": 0} == {**result, "seconds": 0, "grid": 0}
    for name in ("ocr_log_prob", "ocr_exact"):
        assert re.search(rf"^{name} +{line['rewards'][name]:.4f}$", ended.out, re.MULTILINE)
    assert f"4 held-out prompts, weights of update {update or 2}" in ended.out
    assert contents(run) == before


def test_sample(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    prompts = ["-p", "the number 47 in blue", "--prompt", "the number 12 in red"]
    found = {}
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        out, file = tmp_path / name, tmp_path / f"{name}.json"
        words = ["--num", 2, "--seed", seed, "--out", out, "--json", file]
        ended = leangrpo("sample", run, *prompts, *words)
        assert (ended.code, ended.err) == (0, "")
        files = [str(out / f"{p:03d}-{n:03d}.png") for p in range(2) for n in range(2)]
        assert ended.out.splitlines() == read_json(file)["files"] == files
        for picture in files:
            with Image.open(picture) as image:
                assert (image.format, image.size) == ("PNG", (32, 32))
        found[name] = contents(out)
    assert len(set(found["one"].values())) == 4
    assert found["one"] == found["same"]
    assert not set(found["one"].values()) & set(found["other"].values())
    assert contents(run) == before


@pytest.mark.parametrize("where", ["{}", "run.dir={}", "{}/config.yaml run.dir={}"])
def test_resuming_a_finished_run(where: str, run: Path) -> None:
    """Also of one that was moved; only the result is printed with --quiet."""
    before = read_run(run)
    ended = leangrpo("train", *where.format(run, run).split(), "--resume", "--quiet")
    assert (ended.code, ended.err) == (0, "")
    after = read_run(run)
    assert (after.metrics, after.evaluations) == (before.metrics, before.evaluations)
    assert before.summary is not None and after.summary is not None
    assert after.summary["weights_sha256"] == before.summary["weights_sha256"]
    assert after.summary["run"] == str(run)
    first, second = ended.out.splitlines()
    assert first.startswith("2 updates (reweight) in ")
    assert second == f"report: {run / 'report.html'}"


def test_resuming_with_more_updates(run: Path) -> None:
    before = read_run(run).metrics
    assert leangrpo("train", run, "updates=3", "--resume").code == 0
    after = read_run(run).metrics
    assert after[:2] == before
    assert [line["update"] for line in after] == [1, 2, 3]


def test_a_run_as_the_source_of_another(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    words = ["updates=1", "prompts.heldout=null", f"run.dir={tmp_path / 'other'}"]
    assert leangrpo("train", run, *words).code == 0
    assert contents(run) == before
    first, other = read_run(run), read_run(tmp_path / "other")
    assert [line["rewards"] for line in other.metrics] == [first.metrics[0]["rewards"]]


@pytest.mark.slow
def test_bench_of_the_ledger(tmp_path: Path) -> None:
    options = ["--ledger", "--groups", "2,4", "--json", tmp_path / "ledger.json"]
    ended = leangrpo("bench", *SMALL, *options)
    assert ended.code == 0
    assert "streaming" in ended.out
    assert read_json(tmp_path / "ledger.json")


def test_bench(tmp_path: Path) -> None:
    options = ["--rounds", 1, "--schedules", "retain,reweight", "--json", tmp_path / "bench.json"]
    ended = leangrpo("bench", *SMALL, *options)
    assert (ended.code, ended.err) == (0, "")
    rows = read_json(tmp_path / "bench.json")["rows"]
    assert [row["schedule"] for row in rows] == ["retain", "reweight"]
    assert all(row["schedule"] in ended.out for row in rows)


@pytest.mark.parametrize("by", ["summary", "exception"])
def test_stopped(by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train(*args: object, **kwargs: object) -> dict[str, object]:
        if by == "exception":
            raise KeyboardInterrupt
        return {"stopped": "interrupted"}

    monkeypatch.setattr("leangrpo.train.train", train)
    ended = leangrpo("train", f"run.dir={tmp_path / 'run'}", "--json", tmp_path / "result.json")
    assert ended.code == 130
    assert (tmp_path / "result.json").exists() == (by == "summary")


# -- mistakes, known before a model is loaded ------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "rolout.generations=4",
            "`rolout.generations` is 4: no setting has this name. "
            "Did you mean `rollout.generations`?",
        ),
        (
            "selection={rule: list, steps: [0, 7], fraction: 0.5}",
            "`selection.steps` is [0, 7]: step 7 is outside 0..2. sampling.steps is 3.",
        ),
        (
            "rollout.generations=1",
            "`rollout.generations` is 1: a group of one has no baseline to be compared with. "
            "Take 2 or more, or another advantage.baseline.",
        ),
        ("updates=0", "`updates` is 0: it must be at least 1."),
        (
            "model.pipeline={tmp}/pipeline",
            "`model.pipeline` is '{tmp}/pipeline': its model_index.json lists no scheduler, "
            "so there is no step to train.",
        ),
        (
            "prompts.train={tmp}/empty.txt",
            "`prompts.train` is '{tmp}/empty.txt': it holds no prompt. Write one a line.",
        ),
        (
            "run.dir={tmp}/empty.txt/run",
            "`run.dir` is '{tmp}/empty.txt/run': {tmp}/empty.txt cannot be written to.",
        ),
        (
            "run.dir={tmp}/nowhere",
            "`run.dir` is '{tmp}/nowhere': there is no run to resume. "
            "Leave out --resume to start one.",
        ),
        (
            "rewards.0.name=test_cli:missing",
            "`rewards.0.name` is 'test_cli:missing': it cannot be imported: AttributeError: "
            "module 'test_cli' has no attribute 'missing'. Modules are searched in {cwd} and the "
            "installed packages.",
        ),
        (
            "--json {tmp}/missing/result.json",
            "--json {tmp}/missing/result.json: cannot be written. "
            "Choose a file in an existing folder.",
        ),
        (
            "--json {tmp}",
            "--json {tmp}: cannot be written. Choose a file in an existing folder.",
        ),
        (
            "seed=1",
            "The run in {tmp}/run was made with other settings (`seed` is 1 and was 0): going on "
            "would not be the same run. Resume it with its own: leangrpo train {tmp}/run --resume",
        ),
    ],
)
def test_refused_before_a_model_is_loaded(
    words: str, line: str, run: Path, tmp_path: Path, no_model: None
) -> None:
    """While a run is resumed, so that there is something to lose."""
    (tmp_path / "empty.txt").write_text("\n# nothing\n\n", encoding="utf-8")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text("{}", encoding="utf-8")
    before = contents(tmp_path)

    def fill(text: str) -> str:
        return text.replace("{tmp}", str(tmp_path)).replace("{cwd}", str(Path.cwd()))

    given = fill(words).split() if words.startswith("--json") else [fill(words)]
    assert complaint(leangrpo("train", run, *given, "--resume")) == fill(line)
    assert contents(tmp_path) == before


def test_a_run_is_not_trained_over(run: Path, no_model: None) -> None:
    before = contents(run)
    line = f"`run.dir` is '{run}': it already holds a run. Resume it, or name another folder."
    for words in ([f"run.dir={run}"], [run], [run / "config.yaml", f"run.dir={run}"]):
        assert complaint(leangrpo("train", *words)) == line
    assert contents(run) == before


def test_mistakes_come_one_a_line(no_model: None) -> None:
    ended = leangrpo("train", "rolout.generations=4", "seed=x", "updates=0")
    assert ended.code == 2
    assert [line.split(" is ")[0] for line in ended.err.splitlines()] == [
        "error: `rolout.generations`",
        "`seed`",
        "`updates`",
    ]


@pytest.mark.parametrize(
    "command", ["evaluate {}", "sample {} -p cat --out {}/out", "export {} {}/out"]
)
@pytest.mark.parametrize("name", ["nowhere", "folder"])
def test_no_run(command: str, name: str, tmp_path: Path, no_model: None) -> None:
    (tmp_path / "folder").mkdir()
    folder = tmp_path / name
    assert complaint(leangrpo(*command.format(folder, folder).split())) == (
        f"{folder} is not a run: it has no config.yaml. Give a folder made by train."
    )
    assert [p.name for p in tmp_path.rglob("*")] == ["folder"]


@pytest.mark.parametrize(
    "command", ["evaluate {}", "sample {} -p cat --out {}/../out", "export {} {}/../out"]
)
def test_no_checkpoint(command: str, run: Path, no_model: None) -> None:
    words = command.format(run, run).split()
    said = complaint(leangrpo(*words, "--update", "7"))
    assert said == f"{run} has no checkpoint of update 7. It has: 1, 2."
    shutil.rmtree(run / "checkpoints")
    assert complaint(leangrpo(*words)) == (
        f"{run} has no checkpoint yet. Wait for one, or train it first."
    )


def test_a_damaged_checkpoint_is_not_used(run: Path, no_model: None) -> None:
    folder = run / "checkpoints" / "000002"
    file = next(folder.rglob("*.safetensors"))
    file.write_bytes(b"")
    assert complaint(leangrpo("evaluate", run, "--update", 2)) == (
        f"{folder} is damaged: {file.relative_to(folder)} is missing or was changed."
    )


def test_evaluate_without_heldout_prompts(run: Path, no_model: None) -> None:
    text = (run / "config.yaml").read_text(encoding="utf-8")
    changed = text.replace("heldout: embedded", "heldout: null")
    assert changed != text
    (run / "config.yaml").write_text(changed, encoding="utf-8")
    assert complaint(leangrpo("evaluate", run)) == (
        f"{run} has no held-out prompts: prompts.heldout is null in its config.yaml."
    )


@pytest.mark.parametrize(
    "command", ["evaluate RUN", "sample RUN -p cat", "export RUN x", "bench", "recipes"]
)
@pytest.mark.parametrize("name", ["missing/result.json", "run"])
def test_a_result_that_cannot_be_written(
    command: str, name: str, run: Path, tmp_path: Path, no_model: None
) -> None:
    words = command.replace("RUN", str(run)).split()
    assert complaint(leangrpo(*words, "--json", tmp_path / name)) == (
        f"--json {tmp_path / name}: cannot be written. Choose a file in an existing folder."
    )


def test_a_result_that_cannot_be_written_after_all(tmp_path: Path) -> None:
    """A name too long is known only when it is used."""
    file = tmp_path / ("x" * 300)
    assert complaint(leangrpo("recipes", "--json", file)) == (
        f"--json {file}: cannot be written: File name too long."
    )


def test_a_reward_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_model: None
) -> None:
    """One line, also if what it raises has more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = "raise RuntimeError('no weights:\\n  looked here')\n"
    (tmp_path / "reward_of_two_lines.py").write_text(text, encoding="utf-8")
    name = "reward_of_two_lines:score"
    assert complaint(leangrpo("train", f"rewards.0.name={name}", "run.dir=run")) == (
        f"`rewards.0.name` is '{name}': it cannot be imported: RuntimeError: no weights: looked "
        f"here. Modules are searched in {tmp_path} and the installed packages."
    )
    assert not (tmp_path / "run").exists()


def test_pictures_that_cannot_be_written(run: Path, tmp_path: Path, no_model: None) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        said = complaint(leangrpo("sample", run, "--prompt", "cat", "--out", out))
        assert said.startswith(f"--out {out}: ") and said.endswith(". Choose another folder.")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--schedules native,lazy", "`--schedules` is 'lazy': must be among native, retain"),
        ("rolout.generations=4", "`rolout.generations` is 4: no setting has this name."),
    ],
)
def test_bench_refuses(words: str, line: str, no_model: None) -> None:
    assert complaint(leangrpo("bench", *words.split())).startswith(line)


@pytest.mark.parametrize("name", ["2024", "[x]", "héllo 🐈", "it's: #1", "lr=1e-4"])
def test_a_run_may_have_any_name(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch, no_model: None
) -> None:
    run.rename(run.parent / name)
    monkeypatch.chdir(run.parent)
    shutil.rmtree(Path(name) / "checkpoints")
    assert complaint(leangrpo("evaluate", name)) == (
        f"{name} has no checkpoint yet. Wait for one, or train it first."
    )
    assert complaint(leangrpo("train", name)).startswith(f"`run.dir` is {name!r}: it already hold")


# -- rewards that fail while it is trained ---------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (raising, "reward `test_train:moody` raised RuntimeError: no disk left"),
        (lambda scores: scores * math.nan, "gave NaN or infinite scores: 1 of 1, the first for"),
        (lambda scores: [0.5, 0.5], "reward `test_train:moody` returned 2 scores for 1 images."),
    ],
    ids=["raises", "nan", "count"],
)
def test_a_reward_fails(
    act: Callable[[Tensor], Any], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the second update, of four pictures each; the first is saved."""
    run = tmp_path / "run"
    for key, value in {"calls": 0, "from": 6, "act": act}.items():
        monkeypatch.setitem(MOOD, key, value)
    ended = leangrpo("train", *LORA, *MOODY, f"run.dir={run}", "--json", tmp_path / "result.json")
    assert line in complaint(ended)
    assert f"leangrpo train {run} --resume" in ended.out
    assert checkpoint.open_checkpoint(run / "checkpoints" / "000001").update == 1
    assert [line["update"] for line in read_lines(run / "metrics.jsonl")] == [1]
    assert not (run / "summary.json").exists() and not (tmp_path / "result.json").exists()
    monkeypatch.setitem(MOOD, "from", math.inf)
    assert leangrpo("train", run, "--resume").code == 0
    assert [line["update"] for line in read_lines(run / "metrics.jsonl")] == [1, 2]
