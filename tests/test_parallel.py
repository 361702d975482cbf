"""An update on 1, 2 and 4 ranks is the same update.

Each number of ranks is started once for all cases (`many_ranks.py`). Bounds: relative L2 1e-12 in
float64, 5e-6 in float32; samples and rewards bitwise, as micro-batches and threads are equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from train_ranks import python_path

from leangrpo.errors import LeanError
from leangrpo.parallel import blocks, divide

SCHEDULES = ("native", "retain", "reweight")
SHARDING = {
    "replicate": "parallel.shard=1",
    "fsdp": "parallel.replicate=1",
    "hsdp": "parallel={shard: 2, replicate: 2}",
}
CALL = {
    "sd3": ["sampling.call={max_sequence_length: 16}"],
    "flux": ["sampling.call={max_sequence_length: 16}"],
    "wan": ["sampling.call={max_sequence_length: 16}", "sampling.num_frames=5"],
    "wan22": ["sampling.call={max_sequence_length: 16}", "sampling.num_frames=5"],
    "embedded": [
        "sampling={steps: 3, call: {max_sequence_length: 0}}",
        "rewards=[{name: ocr_log_prob}]",
        "prompts={train: embedded, heldout: null}",
    ],
}
SHAPES = {  # prompts, generations: what is laid out
    "m4": "rollout={prompts: 2, generations: 4, micro_batch: 1}",
    "m6": "rollout={prompts: 1, generations: 6, micro_batch: 1}",
    "m2": "rollout={prompts: 3, generations: 2, micro_batch: 1}",
    "m3": "rollout={prompts: 2, generations: 3, micro_batch: 1}",
    "pairs": "rollout={prompts: 2, generations: 8, micro_batch: 2}",
}


def cases() -> dict[str, list[str]]:
    """Name -> settings. The part before ':' is the run on one rank that it must equal."""
    found: dict[str, list[str]] = {}

    def add(
        pipeline: str, settings: list[str], name: str, *kinds: str, schedules=SCHEDULES
    ) -> None:
        for schedule in schedules:
            for kind in kinds:
                same = f"{pipeline} {name} {schedule}"
                found[f"{same}:{kind}"] = [
                    f"model.pipeline={pipeline}",
                    *CALL[pipeline],
                    SHAPES["m4"],
                    *settings,
                    f"schedule={schedule}",
                    SHARDING.get(kind, kind),
                ]

    every = tuple(SHARDING)
    for train in ("full", "lora"):
        for dtype in ("float64", "float32"):
            settings = [f"model.train={train}", f"model.dtype={dtype}"]
            add("sd3", settings, f"{train} {dtype}", *every)
    for pipeline in ("flux", "wan"):
        add(pipeline, [], "full float32", "fsdp")
        add(pipeline, ["model.train=lora"], "lora float32", "fsdp")
    threes = ["rollout={prompts: 2, generations: 6, micro_batch: 3}"]
    add("embedded", threes, "threes float32", "fsdp")
    double = ["model.dtype=float64"]
    one = ["model.train=lora", "model.denoisers=[transformer_2]", "sampling.steps=4"]
    add("wan22", one, "one of two float32", "fsdp", schedules=("native", "reweight"))
    for shape in ("m6", "m2", "m3"):
        add("sd3", [*double, SHAPES[shape]], shape, "fsdp", schedules=("native", "reweight"))
    add("sd3", [*double, SHAPES["m2"]], "m2 copies", "replicate", schedules=("reweight",))
    pairs = [*double, SHAPES["pairs"], "model.train=lora"]
    add("sd3", pairs, "pairs", "fsdp", "replicate", schedules=("retain", "reweight"))
    add(
        "sd3",
        double,
        "group",
        "parallel={replicate: 1, sync: group}",
        "parallel={shard: 1, sync: group}",
    )
    late = ("native", "retain")
    add("sd3", double, "step", "parallel={replicate: 1, sync: step}", schedules=late)
    add("sd3", [], "step float32", "parallel={replicate: 1, sync: step}", schedules=late)
    add("sd3", double, "step copies", "parallel={shard: 1, sync: step}", schedules=late)
    add(
        "sd3",
        [*double, SHAPES["m3"]],
        "step idle",
        "parallel={replicate: 1, sync: step}",
        "parallel={shard: 1, sync: step}",
        schedules=late,
    )
    add("sd3", double, "classic", "parallel={replicate: 1, layout: classic}")
    add("sd3", [*double, "advantage.std=global"], "global", "fsdp")
    add("sd3", [*double, "objective.kl=0.04"], "kl", "fsdp", "replicate")
    add("sd3", [*double, "objective.kl_in_reward=0.1", "model.train=lora"], "kl in reward", "fsdp")
    dead = [*double, "rewards=[{name: 'many_ranks:flat'}]", SHAPES["m3"]]
    add("sd3", dead, "a flat group", "fsdp", "replicate")
    add("sd3", [*double, "model.activation_checkpointing=true"], "checkpointing", "fsdp")
    guided = [*double, "sampling.guidance=4.0", "model.train=lora"]
    add("sd3", guided, "guided", "fsdp")
    add("sd3", [*double, "rollout.parts=2", "rollout.epochs=2"], "parts", "fsdp")
    add_parts(add, double)
    add_streaming(add, double)
    narrow = ["model={dtype: bfloat16, master_dtype: float32, train: full}"]
    add("sd3", narrow, "master", "fsdp", schedules=late)
    return found


def add_streaming(add: Any, double: list[str]) -> None:
    """Each rank has sums of its own, and reads the slopes off its own advantages."""
    streaming = ("streaming",)
    add("sd3", double, "streamed", "fsdp", "replicate", schedules=streaming)
    add("sd3", [*double, SHAPES["m3"]], "streamed m3", "fsdp", schedules=streaming)
    every = [*double, "advantage.std=global", "rollout.ahead=2"]
    add("sd3", every, "streamed global", "fsdp", schedules=streaming)
    grouped = "parallel={replicate: 1, sync: group}"
    add("sd3", [*double, "rollout.ahead=3"], "streamed group", grouped, schedules=streaming)


def add_parts(add: Any, double: list[str]) -> None:
    """Parts of algorithms where ranks do different things: other steps, other samples left out."""
    classic = "parallel={replicate: 1, layout: classic}"
    four = [*double, "sampling.steps=4"]
    dance = [
        "selection={rule: random, fraction: 0.67, per: sample, last_noise: false}",
        "rollout.initial_noise=group",
        "objective.step_weights=[0.5, 1.0, 2.0, 1.5]",
    ]
    add("sd3", [*four, *dance], "steps of a sample", classic)
    add("sd3", [*four, *dance], "steps of a sample", "fsdp", schedules=("reweight",))
    window = "selection={rule: window, size: 2, outside: deterministic, per: "
    add("sd3", [*four, f"{window}group}}"], "steps of a group", classic)
    shared = ["rollout.initial_noise=group", "rollout.share_prefix=true", "seed=1"]
    few = ("native", "reweight")
    for per in ("update", "group"):
        prefix = [*four, f"{window}{per}}}", *shared]
        add("sd3", prefix, f"prefix of a {per}", "fsdp", schedules=few)
    both = "[{name: 'many_ranks:brightness'}, {name: 'many_ranks:contrast', weight: 0.5}]"
    best = "advantage={best_of: 2, rewards: each, ddof: 1, epsilon: 1e-8}"
    add("sd3", [*double, f"rewards={both}", best], "best of", "fsdp")
    add("sd3", [*double, f"rewards={both}", best], "best of", classic, schedules=("reweight",))
    history = "advantage={baseline: history, history: 6, min_history: 4, epsilon: 1e-6}"
    add("sd3", [*double, history], "history", "fsdp", schedules=("reweight",))
    everybody = "advantage.baseline=global"
    add("sd3", [*double, everybody], "global baseline", classic, schedules=("reweight",))
    guard = ["objective={ratio: guard, clip_range: 1e-5}", "rollout.parts=2"]
    add("sd3", [*double, *guard], "guard", "fsdp", schedules=few)
    value = "advantage={baseline: value, std: none, clip: null}"
    add("sd3", [*double, value], "value", "fsdp", schedules=few)


CASES = cases()


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run all cases on some ranks, once; returns what `many_ranks.py` wrote, by case."""
    root = tmp_path_factory.mktemp("ranks")
    for name, build in {"sd3": tiny.tiny_sd3, "flux": tiny.tiny_flux, "wan": tiny.tiny_wan}.items():
        tiny.save(build(), root / name)
    tiny.save(tiny.tiny_wan(second=True), root / "wan22")
    (root / "prompts.txt").write_text("a cat\na dog\na cup\na car\n", encoding="utf-8")
    base = [
        "sampling={steps: 3, height: 16, width: 16}",
        "selection.rule=fraction",
        "selection.fraction=1.0",
        "prompts={train: prompts.txt, heldout: null}",
        "rewards=[{name: 'many_ranks:brightness'}]",
        "optimizer={lr: 1e-3, max_grad_norm: 1e9}",
        "model.lora.rank=4",
        "parallel.check=true",
    ]
    done: dict[tuple[int, bool], dict[str, Any]] = {}
    failed: dict[tuple[int, bool], str] = {}

    def run(ranks: int, quick: bool = True) -> dict[str, Any]:
        if (at := (ranks, quick)) in failed:
            pytest.fail(failed[at])
        if at in done:
            return done[at]
        out = root / f"{ranks}-{quick}"
        out.mkdir()
        settings = {}
        for case, own in CASES.items():
            same = case.partition(":")[0]
            if ranks == 1 and anywhere_quick(case) != quick:
                continue
            if ranks == 1 and "master" not in case:
                settings[same] = [*base, *(o for o in own if not o.startswith("parallel"))]
            elif ranks == 1:
                settings[same] = [*base, *own]
            elif case in of(ranks) and is_quick(ranks, case) == quick:
                settings[case] = [*base, *own]
        names = {case: f"{i:03d}" for i, case in enumerate(settings)}
        todo = {names[case]: own for case, own in settings.items()}
        (out / "cases.json").write_text(json.dumps(todo), encoding="utf-8")
        launch = [sys.executable]
        if ranks > 1:
            launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        here = Path(__file__).parent
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(here)}
        command = [*launch, str(here / "many_ranks.py"), str(out), str(out / "cases.json")]
        result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
        if result.returncode:
            failed[at] = f"{ranks} ranks: {result.stderr[-6000:]}"
            pytest.fail(failed[at])
        done[at] = {
            case: torch.load(out / f"{name}.pt", weights_only=False) for case, name in names.items()
        }
        return done[at]

    return run


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def of(ranks: int) -> list[str]:
    """The cases that make sense on so many ranks; forwards of three of six need two, not four."""
    without = "embedded" if ranks == 4 else ":hsdp"
    return [case for case in CASES if without not in case]


