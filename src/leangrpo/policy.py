"""Any diffusers pipeline as a policy: its own call samples, and the same call replays.

Two attachments and nothing else: a stochastic scheduler in place of the pipeline's, and a
pre-hook on each denoiser that switches gradients on for selected steps. No code here knows a
model; what differs between models is the pipeline's business.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Capture
from .data import Rollout, SampleKey, Transition
from .errors import LeanError, problem
from .guard import Guard
from .kernels import Kernel, kl_to_reference, make_kernel, stds
from .noise import INITIAL, normal
from .pipeline import arguments, decode_in_own_dtype, main_dtype, remember_prompts
from .stochastic import Tape, make_stochastic
from .stopwatch import Stopwatch

DENOISERS = ("transformer", "transformer_2", "unet")
"""Component names under which diffusers keeps the network that is called once per step."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the pipeline is called. `call` holds further keyword arguments of its `__call__`.

    `sigmas`: "pipeline" (whatever pipeline and scheduler make of `steps`), "linear"
    (linspace(1, 1/T, T) before the shift), or T explicit floats.
    """

    steps: int
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    negative_prompt: str | None = None
    sigmas: str | tuple[float, ...] = "pipeline"
    call: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a first, empty run of the pipeline told: `shape` of one sample's latent (without B),
    the scheduler's `table` `(T+1,)` (sigmas, or cumulated alphas), the `timesteps` `(T,)` the
    network sees and the `std` `(T,)` of every transition."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    table: Tensor
    timesteps: Tensor
    std: Tensor


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where the trajectories of a group part: the latents `(1, ...)` before step `step`."""

    step: int
    latents: Tensor


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
        watch: Stopwatch | None = None,
    ) -> None:
        """`kl_form`: what `with_kl` compares, see the setting. `reference`: frozen denoisers by
        name, the policy that KL is taken to (adapters need none). `dtype`: what the denoisers
        compute in, where it is not that of their weights."""
        if isinstance(previous := getattr(pipe, "_leangrpo", None), Policy):
            previous.detach()
        self.pipe, self.seed, self.watch = pipe, seed, watch or Stopwatch()
        self.kl_form = kl_form
        self.names = [n for n in DENOISERS if isinstance(getattr(pipe, n, None), nn.Module)]
        if not self.names:
            raise LeanError(
                f"{type(pipe).__name__} has no denoiser: looked for {', '.join(DENOISERS)}."
            )
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
        self._reference = dict(reference) if reference else None
        self.dtype = dtype
        self._freeze_the_rest()
        self.denoisers = [getattr(pipe, name) for name in self.names]
        self.guard = Guard(self.denoisers)
        self._hooks = []
        networks = list(zip(self.names, self.denoisers, strict=True))
        networks += [(f"reference {n}", m) for n, m in (self._reference or {}).items()]
        for name, module in networks:
            module.eval()  # dropout off; nothing else in a denoiser depends on the mode
            hook = _DenoiserHook(self, name, module)
            self._hooks.append(
                module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            )
        remember_prompts(pipe)
        decode_in_own_dtype(pipe)
        pipe.set_progress_bar_config(disable=True)
        pipe._leangrpo = self
        self.sampling = sampling
        self.plan(sampling)

    def detach(self) -> None:
        """Give the pipeline back as it was: its scheduler, its encoder and decoder, no hooks."""
        self.pipe.scheduler = self.original_scheduler
        for hook in self._hooks:
            hook.remove()
        self.pipe.__dict__.pop("encode_prompt", None)
        if vae := getattr(self.pipe, "vae", None):
            vae.__dict__.pop("decode", None)
        self.pipe._leangrpo = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in module order."""
        return self.guard.parameters

    @property
    def version(self) -> int:
        """Counts the changes of the weights; see `guard`."""
        return self.guard.version

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters with the denoiser's name in front: `transformer.proj_out.weight`."""
        for name, module in zip(self.names, self.denoisers, strict=True):
            for key, parameter in module.named_parameters():
                if parameter.requires_grad:
                    yield f"{name}.{key}", parameter

    def plan(self, sampling: Sampling | None = None) -> Plan:
        """Table, latent shape and stds of a way of sampling, from one denoiser forward; remembered.

        Raises LeanError when the pipeline cannot be called so, or never calls `scheduler.step`.
        """
        sampling = sampling or self.sampling
        key = _hashable(sampling)
        if key not in self._plans:
            tape = Tape(span=(0, 1))
            generator = torch.Generator().manual_seed(0)
            self._call(sampling, tape, ("",), output_type="latent", generator=generator)
            if tape.shape is None:
                raise LeanError(
                    f"{type(self.pipe).__name__} never called scheduler.step(): its loop does not "
                    "go through the scheduler, so there is no transition to sample."
                )
            scheduler = self.pipe.scheduler
            table = scheduler.table
            repeats = self.kernel.family == "flow" and bool((table[1:] == table[:-1]).any())
            if repeats or not torch.isfinite(table).all():
                raise LeanError(
                    f"The scheduler's table for sampling.steps={sampling.steps} repeats a value or "
                    f"is not finite ({[round(v, 4) for v in table.tolist()]}): such a step has no "
                    "density. Choose other sampling.steps or sampling.sigmas."
                )
            self._plans[key] = Plan(
                shape=tape.shape[1:],
                dtype=torch.promote_types(main_dtype(self.denoisers[0]), torch.float32),
                table=table,
                timesteps=scheduler.full_timesteps.cpu(),
                std=stds(self.kernel, table),
            )
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
        on_transition: Callable[[Transition], None] | None = None,
        capture: Capture | None = None,
        sampling: Sampling | None = None,
    ) -> Rollout:
        """Sample one generation for each of B prompts, recording the `selected` steps.

        With `grad` the selected steps run with gradients and their transitions carry a graph; the
        others leave nothing behind. `noisy` steps are stochastic (default: every step that has
        noise, or none when nothing is selected: the pipeline's own deterministic sampler).
        With `same_noise` the generations of a prompt start from the same noise, and with a `prefix`
        they go on from where it ends instead of running its steps again.
        `on_transition` takes each transition as it appears, so that its graph can go at once;
        `capture` is on while several samples are sampled together (see `capture`).
        Raises LeanError for a selected step that does not exist or has no noise.
        """
        sampling = sampling or self.sampling
        plan = self.plan(sampling)
        std = plan.std.tolist()
        if noisy is None:
            noisy = [i for i, s in enumerate(std) if s > 0] if selected else []
        for i in selected:
            if not 0 <= i < len(std):
                raise problem("selected", i, f"the sampler has the steps 0 to {len(std) - 1}")
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
        tape = Tape(
            keys=tuple(keys),
            prompts=tuple(prompts),
            seed=self.seed,
            selected=frozenset(selected),
            noisy=frozenset(noisy),
            grad=grad and bool(selected),
            version=self.version,
            sink=on_transition or taken.append,
            last_step=lambda: self.watch.switch("decode"),
            capture=capture if grad and len(keys) > 1 else None,
        )
        if prefix is None:
            latents = self._noise(tape.keys, plan, same=same_noise)
        else:
            if any(i < prefix.step for i in noisy):
                raise problem(
                    "noisy", sorted(noisy), f"the prefix has run steps 0 to {prefix.step - 1}"
                )
            latents = prefix.latents.expand(len(keys), *plan.shape).contiguous()
            tape.span, tape.latents = (prefix.step, len(std)), latents
        with self.watch.stage("rollout"), tape.capture or nullcontext():
            output = self._call(
                sampling, tape, prompts, latents=latents, output_type="pt" if decode else "latent"
            )
        final = self.pipe.scheduler._emitted
        images = output.detach().to("cpu", torch.float32) if decode else None
        return Rollout(tape.keys, tape.prompts, images, final, tuple(taken))

    def prefix(self, prompt: str, key: SampleKey, step: int) -> Prefix:
        """Run the deterministic steps [0, `step`) that all generations of a prompt share, once.

        They share them when they start from the same noise (`sample(same_noise=True)`) and draw
        none before `step`: FlowGRPO-Fast's branches. With one sample in a forward the rest is
        bitwise what it would have been; in larger forwards the matrix kernels round otherwise.
        """
        plan = self.plan()
        tape = Tape(keys=(key,), prompts=(prompt,), seed=self.seed, span=(0, step))
        latents = self._noise(tape.keys, plan, same=True)
        with self.watch.stage("rollout"):
            self._call(self.sampling, tape, tape.prompts, latents=latents, output_type="latent")
        return Prefix(step, self.pipe.scheduler._emitted)

    def _noise(self, keys: Sequence[SampleKey], plan: Plan, *, same: bool) -> Tensor:
        """The noise trajectories start from; with `same` that of generation 0 for the group."""
        own = [key._replace(generation=0) for key in keys] if same else keys
        like = torch.empty(0, dtype=plan.dtype, device=self._device)
        return normal(self.seed, own, INITIAL, plan.shape, like=like)

    def replay(self, transition: Transition, *, grad: bool = True) -> Transition:
        """The same transition again under the current weights, with gradients unless `grad=False`.

        Bitwise the rollout's log-probability while the weights are the same: the pipeline is
        called for that one step, from the stored z_t, and the stored z_{t-1} is scored.
        """
        t = transition
        if t.latents is None or t.next_latents is None:
            raise LeanError(f"Step {t.step} holds no latents to replay: it was not sampled here.")
        keys = tuple(k if isinstance(k, SampleKey) else SampleKey(0, 0, 0) for k in t.keys)
        taken: list[Transition] = []
        tape = Tape(
            keys=keys,
            prompts=t.prompts,
            seed=self.seed,
            selected=frozenset([t.step]),
            noisy=frozenset([t.step]),
            grad=grad,
            span=(t.step, t.step + 1),
            latents=t.latents,
            next_latents=t.next_latents,
            version=self.version,
            sink=taken.append,
        )
        self._call(self.sampling, tape, t.prompts, latents=t.latents, output_type="latent")
        (new,) = taken
        if t.kl is not None:
            new.kl = self._divergence(new, t)
        return new

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
        if self._reference is None and not any(_adapter_layers(m) for m in self.denoisers):
            raise LeanError(
                "There is no reference policy: pass Policy(reference=copy_denoisers(pipe))."
            )
        if self._reference is not None:
            for name, module in self._reference.items():
                setattr(self.pipe, name, module)
        else:
            for module in self.denoisers:
                module.disable_adapters()
        try:
            yield
        finally:
            for name, module, flags in zip(self.names, self.denoisers, trainable, strict=True):
                if self._reference is not None:
                    setattr(self.pipe, name, module)
                else:
                    module.enable_adapters()
                for parameter, flag in zip(module.parameters(), flags, strict=True):
                    parameter.requires_grad_(flag)  # PEFT turns frozen adapters trainable here

    @property
    def _device(self) -> torch.device:
        parameter: Tensor = next(self.denoisers[0].parameters())
        return parameter.device

    def _freeze_the_rest(self) -> None:
        for name, component in self.pipe.components.items():
            if isinstance(component, nn.Module) and name not in self.names:
                component.requires_grad_(False)

    def _call(self, sampling: Sampling, tape: Tape, prompts: Sequence[str], **kwargs: Any) -> Any:
        """The pipeline's own call with the tape in its scheduler; returns its first output."""
        rule = sampling.sigmas
        if rule not in self._schedulers:
            self._schedulers[rule] = make_stochastic(self.original_scheduler, self.kernel, rule)
        scheduler = self._schedulers[rule]
        if self.pipe.scheduler is not scheduler:
            self.pipe.scheduler = scheduler
        scheduler.tape, self._tape = tape, tape
        try:
            output = self.pipe(**arguments(self.pipe, sampling, prompts), **kwargs)
        finally:
            scheduler.tape = None
        return output[0]


