"""A group's shared prefix (FlowGRPO-Fast's branches): the same samples for fewer evaluations.

With one sample in a forward everything is bitwise. In larger forwards the prefix still runs one
sample, where the unshared run has several, and matrix kernels round by the size of their input:
then latents agree to float32 rounding, 1e-5 relative, which is some 1e2 operations of 6e-8 in each
of at most four steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from leangrpo import setup
from leangrpo.compiling import compile_blocks
from leangrpo.config import Config, load_config
from leangrpo.data import Rollout, SampleKey
from leangrpo.policy import Policy, Sampling
from leangrpo.setup import set_up
from leangrpo.train import one_update

MODELS = ("sd3", "flux", "wan", "wan22", "sd")
STEPS = 5
GROUP = [SampleKey(0, 0, g) for g in range(3)]
PROMPT = "a red cube"


def make_policy(name: str) -> Policy:
    pipe = tiny.BUILDERS[name]()
    kernel = "ddim" if name == "sd" else "flow_sde"
    guidance = 1.0 if name == "wan22" else 3.0
    sampling = Sampling(STEPS, guidance=guidance, call=dict(tiny.CALL[name]))
    return Policy(pipe, sampling, kernel=kernel, noise_level=0.7, seed=3)


@pytest.fixture(scope="module")
def policies() -> Callable[[str], Policy]:
    made: dict[str, Policy] = {}
    return lambda name: made.setdefault(name, make_policy(name))


def sample(policy: Policy, window: tuple[int, ...], *, shared: bool, batch: int = 1) -> list[Any]:
    """The group's rollouts, with the gradient of all its log-probabilities at the end."""
    for p in policy.parameters:
        p.grad = None
    prefix = policy.prefix(PROMPT, GROUP[0], window[0]) if shared and window[0] else None
    rollouts: list[Rollout] = []
    for i in range(0, len(GROUP), batch):
        some = GROUP[i : i + batch]
        rollout = policy.sample(
            [PROMPT] * len(some),
            some,
            selected=window,
            noisy=window,
            grad=True,
            same_noise=True,
            prefix=prefix,
        )
        torch.autograd.backward([t.log_prob.sum() for t in rollout.transitions])
        rollouts.append(rollout)
    return rollouts


@pytest.mark.parametrize("start", range(STEPS - 1))
@pytest.mark.parametrize("name", MODELS)
def test_bitwise_with_one_sample_in_a_forward(
    name: str, start: int, policies: Callable[[str], Policy]
) -> None:
    policy, window = policies(name), tuple(range(start, min(start + 2, STEPS - 1)))
    alone = sample(policy, window, shared=False)
    gradient = [None if p.grad is None else p.grad.clone() for p in policy.parameters]
    together = sample(policy, window, shared=True)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.latents, other.latents)
        assert torch.equal(one.images, other.images)
        assert [t.step for t in one.transitions] == [t.step for t in other.transitions]
        for mine, theirs in zip(one.transitions, other.transitions, strict=True):
            assert torch.equal(mine.latents, theirs.latents)
            assert torch.equal(mine.log_prob, theirs.log_prob)
    for p, then in zip(policy.parameters, gradient, strict=True):
        assert (p.grad is None) == (then is None)
        assert then is None or torch.equal(p.grad, then)
    images = [r.images for r in alone]
    assert not torch.equal(images[0], images[1]), "their noise differs after the prefix"


@pytest.mark.parametrize("name", MODELS)
def test_rounding_with_several_samples_in_a_forward(
    name: str, policies: Callable[[str], Policy]
) -> None:
    policy = policies(name)
    alone = sample(policy, (3,), shared=False, batch=3)
    together = sample(policy, (3,), shared=True, batch=3)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other.latents, one.latents, rtol=1e-5, atol=1e-5)


# -- through the loop ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prefix")
    tiny.save(tiny.tiny_sd3(), root / "sd3")
    (root / "prompts.txt").write_text("a cat\na dog\na cup\na car\n", encoding="utf-8")
    return root


def settings(folder: Path, run: Path, *overrides: str) -> Config:
    return load_config(
        "embedded",
        [
            f"model.pipeline={folder / 'sd3'}",
            f"prompts={{train: {folder / 'prompts.txt'}, heldout: null}}",
            "sampling={steps: 6, height: 16, width: 16, call: {max_sequence_length: 16}}",
            "rollout={prompts: 4, generations: 3, micro_batch: 1, initial_noise: group}",
            "selection={rule: window, size: 2, outside: deterministic}",
            "rewards=[{name: 'conformance:brightness'}]",
            "updates=1",
            f"run.dir={run}",
            *overrides,
        ],
    )


