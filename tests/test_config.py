"""Settings: loading, overriding, and the text of every refusal."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from leangrpo.catalogue import CATALOGUE as REWARDS
from leangrpo.checks import check
from leangrpo.config import (
    Config,
    config_hash,
    describe_settings,
    load_config,
    load_object,
    recipe_text,
    settings_table,
    to_yaml,
)
from leangrpo.errors import LeanError

DOCS = Path(__file__).parents[1] / "docs" / "configuration.md"


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    """Overrides that make a recipe's files exist whatever the package holds."""
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\n\n# a comment\n  a dog  \n", encoding="utf-8")
    rule = "selection.rule=random"
    return [rule, f"prompts.train={file}", "prompts.heldout=null", f"run.dir={tmp_path / 'run'}"]


def refusal(*overrides: str, source: str | Path | None = None) -> list[str]:
    """The lines of the error that loading and checking these overrides gives."""
    with pytest.raises(LeanError) as caught:
        check(load_config(source, overrides))
    return str(caught.value).splitlines()


# -- loading ---------------------------------------------------------------------------------------


def test_nothing_given_is_the_embedded_recipe() -> None:
    config = load_config()
    assert config == load_config("embedded")
    assert config.recipe == "embedded"
    assert config.prompts.heldout == "embedded"


def test_defaults_for_what_a_file_leaves_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("updates: 3\nrun:\nmodel: {lora: {rank: 4}}\n", encoding="utf-8")
    config = load_config(file)
    assert config == load_config(str(file))
    assert (config.updates, config.recipe, config.model.lora.rank) == (3, "mine", 4)
    assert config.model.lora.alpha == Config().model.lora.alpha
    assert config.run == Config().run
    assert config.prompts.heldout is None


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.yml"
    file.touch()
    assert load_config(file) == Config(recipe="empty")


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_config().updates = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["sampling.sigmas=[1.0, 0.5]", "sampling.steps=2"],
        ["selection.rule=list", "selection.steps=[1, 3]", "kernel.noise_level=null"],
        ["sampling.call={max_sequence_length: 77, name: 'ü: #'}", "description='a: b # c'"],
        ["model.lora.targets=[attn.to_q]", "rewards.1.name=a.b:c", "selection.range=[0, 3]"],
    ],
)
def test_yaml_round_trip(overrides: list[str], tmp_path: Path) -> None:
    config = load_config(None, overrides)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    again = load_config(file)
    assert again == config
    assert config_hash(again) == config_hash(config)


def test_hash_covers_what_determines_the_numbers() -> None:
    base = config_hash(load_config())
    assert len(base) == 64
    for same in ("run.dir=x", "checkpoint.every=3", "updates=7", "description=x", "recipe=x"):
        assert config_hash(load_config(None, [same])) == base
    for other in ("seed=1", "optimizer.lr=1e-4", "model.lora.rank=3", "sampling.call.x=1"):
        assert config_hash(load_config(None, [other])) != base


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("updates=3", 3),
        ("optimizer.lr=1e-4", 1e-4),
        ("optimizer.lr=3", 3.0),
        ("selection.steps=[1,3]", (1, 3)),
        ("sampling.height=null", None),
        ("sampling.height=", None),
        ("run.dir=/some/where", "/some/where"),
        ("rewards.0.weight=2", 2.0),
        ("rewards.1.name=ocr", "ocr"),
        ("sampling.call.a.b=1", {"max_sequence_length": 0, "a": {"b": 1}}),
        ("sampling.negative_prompt=a=b", "a=b"),
        ("model={train: lora}", "lora"),
    ],
)
def test_overrides(override: str, value: object) -> None:
    found: object = load_config(None, [override])
    path = {"sampling.call.a.b": "sampling.call", "model": "model.train"}
    name = override.partition("=")[0]
    for part in path.get(name, name).split("."):
        found = found[int(part)] if isinstance(found, tuple) else getattr(found, part)
    assert found == value


