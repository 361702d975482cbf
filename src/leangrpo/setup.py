"""From settings to everything a run needs, in the order in which mistakes are cheapest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .config import Config, check, config_hash, read_prompts, to_yaml
from .errors import LeanError, problem
from .loading import load_pipeline, make_trainable
from .policy import Policy, Sampling
from .report import RunRecord
from .rewards import Scorer
from .schedules import Native, Retain, Reweight, Schedule
from .selection import select
from .stopwatch import Stopwatch


@dataclass
class Setup:
    """What the loop works with. `judge` scores evaluations, `start` counts updates already done,
    `advantages` `(P, M)` are those of the last update. `whole` is false from an optimizer step
    until its update has been counted: the weights are then no update's."""

    config: Config
    policy: Policy
    schedule: Schedule
    optimizer: torch.optim.Optimizer
    scorer: Scorer
    judge: Scorer
    record: RunRecord
    watch: Stopwatch
    prompts: list[str]
    heldout: list[str]
    stds: list[float]
    start: int
    device: torch.device
    whole: bool = field(default=True, init=False)
    advantages: Tensor = field(init=False)

    def __post_init__(self) -> None:
        c = self.config
        shape = (c.rollout.prompts, c.rollout.generations)
        self.advantages = torch.zeros(shape, dtype=torch.float64)
        self.advantage: dict[str, Any] = c.advantage.model_dump()

    @property
    def needs_kl(self) -> bool:
        """Whether transitions are compared with the reference policy."""
        return self.config.objective.kl > 0 or self.config.objective.kl_in_reward > 0


def set_up(config: Config, *, resume: bool = False, quiet: bool = False) -> Setup:
    """Build a run: checks first, then prompts and rewards, then the model, then the run folder.

    Raises LeanError for every mistake a user can make, before the model is loaded where possible.
    """
    folder = run_folder(config)
    check(config, resume=resume)
    found = find_checkpoint(config, folder) if resume else None
    prompts = read_prompts(config.prompts.train)
    heldout = read_prompts(config.prompts.heldout, heldout=True) if config.prompts.heldout else []
    heldout = heldout[: config.evaluation.prompts]
    device = pick_device(config.run.device)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    scorer, judge = make_scorers(config)
    watch = Stopwatch(device)
    policy = make_policy(config, device, watch)
    stds = policy.plan().std.tolist()
    select(config.selection, stds, seed=config.seed, update=0)
    c = config.optimizer
    optimizer = torch.optim.AdamW(
        policy.parameters,
        lr=c.lr,
        betas=c.betas,
        eps=c.eps,
        weight_decay=c.weight_decay,
        fused=True,
    )
    if found:
        checkpoint.restore(found, policy, optimizer)
    start = found.update if found else 0
    if resume and (folder / "config.yaml").exists():
        kept = start if found else -1  # without a checkpoint everything is made again
        record = RunRecord.resume(folder, kept, to_yaml(config), quiet=quiet)
    else:
        record = RunRecord.create(folder, to_yaml(config), quiet=quiet)
    return Setup(
        config=config,
        policy=policy,
        schedule=make_schedule(config, policy, watch),
        optimizer=optimizer,
        scorer=scorer,
        judge=judge,
        record=record,
        watch=watch,
        prompts=prompts,
        heldout=heldout,
        stds=stds,
        start=start,
        device=device,
    )


def make_policy(config: Config, device: torch.device, watch: Stopwatch | None = None) -> Policy:
    """Load the pipeline, choose what is trained, make it stochastic."""
    m, k = config.model, config.kernel
    pipe = load_pipeline(
        m.pipeline,
        dtype=getattr(torch, m.dtype),
        device=device,
        revision=m.revision,
        variant=m.variant,
    )
    make_trainable(
        pipe,
        m.train,
        rank=m.lora.rank,
        alpha=m.lora.alpha,
        targets=m.lora.targets,
        dropout=m.lora.dropout,
        seed=config.seed,
        activation_checkpointing=m.activation_checkpointing,
    )
    sampling = Sampling(**config.sampling.model_dump())
    policy = Policy(
        pipe,
        sampling,
        kernel=k.name,
        noise_level=k.noise_level,
        reduce=k.reduce,
        seed=config.seed,
        watch=watch,
    )
    if config.objective.kl > 0 or config.objective.kl_in_reward > 0:
        policy.keep_reference()
    return policy


def make_schedule(config: Config, policy: Policy, watch: Stopwatch) -> Schedule:
    """The schedule a config names, over the policy's parameters."""
    kl = config.objective.kl
    makers: dict[str, Callable[[], Schedule]] = {
        "retain": lambda: Retain(policy, kl=kl, watch=watch),
        "reweight": lambda: Reweight(policy, kl=kl, watch=watch),
        "native": lambda: Native(
            policy,
            replay=policy.replay,
            clip_range=config.objective.clip_range,
            kl=kl,
            watch=watch,
        ),
    }
    return makers[config.schedule]()


def make_scorers(config: Config) -> tuple[Scorer, Scorer]:
    """The training rewards, and the same with the evaluation-only ones at weight 0."""
    trained = [(r.name, r.weight) for r in config.rewards]
    names = {name for name, _ in trained}
    extra = [(r.name, 0.0) for r in config.evaluation.rewards if r.name not in names]
    on_bad = config.on_bad_reward
    return Scorer(trained, on_bad=on_bad), Scorer([*trained, *extra], on_bad="exclude")


def pick_device(name: str) -> torch.device:
    """`auto` is the first accelerator, or the CPU; raises LeanError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise problem("run.device", name, "torch sees no CUDA device", "Use run.device=cpu.")
    return device


def run_folder(config: Config) -> Path:
    """The run's folder; without `run.dir`, `runs/<recipe>-<date-time>`."""
    if config.run.dir:
        return Path(config.run.dir)
    return Path("runs") / f"{config.recipe}-{datetime.now():%Y%m%d-%H%M%S}"


def find_checkpoint(config: Config, folder: Path) -> checkpoint.Checkpoint | None:
    """The newest sound checkpoint of a run, None if it has none yet.

    Raises LeanError when the settings that determine the numbers are not those it was made with.
    """
    if not (folder / "config.yaml").is_file():
        raise problem(
            "run.dir", str(folder), "there is no run to resume", "Leave out --resume to start one."
        )
    found, complaints = checkpoint.newest(folder / "checkpoints")
    for complaint in complaints:
        print(f"warning: {complaint} Using the one before it.", flush=True)
    if found and found.state.get("config") != config_hash(config):
        raise LeanError(
            f"The run in {folder} was made with other settings: going on would not be the same "
            "run. Resume it with its own: leangrpo train "
            f"{folder / 'config.yaml'} run.dir={folder} --resume"
        )
    return found
