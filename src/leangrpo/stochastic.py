"""A diffusers scheduler that samples: the pipeline's own call becomes the whole policy.

Put in place of `pipe.scheduler`, it keeps the original's configuration and tables (shift, sigmas,
dynamic shifting) and replaces only `step`: the transition's mean and std come from the model
output *after* guidance, the next latent is drawn, its log-probability recorded, with its graph
when gradients are on. Latents and means are float32 (float64 when the model is), log-densities
float64; only the denoiser runs in its own dtype. Steps are carried by index, never looked up by
timestep.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from .data import Transition
from .errors import LeanError, problem
from .kernels import Kernel, Step
from .noise import normal
from .solver import Solver, shorten
from .tape import Finished, Part, Tape


class Stochastic:
    """The part that `make_stochastic` puts in front of a diffusers scheduler class.

    A pipeline with several latents (sound beside video) steps each with a deep copy of its
    scheduler. The copies share the tape: a transition is complete when all of them have stepped,
    and its log-probability is that of all their elements together, one long latent `(B, N)`.
    """

    kernel: Kernel
    tape: Tape | None = None
    sigma_rule: str | Sequence[float] = "pipeline"
    table: Tensor
    timesteps: Tensor
    full_timesteps: Tensor
    cursor: int = 0
    num_steps: int = 0
    voice: int = 0
    init_noise_sigma: Any = 1.0
    sigmas: Tensor
    _emitted: Tensor | None = None
    _offset: int = 0
    _solver: Solver | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        shared = ("tape", "kernel")
        for key, value in self.__dict__.items():
            new.__dict__[key] = value if key in shared else copy.deepcopy(value, memo)
        if self.tape is not None:
            self.tape.copies += 1
            new.voice = self.tape.copies
        return new

    def scale_model_input(self, sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The sample: neither family scales what the network sees."""
        return sample

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        """The original's `set_timesteps`; its table is kept, its steps are cut to the span.

        A second loop of the same call is deterministic and not recorded.
        """
        original = super().set_timesteps  # type: ignore[misc]
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if self.sigma_rule != "pipeline":
            own = [given[k] for k in ("sigmas", "timesteps") if given.get(k) is not None]
            wanted = len(own[0]) if own else given["num_inference_steps"]  # own table, or a length
            rule = self.sigma_rule
            sigmas = np.linspace(1.0, 1.0 / wanted, wanted).tolist() if rule == "linear" else rule
            given = {k: v for k, v in given.items() if k in ("device", "mu")}
            given["sigmas"] = np.array(sigmas)
            original(**given)
        else:
            original(*args, **kwargs)
        self.full_timesteps = self.timesteps
        self.table = self._make_table()
        total = len(self.timesteps)
        tape = self.tape or Tape()
        first = self._compress(tape, original, given)
        self.num_steps = first + len(self.timesteps)
        start, stop = tape.span or (0, total)
        if not 0 <= start < stop <= total:
            raise problem("selection", (start, stop), f"the sampler has the steps 0 to {total - 1}")
        start, stop = start or first, self.num_steps if stop == total else stop
        if tape.span:
            self.timesteps = self.timesteps[start - first : stop - first]
            if self.kernel.family == "flow":  # what a pipeline reads by its own count of steps
                self.sigmas = self.sigmas[start - first : stop - first + 1]
        self.cursor = start if tape.span else first or tape.begin
        self._offset = start
        self._emitted = None
        if self.voice == 0:
            tape.over = tape.over or tape.started
            tape.cursor = self.cursor

    def _compress(self, tape: Tape, original: Any, given: dict[str, Any]) -> int:
        """Save steps outside the window, if the tape says so; returns the first step's index.

        A step of the window keeps its index. Those before it count down from there, those after it
        up, so that no other step has an index of the window.
        """
        self._solver = None
        if tape.flash is None or tape.window is None or tape.started:
            return 0
        if self.kernel.family != "flow":
            rule = f"it needs a kernel of flow matching, and kernel.name is {self.kernel.name}"
            raise problem("sampling.flash.ratio", tape.flash.ratio, rule, "Set it to null.")
        first = shorten(self, original, given, tape.window, tape.flash)
        self._solver = Solver(self._make_table(), tape.window, first, tape.flash, tape.history)
        return first

    def _make_table(self) -> Tensor:
        """`(T+1,)` float32 on the CPU: the sigmas, or for DDIM the cumulated alphas."""
        if self.kernel.family == "flow":
            sigmas = self.sigmas.detach().to("cpu", torch.float32)
            return 1 - sigmas if self._inverted else sigmas
        steps = self.timesteps.cpu()
        stride = self.config.num_train_timesteps // len(steps)  # type: ignore[attr-defined]
        last = int(steps[-1]) - stride
        end = self.alphas_cumprod[last] if last >= 0 else self.final_alpha_cumprod  # type: ignore[attr-defined]
        following = steps - stride
        table = self.alphas_cumprod[steps]  # type: ignore[attr-defined]
        if not torch.equal(following[:-1], steps[1:]):
            raise LeanError(
                f"{len(steps)} DDIM steps do not divide {self.config.num_train_timesteps} training "  # type: ignore[attr-defined]
                "timesteps evenly, so a step would not end where the next one starts. "
                "Set sampling.steps to a divisor."
            )
        return torch.cat([table, end.reshape(1)]).to(torch.float32)

    @property
    def _inverted(self) -> bool:
        """Whether the sigmas run upwards, from noise at 0 to data at 1 (Mochi): the velocity then
        points the other way, and 1 - sigma with its sign changed is the same flow."""
        return bool(self.config.get("invert_sigmas"))  # type: ignore[attr-defined]

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        *args: Any,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> SchedulerOutput | tuple[Tensor]:
        """One transition of `sample` `(B, ...)`; the next latent comes back detached.

        Raises LeanError when it is no transition of the whole latent by the model output.
        """
        tape, rows = self.tape or Tape(), sample.shape
        if len(sample) > 1 and len(tape.keys) < 2:  # the frames of one video, in rows
            half = len(sample) // 2
            if torch.equal(sample[:half], sample[half:]):
                raise LeanError(
                    "The pipeline steps its latent twice in one batch, the way its guidance works: "
                    "the two would get different noise. Use a guidance of 1."
                )
            model_output, sample = model_output[None], sample[None]
        if tape.planning and not tape.started:
            tape.begin = tape.cursor = self.cursor = self._position(timestep)
        i = self.cursor
        self._check(tape, model_output, timestep, sample, kwargs.get("per_token_timesteps"))
        dtype = torch.promote_types(
            torch.promote_types(model_output.dtype, sample.dtype), torch.float32
        )
        given = None if tape.over or i > tape.at else tape.latents
        if given is not None:
            x = self._stored(tape, given, sample, dtype)
        else:
            x = self._exact(sample, dtype)
        tape.started = True
        selected = tape.recorded()
        if given is not None and i < tape.at:
            following, zero = x, torch.zeros(())
            tape.parts.append(Part(x, x, Step(x, zero, zero), x))
        else:
            following = self._transition(tape, i, x, model_output.to(dtype), selected)
        self.cursor = i + 1
        self._step_index = self.cursor - self._offset
        self._emitted = following
        tape.copied = tape.copied or (not tape.parts[1:] and self.voice > 0)
        if len(tape.parts) == tape.voices and not tape.planning:
            self._conclude(tape, i, selected)
        # its own memory, which the pipeline may write into, laid out as a replay will hand it
        handed = following.reshape(rows).clone(memory_format=torch.contiguous_format)
        return SchedulerOutput(prev_sample=handed) if return_dict else (handed,)

    def _transition(self, tape: Tape, i: int, x: Tensor, output: Tensor, selected: bool) -> Tensor:
        """Draw, or for a replay read, the next latent of one scheduler; its part of the step."""
        noisy = i in tape.noisy and not tape.over
        output = -output if self._inverted else output
        step = self._move(x, output, i, noisy)
        mean = step.mean.detach()
        if tape.next_latents is not None and selected:
            following = _slice(tape, tape.next_latents, x).to(x.dtype)
        elif noisy:
            noise = normal(tape.seed, tape.keys, i + (self.voice << 32), x.shape[1:], like=mean)
            following = torch.addcmul(mean, noise, step.std.to(mean.device, x.dtype))
        else:
            following = mean
        tape.parts.append(Part(x, following, step, output))
        return following

    def _move(self, x: Tensor, output: Tensor, i: int, noisy: bool) -> Step:
        """Step i as a Gaussian: the kernel's, or a deterministic one, the solver's where it is."""
        table = self.table.to(x.dtype)  # a float64 model wants float64 coefficients too
        if self._solver is not None:
            self._solver.note(x, output, i)
        if noisy:
            return self.kernel.step(x, output, table, i)
        if self._solver is not None and self._solver.covers(i):
            zero = torch.zeros((), dtype=x.dtype)
            return Step(self._solver.step(x, i), zero, zero)
        return self.kernel.deterministic(x, output, table, i)

    def _conclude(self, tape: Tape, i: int, selected: bool) -> None:
        """All latents have stepped: score the transition, gradients off, the next step."""
        x, following, step, output = tape.parts[0] if len(tape.parts) == 1 else _join(tape.parts)
        if not tape.over:
            tape.state = following
            tape.final = following if tape.copied else tape.parts[0].following
        if selected:
            log_prob = self.kernel.log_prob(following, step)
        if tape.grad:
            torch.set_grad_enabled(False)
        tape.advance()
        if selected and tape.sink is not None:
            tape.sink(
                Transition(
                    keys=tape.keys,
                    step=i,
                    log_prob=log_prob,
                    prompts=tape.prompts,
                    latents=x,
                    next_latents=following,
                    mean=step.mean,
                    std=step.std,
                    kl_std=step.kl_std,
                    output=output,
                    same_start=tape.same_start,
                    inputs=tape.inputs,
                    version=tape.version,
                )
            )
        if tape.cursor == tape.stop:
            raise Finished
        if tape.cursor == self.num_steps and tape.last_step is not None:
            tape.last_step()

    def _position(self, timestep: Any) -> int:
        """The index a pipeline starts at: image-to-image leaves out the first steps."""
        if (begin := getattr(self, "begin_index", None)) is not None:
            return int(begin)
        same = (self.full_timesteps.cpu().double() == float(timestep)).nonzero()
        return int(same[0]) if len(same) else 0

    def _check(
        self, tape: Tape, output: Tensor, timestep: Any, sample: Tensor, tokens: Tensor | None
    ) -> None:
        if output.shape != sample.shape:
            raise LeanError(
                f"scheduler.step got a model output {tuple(output.shape)} for a latent "
                f"{tuple(sample.shape)}: a model that predicts its variance too has another "
                "density than the kernels know."
            )
        if tokens is not None and bool((tokens != tokens.max()).any()):
            raise LeanError(
                "scheduler.step got a timestep for each token: their transitions have several "
                "stds at once, which no kernel has. Leave out the conditions that need it."
            )
        if tape.planning:
            tape.shape = tuple(sample.shape)
            if tape.given is not None:
                given = tape.given.to(sample.device, sample.dtype)
                tape.taken_as_given = sample.shape == given.shape and torch.equal(sample, given)
                raise Finished
        elif tape.keys and len(sample) != len(tape.keys) and not tape.over:
            raise LeanError(
                f"The pipeline made {len(sample)} latents of {len(tape.keys)} prompts: it does not "
                "take them as a batch. Use rollout.micro_batch=1, and leave num_..._per_prompt."
            )

    def _stored(self, tape: Tape, stored: Tensor, sample: Tensor, dtype: torch.dtype) -> Tensor:
        """The stored latent; at the replayed step the pipeline must have it too."""
        x = _slice(tape, stored, sample).to(dtype)
        if self.cursor == tape.at and not torch.equal(sample.detach(), x.to(sample.dtype)):
            raise LeanError(
                f"Step {self.cursor} cannot be replayed: the pipeline does not come back to the "
                "latents it had. Use schedule 'retain' or 'reweight', which need no replay, with "
                "one optimizer step an update."
            )
        return x

    def _exact(self, sample: Tensor, dtype: torch.dtype) -> Tensor:
        """What the pipeline hands back, in full precision and in memory of its own.

        A pipeline may round the latent to its own dtype between two steps; the transition that is
        scored must start from the one that was emitted, so the unrounded value is put back. Some
        write the next latent into the same memory, which the transition must not see.
        """
        emitted = self._emitted
        if emitted is None or sample.dtype == emitted.dtype or sample.shape != emitted.shape:
            return sample.detach().to(dtype, copy=True)
        same = torch.equal(sample, emitted.to(sample.dtype))
        return emitted if same else sample.detach().to(dtype)