def test_later_overrides_win() -> None:
    assert load_config(None, ["updates=3", "updates=4"]).updates == 4


# -- what loading refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "selection.stepz=[1]",
            "`selection.stepz` is [1]: no setting has this name. Did you mean `selection.steps`?",
        ),
        ("lr=1", "`lr` is 1: no setting has this name. Did you mean `optimizer.lr`?"),
        ("steps=1", "`steps` is 1: no setting has this name. Did you mean `sampling.steps`?"),
        (
            "modle.dtype=float32",
            "`modle.dtype` is 'float32': no setting has this name. Did you mean `model.dtype`?",
        ),
        (
            "model.lora.rang=3",
            "`model.lora.rang` is 3: no setting has this name. Did you mean `model.lora.rank`?",
        ),
        (
            "rewards.0.wieght=2",
            "`rewards.0.wieght` is 2: no setting has this name. Did you mean `rewards.0.weight`?",
        ),
        (
            "xyzzy=1",
            "`xyzzy` is 1: no setting has this name. "
            "All of them are listed in docs/configuration.md.",
        ),
        ("updates", "`override` is 'updates': it must be setting=value. Example: updates=3."),
        ("=3", "`override` is '=3': it must be setting=value. Example: updates=3."),
        (
            "updates.x=3",
            "`updates` is 50: it has no settings of its own. Set it as a whole: updates=VALUE.",
        ),
        (
            "rewards.7.weight=3",
            "`rewards` is [{'name': 'ocr_log_prob', 'weight': 1.0}]: the list has 1 entries, "
            "numbered from 0. `7` is none of them, nor the next one.",
        ),
        (
            "updates=[1",
            "the value given for updates, line 1, column 3 is not valid YAML: "
            "expected ',' or ']', but got '<stream end>'.",
        ),
        ("updates=0", "`updates` is 0: it must be at least 1."),
        ("updates=-3", "`updates` is -3: it must be at least 1."),
        ("updates=many", "`updates` is 'many': it must be a whole number."),
        ("updates=1.5", "`updates` is 1.5: it must be a whole number."),
        ("updates=yes", "`updates` is True: it must be a number."),
        ("optimizer.lr=0", "`optimizer.lr` is 0: it must be greater than 0."),
        ("optimizer.lr=.nan", "`optimizer.lr` is nan: it must be finite."),
        ("optimizer.lr=fast", "`optimizer.lr` is 'fast': it must be a number."),
        ("optimizer.betas=[1]", "`optimizer.betas.0` is 1: it must be less than 1."),
        ("selection.fraction=1.5", "`selection.fraction` is 1.5: it must be at most 1."),
        ("selection.last=3", "`selection.last` is 3: it must be true or false."),
        ("description=3", "`description` is 3: it must be text."),
        ("run.dir=''", "`run.dir` is '': it must not be empty."),
        ("run.device=gpu", "`run.device` is 'gpu': it must be auto, cpu, cuda or cuda:N."),
        ("model=3", "`model` is 3: it must be a mapping of settings."),
        ("sampling.call=3", "`sampling.call` is 3: it must be a mapping."),
        ("rewards=ocr", "`rewards` is 'ocr': it must be a list."),
        ("rewards=[]", "`rewards` is []: it must have at least 1 entries."),
        ("rewards.1.weight=2", "`rewards.1.name` is None: it must be given."),
        ("{a: 1}=2", "`{a: 1}` is 2: no setting has this name. "),
        (
            "schedule=reweigth",
            "`schedule` is 'reweigth': it must be auto, native, retain, reweight or "
            "streaming. Did you mean `reweight`?",
        ),
        ("advantage.ddof=2", "`advantage.ddof` is 2: it must be 0 or 1."),
        (
            "sampling.sigmas=cosine",
            "`sampling.sigmas` is 'cosine': it must be `pipeline`, `linear`, or a list of "
            "numbers in (0, 1].",
        ),
        (
            "sampling.sigmas=[1.5, 0.5]",
            "`sampling.sigmas` is [1.5, 0.5]: it must be `pipeline`, `linear`, or a list of "
            "numbers in (0, 1].",
        ),
    ],
)
def test_refused_while_loading(override: str, line: str) -> None:
    lines = refusal(override)
    assert lines[0].startswith(line)


