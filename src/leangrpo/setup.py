"""From settings to everything a run needs, in the order in which mistakes are cheapest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import checkpoint
from .auto import Auto, adopted
from .checks import before_auto, check
from .choice import Choice, configured
from .collectives import Collectives
from .compiling import compile_blocks, require_compiler
from .components import denoisers
from .config import Config, to_yaml
from .credit import Credit, step_weights
from .crew import Crew
from .data import SampleKey
from .datasets import Example, digest, read_examples
from .ema import Ema
from .errors import problem
from .gradients import Gradients
from .layout import Layout, classic_layout, shared_layout
from .loading import copy_denoisers, load_pipeline, make_trainable, place
from .parallel import World, join, make_gradients, mixed_dtypes, shard_denoiser
from .pipeline import Sampling
from .policy import Policy
from .recompute import set_checkpointing
from .report import Onlooker, RunRecord
from .resume import found_by_the_first, in_its_terms
from .reweight import Reweight
from .runfolder import run_folder
from .schedules import Native, Retain, Schedule
from .scoring import Scorer
from .selection import Selection, select
from .solver import Flash, num_steps
from .stopwatch import Stopwatch
from .streaming import Streaming
from .value import Critic


@dataclass
class Setup:
    """What the loop works with. `judge` scores evaluations, `schedule` has the first
    optimizer step of an update, `later` the others. `digest` is that of all examples,
    training's and those held out. `weights` `(T,)` multiply the steps' losses,
    `credit` gives advantages, `critic` a learned baseline. `start` counts updates already done.
    `whole` is false from an optimizer step until its update has been counted: the weights are then
    no update's. `left_out` are this update's trajectories that are not finite (see `exclusion`).
    `order` watches the collectives, if they are to be compared. `choice` is what
    `schedule: auto` decided, where it did."""

    config: Config
    world: World
    layout: Layout
    policy: Policy
    gradients: Gradients
    schedule: Schedule
    later: Schedule
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    scorer: Scorer
    judge: Scorer
    record: RunRecord | Onlooker
    watch: Stopwatch
    examples: list[Example]
    heldout: list[Example]
    digest: str
    stds: list[float]
    weights: list[float]
    credit: Credit
    critic: Critic | None
    start: int
    device: torch.device
    order: Collectives | None
    choice: Choice | None = None
    whole: bool = field(default=True, init=False)
    left_out: frozenset[SampleKey] = field(default=frozenset(), init=False)

    def select(self, update: int, prompt: int = 0, generation: int = 0) -> Selection:
        """The steps of a generation of a prompt of an update."""
        c = self.config
        return select(
            c.selection, self.stds, seed=c.seed, update=update, group=prompt, sample=generation
        )

    def memory(self) -> dict[str, Any]:
        """What a run remembers from update to update, besides weights: a checkpoint's `extra`."""
        history = {"history": self.credit.history.state_dict()} if self.credit.remembers else {}
        return history | (self.critic.state_dict() if self.critic is not None else {})

    def selected_anywhere(self, update: int) -> list[int]:
        """The steps that an update trains in some sample."""
        c, per = self.config.rollout, self.config.selection.per
        prompts = range(1 if per == "update" else c.prompts)
        generations = range(c.generations if per == "sample" else 1)
        return sorted(
            {i for p in prompts for g in generations for i in self.select(update, p, g).selected}
        )

    @property
    def ahead(self) -> int:
        """How many forwards are sampled while the reward of an earlier one is computed."""
        ahead = self.config.rollout.ahead
        return (0 if self.schedule.streams else 1) if ahead is None else ahead

    @property
    def shares_prefix(self) -> bool:
        """Whether the deterministic steps a group begins with are run once."""
        return self.config.rollout.share_prefix

    @property
    def deferred(self) -> bool:
        """Whether a backward has to wait for the end of its trajectory.

        Every backward under sharding is a collective: where ranks select other steps, it must not
        meet another rank's forward.
        """
        return self.world.shards > 1 and self.config.selection.per != "update"

    @property
    def needs_kl(self) -> bool:
        """Whether transitions are compared with the reference policy."""
        return self.config.objective.needs_reference