class _DenoiserHook:
    """Before every denoiser call: gradients on for a selected step, inputs in the network's dtype.

    `Policy.on_call(name, step)`, where set, is told. Installed first (`prepend`), so that a sharded
    module finds gradients on when it prepares its own backward. Timesteps, guidance and position
    ids keep the precision the pipeline gave them: rounded to 16 bits they would be other numbers
    (978.26 becomes 980).
    """

    def __init__(self, policy: Policy, name: str, module: nn.Module) -> None:
        self.policy, self.name = policy, name
        self.dtype = policy.dtype or main_dtype(module)
        self.names = list(inspect.signature(module.forward).parameters)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        scheduler = self.policy.pipe.scheduler
        tape = getattr(scheduler, "tape", None)
        if tape is not None:
            torch.set_grad_enabled(tape.grad and scheduler.cursor in tape.selected)
            if self.policy.on_call is not None:
                self.policy.on_call(self.name, scheduler.cursor)
        args = tuple(self._cast(n, a) for n, a in zip(self.names, args, strict=False))
        kwargs = {name: self._cast(name, value) for name, value in kwargs.items()}
        if tape is not None and tape.capture is not None:
            first = args[0] if args else kwargs[self.names[0]]
            tape.capture.rows = len(first)
        return args, kwargs

    def _cast(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            exact = name in _EXACT or name.endswith("ids") or not value.is_floating_point()
            return value if exact else value.to(self.dtype)
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [self._cast(name, v) for v in value]
        if isinstance(value, dict):
            return {key: self._cast(key, v) for key, v in value.items()}
        return value


_EXACT = frozenset({"timestep", "timesteps", "t", "guidance", "image_rotary_emb", "freqs"})


def _adapter_layers(module: nn.Module) -> bool:
    return any(hasattr(m, "merged_adapters") for m in module.modules())


def _hashable(sampling: Sampling) -> tuple[Any, ...]:
    return (*(getattr(sampling, n) for n in sampling.__slots__ if n != "call"), repr(sampling.call))