def test_all_mistakes_at_once() -> None:
    lines = refusal("lr=1", "updates=0", "modle.x=1", "schedule=x")
    assert [line.split("`")[1] for line in lines] == ["modle.x", "updates", "schedule", "lr"]


def test_a_long_value_is_shortened() -> None:
    (line,) = refusal(f"updates={'x' * 500}")
    assert line == f"`updates` is '{'x' * 76}...: it must be a whole number."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("updates: 3\nseed: [1\n", "line 3, column 1 is not valid YAML: expected ',' or ']'"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1 is not valid YAML: the key 'a' is given twice."),
        ("- updates\n", "holds no mapping of settings. Write lines like `updates: 40`."),
        ("updates: !!python/name:os.system\n", "line 1, column 10 is not valid YAML: could not"),
        ("seed: 2024-13-45\n", "is not valid YAML: month must be in 1..12."),
        ("a: b\x00\n", "is not valid YAML: "),
    ],
)
def test_bad_files(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    (found,) = refusal(source=file)
    assert found.startswith(str(file))
    assert line in found


def test_unreadable_sources(tmp_path: Path) -> None:
    here = Path.cwd()
    assert refusal(source="no.yaml") == [
        f"`config` is 'no.yaml': there is no such file. Relative paths start from {here}."
    ]
    assert refusal(source=tmp_path) == [
        f"`config` is '{tmp_path}': it is a folder, not a text file."
    ]
    (tmp_path / "latin.yaml").write_bytes(b"description: \xe9t\xe9\n")
    assert refusal(source=tmp_path / "latin.yaml") == [
        f"`config` is '{tmp_path / 'latin.yaml'}': it is not UTF-8 text (line 1, byte 13). "
        "Save it as UTF-8."
    ]
    assert refusal(source="embeded") == [
        "`recipe` is 'embeded': it is neither a recipe nor a YAML file. Did you mean `embedded`?"
    ]
    (line,) = refusal(source="zzz")
    assert line.startswith("`recipe` is 'zzz': it is neither a recipe nor a YAML file. Recipes: ")
    with pytest.raises(LeanError, match="neither a recipe"):
        recipe_text("../config")
    with pytest.raises(LeanError, match="neither a recipe"):
        load_config("a\x00b")


# -- rules between settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            "advantage.baseline=value advantage.std=none advantage.clip=null advantage.best_of=4",
            "`advantage.best_of` is 4: with advantage.baseline=value generations left out would "
            "still have a baseline subtracted. Set it null.",
        ),
        (
            "advantage.baseline=value advantage.std=none advantage.clip=null on_bad_reward=exclude",
            "`on_bad_reward` is 'exclude': with advantage.baseline=value images left out would "
            "still have a baseline subtracted. Set it to stop.",
        ),
        (
            "rollout.generations=1",
            "`rollout.generations` is 1: a group of one has no baseline to be compared with. "
            "Take 2 or more, or another advantage.baseline.",
        ),
        (
            "rollout.generations=10 rollout.micro_batch=4 schedule=native",
            "`rollout.generations` is 10: it must be a multiple of rollout.micro_batch, which "
            "is 4. Nearest: 8 or 12 generations, or a micro-batch of 5.",
        ),
        (
            "rollout.generations=2 rollout.micro_batch=3 schedule=retain",
            "`rollout.generations` is 2: it must be a multiple of rollout.micro_batch, which "
            "is 3. Nearest: 3 generations, or a micro-batch of 2.",
        ),
        (
            "schedule=streaming advantage.best_of=4 advantage.clip=null",
            "`advantage.best_of` is 4: schedule streaming forgets the gradients it would have to "
            "leave out. Set it to null, or schedule=reweight.",
        ),
        (
            "schedule=streaming advantage.baseline=history advantage.clip=null",
            "`advantage.baseline` is 'history': schedule streaming needs statistics of the "
            "update's own rewards. Take prompt or global, or schedule=reweight.",
        ),
        (
            "schedule=streaming rollout.generations=32 rollout.micro_batch=1 advantage.clip=5",
            "`advantage.clip` is 5.0: an advantage can be as large as 5.57, and schedule "
            "streaming cannot clip it. Set it to null, or schedule=reweight.",
        ),
        (
            "schedule=streaming advantage.std=none advantage.clip=5",
            "`advantage.clip` is 5.0: an advantage can have any size, and schedule streaming "
            "cannot clip it. Set it to null, or schedule=reweight.",
        ),
        (
            "parallel.check=true model.compile=true schedule=retain",
            "`parallel.check` is True: it looks at every operation, which torch.compile does not "
            "allow. Set it or model.compile to false.",
        ),
        (
            "selection.rule=list",
            "`selection.steps` is None: rule list needs at least one step.",
        ),
        (
            "selection.rule=list selection.steps=[0,10]",
            "`selection.steps` is [0, 10]: step 10 is outside 0..9. sampling.steps is 10.",
        ),
        (
            "selection.rule=list selection.steps=[-1]",
            "`selection.steps` is [-1]: step -1 is outside 0..9. sampling.steps is 10.",
        ),
        (
            "selection.rule=list selection.steps=[3,3]",
            "`selection.steps` is [3, 3]: step 3 is listed twice.",
        ),
        (
            "selection.steps=[1]",
            "`selection.steps` is [1]: only rule list reads it, and selection.rule is random. "
            "Set one or the other.",
        ),
        (
            "selection.size=2",
            "`selection.size` is 2: only rule window reads it, and selection.rule is random. "
            "Set one or the other.",
        ),
        (
            "selection.range=[0,3]",
            "`selection.range` is (0, 3): only rule window reads it, and selection.rule is "
            "random. Set one or the other.",
        ),
        (
            "selection.rule=window",
            "`selection.size` is None: rule window needs one in 1..9.",
        ),
        (
            "selection.rule=window selection.size=4 selection.range=[2,5]",
            "`selection.size` is 4: the window lies in [2, 5), so it has at most 3 steps.",
        ),
        (
            "selection.rule=window selection.size=10",
            "`selection.size` is 10: the window lies in [0, 9), so it has at most 9 steps.",
        ),
        (
            "selection.rule=window selection.size=2 selection.range=[0,10]",
            "`selection.range` is [0, 10]: it must be [lo, hi) inside the candidate steps [0, 9).",
        ),
        (
            "selection.rule=window selection.size=2 selection.range=[3,3]",
            "`selection.range` is [3, 3]: it must be [lo, hi) inside the candidate steps [0, 9).",
        ),
        (
            "sampling.steps=1",
            "`sampling.steps` is 1: no step is left to train, because the last one is no "
            "candidate. Take more, or set selection.last=true.",
        ),
        (
            "sampling.sigmas=[1,0.5]",
            "`sampling.sigmas` is [1.0, 0.5]: 2 numbers for 10 steps. Give one a step.",
        ),
        (
            "sampling.sigmas=[1,1] sampling.steps=2",
            "`sampling.sigmas` is [1.0, 1.0]: each must be below the one before.",
        ),
        (
            "sampling.call.guidance_scale=3",
            "`sampling.call.guidance_scale` is 3: the trainer passes this argument itself. "
            "Use sampling.guidance.",
        ),
        (
            "sampling.call.latents=3",
            "`sampling.call.latents` is 3: the trainer passes this argument itself. Remove it.",
        ),
        (
            "kernel.noise_level=0",
            "`kernel.noise_level` is 0.0: it must be above 0, because a step without noise has "
            "no log-probability.",
        ),
        (
            "kernel.noise_level=null",
            "`kernel.noise_level` is None: it must be above 0, because a step without noise has "
            "no log-probability.",
        ),
        (
            "kernel.name=flow_sde_wan",
            "`kernel.noise_level` is 0.7: flow_sde_wan takes its noise from the sigmas. "
            "Set it to null.",
        ),
        (
            "kernel.name=flow_cps kernel.noise_level=1.5",
            "`kernel.noise_level` is 1.5: flow_cps has all its noise at 1. Take a value in (0, 1].",
        ),
        (
            "kernel.name=ddim sampling.sigmas=linear",
            "`sampling.sigmas` is 'linear': ddim steps through timesteps and has no sigmas. "
            "Set it to pipeline.",
        ),
        (
            "objective.clip_range=1e-8",
            "`objective.clip_range` is 1e-08: below 1e-07 float32 rounding of the ratio alone "
            "would be clipped.",
        ),
        (
            "model.train=lora model.lora.targets=[]",
            "`model.lora.targets` is []: it names no layer. null finds them.",
        ),
        (
            "rewards.0.name=orc",
            "`rewards.0.name` is 'orc': no reward has this name. Did you mean `ocr`?",
        ),
        (
            "evaluation.rewards.0.name=zzz",
            "`evaluation.rewards.0.name` is 'zzz': no reward has this name. Names: "
            f"{', '.join(REWARDS)}.",
        ),
        (
            "rewards.1.name=ocr_log_prob",
            "`rewards.1.name` is 'ocr_log_prob': it is listed twice.",
        ),
        (
            "sampling.flash.ratio=0.4 selection.rule=window selection.size=2",
            "`sampling.flash.ratio` is 0.4: it saves deterministic steps, and selection.outside "
            "is stochastic. Set selection.outside=deterministic.",
        ),
        (
            "sampling.flash.ratio=0.4 selection.outside=deterministic",
            "`sampling.flash.ratio` is 0.4: it saves steps outside one window, which rule random "
            "does not make. Set selection.rule=window.",
        ),
        (
            "sampling.flash.ratio=0.4 selection.outside=deterministic selection.rule=list "
            "selection.steps=[4,2]",
            "`sampling.flash.ratio` is 0.4: it saves steps outside one window, which steps [2, 4] "
            "do not make. List steps in a row.",
        ),
        (
            "sampling.flash.ratio=0.4 selection.outside=deterministic selection.rule=fraction "
            "kernel.name=ddim",
            "`sampling.flash.ratio` is 0.4: it needs a kernel of flow matching, and kernel.name "
            "is ddim. Set it to null.",
        ),
        ("rewards.0.weight=0", "`rewards` is ['ocr_log_prob']: every weight is 0."),
        (
            "rewards.0.name=no_such_module:score",
            "`rewards.0.name` is 'no_such_module:score': it cannot be imported: "
            "ModuleNotFoundError: No module named 'no_such_module'. Modules are searched in "
            f"{Path.cwd()} and the installed packages.",
        ),
        (
            "rewards.0.name=os:no_such_thing",
            "`rewards.0.name` is 'os:no_such_thing': it cannot be imported: AttributeError: "
            "module 'os' has no attribute 'no_such_thing'. Modules are searched in "
            f"{Path.cwd()} and the installed packages.",
        ),
        *(
            (
                f"schedule={schedule} memory.activations=1024",
                "`memory.activations` is 1024: only retain keeps activations, and schedule is "
                f"{schedule}. Set it to null, or schedule=retain.",
            )
            for schedule in ("native", "reweight", "streaming")
        ),
        ("rewards.0.name=os:sep", "`rewards.0.name` is 'os:sep': it is not callable but str."),
        (
            "model.pipeline=./no/such/folder",
            "`model.pipeline` is './no/such/folder': there is no such folder, and it has not "
            "the form of a hub id.",
        ),
    ],
)
def test_refused_by_check(overrides: str, line: str, prompts: list[str]) -> None:
    assert refusal(*prompts, *overrides.split()) == [line]


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "selection.rule=list selection.steps=[0,9]",
        "selection.rule=window selection.size=3 selection.range=[0,3]",
        "selection.last=true sampling.steps=1",
        "sampling.flash.ratio=0.4 selection.rule=window selection.size=2 "
        "selection.outside=deterministic",
        "sampling.flash.ratio=1 selection.rule=list selection.steps=[3,2] "
        "selection.outside=deterministic",
        "rollout.generations=7 rollout.micro_batch=4 schedule=auto",
        "rollout.micro_batch=4 schedule=retain",
        "rollout.micro_batch=4 schedule=reweight model.activation_checkpointing=true",
        "schedule=retain memory.activations=0",
        "schedule=auto memory.activations=2GiB",
        "kernel.name=flow_sde_wan kernel.noise_level=null",
        "model.pipeline=someone/some-model.v1",
        "rewards.0.name=os.path:join",
    ],
)
def test_accepted_by_check(overrides: str, prompts: list[str]) -> None:
    check(load_config(None, [*prompts, *overrides.split()]))