def set_up(config: Config, *, resume: bool = False, quiet: bool = False) -> Setup:
    """Build a run: checks first, then prompts and rewards, then the model, then the run folder.

    Raises LeanError for every mistake a user can make, before the model is loaded where possible.
    """
    check(config, resume=resume)
    p = config.parallel
    device = pick_device(config.run.device)
    world = join(
        p.shard, p.replicate, timeout_s=p.timeout, master=config.model.has_master, device=device
    )
    folder = world.share(run_folder(config))
    if resume and config.schedule == "auto":
        config = world.share(adopted(config, folder))
    config = before_auto(config)
    found = found_by_the_first(world, config, folder) if resume else None
    examples, heldout = read_examples(config.prompts), read_examples(config.prompts, heldout=True)
    heldout = heldout[: config.evaluation.prompts]
    examples_digest = _check_examples(config, world, [*examples, *heldout], found)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    scorer, judge = make_scorers(config)
    watch = Stopwatch(device)
    policy = make_policy(config, device, watch, world)
    stds = policy.plan().std.tolist()
    select(config.selection, stds, seed=config.seed, update=0)
    gradients = gradients_of(config, policy, world)
    again = config.model_copy(update={"schedule": "native"})
    layout = make_layout(config, world)
    world.open_teams(layout)
    _check_ranks(config, world, layout, policy)
    c = config.optimizer
    optimizer = torch.optim.AdamW(
        policy.parameters,
        lr=c.lr,
        betas=c.betas,
        eps=c.eps,
        weight_decay=c.weight_decay,
        fused=True,
    )
    credit = Credit(config)
    critic = None
    if config.advantage.baseline == "value":
        critic = Critic.of(policy, config.value, seed=config.seed, world=world, device=device)
    ema = Ema(policy, config.ema.decay, config.ema.every) if config.ema.decay else None
    if found:
        checkpoint.restore(found, policy, optimizer, ema)
        credit.history.load_state_dict(found.extra.get("history", {}))
        if critic is not None:
            critic.load_state_dict(found.extra)
    choice = None
    if config.schedule == "auto":
        first, num = examples[0], len(examples)
        auto = Auto(config, policy, gradients, world, layout, optimizer, scorer, first, num)
        auto.others = ema.mean if ema is not None else ()
        choice = auto.decide()
        config = apply(choice, config, policy, gradients)
        layout = make_layout(config, world)
    start = found.update if found else 0
    record: RunRecord | Onlooker
    if not world.is_main:
        record = Onlooker(folder)
    elif resume and (folder / "config.yaml").exists():
        kept = start if found else -1  # without a checkpoint everything is made again
        text = in_its_terms(to_yaml(config), folder) if found else to_yaml(config)
        record = RunRecord.resume(folder, kept, text, quiet=quiet)
    else:
        record = RunRecord.create(folder, to_yaml(config), quiet=quiet)
    if choice is not None:
        record.choice(choice.text(), choice.as_dict())
    return Setup(
        config=config,
        world=world,
        layout=layout,
        policy=policy,
        gradients=gradients,
        schedule=make_schedule(config, policy, watch, gradients),
        later=make_schedule(again, policy, watch, gradients),
        optimizer=optimizer,
        ema=ema,
        scorer=scorer,
        judge=judge,
        record=record,
        watch=watch,
        examples=examples,
        heldout=heldout,
        digest=examples_digest,
        stds=stds,
        weights=step_weights(config, policy),
        credit=credit,
        critic=critic,
        start=start,
        device=device,
        order=make_order(policy, world) if p.check and world.size > 1 else None,
        choice=choice,
    )


def apply(choice: Choice, config: Config, policy: Policy, gradients: Gradients) -> Config:
    """Switch to what was chosen, and return the settings that say so."""
    option = choice.chosen.option
    set_checkpointing(policy, option.checkpointing)
    gradients.sync = option.sync
    return configured(config, option)


def _check_examples(
    config: Config, world: World, examples: list[Example], found: checkpoint.Checkpoint | None
) -> str:
    """The digest of all examples, which ranks, and a run and its checkpoint, must have in common.

    Raises LeanError where they have not; a collective.
    """
    own = digest(examples)
    others = world.share_all(own)
    if len(set(others)) > 1:
        ranks = [rank for rank, other in enumerate(others) if other != others[0]]
        rule = f"ranks {', '.join(map(str, ranks))} read other examples than rank 0"
        raise problem("prompts.train", config.prompts.train, rule, "Give all the same files.")
    if found and found.state.get("examples", own) != own:
        rule = "the examples, or those held out, are not the ones that the run was begun with"
        remedy = "Put the file back as it was, or start a new run."
        raise problem("prompts.train", config.prompts.train, rule, remedy)
    return own


