"""Any diffusers pipeline as a policy: its own call samples, and the same call replays.

Two attachments and nothing else: a stochastic scheduler in place of the pipeline's, and a
pre-hook on each denoiser that switches gradients on for selected steps. No code here knows a
model; what differs between models is the pipeline's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Capture
from .compiling import detached, release_blocks
from .components import StandIn, denoisers
from .data import Rollout, SampleKey, Transition
from .errors import LeanError, problem
from .guard import Guard
from .hook import DenoiserHook
from .kernels import Kernel, kl_to_reference, make_kernel
from .memory import is_out_of_memory
from .noise import INITIAL, normal
from .pipeline import (
    Sampling,
    arguments,
    as_tensor,
    decode_in_own_dtype,
    generators,
    remember_prompts,
)
from .planning import Plan, check_memory, make_plan
from .solver import window
from .stochastic import make_stochastic, require_density
from .stopwatch import Stopwatch
from .tape import Finished, Tape


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where the trajectories of a group part: the latents `(1, ...)` before step `step`.

    `history` `(1, ...)` each: what the steps before it predicted, where a solver goes on from it.
    """

    step: int
    latents: Tensor
    history: tuple[Tensor, ...] = ()


class Policy:
    """A pipeline whose transitions are sampled, scored and differentiated.

    Raises LeanError when the pipeline has no denoiser or a scheduler without a known kernel. What
    is trained are the denoisers' parameters that require gradients now; everything else is frozen.
    """

    def __init__(
        self,
        pipe: Any,
        sampling: Sampling,
        *,
        kernel: str = "flow_sde",
        noise_level: float | None = 0.7,
        reduce: str = "mean",
        kl_form: str = "flow_grpo",
        seed: int = 0,
        reference: Mapping[str, nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        inputs: Mapping[str, Any] | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        """`kl_form`: what `with_kl` compares, see the setting. `reference`: frozen denoisers by
        name, the policy that KL is taken to (adapters need none). `dtype`: what the denoisers
        compute in, where it is not that of their weights. `inputs`: further arguments of the
        pipeline's call, where `sample` is given none (a picture to plan with)."""
        if isinstance(previous := getattr(pipe, "_leangrpo", None), Policy):
            previous.detach()
        self.pipe, self.seed, self.watch = pipe, seed, watch or Stopwatch()
        self.kl_form, self.inputs = kl_form, dict(inputs or {})
        self.names = list(denoisers(pipe))
        if not self.names:
            raise LeanError(
                f"{type(pipe).__name__} has no denoiser: none of its components "
                f"({', '.join(pipe.components)}) is a network that takes a timestep."
            )
        if not hasattr(pipe, "scheduler"):
            raise LeanError(
                f"{type(pipe).__name__} has no scheduler of its own: its loops are those of other "
                "pipelines. Use the one whose model is to be trained."
            )
        require_density(pipe.scheduler)
        self.original_scheduler = pipe.scheduler
        config = pipe.scheduler.config
        self.kernel: Kernel = make_kernel(
            kernel,
            noise_level=noise_level,
            reduce=reduce,
            prediction_type=config.get("prediction_type", "epsilon"),
            clip_range=config.get("clip_sample_range", 1.0) if config.get("clip_sample") else None,
        )
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self.on_call: Callable[[str, int], None] | None = None
        self._schedulers: dict[Any, Any] = {}
        self._shapes: dict[Any, Any] = {}
        self._reference = dict(reference) if reference else None
        self.dtype = dtype
        self.compiled = False  # see `compiling.compile_blocks`
        self._freeze_the_rest()
        self.denoisers = [getattr(pipe, name) for name in self.names]
        self.guard = Guard(self.denoisers)
        self._hooks = []
        named = [*self.names, *(f"reference {n}" for n in self._reference or ())]
        for name, module in zip(named, self.networks, strict=True):
            module.eval()  # dropout off; nothing else in a denoiser depends on the mode
            hook = DenoiserHook(self, name, module)
            self._hooks.append(
                module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            )
        remember_prompts(pipe)
        decode_in_own_dtype(pipe)
        pipe.set_progress_bar_config(disable=True)
        pipe._leangrpo = self
        self.sampling = sampling
        self.plan(sampling)
        check_memory(self)

    def detach(self) -> None:
        """Give the pipeline back as it was: its scheduler, its encoder and decoder, no hooks."""
        release_blocks(self)
        self.pipe.scheduler = self.original_scheduler
        for hook in self._hooks:
            hook.remove()
        self.pipe.__dict__.pop("encode_prompt", None)
        for component in self.pipe.components.values():
            if isinstance(component, nn.Module):
                component.__dict__.pop("decode", None)
        self.pipe._leangrpo = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in module order."""
        return self.guard.parameters

    @property
    def version(self) -> int:
        """Counts the changes of the weights; see `guard`."""
        return self.guard.version

    @property
    def networks(self) -> list[nn.Module]:
        """The denoisers, and the frozen ones of the reference policy."""
        return [*self.denoisers, *(self._reference or {}).values()]

    def trained(self) -> dict[str, nn.Module]:
        """The denoisers of which something is trained, by component name."""
        networks = zip(self.names, self.denoisers, strict=True)
        return {n: m for n, m in networks if any(p.requires_grad for p in m.parameters())}

    def all_trained(self) -> bool:
        """Whether every denoiser is trained (or none, where a policy only samples)."""
        return len(self.trained()) in (0, len(self.names))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters with the denoiser's name in front: `transformer.proj_out.weight`."""
        for name, module in zip(self.names, self.denoisers, strict=True):
            for key, parameter in module.named_parameters():
                if parameter.requires_grad:
                    yield f"{name}.{key}", parameter

    def plan(self, sampling: Sampling | None = None) -> Plan:
        """Table, latent shape and stds of a way of sampling, from some denoiser forwards; kept.

        Raises LeanError when the pipeline cannot be called so, or never calls `scheduler.step`.
        """
        sampling = sampling or self.sampling
        key = _hashable(sampling)
        if key not in self._plans:
            self._plans[key] = make_plan(self, sampling)
        return self._plans[key]

    def sample(
        self,
        prompts: Sequence[str],
        keys: Sequence[SampleKey],
        *,
        selected: Collection[int] = (),
        noisy: Collection[int] | None = None,
        grad: bool = False,
        decode: bool = True,
        same_noise: bool = False,
        prefix: Prefix | None = None,
        inputs: Mapping[str, Any] | None = None,
        on_transition: Callable[[Transition], None] | None = None,
        capture: Capture | None = None,
        sampling: Sampling | None = None,
    ) -> Rollout:
        """Sample one generation for each of B prompts, recording the `selected` steps.

        With `grad` the selected steps run with gradients and their transitions carry a graph; the
        others leave nothing behind. `noisy` steps are stochastic (default: every step that has
        noise, or none when nothing is selected: the pipeline's own deterministic sampler).
        With `same_noise` the generations of a prompt start from the same noise, and with a `prefix`
        they go on from where it ends instead of running its steps again. `inputs` are further
        arguments of the pipeline's call, such as the picture to edit: one for all B.
        `on_transition` takes each transition as it appears, so that its graph can go at once;
        `capture` is on while several samples are sampled together (see `capture`).
        Raises LeanError for a selected step that does not exist or has no noise, and for noisy
        steps that are no window where `sampling.flash` saves steps outside it.
        """
        sampling = sampling or self.sampling
        plan = self.plan(sampling)
        std = plan.std.tolist()
        if noisy is None:
            noisy = [i for i, s in enumerate(std) if s > 0] if selected else []
        for i in selected:
            if not 0 <= i < len(std):
                raise problem("selected", i, f"the sampler has the steps 0 to {len(std) - 1}")
            if std[i] <= 0 and plan.served and plan.served[i]:
                who = ", ".join(plan.served[i])
                raise problem("selected", i, f"only {who} works at this step, which is frozen")
            if std[i] <= 0 or i not in noisy:
                raise problem(
                    "selected", i, "this step adds no noise, so it has no log-probability"
                )
        if torch.is_inference_mode_enabled():
            raise LeanError(
                "Policy.sample was called under torch.inference_mode(), whose tensors can never "
                "take part in a backward. Use torch.no_grad(), or nothing: it is not needed."
            )
        taken: list[Transition] = []
        deliver = on_transition or taken.append
        tape = Tape(
            keys=tuple(keys),
            prompts=tuple(prompts),
            seed=self.seed,
            selected=frozenset(selected),
            noisy=frozenset(noisy),
            grad=(grad or self.compiled) and bool(selected),
            version=self.version,
            sink=deliver if grad else lambda t: deliver(detached(t)),
            last_step=lambda: self.watch.switch("decode"),
            capture=capture if grad and len(keys) > 1 else None,
            begin=plan.begin,
            voices=plan.voices,
            same_start=same_noise,
            inputs=inputs or {},
            flash=sampling.flash,
            window=window(noisy, sampling.flash),
        )
        latents = self.initial_noise(tape, plan)
        if prefix is not None:
            _check_prefix(prefix, tape)
            tape.history = list(prefix.history)
            stored = prefix.latents.expand(len(keys), *prefix.latents.shape[1:]).contiguous()
            tape.latents, tape.at, tape.same_start = stored, prefix.step, True
        with self.watch.stage("rollout"), tape.capture or nullcontext():
            output = self._go(
                sampling, tape, latents=latents, output_type="pt" if decode else "latent"
            )
        assert tape.final is not None
        images = as_tensor(output) if decode else None
        return Rollout(tape.keys, tape.prompts, images, tape.final, tuple(taken))

    def prefix(
        self, prompt: str, key: SampleKey, step: int, *, inputs: Mapping[str, Any] | None = None
    ) -> Prefix:
        """Run the deterministic steps [0, `step`) that all generations of a prompt share, once.

        They share them when they start from the same noise (`sample(same_noise=True)`) and draw
        none before `step`: FlowGRPO-Fast's branches. With one sample in a forward the rest is
        bitwise what it would have been; in larger forwards the matrix kernels round otherwise.
        """
        plan = self.plan()
        tape = Tape(
            keys=(key,),
            prompts=(prompt,),
            seed=self.seed,
            stop=step,
            begin=plan.begin,
            voices=plan.voices,
            same_start=True,
            inputs=inputs or {},
            flash=self.sampling.flash,
            window=window([step], self.sampling.flash),  # where it ends makes no difference here
        )
        with self.watch.stage("rollout"):
            latents = self.initial_noise(tape, plan)
            self._go(self.sampling, tape, latents=latents, output_type="latent")
        assert tape.state is not None
        return Prefix(step, tape.state, tuple(tape.history))

    def initial_noise(self, tape: Tape, plan: Plan) -> Tensor | None:
        """The noise trajectories start from, None where the pipeline draws it."""
        if not plan.direct:
            return None
        like = torch.empty(0, dtype=plan.dtype, device=self.device)
        return normal(self.seed, _start_keys(tape), INITIAL, plan.shape, like=like)

    def _go(
        self, sampling: Sampling, tape: Tape, *, latents: Tensor | None, output_type: str
    ) -> Any:
        """`_call`, from the tape's latents where it has any, in the way the pipeline allows."""
        plan = self.plan(sampling)
        if tape.latents is None:
            return self.call(sampling, tape, latents=latents, output_type=output_type)
        if plan.direct:
            tape.span = (tape.at, len(plan.std))
            return self.call(sampling, tape, latents=tape.latents, output_type=output_type)
        with self._stand_ins(tape):
            return self.call(sampling, tape, output_type=output_type)

    def replay(
        self, transition: Transition, *, grad: bool = True, capture: Capture | None = None
    ) -> Transition:
        """The same transition again under the current weights, with gradients unless `grad=False`.

        Bitwise the rollout's log-probability while the weights are the same: the pipeline is
        called for that one step, from the stored z_t, and the stored z_{t-1} is scored. A pipeline
        that does not take its latents as an argument is run from its start, with stand-ins for the
        denoisers until the step is reached. With `sampling.flash` too: a step of the window is the
        same in the sampler of all T steps. `capture`: as in `sample`.
        """
        t = transition
        if t.latents is None or t.next_latents is None:
            raise LeanError(f"Step {t.step} holds no latents to replay: it was not sampled here.")
        keys = tuple(k if isinstance(k, SampleKey) else SampleKey(0, 0, 0) for k in t.keys)
        taken: list[Transition] = []
        plan = self.plan()
        tape = Tape(
            keys=keys,
            prompts=t.prompts,
            seed=self.seed,
            selected=frozenset([t.step]),
            noisy=frozenset([t.step]),
            grad=grad,
            begin=plan.begin,
            voices=plan.voices,
            latents=t.latents,
            next_latents=t.next_latents,
            at=t.step,
            stop=t.step + 1,
            same_start=t.same_start,
            inputs=t.inputs,
            version=self.version,
            sink=taken.append,
            capture=capture if grad and len(keys) > 1 else None,
        )
        with tape.capture or nullcontext():
            self._go(self.sampling, tape, latents=None, output_type="latent")
        (new,) = taken
        if t.kl is not None:
            new.kl = self._divergence(new, t)
        return new

    @contextmanager
    def _stand_ins(self, tape: Tape) -> Iterator[None]:
        """Inside, the denoisers work from the step on that the tape has the latents of."""
        networks = {name: getattr(self.pipe, name) for name in self.names}
        for name, network in networks.items():
            self.pipe.__dict__[name] = StandIn(network, lambda: tape.cursor < tape.at, self._shapes)
        try:
            yield
        finally:
            self.pipe.__dict__.update(networks)

    def with_kl(self, transition: Transition) -> Transition:
        """Attach the divergence from the reference policy `(B,)`, with the graph the mean has.

        One more denoiser evaluation of the step, without gradients, under the reference weights:
        the adapters switched off, or the frozen copy of full fine-tuning.
        """
        with self.reference():
            away = self.replay(replace(transition, kl=None), grad=False)
        transition.reference = away.output if self.kl_form == "output" else away.mean
        transition.kl = self._divergence(transition, transition)
        return transition

    def _divergence(self, t: Transition, other: Transition) -> Tensor:
        """From what `other` has as its reference."""
        mine = t.output if self.kl_form == "output" else t.mean
        std = {"flow_grpo": t.kl_std, "exact": t.std}.get(self.kl_form)
        assert mine is not None and other.reference is not None
        return kl_to_reference(mine, other.reference, std)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the pipeline runs the reference policy; what is trainable is the same after."""
        trainable = [[p.requires_grad for p in module.parameters()] for module in self.denoisers]
        adapted = [module for module in self.denoisers if _adapter_layers(module)]
        if self._reference is None and not adapted:
            raise LeanError(
                "There is no reference policy: pass Policy(reference=copy_denoisers(pipe))."
            )
        if self._reference is not None:
            for name, module in self._reference.items():
                setattr(self.pipe, name, module)
        else:
            for module in adapted:
                module.disable_adapters()
        try:
            yield
        finally:
            for name, module, flags in zip(self.names, self.denoisers, trainable, strict=True):
                if self._reference is not None:
                    setattr(self.pipe, name, module)
                elif module in adapted:
                    module.enable_adapters()
                for parameter, flag in zip(module.parameters(), flags, strict=True):
                    parameter.requires_grad_(flag)  # PEFT turns frozen adapters trainable here

    @property
    def device(self) -> torch.device:
        parameter: Tensor = next(self.denoisers[0].parameters())
        return parameter.device

    def _freeze_the_rest(self) -> None:
        for name, component in self.pipe.components.items():
            if isinstance(component, nn.Module) and name not in self.names:
                component.requires_grad_(False)

    def call(
        self,
        sampling: Sampling,
        tape: Tape,
        *,
        output_type: str,
        latents: Tensor | None = None,
    ) -> Any:
        """The pipeline's own call with the tape in its scheduler; returns its first output.

        What the pipeline draws itself (its start, a picture's code) it draws with the generators
        of the samples, or torch's own seeded by the first, so that it draws the same again.
        """
        prompts = tape.prompts or ("",)
        rule = sampling.sigmas
        if rule not in self._schedulers:
            self._schedulers[rule] = make_stochastic(self.original_scheduler, self.kernel, rule)
        scheduler = self._schedulers[rule]
        if self.pipe.scheduler is not scheduler:
            self.pipe.scheduler = scheduler
        scheduler.tape, self._tape = tape, tape
        options = {
            "latents": None if latents is None else latents.clone(),  # some write into it
            "output_type": output_type,
            "generator": generators(self.seed, _start_keys(tape)),
            "return_dict": False,
        }
        first = options["generator"]
        first = first[0] if isinstance(first, list) else first
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                torch.manual_seed(first.initial_seed())
                output = self.pipe(
                    **arguments(self.pipe, sampling, prompts, options, tape.inputs or self.inputs)
                )
        except Finished:
            return None
        except (ValueError, TypeError, IndexError, AssertionError, RuntimeError) as error:
            if isinstance(error, LeanError) or is_out_of_memory(error) or len(prompts) < 2:
                raise
            raise LeanError(
                f"{type(self.pipe).__name__} cannot be called with {len(prompts)} prompts at once "
                f"({type(error).__name__}: {error}). Use rollout.micro_batch=1."
            ) from error
        finally:
            scheduler.tape = None
            if tape.planning:
                tape.count()
        return output[0]


def _start_keys(tape: Tape) -> list[SampleKey]:
    """Whose noise the trajectories start from: their own, or that of generation 0 for the group."""
    keys = list(tape.keys) or [SampleKey(0, 0, 0)]
    return [key._replace(generation=0) for key in keys] if tape.same_start else keys


def _check_prefix(prefix: Prefix, tape: Tape) -> None:
    if any(i < prefix.step for i in tape.noisy):
        rule = f"the prefix has run steps 0 to {prefix.step - 1}"
        raise problem("noisy", sorted(tape.noisy), rule)
    if tape.window and tape.window[0] != prefix.step:
        rule = "with sampling.flash they must begin where the prefix ends"
        raise problem("noisy", sorted(tape.noisy), rule, f"It ends before step {prefix.step}.")


def _adapter_layers(module: nn.Module) -> bool:
    return any(hasattr(m, "merged_adapters") for m in module.modules())


def _hashable(sampling: Sampling) -> tuple[Any, ...]:
    return (*(getattr(sampling, n) for n in sampling.__slots__ if n != "call"), repr(sampling.call))