def test_check_collects_all(prompts: list[str]) -> None:
    lines = refusal(*prompts, "rollout.generations=1", "kernel.noise_level=0", "rewards.0.name=x")
    assert [line.split("`")[1] for line in lines] == [
        "kernel.noise_level",
        "rollout.generations",
        "rewards.0.name",
    ]


# -- files -----------------------------------------------------------------------------------------


def test_prompt_files(tmp_path: Path, prompts: list[str]) -> None:
    file = tmp_path / "prompts.txt"
    assert refusal(*prompts, f"prompts.heldout={file}", "evaluation.prompts=3") == [
        "`evaluation.prompts` is 3: prompts.heldout has only 2. null takes all of them."
    ]
    file.write_text("\n# nothing\n", encoding="utf-8")
    assert refusal(*prompts) == [
        f"`prompts.train` is '{file}': it holds no prompt. Write one a line."
    ]
    file.write_bytes(b"\xff\xfe a")
    assert refusal(*prompts) == [
        f"`prompts.train` is '{file}': it is not UTF-8 text (line 1, byte 0). Save it as UTF-8."
    ]
    assert refusal(*prompts, f"prompts.heldout={tmp_path}")[1] == (
        f"`prompts.heldout` is '{tmp_path}': it is a folder, not a text file."
    )
    assert refusal(*prompts, "prompts.train=ocr.txt") == [
        f"`prompts.train` is 'ocr.txt': there is no such file. "
        f"Relative paths start from {Path.cwd()}."
    ]