def _check_ranks(config: Config, world: World, layout: Layout, policy: Policy) -> None:
    """Raise LeanError where ranks under sharding would not run the same forwards and backwards."""
    per = config.selection.per
    if world.shards == 1 or per == "update" or (per == "group" and len(layout.teams) == 1):
        return
    if config.rollout.share_prefix:
        rule = "ranks with different prompts would run prefixes of different lengths"
        remedy = "Set selection.per=update, or parallel.shard=1."
        raise problem("rollout.share_prefix", True, rule, remedy)
    if len(policy.denoisers) > 1:
        rule = f"ranks would differentiate different denoisers ({', '.join(policy.names)}) at once"
        raise problem("selection.per", per, rule, "Set it to update, or parallel.shard=1.")


def make_order(policy: Policy, world: World) -> Collectives:
    """What compares the ranks' collectives, and which denoiser each of them calls."""
    order = Collectives.of(world)
    policy.on_call = order.call
    return order


def plan_text(s: Setup) -> str:
    """One line on what an update samples, trains and steps, and on which ranks."""
    r, p, layout = s.config.rollout, s.config.parallel, s.layout
    steps_of_first = select(s.config.selection, s.stds, seed=s.config.seed, update=0)
    steps = r.parts * r.epochs
    text = f"{r.prompts} prompts x {r.generations} generations an update"
    if s.world.size > 1:
        shards = s.world.shards
        weights = f"weights in {shards} shards" if shards > 1 else "the weights on each"
        weights += f", {s.world.whole_because}" if s.world.whole_because else ""
        text += (
            f" on {s.world.size} ranks ({len(layout.teams[0])} share a prompt, "
            f"{layout.held} generations each; {weights}; gradients added every {p.sync})"
        )
    text += f", up to {min(r.micro_batch, layout.held)} a forward; "
    total = s.config.sampling.steps
    text += f"{len(steps_of_first.selected)} of {total} steps trained"
    if flash := s.policy.sampling.flash:
        start, stop = steps_of_first.stochastic[0], steps_of_first.stochastic[-1] + 1
        text += f" ({num_steps(total, start, stop, flash)} run at first)"
    text += "; "
    lean = s.schedule.needs_graph
    if steps == 1:
        return f"{text}1 optimizer step, on-policy{', no second forward' if lean else ''}"
    first = "the first on-policy" + (" and without a second forward" if lean else "")
    return f"{text}{steps} optimizer steps, {first}, the others replayed"