def _slice(tape: Tape, stored: Tensor, like: Tensor) -> Tensor:
    """This scheduler's part of a stored latent; schedulers step in the same order every time."""
    if tape.voices == 1:
        return stored
    start = sum(part.x[0].numel() for part in tape.parts)
    return stored[:, start : start + like[0].numel()].reshape(like.shape)


def _join(parts: Sequence[Part]) -> Part:
    """Several latents that stepped together as one `(B, N)`: one density over all elements."""
    stds = [float(part.step.std) for part in parts]
    if len(set(stds)) > 1:
        raise LeanError(
            f"The pipeline's latents step together with stds {stds}: a transition has one std."
        )
    x, following, mean, output = (
        torch.cat([tensor.flatten(1) for tensor in tensors], dim=1)
        for tensors in zip(*((p.x, p.following, p.step.mean, p.output) for p in parts), strict=True)
    )
    return Part(x, following, parts[0].step._replace(mean=mean), output)


def make_stochastic(scheduler: Any, kernel: Kernel, sigma_rule: str | Sequence[float]) -> Any:
    """A stochastic twin of a pipeline's scheduler, with its configuration.

    Flow-matching schedulers stay what they are where they have an Euler table (or
    `use_flow_sigmas`); any other flow scheduler becomes FlowMatchEulerDiscreteScheduler, and so
    does one that cannot be given sigmas when `sigma_rule` has some (DPMSolverMultistep, Sana's),
    with the same shift. One with cumulated alphas becomes DDIM with those very alphas. All by
    `from_config`. Raises LeanError when the kernel belongs to the other family, or the scheduler to
    neither.
    """
    require_density(scheduler)
    config = scheduler.config
    name = type(scheduler).__name__
    is_flow = hasattr(scheduler, "scale_noise") or bool(config.get("use_flow_sigmas"))
    base: Any
    other = {}
    if is_flow:
        base = type(scheduler) if config.get("use_flow_sigmas") else FlowMatchEulerDiscreteScheduler
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            base = type(scheduler)
        takes = inspect.signature(base.set_timesteps).parameters
        if sigma_rule != "pipeline" and "sigmas" not in takes:
            base, other = FlowMatchEulerDiscreteScheduler, {"shift": config.get("flow_shift", 1.0)}
    else:
        base = DDIMScheduler
    family = "flow" if is_flow else "ddim"
    if kernel.family != family:
        names = "flow_sde, flow_sde_wan, dance_sde, flow_cps" if is_flow else "ddim"
        raise problem("kernel.name", kernel.name, f"a {name} needs one of: {names}")
    if sigma_rule != "pipeline" and not is_flow:
        raise problem("sampling.sigmas", sigma_rule, f"a {name} has no sigmas", "Use 'pipeline'.")
    twin = _class(base).from_config(config, **other)
    twin.kernel, twin.sigma_rule = kernel, sigma_rule
    for table in () if is_flow else ("alphas_cumprod", "final_alpha_cumprod"):
        if isinstance(alphas := getattr(scheduler, table, None), Tensor):
            setattr(twin, table, alphas)  # CogVideoX shifts them, EulerDiscrete rescales them
    return twin


