"""Rules between settings, and with this machine's files: all refusals at once, before any model.

Imports neither torch nor diffusers: a mistake is reported before anything slow happens.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from .config import EMBEDDED_PIPELINES, Config, read_text
from .datasets import read_examples
from .errors import LeanError, problem
from .reward_checks import check_reward

# Arguments of a pipeline's call that follow from other settings or that the trainer itself needs.
RESERVED_CALL = {
    "prompt": "prompts.train",
    "num_inference_steps": "sampling.steps",
    "guidance_scale": "sampling.guidance",
    "height": "sampling.height",
    "width": "sampling.width",
    "num_frames": "sampling.num_frames",
    "negative_prompt": "sampling.negative_prompt",
    "sigmas": "sampling.sigmas",
    "generator": "seed",
    "num_images_per_prompt": "rollout.generations",
    "num_videos_per_prompt": "rollout.generations",
    "latents": None,
    "output_type": None,
    "return_dict": None,
    "callback_on_step_end": None,
    "timesteps": None,
}

# Kernels whose noise is g√h.
GUARDED = ("flow_sde", "flow_sde_wan", "dance_sde")

# Half the spacing of float32 just above 1 is 6e-8: a narrower range would clip rounding.
MIN_CLIP_RANGE = 1e-7


def check(config: Config, *, resume: bool = False, files: bool = True) -> None:
    """Refuse settings that cannot work together or, with `files`, with this machine's files.

    Raises one LeanError with a line per problem; loads no model.
    """
    config = before_auto(config)
    groups = (
        _check_steps,
        _check_kernel,
        _check_flash,
        _check_rollout,
        _check_prefix,
        _check_advantage,
        _check_streaming,
        _check_objective,
        _check_parallel,
        _check_memory,
        _check_model,
        _check_rewards,
        _check_scoring,
    )
    problems = [p for group in groups for p in group(config)]
    problems += _check_files(config, resume) if files else ()
    if problems:
        raise LeanError("\n".join(map(str, problems)))


def before_auto(config: Config) -> Config:
    """Under `auto`, the settings before it chooses a micro-batch: one of 1 divides any group."""
    if config.schedule != "auto":
        return config
    rollout = config.rollout.model_copy(update={"micro_batch": 1})
    return config.model_copy(update={"rollout": rollout})


def _check_steps(config: Config) -> Iterator[LeanError]:
    selection, steps = config.selection, config.sampling.steps
    candidates = steps if selection.last else steps - 1
    if selection.rule == "list":
        listed = selection.steps or ()
        if not listed:
            yield problem("selection.steps", None, "rule list needs at least one step")
        for step in sorted({s for s in listed if not 0 <= s < steps}):
            rule = f"step {step} is outside 0..{steps - 1}"
            yield problem("selection.steps", list(listed), rule, f"sampling.steps is {steps}.")
        for step in sorted({s for s in listed if listed.count(s) > 1}):
            yield problem("selection.steps", list(listed), f"step {step} is listed twice")
    elif selection.steps is not None:
        rule = f"only rule list reads it, and selection.rule is {selection.rule}"
        yield problem("selection.steps", list(selection.steps), rule, "Set one or the other.")
    elif candidates < 1:
        rule = "no step is left to train, because the last one is no candidate"
        yield problem("sampling.steps", steps, rule, "Take more, or set selection.last=true.")
    if selection.rule == "window":
        lo, hi = selection.range or (0, candidates)
        if not 0 <= lo < hi <= candidates:
            rule = f"it must be [lo, hi) inside the candidate steps [0, {candidates})"
            yield problem("selection.range", [lo, hi], rule)
        elif selection.size is None:
            yield problem("selection.size", None, f"rule window needs one in 1..{hi - lo}")
        elif selection.size > hi - lo:
            rule = f"the window lies in [{lo}, {hi}), so it has at most {hi - lo} steps"
            yield problem("selection.size", selection.size, rule)
    else:
        for name in ("size", "range"):
            if (value := getattr(selection, name)) is not None:
                rule = f"only rule window reads it, and selection.rule is {selection.rule}"
                yield problem(f"selection.{name}", value, rule, "Set one or the other.")
    sigmas = config.sampling.sigmas
    if not isinstance(sigmas, str):
        if len(sigmas) != steps:
            rule = f"{len(sigmas)} numbers for {steps} steps"
            yield problem("sampling.sigmas", list(sigmas), rule, "Give one a step.")
        if any(a <= b for a, b in pairwise(sigmas)):
            yield problem("sampling.sigmas", list(sigmas), "each must be below the one before")
        if config.evaluation.steps not in (None, steps):
            rule = f"sampling.sigmas lists {steps} noise levels"
            yield problem("evaluation.steps", config.evaluation.steps, rule, "Set it to null.")
    for name in sorted(set(config.prompts.images) & {*RESERVED_CALL, *config.sampling.call}):
        home = f"sampling.call.{name}" if name in config.sampling.call else RESERVED_CALL[name]
        rule = f"this argument is given by {home or 'the trainer itself'}"
        yield problem(f"prompts.images.{name}", config.prompts.images[name], rule, "Remove one.")
    for name in sorted(set(config.sampling.call) & set(RESERVED_CALL)):
        home = RESERVED_CALL[name]
        remedy = f"Use {home}." if home else "Remove it."
        rule = "the trainer passes this argument itself"
        yield problem(f"sampling.call.{name}", config.sampling.call[name], rule, remedy)


def _check_kernel(config: Config) -> Iterator[LeanError]:
    name, level = config.kernel.name, config.kernel.noise_level
    if name == "flow_sde_wan":
        if level is not None:
            rule = "flow_sde_wan takes its noise from the sigmas"
            yield problem("kernel.noise_level", level, rule, "Set it to null.")
    elif level is None or level <= 0:
        rule = "it must be above 0, because a step without noise has no log-probability"
        yield problem("kernel.noise_level", level, rule)
    elif name in ("flow_cps", "ddim") and level > 1:
        rule = f"{name} has all its noise at 1"
        yield problem("kernel.noise_level", level, rule, "Take a value in (0, 1].")
    if name == "ddim" and config.sampling.sigmas != "pipeline":
        rule = "ddim steps through timesteps and has no sigmas"
        yield problem("sampling.sigmas", config.sampling.sigmas, rule, "Set it to pipeline.")


def _check_flash(config: Config) -> Iterator[LeanError]:
    ratio, selection = config.sampling.flash.ratio, config.selection
    if ratio is None:
        return
    if config.kernel.name == "ddim":
        rule = "it needs a kernel of flow matching, and kernel.name is ddim"
        yield problem("sampling.flash.ratio", ratio, rule, "Set it to null.")
    if selection.outside != "deterministic":
        rule = "it saves deterministic steps, and selection.outside is stochastic"
        yield problem("sampling.flash.ratio", ratio, rule, "Set selection.outside=deterministic.")
    steps = sorted(selection.steps or ())
    gaps = selection.rule == "list" and any(b - a > 1 for a, b in pairwise(steps))
    if gaps or selection.rule == "random":
        which = f"steps {steps}" if gaps else "rule random"
        rule = f"it saves steps outside one window, which {which} do{'' if gaps else 'es'} not make"
        remedy = "List steps in a row." if gaps else "Set selection.rule=window."
        yield problem("sampling.flash.ratio", ratio, rule, remedy)


def _check_rollout(config: Config) -> Iterator[LeanError]:
    num, micro = config.rollout.generations, config.rollout.micro_batch
    if num < 2 and config.advantage.baseline == "prompt":
        rule = "a group of one has no baseline to be compared with"
        remedy = "Take 2 or more, or another advantage.baseline."
        yield problem("rollout.generations", num, rule, remedy)
    yield from check_capture(config)
    if num >= 2 and num % micro:
        below, above = num - num % micro, num + micro - num % micro
        near = f"{below} or {above}" if below else f"{above}"
        rule = f"it must be a multiple of rollout.micro_batch, which is {micro}"
        remedy = f"Nearest: {near} generations, or a micro-batch of {_nearest_divisor(num, micro)}."
        yield problem("rollout.generations", num, rule, remedy)
    if config.rollout.prompts % config.rollout.parts:
        rule = f"it must be a multiple of rollout.parts, which is {config.rollout.parts}"
        yield problem("rollout.prompts", config.rollout.prompts, rule)


def check_capture(config: Config) -> Iterator[LeanError]:
    """Reweight in micro-batches reaches into the layers, which a compiled block has not."""
    micro = config.rollout.micro_batch
    if config.model.compile and config.schedule in ("reweight", "streaming") and micro > 1:
        rule = f"schedule {config.schedule} cannot split the gradient of a compiled block by sample"
        remedy = "Set it to 1, or model.compile to false, or use retain."
        yield problem("rollout.micro_batch", micro, rule, remedy)


def _check_prefix(config: Config) -> Iterator[LeanError]:
    selection, rollout = config.selection, config.rollout
    drawn = selection.rule == "random" or (
        selection.rule == "window" and selection.move == "random"
    )
    if selection.per != "update" and not drawn:
        rule = "only rule random and a random window are drawn"
        yield problem("selection.per", selection.per, rule, "Set it to update.")
    if selection.per == "sample" and rollout.micro_batch > 1:
        rule = "the samples of a forward share their steps"
        yield problem(
            "selection.per", "sample", rule, "Set rollout.micro_batch to 1, or per group."
        )
    if selection.move == "progressive" and selection.rule != "window":
        rule = f"only rule window moves, and selection.rule is {selection.rule}"
        yield problem("selection.move", selection.move, rule)
    if not rollout.share_prefix:
        return
    if rollout.initial_noise != "group":
        rule = "generations share their first steps only if they start from the same noise"
        yield problem("rollout.share_prefix", True, rule, "Set rollout.initial_noise=group.")
    if selection.outside != "deterministic":
        rule = "steps that draw noise are no sample's but its own"
        yield problem("rollout.share_prefix", True, rule, "Set selection.outside=deterministic.")
    if selection.per == "sample":
        rule = "generations that part at different steps have no common prefix"
        yield problem("rollout.share_prefix", True, rule, "Set selection.per to group or update.")


def _check_advantage(config: Config) -> Iterator[LeanError]:
    a, o, num = config.advantage, config.objective, config.rollout.generations
    fitting = {"history": "prompt", "value": "none"}.get(a.baseline, a.std)
    if a.std != fitting:
        rule = f"with advantage.baseline={a.baseline} it must be {fitting}"
        yield problem("advantage.std", a.std, rule)
    if a.rewards != "sum" and a.baseline in ("history", "value"):
        rule = f"advantage.baseline={a.baseline} has one reward"
        yield problem("advantage.rewards", a.rewards, rule, "Set it to sum.")
    if a.rewards != "sum" and o.kl_in_reward:
        rule = "there is no sum for the KL to be subtracted from"
        yield problem("objective.kl_in_reward", o.kl_in_reward, rule, "Set advantage.rewards=sum.")
    if a.rewards == "each" and sum(r.weight for r in config.trained) <= 0:
        rule = "with advantage.rewards=each the weights are divided by their sum"
        yield problem("rewards", [r.weight for r in config.rewards], rule, "Make it positive.")
    if a.min_history > a.history:
        rule = f"only advantage.history={a.history} rewards of a prompt are kept"
        yield problem("advantage.min_history", a.min_history, rule)
    if a.best_of is not None and a.best_of > num:
        rule = f"there are {num} generations (rollout.generations)"
        yield problem("advantage.best_of", a.best_of, rule)
    if a.best_of is not None and o.kl:
        rule = "generations left out would still have a KL in the loss"
        yield problem("advantage.best_of", a.best_of, rule, "Set objective.kl to 0.")
    if a.baseline == "value" and a.clip is not None:
        rule = "with advantage.baseline=value it would bound the reward, before its baseline"
        yield problem("advantage.clip", a.clip, rule, "Set it to null.")
    if a.baseline == "value":
        rule = "with advantage.baseline=value {} left out would still have a baseline subtracted"
        if a.best_of is not None:
            yield problem(
                "advantage.best_of", a.best_of, rule.format("generations"), "Set it null."
            )
        if config.on_bad_reward == "exclude":
            remedy = "Set it to stop."
            yield problem("on_bad_reward", "exclude", rule.format("images"), remedy)


def _check_streaming(config: Config) -> Iterator[LeanError]:
    if config.schedule == "streaming" and (why := not_affine(config)):
        setting, value, rule, remedy = why
        yield problem(setting, value, rule, f"{remedy}, or schedule=reweight.")


def not_affine(config: Config) -> tuple[str, object, str, str] | None:
    """Why advantages are no affine function of the rewards, which `streaming` needs them to be.

    Setting, value, rule and remedy; None where they are. Of N rewards one lies at most sqrt(N - 1)
    population deviations from the mean, (N - 1)/sqrt(N) sample deviations (Samuelson 1968), so that
    a clip beyond that never binds.
    """
    a, r = config.advantage, config.rollout
    if a.best_of is not None:
        rule = "schedule streaming forgets the gradients it would have to leave out"
        return "advantage.best_of", a.best_of, rule, "Set it to null"
    if a.rewards == "gdpo":
        rule = "schedule streaming cannot normalise a sum again"
        return "advantage.rewards", a.rewards, rule, "Set it to each or sum"
    if a.baseline == "history":
        rule = "schedule streaming needs statistics of the update's own rewards"
        return "advantage.baseline", a.baseline, rule, "Take prompt or global"
    if a.clip is None:
        return None
    num = r.generations if a.baseline == "prompt" else r.generations * r.prompts
    if a.std == "none":
        bound = math.inf
    elif a.std == "global" and a.baseline == "prompt":  # the widest group is all there is
        every = r.generations * r.prompts - a.ddof
        bound = math.sqrt(every * (num - 1) / num)
    else:
        bound = math.sqrt((num - 1) * (num - a.ddof) / num)
    if a.rewards == "each":
        weights = [w.weight for w in config.trained]
        bound *= sum(map(abs, weights)) / abs(sum(weights) or 1.0)
    if bound <= a.clip:
        return None
    most = "have any size" if bound == math.inf else f"be as large as {bound:.3g}"
    rule = f"an advantage can {most}, and schedule streaming cannot clip it"
    return "advantage.clip", a.clip, rule, "Set it to null"


def _check_objective(config: Config) -> Iterator[LeanError]:
    o, steps = config.objective, config.sampling.steps
    if o.clip_range < MIN_CLIP_RANGE:
        rule = f"below {MIN_CLIP_RANGE:g} float32 rounding of the ratio alone would be clipped"
        yield problem("objective.clip_range", o.clip_range, rule)
    if o.step_weights is not None and len(o.step_weights) != steps:
        rule = f"{len(o.step_weights)} numbers for {steps} steps (sampling.steps)"
        yield problem("objective.step_weights", list(o.step_weights), rule, "Give one a step.")
    if o.step_weights is not None and any(w <= 0 for w in o.step_weights):
        rule = "each must be above 0; steps that are not to be trained belong into selection"
        yield problem("objective.step_weights", list(o.step_weights), rule)
    if o.ratio == "guard" and config.kernel.name not in GUARDED:
        rule = f"it normalises noise of std g√h, which {config.kernel.name} does not have"
        yield problem("objective.ratio", o.ratio, rule, f"Kernels: {', '.join(GUARDED)}.")


def _check_parallel(config: Config) -> Iterator[LeanError]:
    p = config.parallel
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    here = f"{ranks} ranks" if ranks > 1 else "one rank"
    if p.shard is None and p.replicate and ranks % p.replicate:
        yield problem("parallel.replicate", p.replicate, f"it does not divide {here}")
    else:
        shard = p.shard or (ranks // p.replicate if p.replicate else local)
        replicate = p.replicate or max(1, ranks // shard)
        if shard * replicate != ranks:
            there = f"there are {ranks} ranks" if ranks > 1 else "there is one rank"
            rule = f"shard x replicate is {shard} x {replicate}, and {there}"
            yield problem("parallel.shard", p.shard, rule, "Leave one of the two null.")
    if p.sync == "step" and config.schedule in ("reweight", "streaming"):
        rule = f"schedule {config.schedule} must multiply by the advantage before ranks are added"
        yield problem("parallel.sync", p.sync, rule, "Set it to update or group.")
    if p.check and config.model.compile:
        rule = "it looks at every operation, which torch.compile does not allow"
        yield problem("parallel.check", True, rule, "Set it or model.compile to false.")
    has_ledger = config.schedule in ("reweight", "streaming", "auto")
    if p.ledger_dtype and not has_ledger:
        rule = f"only reweight has a ledger, and schedule is {config.schedule}"
        yield problem("parallel.ledger_dtype", p.ledger_dtype, rule, "Set it to null.")
    if p.ledger_device == "host" and not has_ledger:
        rule = f"only reweight has a ledger, and schedule is {config.schedule}"
        yield problem("parallel.ledger_device", p.ledger_device, rule, "Set it to accelerator.")


def _check_memory(config: Config) -> Iterator[LeanError]:
    """Only retain keeps graphs; `auto` may choose it."""
    activations = config.memory.activations
    if activations is not None and config.schedule not in ("retain", "auto"):
        rule = f"only retain keeps activations, and schedule is {config.schedule}"
        remedy = "Set it to null, or schedule=retain."
        yield problem("memory.activations", activations, rule, remedy)


def _nearest_divisor(num: int, near: int) -> int:
    return min((d for d in range(1, num + 1) if num % d == 0), key=lambda d: abs(d - near))


def _check_model(config: Config) -> Iterator[LeanError]:
    lora = config.model.lora
    if config.model.train == "lora" and lora.targets == ():
        yield problem("model.lora.targets", [], "it names no layer", "null finds them.")
    pipeline = config.model.pipeline
    if pipeline in EMBEDDED_PIPELINES:
        return
    folder = Path(pipeline).expanduser()
    index = folder / "model_index.json"
    if not folder.exists():
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", pipeline):
            rule = "there is no such folder, and it has not the form of a hub id"
            yield problem("model.pipeline", pipeline, rule)
    elif not index.is_file():
        rule = "the folder has no model_index.json, so it is no diffusers pipeline"
        yield problem("model.pipeline", pipeline, rule, "Save one with save_pretrained.")
    else:
        try:
            entry = json.loads(read_text("model.pipeline", index)).get("scheduler")
        except (LeanError, ValueError, AttributeError):
            yield problem("model.pipeline", pipeline, "its model_index.json cannot be read")
            return
        if not entry or entry[0] is None:
            rule = "its model_index.json lists no scheduler, so there is no step to train"
            yield problem("model.pipeline", pipeline, rule)


def _check_rewards(config: Config) -> Iterator[LeanError]:
    lists = {"rewards": config.rewards, "evaluation.rewards": config.evaluation.rewards}
    for where, rewards in lists.items():
        for n, reward in enumerate(rewards):
            yield from check_reward(f"{where}.{n}", reward)
            if reward.name in (r.name for r in rewards[:n]):
                yield problem(f"{where}.{n}.name", reward.name, "it is listed twice")
            if reward.sees_groups and (reward.evaluate_only or where != "rewards"):
                rule = "it compares the pictures of a prompt, and a held-out prompt has one"
                yield problem(f"{where}.{n}.name", reward.name, rule)
    if not config.trained:
        rule = "every one is evaluate_only, and nothing is left to train on"
        yield problem("rewards", [r.name for r in config.rewards], rule)
    elif all(reward.weight == 0 for reward in config.trained):
        yield problem("rewards", [r.name for r in config.rewards], "every weight is 0")
    groupwise = [r.name for r in config.trained if r.sees_groups]
    if groupwise and config.schedule in ("streaming", "auto"):
        rule = f"reward `{groupwise[0]}` needs a whole group, and streaming cannot wait for it"
        remedy = "Take retain, reweight or native."
        yield problem("schedule", config.schedule, rule, remedy)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if groupwise and ranks > 1 and config.parallel.layout == "shared":
        rule = f"reward `{groupwise[0]}` needs a whole group on one rank"
        yield problem("parallel.layout", "shared", rule, "Set parallel.layout=classic.")


def _check_scoring(config: Config) -> Iterator[LeanError]:
    c = config.scoring
    if c.timeout is None or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    pauses = sum(map(c.pause, range(1, min(c.retries, 10_000) + 1)))
    longest = c.timeout * (c.retries + 1) + pauses
    if longest > config.parallel.timeout:
        rule = f"a reward may take {longest:g} s with its retries, and other ranks wait for it"
        remedy = "Take more, or lower scoring.timeout or scoring.retries."
        yield problem("parallel.timeout", config.parallel.timeout, rule, remedy)


def _check_files(config: Config, resume: bool) -> Iterator[LeanError]:
    found: dict[bool, int | LeanError] = {}
    for heldout in (False, True):
        try:
            found[heldout] = len(read_examples(config.prompts, heldout=heldout))
        except LeanError as error:
            found[heldout] = error
    # Where the held-out ones are split off, both ways meet the same mistake.
    yield from {
        str(error): error for error in found.values() if isinstance(error, LeanError)
    }.values()
    wanted, num = config.evaluation.prompts or 0, found[True]
    if config.prompts.heldout is not None and isinstance(num, int) and wanted > num:
        rule = f"prompts.heldout has only {num}"
        yield problem("evaluation.prompts", wanted, rule, "null takes all of them.")
    folder = Path(config.run.dir or "runs").expanduser()
    if "\0" in str(folder):
        yield problem("run.dir", config.run.dir, "no folder can have this name")
        return
    if folder.exists() and not folder.is_dir():
        yield problem("run.dir", str(folder), "it is a file, and a folder is needed")
        return
    above = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        yield problem("run.dir", str(folder), f"{above} cannot be written to")
    elif config.run.dir is not None and not resume and _holds_run(folder):
        remedy = "Resume it, or name another folder."
        yield problem("run.dir", str(folder), "it already holds a run", remedy)


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl"))