LONG = (
    "sd3 full float32",
    "classic",
    "retain replicate",
    "parts",
    "guard",
    "global",
    "m2 copies",
    "m6",
    "pairs",
    "step copies",
    "step idle",
    "streamed m3",
    "streamed group",
    "lora float32",
    "steps of a group",
    "prefix of a group",
    "best of",
    "history",
    "global baseline",
    "value",
    "step float32",
    "checkpointing",
    "guided",
    "kl in reward",
)
"""Cases that wait for `make test-all`: each has a neighbour that does not."""


def anywhere_quick(case: str) -> bool:
    """Whether a case is quick on some number of ranks."""
    return any(is_quick(n, case) for n in (2, 4) if case in of(n))


def is_quick(ranks: int, case: str) -> bool:
    """Whether a case runs in `make test`: most on two ranks, and what needs four."""
    if ranks == 2:
        words = f" {case.replace(':', ' ')} "
        return not any(f" {name} " in words for name in LONG)
    return ("sd3 full float64" in case and "hsdp" in case) or "sd3 m3 " in case


def runs(part: str = "") -> list[Any]:
    return [
        pytest.param(n, case, marks=[] if is_quick(n, case) else [pytest.mark.slow])
        for n in (2, 4)
        for case in of(n)
        if part in case
    ]