def require_density(scheduler: Any) -> None:
    """Raise LeanError when no kernel is the transition of this scheduler."""
    if reason := _no_density(scheduler):
        raise LeanError(f"The pipeline's scheduler is a {type(scheduler).__name__}, {reason}")


def _no_density(scheduler: Any) -> str:
    """Why no kernel is the transition of this scheduler, by what it takes and what it has."""
    config = scheduler.config
    step = inspect.signature(scheduler.step).parameters
    if "r_timestep" in step:
        return "whose model predicts where a step ends, not a velocity: no density is known."
    if config.get("original_inference_steps") or config.get("prediction_type") == "trigflow":
        return (
            "a sampler of consistency models, which jump to the image and back: their steps are "
            "not those of a diffusion, and no density is known. Train the model it was made from."
        )
    if config.get("thresholding"):
        return "which thresholds its prediction: no density is known. Switch it off."
    if config.get("timestep_type") == "continuous":
        return "with continuous timesteps, which DDIM has not: no density is known."
    if hasattr(scheduler, "scale_noise") or config.get("use_flow_sigmas"):
        return ""
    if "sigma_data" in config:
        return (
            "which preconditions its model as EDM does: neither a flow-matching scheduler nor one "
            "with cumulated alphas, so no transition kernel is known for it."
        )
    if not hasattr(scheduler, "alphas_cumprod"):
        return (
            "which is neither a flow-matching scheduler nor one with cumulated alphas: no "
            "transition kernel is known for it. If the model is of one of these two kinds, replace "
            "pipe.scheduler by FlowMatchEulerDiscreteScheduler or DDIMScheduler."
        )
    return ""


@functools.cache
def _class(base: Any) -> Any:
    """`Stochastic` in front of `base`, with the signature pipelines look at (`sigmas`, `mu`)."""
    made = type(f"Stochastic{base.__name__}", (Stochastic, base), {"__module__": __name__})
    set_timesteps = functools.wraps(base.set_timesteps)(
        lambda self, *args, **kwargs: Stochastic.set_timesteps(self, *args, **kwargs)
    )
    made.set_timesteps = set_timesteps  # type: ignore[attr-defined]
    return made