def update(config: Config) -> dict[str, Any]:
    """Calls, encodings, pictures, gradient and window starts of an update."""
    s = set_up(config, quiet=True)
    calls: list[int] = []
    encoded: list[int] = []
    gradients: list[torch.Tensor] = []
    pictures: dict[SampleKey, torch.Tensor] = {}
    original = s.policy.sample

    def watched(prompts: Any, keys: Any, **options: Any) -> Rollout:
        rollout = original(prompts, keys, **options)
        pictures.update(zip(rollout.keys, rollout.images, strict=True))
        return rollout

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients.extend(p.grad.clone() for p in s.policy.parameters)

    s.policy.sample = watched  # type: ignore[method-assign]
    s.policy.denoisers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    s.policy.pipe.text_encoder.register_forward_pre_hook(lambda *_: encoded.append(1))
    s.optimizer.register_step_pre_hook(look)
    updates: list[tuple[int, int]] = []
    with s.scorer, s.judge:
        for number in range(config.updates):
            one_update(s, number)
            updates.append((len(calls), len(encoded)))
    s.record.close()
    starts = [s.select(0, p).selected[0] for p in range(config.rollout.prompts)]
    return {
        "calls": len(calls),
        "updates": updates,
        "pictures": pictures,
        "gradients": gradients,
        "starts": starts,
    }


@pytest.mark.parametrize("schedule", ["native", "retain", "reweight"])
@pytest.mark.parametrize("per", ["group", "update"])
def test_an_update(per: str, schedule: str, folder: Path, tmp_path: Path) -> None:
    """M·T evaluations a group become start + M·(T - start), and nothing else changes."""
    how = (f"selection.per={per}", f"schedule={schedule}", "seed=1")
    alone = update(settings(folder, tmp_path / "alone", *how))
    together = update(settings(folder, tmp_path / "together", *how, "rollout.share_prefix=true"))
    starts = alone["starts"]
    assert together["starts"] == starts
    assert (len(set(starts)) > 1) == (per == "group"), "a seed that draws different starts"
    assert max(starts) > 0
    replays = 4 * 3 * 2 if schedule == "native" else 0
    assert alone["calls"] == 4 * 3 * 6 + replays
    assert together["calls"] == sum(s + 3 * (6 - s) for s in starts) + replays
    for key, picture in alone["pictures"].items():
        assert torch.equal(picture, together["pictures"][key]), key
    for mine, theirs in zip(alone["gradients"], together["gradients"], strict=True):
        assert torch.equal(mine, theirs)


def test_parts_share_their_own_prefixes(folder: Path, tmp_path: Path) -> None:
    how = ("selection.per=group", "schedule=retain", "rollout.parts=2", "seed=1")
    alone = update(settings(folder, tmp_path / "alone", *how))
    together = update(settings(folder, tmp_path / "together", *how, "rollout.share_prefix=true"))
    saved = sum((3 - 1) * start for start in alone["starts"])
    assert alone["calls"] - together["calls"] == saved > 0
    for key, picture in alone["pictures"].items():
        assert torch.equal(picture, together["pictures"][key]), key


MORE = {
    "streaming": ["schedule=streaming"],
    "streaming, one ahead": ["schedule=streaming", "rollout.ahead=1"],
    "retain, one ahead": ["schedule=retain", "rollout.ahead=1"],
    "native, compiled": ["schedule=native", "model.compile=true"],
    "reweight, compiled": ["schedule=reweight", "model.compile=true"],
}


# torch hides this warning of its own tracing where it is shown, not where it is made an error
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "how",
    [pytest.param(n, marks=[pytest.mark.slow] if n.endswith("compiled") else []) for n in MORE],
)
def test_what_is_computed_once(
    how: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts are encoded in the first update, and never again, whatever samples them; the
    steps before a group's window run once for its three generations.

    A compiled block changes nothing of it: the backend "eager" traces it and runs it as it is.
    """
    monkeypatch.setattr(setup, "compile_blocks", partial(compile_blocks, backend="eager"))
    done = update(
        settings(
            folder,
            tmp_path / "run",
            "selection.per=group",
            "rollout.share_prefix=true",
            "updates=2",
            "seed=1",
            *MORE[how],
        )
    )
    replays = 4 * 3 * 2 if "native" in how else 0
    assert any(done["starts"])
    calls, encoded = zip(*done["updates"], strict=True)
    assert calls[0] == sum(s + 3 * (6 - s) for s in done["starts"]) + replays
    assert encoded == (4, 4)