def test_pipeline_folders(tmp_path: Path, prompts: list[str]) -> None:
    folder = tmp_path / "pipe"
    folder.mkdir()
    set_pipeline = f"model.pipeline={folder}"
    assert refusal(*prompts, set_pipeline) == [
        f"`model.pipeline` is '{folder}': the folder has no model_index.json, so it is no "
        "diffusers pipeline. Save one with save_pretrained."
    ]
    index = folder / "model_index.json"
    for text in ("{", "[]", "\udcff"):
        index.write_text(text, encoding="utf-8", errors="surrogateescape")
        assert refusal(*prompts, set_pipeline) == [
            f"`model.pipeline` is '{folder}': its model_index.json cannot be read."
        ]
    for entry in ({}, {"scheduler": [None, None]}):
        index.write_text(json.dumps(entry), encoding="utf-8")
        assert refusal(*prompts, set_pipeline) == [
            f"`model.pipeline` is '{folder}': its model_index.json lists no scheduler, so there "
            "is no step to train."
        ]
    index.write_text('{"scheduler": ["diffusers", "DDIMScheduler"]}', encoding="utf-8")
    check(load_config(None, [*prompts, set_pipeline]))


def test_run_folders(tmp_path: Path, prompts: list[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    check(load_config(None, prompts))
    (run / "config.yaml").touch()
    assert refusal(*prompts) == [
        f"`run.dir` is '{run}': it already holds a run. Resume it, or name another folder."
    ]
    check(load_config(None, prompts), resume=True)
    assert refusal(*prompts, f"run.dir={run / 'config.yaml'}") == [
        f"`run.dir` is '{run / 'config.yaml'}': it is a file, and a folder is needed."
    ]
    below = run / "config.yaml" / "deeper"
    assert refusal(*prompts, f"run.dir={below}") == [
        f"`run.dir` is '{below}': {run / 'config.yaml'} cannot be written to."
    ]


def test_load_object_finds_modules_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_reward_module.py").write_text(
        "def score(images, prompts):\n    return [0.0 for _ in images]\n", encoding="utf-8"
    )
    assert load_object("rewards.0.name", "my_reward_module:score")([1], ["a"]) == [0.0]
    (tmp_path / "broken_reward_module.py").write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(LeanError, match="imported: ZeroDivisionError: division by zero"):
        load_object("rewards.0.name", "broken_reward_module:score")


# -- documentation ---------------------------------------------------------------------------------


def test_every_setting_is_described() -> None:
    rows = describe_settings()
    assert len({row.name for row in rows}) == len(rows)
    assert {"updates", "model.lora.rank", "rewards.N.weight"} <= {row.name for row in rows}
    assert all(row.description and row.type for row in rows)


def test_the_docs_hold_the_settings_table() -> None:
    # Rewrite it with `python -m leangrpo.config`.
    assert settings_table() in DOCS.read_text(encoding="utf-8")


def test_reward_names_are_those_of_the_module() -> None:
    rewards = pytest.importorskip("leangrpo.rewards")
    assert set(REWARDS) > set(rewards.REWARDS)


# -- anything at all -------------------------------------------------------------------------------

KEYS = st.sampled_from([row.name.replace(".N", ".0") for row in describe_settings()])
NAMES = st.one_of(st.text(max_size=12), KEYS, st.builds("{}{}".format, KEYS, st.text(max_size=3)))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def loads_or_explains(source: Path | None, overrides: list[str]) -> None:
    """Anything but a LeanError gets through, and fails the test."""
    with contextlib.suppress(LeanError):
        load_config(source, overrides)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.text(), st.builds("{}={}".format, NAMES, VALUES)), max_size=3))