@pytest.mark.parametrize(("ranks", "case"), runs())
def test_equals_one_rank(ranks: int, case: str, start: Any) -> None:
    one = start(1, anywhere_quick(case))[case.partition(":")[0]]
    many = start(ranks, is_quick(ranks, case))[case]
    assert one["samples"].keys() == many["samples"].keys()
    for key, latents in one["samples"].items():
        assert torch.equal(latents, many["samples"][key]), key
    exact = ("reward_mean", "reward_std", "rewards", "advantage_std", "zero_variance_groups")
    for name in exact if "kl" not in case else exact[:3]:
        assert one["lines"][0][name] == many["lines"][0][name], name
    bound = 5e-6 if "float32" in case else 1e-12
    if "master" in case:
        bound = 0.02  # bfloat16 gradients are summed in another order
    assert distance(many["gradient"], one["gradient"]) < bound
    for name in ("loss", "grad_norm"):
        assert many["lines"][0][name] == pytest.approx(one["lines"][0][name], rel=bound, abs=1e-9)
    if "guard" in case:  # its ratio comes with the second step, after AdamW
        for mine, theirs in zip(many["lines"][0]["steps"], one["lines"][0]["steps"], strict=True):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
            assert mine["ratio_error"] == pytest.approx(theirs["ratio_error"], rel=1e-6, abs=1e-12)
        assert many["lines"][0]["steps"][1]["ratio_error"] > 0


