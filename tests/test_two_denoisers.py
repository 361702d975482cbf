"""`model.denoisers`: Wan 2.2 has a network for the noisy steps and one for the others.

Of four steps the first two are the first network's. A step that only a frozen network serves has
no gradient: it is deterministic and cannot be selected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import zoo_video
from test_reach import ADVANTAGES, KEYS, PROMPT, error

from leangrpo.config import load_config
from leangrpo.data import Transition
from leangrpo.errors import LeanError
from leangrpo.export import export_run
from leangrpo.loading import copy_denoisers, load_pipeline, make_trainable
from leangrpo.policy import Policy, Sampling
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native, Retain
from leangrpo.selection import select
from leangrpo.settings import Selection
from leangrpo.train import train

OF = {"transformer": (0, 1), "transformer_2": (2,)}
"""The steps of each that add noise and are not the last."""


def policy_of(only: str, train: str, **options: Any) -> Policy:
    torch.manual_seed(0)
    pipe = zoo_video.two_denoisers()
    make_trainable(pipe, train, rank=2, alpha=4, only=[only])
    for name, parameter in getattr(pipe, only).named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if options.pop("reference", False):
        options["reference"] = copy_denoisers(pipe, [only])
    return Policy(pipe, Sampling(4, guidance=1.0, call=zoo_video.VIDEO), seed=5, **options)


def gradient(kind: type, only: str, train: str) -> tuple[dict[str, Any], Any]:
    policy = policy_of(only, train)
    schedule = kind(policy, replay=policy.replay) if kind is Native else kind(policy)
    schedule.begin(len(KEYS), len(OF[only]))
    for key in KEYS:
        policy.sample(
            [PROMPT], [key], selected=OF[only], grad=schedule.needs_graph, decode=False,
            on_transition=schedule.transition, capture=schedule.capture,
        )  # fmt: skip
    schedule.advantages(ADVANTAGES)
    statistics = schedule.finish()
    return {name: p.grad for name, p in policy.named_parameters()}, statistics


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("only", OF)
def test_three_schedules_one_gradient(only: str, train: str) -> None:
    native, statistics = gradient(Native, only, train)
    assert statistics.ratio_error == 0
    assert all(name.startswith(f"{only}.") for name in native)
    assert all(g is not None and g.any() for g in native.values())
    assert error(gradient(Retain, only, train)[0], native) == 0
    assert error(gradient(Reweight, only, train)[0], native) <= 5e-6


@pytest.mark.parametrize("only", OF)
def test_the_frozen_networks_steps_are_deterministic(only: str) -> None:
    policy = policy_of(only, "full")
    std = policy.plan().std
    other = next(name for name in OF if name != only)
    assert policy.plan().served == (("transformer",),) * 2 + (("transformer_2",),) * 2
    assert all(float(std[i]) > 0 for i in OF[only])
    assert all(float(std[i]) == 0 for i in OF[other])
    drawn = set()
    for update in range(8):
        drawn |= set(select(Selection(), std.tolist(), seed=0, update=update).selected)
    assert drawn == set(OF[only])
    with pytest.raises(LeanError, match=f"only {other} works at this step, which is frozen"):
        policy.sample([PROMPT], KEYS[:1], selected=[OF[other][0]], grad=True, decode=False)


def test_both_are_trained_by_default() -> None:
    pipe = zoo_video.two_denoisers()
    make_trainable(pipe, "lora", rank=2, alpha=4)
    policy = Policy(pipe, Sampling(4, guidance=1.0, call=zoo_video.VIDEO))
    assert list(policy.trained()) == list(OF)
    assert policy.plan().served == ()
    assert [i for i, s in enumerate(policy.plan().std[:3]) if s > 0] == [0, 1, 2]


def test_an_unknown_name_is_explained() -> None:
    with pytest.raises(LeanError, match=r"`model\.denoisers`.*it has transformer, transformer_2"):
        make_trainable(zoo_video.two_denoisers(), "full", only=["unet"])


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_reference_policy(train: str) -> None:
    policy = policy_of("transformer_2", train, reference=train == "full")
    if train == "lora":
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(p)

    def divergence() -> float:
        rollout = policy.sample([PROMPT], KEYS[:1], selected=[2], grad=True, decode=False)
        (t,) = rollout.transitions
        assert isinstance(policy.with_kl(t), Transition)
        assert t.kl is not None and t.kl.requires_grad
        return float(t.kl.detach())

    assert divergence() == 0
    before = [name for name, _ in policy.named_parameters()]
    with torch.no_grad():
        for _, p in policy.named_parameters():
            p.add_(0.01)
    policy.guard.bump("a test")
    assert divergence() > 0
    assert [name for name, _ in policy.named_parameters()] == before
    assert policy.pipe.transformer is policy.denoisers[0]
    assert not any(p.requires_grad for p in policy.pipe.transformer.parameters())


@pytest.mark.parametrize("train_as", ["full", "lora"])
def test_a_run_trains_and_exports_one_of_them(train_as: str, tmp_path: Path) -> None:
    """Settings, updates, checkpoints, the export: only the second network has moved."""
    source = tiny.save(tiny.tiny_wan(second=True), tmp_path / "wan")
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n", encoding="utf-8")
    config = load_config(
        "embedded",
        [
            f"model={{pipeline: {source}, train: {train_as}, denoisers: [transformer_2], "
            "lora: {rank: 2}}",
            "sampling={steps: 4, height: 16, width: 16, num_frames: 5}",
            "sampling.call={max_sequence_length: 16}",
            "selection={rule: random, fraction: 1.0, steps: null}",
            f"prompts={{train: {tmp_path / 'prompts.txt'}, heldout: null}}",
            "rollout={prompts: 1, generations: 2, micro_batch: 1}",
            "rewards=[{name: 'many_ranks:brightness'}]",
            "optimizer.lr=1e-2",
            "updates=2",
            f"run.dir={tmp_path / 'run'}",
        ],
    )
    train(config, quiet=True)
    written = export_run(config, tmp_path / "run", tmp_path / "out")
    loaded = load_pipeline(str(source))
    if train_as == "lora":
        assert "load_into_transformer_2=True" in written["load"][0]
        folder = tmp_path / "out" / "transformer_2"
        loaded.load_lora_weights(folder, load_into_transformer_2=True)
        assert not getattr(loaded.transformer, "peft_config", None)
        assert any("lora_B" in n and p.any() for n, p in loaded.transformer_2.named_parameters())
    else:
        exported = load_pipeline(str(tmp_path / "out"))
        assert same(exported.transformer, loaded.transformer)
        assert not same(exported.transformer_2, loaded.transformer_2)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
