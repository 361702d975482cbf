"""The settings tree: what a run can be told, each with its meaning, unit and default's source.

Loading, overriding and checking are in `config.py`. "FlowGRPO" below is yifan123/flow_grpo
(`config/base.py` and `config/grpo.py`), "paper" is arXiv 2609.03528.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _not_bool(value: object) -> object:
    """YAML's yes/no/on/off are booleans, and pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Int = Annotated[int, BeforeValidator(_not_bool)]
Float = Annotated[float, BeforeValidator(_not_bool)]
Momentum = Annotated[Float, Field(ge=0, lt=1)]


def _sigmas(value: object) -> object:
    """One sentence for a union, where pydantic has one complaint for each of its branches."""
    is_list = isinstance(value, list | tuple) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= 1 for v in value
    )
    if value not in ("pipeline", "linear") and not is_list:
        raise ValueError("must be `pipeline`, `linear`, or a list of numbers in (0, 1]")
    return value


def _device(value: object) -> object:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


def _heldout(value: object) -> object:
    """One sentence for a union, as above."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    share = isinstance(value, float) and 0 < value < 1
    count = number and isinstance(value, int) and value >= 1
    if not (share or count or value is None or (isinstance(value, str) and value)):
        raise ValueError(
            "must be a source as prompts.train is, a share of it between 0 and 1, "
            "a number of its examples, or null"
        )
    return value


class Settings(BaseModel):
    """A branch of the tree: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class Lora(Settings):
    """Low-rank adapters; used when `model.train` is lora."""

    rank: Int = Field(32, ge=1, description="rank of the adapters (FlowGRPO, SD3: 32)")
    alpha: Float = Field(64.0, gt=0, description="scale is alpha / rank (FlowGRPO, SD3: 64)")
    targets: tuple[str, ...] | None = Field(
        None, description="suffixes of the layers adapted; null = the attention projections found"
    )


class Model(Settings):
    """The policy and which of its weights are trained."""

    pipeline: str = Field(
        "embedded",
        min_length=1,
        description="`embedded`, `embedded-ddim`, a folder in diffusers format, or a hub id",
    )
    revision: str | None = Field(None, description="revision of a hub id; null = its main one")
    variant: str | None = Field(None, description="variant of the weight files, such as fp16")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Field(
        "float32", description="of the denoisers and text encoders; latents are always float32"
    )
    master_dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="of the trained weights, cast to dtype for computing; null = dtype itself",
    )
    train: Literal["full", "lora"] = Field(
        "full", description="train every weight of the denoiser, or adapters on its layers"
    )
    lora: Lora = Field(Lora(), description="the adapters")
    denoisers: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="names of the denoisers that are trained (Wan 2.2: transformer, "
        "transformer_2), the others stay frozen; null = all",
    )
    offload: bool = Field(
        False, description="text encoders and VAE wait in the host's memory while they are not used"
    )
    activation_checkpointing: bool = Field(
        False, description="recompute activations inside a backward: less memory, more time"
    )

    @property
    def has_master(self) -> bool:
        """Whether the weights are kept in another dtype than is computed in."""
        return self.master_dtype not in (None, self.dtype)


class Prompts(Settings):
    """Where prompts come from."""

    train: str = Field(
        "embedded",
        min_length=1,
        description="`embedded`, hf:owner/name, or a file: .jsonl, .csv, .tsv, .parquet, or text "
        "with a prompt a line",
    )
    heldout: Annotated[str | int | float | None, BeforeValidator(_heldout)] = Field(
        None,
        description="for evaluation: the same, or a share (0.05) or number (64) of prompts.train "
        "that is left out of training; null = no evaluation",
    )
    column: str = Field("prompt", min_length=1, description="the column that holds the prompt")
    images: dict[str, str] = Field(
        {},
        description="pictures the pipeline is called with: its argument to a column of files, "
        "such as {image: source}",
    )


class Flash(Settings):
    """Fewer deterministic steps outside the window of noisy ones (MixGRPO-Flash)."""

    ratio: Float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the deterministic steps that stay; null = all, by Euler "
        "(MixGRPO-Flash: 0.4, Flash*: 0.2)",
    )
    order: Literal[1, 2, 3] = Field(2, description="of DPM-Solver++ there (MixGRPO-Flash: 2)")
    kind: Literal["midpoint", "heun"] = Field(
        "midpoint", description="of its second order (MixGRPO-Flash: midpoint)"
    )
    where: Literal["after", "around"] = Field(
        "after", description="steps after the window (MixGRPO-Flash), or those before it as well"
    )


class Sampling(Settings):
    """What the pipeline is called with."""

    steps: Int = Field(10, ge=1, description="sampling steps T (FlowGRPO, SD3: 10)")
    guidance: Float = Field(1.0, ge=0, description="the pipeline's guidance_scale; 1 = none")
    height: Int | None = Field(None, ge=1, description="pixels; null = the pipeline's default")
    width: Int | None = Field(None, ge=1, description="pixels; null = the pipeline's default")
    num_frames: Int | None = Field(None, ge=1, description="frames of a video; null = default")
    negative_prompt: str | None = Field(None, description="for guidance; null = the default")
    sigmas: Annotated[
        Literal["pipeline", "linear"] | tuple[Float, ...], BeforeValidator(_sigmas)
    ] = Field(
        "pipeline",
        description="noise levels: the pipeline's own, linspace(1, 1/T, T) before the shift, "
        "or a list of T falling numbers in (0, 1]",
    )
    call: dict[str, Any] = Field({}, description="further keyword arguments of the pipeline's call")
    flash: Flash = Field(Flash(), description="fewer deterministic steps")


class Kernel(Settings):
    """How one step draws the next latent."""

    name: Literal["flow_sde", "flow_sde_wan", "dance_sde", "flow_cps", "ddim"] = Field(
        "flow_sde", description="the Gaussian transition; see the kernels' page for formulas"
    )
    noise_level: Float | None = Field(
        0.7,
        description="noise_level of flow_sde and flow_cps, eta of dance_sde and ddim; null for "
        "flow_sde_wan (FlowGRPO: 0.7)",
    )
    reduce: Literal["mean", "sum"] = Field(
        "mean", description="log-probability over a latent's elements (all public code: mean)"
    )


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
    rewards: Literal["sum", "each"] = Field(
        "sum",
        description="several rewards: their weighted sum is normalised, or each is and then "
        "weighted (MixGRPO)",
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
    """One reward and its weight."""

    name: str = Field(min_length=1, description="a reward's name, or your own as module:function")
    weight: Float = Field(1.0, description="its weight in the sum that is trained on")


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
    schedule: Literal["native", "retain", "reweight"] = Field(
        "reweight", description="when the gradient is formed (paper, eqs. 5 to 7)"
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
    rewards: tuple[Reward, ...] = Field(
        (Reward(name="ocr_log_prob"),), min_length=1, description="what is trained on, summed"
    )
    on_bad_reward: Literal["stop", "exclude"] = Field(
        "stop", description="what a NaN or infinite score does: stop, or leave the image out"
    )
    evaluation: Evaluation = Field(Evaluation(), description="what is measured")
    checkpoint: Checkpoint = Field(Checkpoint(), description="what is saved")
    run: Run = Field(Run(), description="where it runs")