def make_layout(config: Config, world: World) -> Layout:
    """Which rank samples what, the same for every part of every update."""
    make = shared_layout if config.parallel.layout == "shared" else classic_layout
    r = config.rollout
    return make(r.prompts // r.parts, r.generations, world.size, r.micro_batch)


def make_sampling(config: Config) -> Sampling:
    """The `sampling` settings as the policy takes them."""
    options = config.sampling.model_dump()
    flash = options.pop("flash")
    return Sampling(**options, flash=Flash(**flash) if flash["ratio"] is not None else None)


def choose_trained(config: Config, pipe: Any) -> None:
    """Make trainable what the `model` settings say, and nothing else."""
    m = config.model
    make_trainable(
        pipe,
        m.train,
        rank=m.lora.rank,
        alpha=m.lora.alpha,
        targets=m.lora.targets,
        seed=config.seed,
        activation_checkpointing=m.activation_checkpointing,
        only=m.denoisers,
    )


def make_policy(
    config: Config,
    device: torch.device,
    watch: Stopwatch | None = None,
    world: World | None = None,
) -> Policy:
    """Load the pipeline, choose what is trained, shard it, make it stochastic."""
    m, k = config.model, config.kernel
    if m.compile:
        require_compiler(device)
    compute = getattr(torch, m.dtype) if m.has_master else None
    pipe = load_pipeline(
        m.pipeline,
        dtype=getattr(torch, m.master_dtype or m.dtype),
        revision=m.revision,
        variant=m.variant,
    )
    choose_trained(config, pipe)
    if world is not None and world.shards > 1 and compute is None:
        _shard_one_dtype(config, pipe, world)
    sharded = world is not None and world.mesh is not None and (world.shards > 1 or bool(compute))
    sampling = make_sampling(config)
    inputs = read_examples(config.prompts)[0].open_images() if config.prompts.images else None
    copied = config.objective.needs_reference and m.train == "full"
    reference = copy_denoisers(pipe, m.denoisers) if copied else None
    if sharded:
        assert world is not None
        reduce = getattr(torch, config.parallel.reduce_dtype)
        for module in (*denoisers(pipe).values(), *(reference or {}).values()):
            shard_denoiser(module, world.mesh, compute=compute, reduce=reduce)
    place(pipe, device, offload=m.offload)
    for module in (reference or {}).values():
        module.to(device)
    policy = Policy(
        pipe,
        sampling,
        reference=reference,
        dtype=compute,
        kernel=k.name,
        noise_level=k.noise_level,
        reduce=k.reduce,
        kl_form=config.objective.kl_form,
        inputs=inputs,
        seed=config.seed,
        watch=watch,
    )
    if m.compile:
        compile_blocks(policy, graphs_used_twice=config.objective.kl > 0)
    return policy


def _shard_one_dtype(config: Config, pipe: Any, world: World) -> None:
    """Keep weights whole that FSDP2 cannot shard; raises LeanError where shards were asked for."""
    found = [mixed for module in denoisers(pipe).values() if (mixed := mixed_dtypes(module))]
    if not found:
        return
    dtypes = " and ".join(found[0])
    if config.parallel.shard:
        raise problem(
            "parallel.shard",
            config.parallel.shard,
            f"FSDP2 does not shard trained weights in {dtypes} in one block, as this model has",
            "Use model.master_dtype=float32 (all weights in one dtype), model.train=lora, or "
            "parallel.shard=1.",
        )
    world.hold_whole(
        f"as FSDP2 does not shard {dtypes} in one block; model.master_dtype=float32 shards them"
    )


def gradients_of(config: Config, policy: Policy, world: World) -> Gradients:
    """Where the policy's gradients are found, and how the ranks add them up, as the config says."""
    p = config.parallel
    reduce = getattr(torch, p.reduce_dtype)
    return make_gradients(policy.guard, policy.denoisers, world, sync=p.sync, reduce=reduce)


def make_schedule(
    config: Config, policy: Policy, watch: Stopwatch, gradients: Gradients | None = None
) -> Schedule:
    """The schedule a config names, over the policy's parameters."""
    kl, p = config.objective.kl, config.parallel
    waiting: dict[str, Any] = {
        "kl": kl,
        "gradients": gradients,
        "ledger_dtype": getattr(torch, p.ledger_dtype) if p.ledger_dtype else None,
        "ledger_on_host": p.ledger_device == "host",
        "watch": watch,
    }
    makers: dict[str, Callable[[], Schedule]] = {
        "retain": lambda: Retain(
            policy,
            activations=config.memory.activations,
            kl=kl,
            gradients=gradients,
            watch=watch,
        ),
        "reweight": lambda: Reweight(policy, **waiting),
        "streaming": lambda: Streaming(policy, **waiting),
        "native": lambda: Native(
            policy,
            replay=policy.replay,
            clip_range=config.objective.clip_range,
            ratio=config.objective.ratio,
            kl=kl,
            gradients=gradients,
            watch=watch,
        ),
    }
    return makers[config.schedule]()


def make_scorers(config: Config) -> tuple[Scorer, Scorer]:
    """The training rewards, and the same with the evaluation-only ones at weight 0.

    Those that compare a group are left out there, as a held-out prompt has one picture. They share
    their workers, so that a reward is loaded once in each.
    """
    trained = [(r, r.weight) for r in config.trained]
    names = {r.name for r, _ in trained}
    extra = {
        r.name: (r, 0.0)
        for r in (*config.evaluation.rewards, *config.rewards)
        if r.name not in names
    }
    crew = Crew([reward for reward, _ in (*trained, *extra.values())], config.scoring)
    alone = [pair for pair in trained if not pair[0].sees_groups]
    judge = Scorer([*alone, *extra.values()], on_bad="exclude", crew=crew)
    return Scorer(trained, on_bad=config.on_bad_reward, crew=crew), judge


def pick_device(name: str) -> torch.device:
    """`auto` is the first accelerator, or the CPU; raises LeanError for one that is not there."""
    if name == "auto":
        own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        return torch.device(own if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise problem("run.device", name, "torch sees no CUDA device", "Use run.device=cpu.")
    return device
