"""Pictures beside the prompt: editing and image-to-video, from a data file to the gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from PIL import Image
from torch import Tensor

from leangrpo.config import Config, load_config
from leangrpo.data import SampleKey
from leangrpo.errors import LeanError
from leangrpo.policy import Policy, Sampling
from leangrpo.report import read_run
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native, Retain
from leangrpo.setup import set_up
from leangrpo.train import one_update, train

SEEN: list[dict[str, Any]] = []


def likeness(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """How near a picture's brightness is to that of the one it was made from."""
    SEEN.extend(metadata)
    return [
        -abs(float(image.mean()) - float(np.asarray(about["images"]["image"]).mean()) / 255)
        for image, about in zip(images, metadata, strict=True)
    ]


def picture(shade: int) -> Image.Image:
    return Image.new("RGB", (16, 16), (shade, 255 - shade, 90))


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FLUX.1-Kontext on the disk and a data file with a picture for each prompt."""
    root = tmp_path_factory.mktemp("kontext")
    zoo.SPECIMENS["FluxKontext"].build().save_pretrained(root / "model")
    rows = []
    for shade in (20, 120, 220):
        picture(shade).save(root / f"{shade}.png")
        rows.append({"prompt": f"make it {shade}", "source": f"{shade}.png", "shade": shade})
    (root / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return root


def settings(root: Path, run: Path, *overrides: str) -> Config:
    base = [
        f"model.pipeline={root / 'model'}",
        f"prompts={{train: {root / 'edits.jsonl'}, heldout: 1, images: {{image: source}}}}",
        "sampling={steps: 3, height: 16, width: 16, guidance: 3.5}",
        "sampling.call={max_sequence_length: 8, _auto_resize: false, max_area: 256}",
        "selection={rule: fraction, fraction: 1.0}",
        "rollout={prompts: 2, generations: 2, micro_batch: 1}",
        "rewards=[{name: 'test_conditioning:likeness'}]",
        "evaluation={every: 1, rewards: []}",
        f"run.dir={run}",
    ]
    return load_config("embedded", [*base, *overrides])


@pytest.mark.parametrize("schedule", ["native", "retain", "reweight"])
def test_an_editing_model_is_trained(schedule: str, kontext: Path, tmp_path: Path) -> None:
    SEEN.clear()
    train(settings(kontext, tmp_path / "run", f"schedule={schedule}", "updates=2"), quiet=True)
    run = read_run(tmp_path / "run")
    assert all(line["optimizer_stepped"] for line in run.metrics)
    assert len(run.evaluations) == 3
    for about in SEEN:  # each sample with the picture of its own prompt
        assert np.asarray(about["images"]["image"])[0, 0, 0] == about["shade"]
    assert len({about["shade"] for about in SEEN}) == 3


def first_update(config: Config) -> tuple[dict[str, Any], Tensor]:
    s = set_up(config, quiet=True)
    found: list[Tensor] = []

    def look(*_: Any) -> None:
        some = [p.grad.flatten() for p in s.policy.parameters if p.grad is not None]
        found.append(torch.cat(some))

    hook = s.optimizer.register_step_pre_hook(look)
    with s.scorer, s.judge:
        line = one_update(s, 0)
    hook.remove()
    s.record.close()
    return line, found[0]


def test_schedules_agree(kontext: Path, tmp_path: Path) -> None:
    found = {
        name: first_update(settings(kontext, tmp_path / name, f"schedule={name}"))
        for name in ("native", "retain", "reweight")
    }
    assert torch.equal(found["native"][1], found["retain"][1])
    away = found["reweight"][1] - found["native"][1]
    assert float(away.norm() / found["native"][1].norm()) < 5e-6
    assert found["native"][0]["ratio_error"] == 0.0


def test_a_shared_prefix_has_the_same_picture(kontext: Path, tmp_path: Path) -> None:
    own = [
        "selection={rule: list, steps: [1], fraction: 1.0, outside: deterministic}",
        "rollout.initial_noise=group",
    ]
    plain, _ = first_update(settings(kontext, tmp_path / "plain", *own))
    own.append("rollout.share_prefix=true")
    shared, _ = first_update(settings(kontext, tmp_path / "shared", *own))
    assert plain["reward_mean"] == shared["reward_mean"]
    assert plain["grad_norm"] == shared["grad_norm"]


@pytest.mark.parametrize("name", ["FluxKontext", "WanImageToVideo"])
def test_the_picture_of_a_call_is_that_of_its_replay(name: str) -> None:
    """Two pictures make two samples; each is replayed bitwise, whichever came last."""
    spec = zoo.SPECIMENS[name]
    call = {k: v for k, v in spec.call.items() if k != "image"}
    guidance = call.pop("guidance", None)
    sampling = Sampling(3, guidance=guidance, call=call)
    size = spec.call["image"].size
    one, other = picture(30).resize(size), picture(200).resize(size)
    policy = Policy(spec.build(), sampling, noise_level=0.7, inputs={"image": one})
    rollouts = [
        policy.sample(["a"], [SampleKey(0, 0, 0)], selected=[1], decode=False, inputs={"image": p})
        for p in (one, other)
    ]
    assert not torch.equal(rollouts[0].latents, rollouts[1].latents)
    for rollout in rollouts:
        (t,) = rollout.transitions
        assert torch.equal(policy.replay(t, grad=False).log_prob, t.log_prob)
    for kind in (Native, Retain, Reweight):
        schedule: Any = kind(policy, replay=policy.replay) if kind is Native else kind(policy)
        schedule.begin(1, 1)
        policy.sample(
            ["a"],
            [SampleKey(0, 0, 0)],
            selected=[1],
            grad=schedule.needs_graph,
            decode=False,
            inputs={"image": other},
            on_transition=schedule.transition,
        )
        schedule.advantages({SampleKey(0, 0, 0): 1.0})
        schedule.finish()


def test_what_is_missing_is_said(kontext: Path, tmp_path: Path) -> None:
    images = "prompts.images={video: source}"
    with pytest.raises(LeanError, match=r"takes no argument 'video'"):
        set_up(settings(kontext, tmp_path / "a", images), quiet=True)
    gone = kontext / "gone.jsonl"
    gone.write_text('{"prompt": "a", "source": "nowhere.png"}\n', encoding="utf-8")
    with pytest.raises(LeanError, match=r"nowhere.png"):
        set_up(settings(kontext, tmp_path / "b", f"prompts.train={gone}"), quiet=True)