@pytest.mark.parametrize(("ranks", "case"), runs(" retain:"))
def test_retain_is_native_bitwise(ranks: int, case: str, start: Any) -> None:
    if case.replace(" retain:", " native:") not in CASES:
        pytest.skip("no native run to compare with")
    results = start(ranks, is_quick(ranks, case))
    retain, native = results[case], results[case.replace(" retain:", " native:")]
    assert torch.equal(retain["gradient"], native["gradient"])
    assert torch.equal(retain["weights"], native["weights"])


def test_the_blocks_are_found_in_the_model() -> None:
    found = {
        name: [type(b).__name__ for b in blocks(build().transformer)]
        for name, build in {
            "sd3": tiny.tiny_sd3,
            "flux": tiny.tiny_flux,
            "wan": tiny.tiny_wan,
        }.items()
    }
    assert set(found["sd3"]) == {"JointTransformerBlock"}
    assert set(found["flux"]) == {"FluxTransformerBlock", "FluxSingleTransformerBlock"}
    assert set(found["wan"]) == {"WanTransformerBlock"}
    plain = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Linear(2, 2)] * 3)
    )
    assert all(isinstance(b, torch.nn.Linear) for b in blocks(plain))


@pytest.mark.parametrize(
    ("size", "shard", "replicate", "expected"),
    [(8, None, None, (8, 1)), (8, 2, None, (2, 4)), (8, None, 2, (4, 2)), (4, 2, 2, (2, 2))],
)
def test_divide(size, shard, replicate, expected, monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert divide(size, shard, replicate) == expected


def test_divide_on_two_nodes(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert divide(8, None, None) == (4, 2)


def test_divide_refuses() -> None:
    with pytest.raises(LeanError, match="3 x 2 is not 8"):
        divide(8, 3, 2)