def test_any_override_loads_or_is_explained(overrides: list[str]) -> None:
    loads_or_explains(None, overrides)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.one_of(NAMES, st.integers()), VALUES, max_size=4))
def test_any_file_loads_or_is_explained(tmp_path: Path, tree: dict[object, object]) -> None:
    file = tmp_path / "any.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    loads_or_explains(file, [])


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "it has more than 100000 entries"),
        ("seed: " + "[" * 50 + "]" * 50, "it has more than 40 levels"),
        ("a: &a [*a]", "aliases inside themselves"),
        ("x" * (1 << 21), "it is longer than 1048576 characters"),
        ("seed: !!python/object/apply:os.system [true]", "could not determine a constructor"),
    ],
)
def test_yaml_that_is_a_trap(text: str, words: str, tmp_path: Path) -> None:
    """Refused before anything is made of it, in a file and as an override."""
    file = tmp_path / "trap.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(LeanError, match=words):
        load_config(file)


def test_aliases_are_welcome(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "rewards: [{name: ocr, weight: &w 2.0}, {name: ocr_exact, weight: *w}]\n", encoding="utf-8"
    )
    assert [r.weight for r in load_config(file).rewards] == [2.0, 2.0]


def test_a_device_is_no_file() -> None:
    with pytest.raises(LeanError, match="it is a device, not a text file"):
        load_config(Path("/dev/zero"))
