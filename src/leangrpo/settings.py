"""The settings tree: what a run can be told, each with its meaning, unit and default's source.

Loading, overriding and checking are in `config.py`. "FlowGRPO" below is yifan123/flow_grpo
(`config/base.py` and `config/grpo.py`), "paper" is arXiv 2609.03528.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .catalogue import CATALOGUE
from .settings_model import Float, Int, Kernel, Model, Prompts, Sampling, Settings, Size

Momentum = Annotated[Float, Field(ge=0, lt=1)]


def _device(value: object) -> object:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


class Selection(Settings):
    """Which sampling steps are trained."""

    rule: Literal["fraction", "random", "window", "list"] = Field(
        "random", description="the first ones, drawn ones, a contiguous window, or a list"
    )
    per: Literal["update", "group", "sample"] = Field(
        "update",
        description="rule random, and a random window: one draw for the whole update, for each "
        "prompt (FlowGRPO-Fast) or for each sample (DanceGRPO)",
    )
    fraction: Float = Field(
        0.5, gt=0, le=1, description="rules fraction and random: share of the candidate steps"
    )
    size: Int | None = Field(None, ge=1, description="rule window: number of steps in it")
    range: tuple[Int, Int] | None = Field(
        None, description="rule window: [lo, hi) it lies in; null = all candidates"
    )
    move: Literal["random", "progressive"] = Field(
        "random", description="rule window: drawn anew, or moving on from lo to hi (MixGRPO)"
    )
    every: Int = Field(
        25, ge=1, description="progressive window: updates before it moves (MixGRPO: 25, Flash 20)"
    )
    stride: Int = Field(
        1, ge=0, description="progressive window: steps it moves by; 0 = it stays (Flash*)"
    )
    decay: Literal["constant", "linear", "exponential"] = Field(
        "constant",
        description="progressive window: how `every` shrinks as the window moves on (MixGRPO)",
    )
    wrap: bool = Field(
        True, description="progressive window: back to lo after the end (MixGRPO), or stay there"
    )
    steps: tuple[Int, ...] | None = Field(None, description="rule list: indices, 0 = first step")
    last: bool = Field(False, description="whether the last step is a candidate (FlowGRPO: no)")
    outside: Literal["stochastic", "deterministic"] = Field(
        "stochastic", description="what the other steps do (FlowGRPO-Fast, MixGRPO: deterministic)"
    )
    last_noise: bool = Field(
        True,
        description="whether an untrained last step draws noise; false = the picture is decoded "
        "from the last predicted clean latent (DanceGRPO)",
    )


class Rollout(Settings):
    """How much is sampled for one update."""

    prompts: Int = Field(8, ge=1, description="prompts (groups) per update")
    generations: Int = Field(
        12,
        ge=1,
        description="generations per prompt (group size); 2 or more where advantage.baseline is "
        "prompt",
    )
    micro_batch: Int = Field(1, ge=1, description="generations in one forward")
    parts: Int = Field(
        1, ge=1, description="optimizer steps on a rollout, each on its own share of the prompts"
    )
    epochs: Int = Field(
        1,
        ge=1,
        description="passes over a rollout; all steps but the very first run the model again",
    )
    initial_noise: Literal["sample", "group"] = Field(
        "sample",
        description="generations of a prompt start from noise of their own or, with group, from "
        "the same (DanceGRPO, MixGRPO)",
    )
    ahead: Int | None = Field(
        None,
        ge=0,
        description="forwards that may be sampled while the reward of an earlier one is still "
        "computed, across groups; null = 1, and 0 with schedule streaming",
    )
    share_prefix: bool = Field(
        False,
        description="deterministic steps before the first noisy one are run once for a group; "
        "needs initial_noise=group",
    )


class Advantage(Settings):
    """A = (r - baseline) / (std + epsilon), clipped."""

    baseline: Literal["prompt", "global", "history", "value"] = Field(
        "prompt",
        description="the mean of the group, of the update, of a prompt's last rewards (DDPO), or "
        "a learned value of the step (DPOK)",
    )
    std: Literal["prompt", "global", "none"] = Field(
        "prompt",
        description="standard deviation of what the baseline averages, of the update, or none",
    )
    ddof: Literal[0, 1] = Field(0, description="0 = population (FlowGRPO), 1 = sample (DanceGRPO)")
    epsilon: Float = Field(1e-4, ge=0, description="added to the deviation (FlowGRPO: 1e-4)")
    clip: Float | None = Field(5.0, gt=0, description="bound of |A|; null = off (FlowGRPO: 5)")
    rewards: Literal["sum", "each", "gdpo"] = Field(
        "sum",
        description="several rewards: their weighted sum is normalised, or each is and then "
        "weighted (MixGRPO), or that sum is normalised again over the update (GDPO)",
    )
    history: Int = Field(
        16, ge=1, description="baseline history: rewards kept of a prompt (DDPO: 16)"
    )
    min_history: Int = Field(
        16, ge=1, description="baseline history: with fewer, the update's statistics (DDPO: 16)"
    )
    best_of: Int | None = Field(
        None,
        ge=2,
        description="train on so many generations of a prompt, the worst and the best half; "
        "null = all (DanceGRPO, HunyuanVideo: 8 of 24)",
    )


class Value(Settings):
    """The learned baseline, a small network; used when `advantage.baseline` is value.

    "DPOK" is google-research/google-research (`dpok/train_online_pg.py`, `dpok/reward_model.py`).
    """

    lr: Float = Field(1e-4, gt=0, description="learning rate of its AdamW (DPOK: 1e-4)")
    steps: Int = Field(
        5, ge=1, description="its AdamW steps an update (DPOK: 5 batches, in one step)"
    )
    batch: Int = Field(256, ge=1, description="transitions in one of them (DPOK: 256)")
    width: Int = Field(256, ge=1, description="of its three hidden layers (DPOK: 256)")
    buffer: Int = Field(1000, ge=1, description="newest transitions it learns from (DPOK: 1000)")


class Objective(Settings):
    """The loss of a selected step."""

    ratio: Literal["clip", "clamp", "guard"] = Field(
        "clip",
        description="of steps after an update's first: PPO's clipped ratio, the clamped ratio "
        "alone (DPOK), or normalised by step (GRPO-Guard)",
    )
    clip_range: Float = Field(
        1e-4, gt=0, description="bound of |ratio - 1| (FlowGRPO: 1e-4, 1e-5 in -Fast)"
    )
    step_weights: tuple[Float, ...] | None = Field(
        None, description="weight of each of the T steps in the loss; null = all 1"
    )
    kl: Float = Field(0.0, ge=0, description="weight of the KL to the reference in the loss")
    kl_form: Literal["flow_grpo", "exact", "mean", "output"] = Field(
        "flow_grpo",
        description="the means' square distance over 2g² (over 2s² where there is no g), over "
        "2s², over nothing, or the model outputs' (DPOK)",
    )
    kl_in_reward: Float = Field(0.0, ge=0, description="weight of the KL subtracted from rewards")

    @property
    def needs_reference(self) -> bool:
        """Whether transitions are compared with the reference policy."""
        return self.kl > 0 or self.kl_in_reward > 0


class Parallel(Settings):
    """How the ranks that torchrun starts share the work; nothing here changes the gradient."""

    shard: Int | None = Field(
        None,
        ge=1,
        description="ranks that hold one copy of the weights between them (FSDP2); "
        "null = those of a node, 1 = a copy on every rank",
    )
    replicate: Int | None = Field(
        None, ge=1, description="copies of the weights; null = ranks / shard"
    )
    layout: Literal["shared", "classic"] = Field(
        "shared", description="a prompt's generations over the ranks, or each rank its own prompts"
    )
    sync: Literal["update", "group", "step"] = Field(
        "update",
        description="ranks add their gradients once an update, after every group, or at every "
        "backward (not with reweight)",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of gradients between ranks; float64 gradients stay float64"
    )
    ledger_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="of gradients that wait in reweight; null = as backward makes them"
    )
    ledger_device: Literal["accelerator", "host"] = Field(
        "accelerator", description="where they wait; host = pinned memory"
    )
    check: bool = Field(
        False, description="compare the ranks' collectives and weights after every update"
    )
    timeout: Float = Field(600.0, ge=1, description="seconds until a collective gives up")


class Memory(Settings):
    """What may be kept on the device."""

    activations: Size | None = Field(
        None,
        description="schedule retain: bytes of kept activations that stay on the device, such as "
        "2GiB; the others wait in the host's memory; null = all stay",
    )
    limit: Size | None = Field(
        None,
        description="schedule auto: bytes of the device to plan with, such as 48GiB; null = what "
        "it has (no limit on a CPU)",
    )


class Scoring(Settings):
    """How rewards are computed while the next pictures are sampled."""

    workers: Int = Field(1, ge=1, description="reward calls at the same time")
    processes: bool = Field(
        False, description="in processes of their own instead of threads, for rewards in Python"
    )
    timeout: Float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="seconds a call may take before it counts as failed; null = any",
    )
    retries: Int = Field(
        3, ge=0, description="further tries after a timeout or a failed connection"
    )
    backoff: Float = Field(
        1.0, ge=0, description="seconds before the first further try; twice as many before the next"
    )

    def pause(self, tries: int) -> float:
        """Seconds to wait after so many failed tries; five minutes at most."""
        return min(self.backoff * 2.0 ** min(tries - 1, 60), 300.0)


class Optimizer(Settings):
    """AdamW and clipping."""

    lr: Float = Field(5e-5, gt=0, description="learning rate")
    warmup: Int = Field(0, ge=0, description="updates over which lr rises linearly from 0")
    betas: tuple[Momentum, Momentum] = Field((0.9, 0.999), description="AdamW (FlowGRPO: same)")
    eps: Float = Field(1e-8, gt=0, description="AdamW (FlowGRPO: same)")
    weight_decay: Float = Field(1e-4, ge=0, description="AdamW (FlowGRPO: 1e-4)")
    max_grad_norm: Float = Field(1.0, gt=0, description="global norm bound (FlowGRPO: 1.0)")


class Ema(Settings):
    """An exponential moving average of the trained weights, evaluated and exported in their place.

    The decay of update n is min(decay, (1 + n) / (10 + n)), applied every `every` updates
    (FlowGRPO, `flow_grpo/ema.py`).
    """

    decay: Float = Field(0.0, ge=0, lt=1, description="0 = none (FlowGRPO: 0.9)")
    every: Int = Field(1, ge=1, description="updates between two of its steps (FlowGRPO: 8)")


class Reward(Settings):
    """One reward: its weight, where it computes, and what it is made of."""

    name: str = Field(
        min_length=1, description="a reward's name, your own as module:function, or a server's URL"
    )
    weight: Float = Field(1.0, description="its weight in the sum that is trained on")
    evaluate_only: bool = Field(
        False, description="measured on held-out prompts, and never trained on"
    )
    normalise: tuple[Float, Annotated[Float, Field(gt=0)]] | None = Field(
        None, description="mean and std: the score becomes (score - mean) / std, before its weight"
    )
    groupwise: bool = Field(
        False, description="your own or a server's: it is given all pictures of a prompt at once"
    )
    batch_size: Int | None = Field(
        None,
        ge=1,
        description="pictures in one call of it, of a judge requests at once; null = all, 8",
    )
    device: Annotated[str, BeforeValidator(_device)] = Field(
        "auto", description="where its network computes: auto, cpu, cuda or cuda:N"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="its network computes in"
    )
    offload: bool = Field(False, description="its network waits on the CPU between calls")
    model: str | None = Field(
        None, min_length=1, description="hub id or folder of its network; null = the published one"
    )
    weights: str | None = Field(
        None,
        min_length=1,
        description="file, or owner/repository/file, of what is loaded into it; null = published",
    )
    tokenizer: str | None = Field(
        None, min_length=1, description="hub id or folder; null = the model's, or the published one"
    )
    clip: str | None = Field(
        None, min_length=1, description="geneval: hub id or folder of the CLIP that names colours"
    )
    url: str | None = Field(
        None,
        min_length=1,
        description="judges: an OpenAI-compatible endpoint; or a reward's server",
    )
    template: str | None = Field(
        None, min_length=1, description="a file with the instruction, {prompt} in it"
    )
    pattern: str | None = Field(
        None,
        min_length=1,
        description="judges: regular expression whose first group is the verdict",
    )
    reference: str | None = Field(
        None,
        min_length=1,
        description="similarity: name of the picture to compare with; null = image",
    )

    @property
    def sees_groups(self) -> bool:
        """Whether it has to be given all pictures of a prompt at once."""
        entry = CATALOGUE.get(self.name)
        return self.groupwise or (entry is not None and entry.groupwise)


class Evaluation(Settings):
    """What is measured on the held-out prompts."""

    every: Int = Field(10, ge=1, description="updates between evaluations")
    prompts: Int | None = Field(None, ge=1, description="how many held-out prompts; null = all")
    steps: Int | None = Field(
        None, ge=1, description="sampling steps; null = sampling.steps (FlowGRPO: 40 for 10)"
    )
    batch: Int = Field(32, ge=1, description="images in one forward")
    rewards: tuple[Reward, ...] = Field((), description="measured besides the training rewards")
    grid: Int = Field(16, ge=1, description="images in the sample grid")


class Checkpoint(Settings):
    """What is saved, and when."""

    every: Int = Field(10, ge=1, description="updates between checkpoints")
    keep: Int = Field(2, ge=1, description="how many of the newest are kept")


class Run(Settings):
    """Where and on what it runs; never changes a number."""

    dir: str | None = Field(
        None, min_length=1, description="the run's folder; null = runs/<recipe>-<date-time>"
    )
    threads: Int | None = Field(None, ge=1, description="CPU threads of torch; null = its default")
    device: Annotated[str, BeforeValidator(_device)] = Field(
        "auto", description="auto, cpu, cuda or cuda:N"
    )


class Config(Settings):
    """All settings of a run."""

    recipe: str = Field("embedded", min_length=1, description="names the run and its folder")
    description: str = Field("", description="one line on what the run is")
    seed: Int = Field(0, ge=0, lt=2**63, description="of all noise and every draw")
    updates: Int = Field(40, ge=1, description="optimizer steps")
    schedule: Literal["auto", "native", "retain", "reweight", "streaming"] = Field(
        "reweight",
        description="when the gradient is formed (paper, eqs. 5 to 7); auto = the best that fits",
    )
    model: Model = Field(Model(), description="the policy")
    prompts: Prompts = Field(Prompts(), description="where prompts come from")
    sampling: Sampling = Field(Sampling(), description="what the pipeline is called with")
    kernel: Kernel = Field(Kernel(), description="how a step draws the next latent")
    selection: Selection = Field(Selection(), description="which steps are trained")
    rollout: Rollout = Field(Rollout(), description="how much is sampled")
    advantage: Advantage = Field(Advantage(), description="from rewards to advantages")
    objective: Objective = Field(Objective(), description="the loss")
    optimizer: Optimizer = Field(Optimizer(), description="AdamW")
    value: Value = Field(Value(), description="the learned baseline")
    ema: Ema = Field(Ema(), description="a running mean of the trained weights")
    parallel: Parallel = Field(Parallel(), description="several ranks")
    memory: Memory = Field(Memory(), description="what may be kept on the device")
    scoring: Scoring = Field(Scoring(), description="how rewards are computed")
    rewards: tuple[Reward, ...] = Field(
        (Reward(name="ocr_log_prob"),), min_length=1, description="what is trained on, summed"
    )
    on_bad_reward: Literal["stop", "exclude"] = Field(
        "stop", description="what a NaN or infinite score does: stop, or leave the image out"
    )
    evaluation: Evaluation = Field(Evaluation(), description="what is measured")
    checkpoint: Checkpoint = Field(Checkpoint(), description="what is saved")
    run: Run = Field(Run(), description="where it runs")

    @property
    def trained(self) -> tuple[Reward, ...]:
        """The rewards that are trained on."""
        return tuple(reward for reward in self.rewards if not reward.evaluate_only)
