"""What a step costs here: a few are run at their real shapes, timed, and their memory measured.

The pipeline itself is called, as for training; nothing is stepped. Noise belongs to samples, so
what is drawn here is drawn nowhere less, and the gradients formed here are thrown away: a run that
is probed first and one that is not are the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .costs import Key, StepCost
from .data import SampleKey, Transition
from .errors import LeanError
from .gradients import Gradients
from .ledger import sum_bytes
from .memory import Trace, peak_memory, storages
from .parallel import World
from .policy import Policy, Prefix
from .recompute import checkpointed
from .reweight import Reweight
from .samples import Samples
from .stopwatch import Stopwatch
from .tape import Tape

REPEATS = 3, 15
"""Timed runs, of which the median counts: at least, and at most; one run before them warms up."""

TIMED_S = 1.0
"""Seconds that timed runs are repeated for."""

SLOW_S = 20.0
"""A run that takes longer is timed once."""

SAMPLE = 2**24
"""Elements that the costs of the optimizer and of adding gradients are measured with, at most."""

Mark = Callable[[str], None]


class Times:
    """Seconds between marks; on CUDA by events, so that nothing waits in between."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.watch = device, Stopwatch(device)
        self.marks: list[tuple[str, object]] = []

    def mark(self, name: str) -> None:
        """End the phase underway and begin the next."""
        self.marks.append((name, self.watch.mark()))

    def read(self) -> dict[str, float]:
        """Seconds from each mark to the next one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {
            name: self.watch.seconds(start, end) for (name, start), (_, end) in pairwise(self.marks)
        }


@dataclass
class Probe:
    """What measures: a policy, where its backwards leave gradients, and the ranks in step with it.

    `selected` is how many steps of a trajectory are trained. Raises LeanError where none can be.
    """

    policy: Policy
    gradients: Gradients
    world: World = field(default_factory=World)
    prompt: str = "a test"
    selected: float = 1.0

    def __post_init__(self) -> None:
        std = self.policy.plan().std.tolist()
        free = [i for i, s in enumerate(std) if s > 0]
        if not free:
            raise LeanError("No step of this sampler can be trained, so there is none to probe.")
        pairs = [i for i in free if i + 1 in free]
        first = pairs[0] if pairs else free[0]
        self.steps = (first, first + 1) if pairs else (first,)
        self.device = self.policy.device

    # one walk through the first steps of a trajectory

    def _tape(self, m: int, *, grad: bool, sink: Callable[[Transition], None]) -> Tape:
        plan = self.policy.plan()
        return Tape(
            keys=tuple(SampleKey(0, 0, g) for g in range(m)),
            prompts=(self.prompt,) * m,
            seed=self.policy.seed,
            selected=frozenset(self.steps),
            noisy=frozenset(self.steps),
            grad=grad,
            stop=self.steps[-1] + 1,
            sink=sink,
            version=self.policy.version,
            begin=plan.begin,
            voices=plan.voices,
        )

    def _walk(self, tape: Tape, mark: Mark, *, capture: Any = None) -> None:
        """Call the pipeline; a mark at its start, before each step, and at the end."""
        policy, begun = self.policy, set[int]()

        def called(_: str, step: int) -> None:
            if step not in begun:
                begun.add(step)
                mark(f"step {step}")

        before, policy.on_call = policy.on_call, called
        tape.capture = capture if len(tape.keys) > 1 else None
        try:
            mark("call")
            latents = policy.initial_noise(tape, policy.plan())
            if tape.capture is not None:
                with tape.capture:
                    policy.call(policy.sampling, tape, latents=latents, output_type="latent")
            else:
                policy.call(policy.sampling, tape, latents=latents, output_type="latent")
            mark("end")
        finally:
            policy.on_call = before

    def plain(self, m: int, mark: Mark) -> list[Transition]:
        """Steps without gradients; returns what replays need."""
        taken: list[Transition] = []
        self._walk(self._tape(m, grad=False, sink=taken.append), mark)
        return taken

    def differentiated(
        self, m: int, mark: Mark, *, per_sample: bool, left: list[Left] | None = None
    ) -> None:
        """Steps with gradients, each followed by its backward.

        What the first of them has `left` of the batch is noted, if that is asked for.
        """
        gradients = self.gradients
        schedule = None
        if per_sample:
            schedule = Reweight(self.policy, gradients=gradients)
            schedule.begin(m, len(self.steps))
        else:
            gradients.begin()

        def backward(t: Transition) -> None:
            mark(f"backward {t.step}")
            if schedule is not None:
                schedule.transition(t)
                if left is not None and not left:
                    for samples in schedule._ledger.batches.values():
                        left.extend(kept_of(samples))
            else:
                gradients.before(idle=False)
                torch.autograd.backward([t.log_prob], [torch.full_like(t.log_prob, 1e-3)])
                gradients.after()
            mark(f"rest {t.step}")

        capture = None if schedule is None else schedule.capture
        try:
            tape = self._tape(m, grad=True, sink=backward)
            if schedule is None:
                self._walk(tape, mark)
            else:
                with schedule.sampling():
                    self._walk(tape, mark, capture=capture)
                self._fold(schedule, mark)
        finally:
            self._forget()

    def _fold(self, schedule: Reweight, mark: Mark) -> None:
        """Add a batch's gradients to a sum that is there."""
        ledger = schedule._ledger
        for i in range(len(self.policy.parameters)):
            ledger._sum(i)
        batches = list(ledger.batches.values())
        for samples in batches:
            mark("fold")
            samples.fold(torch.ones(samples.num, dtype=torch.float64), ledger._sum)
            mark("folded")

    def _forget(self) -> None:
        """Drop what backward has left, and put back what was there before."""
        self.gradients.take()
        self.gradients.finish()

    # what is made of the walks

    def step(self, key: Key) -> StepCost:
        """The cost of a step. Raises LeanError or torch.OutOfMemoryError where there is none."""
        with checkpointed(self.policy, key.checkpointing):
            return self._step(key.micro_batch, key.per_sample)

    def _step(self, m: int, per_sample: bool) -> StepCost:
        last = self.steps[-1]

        def run(mark: Mark) -> None:
            self.differentiated(m, mark, per_sample=per_sample)

        began = time.perf_counter()
        left: list[Left] = []
        # warms up, and finds out what cannot be done
        self.differentiated(m, lambda name: None, per_sample=per_sample, left=left)
        transitions = self.plain(m, lambda name: None)
        repeats = self._repeats(time.perf_counter() - began)
        with_grad, plain, replays = [], [], []
        for _ in range(repeats):  # in turn: a machine slows down and speeds up
            with_grad.append(self._timed(run))
            plain.append(self._timed(lambda mark: self.plain(m, mark)))
            replays.append(self._timed(lambda mark: self._replay(transitions[-1], mark)))
        steps = [[s for name, s in times.items() if name[:4] == "step"] for times in plain]
        forwards = [s for some in steps for s in (some[1:] or some)]  # the first may prepare
        memory = self._measured(run)
        peaks = {phase.name: phase for phase in memory.phases}
        bare = {p.name: p for p in self._measured(lambda mark: self.plain(m, mark)).phases}
        first = peaks[f"backward {self.steps[0]}"]
        again = peaks[f"backward {last}"] if len(self.steps) > 1 else first
        start, end = peaks[f"step {last}"], peaks[f"backward {last}"]
        forward = statistics.median(forwards)
        around, encode, decode, decode_peak = self._around(m, repeats)
        batch: dict[str, Any] = {}
        if left:
            whole, before = (waiting_bytes(left, n) for n in (self.selected, self.selected - 1))
            share = whole / max(1, waiting_bytes(left, len(self.steps)))
            fold = _median(with_grad, "fold") * share
            batch = {"waiting": whole, "waiting_before": before, "fold": fold}
        return StepCost(
            forward=forward,
            forward_grad=_median(with_grad, f"step {last}") + _median(with_grad, f"rest {last}"),
            backward=_median(with_grad, f"backward {last}"),
            replay=_median(replays, "replay"),
            call=max(0.0, around - self.last_steps * forward - decode),
            encode=encode,
            decode=decode,
            kept=max(0, end.held - start.held),
            forward_peak=max(p.peak for name, p in bare.items() if name.startswith("step")),
            forward_grad_peak=start.peak,
            backward_first_peak=first.peak,
            backward_peak=again.peak,
            decode_peak=decode_peak,
            **batch,
        )

    def _repeats(self, seconds: float) -> int:
        """How often to time what has taken so long; the same on all ranks."""
        least, most = REPEATS
        often = min(most, max(least, int(TIMED_S / max(seconds, 1e-6))))
        every: list[int] = self.world.share_all(1 if seconds > SLOW_S else often)
        return min(every)

    def _replay(self, transition: Transition, mark: Mark) -> None:
        mark("replay")
        again = self.policy.replay(transition)
        mark("end")
        del again

    def _timed(self, run: Callable[[Mark], Any]) -> dict[str, float]:
        times = Times(self.device)
        run(times.mark)
        return times.read()

    def _measured(self, run: Callable[[Mark], Any]) -> Trace:
        with peak_memory(self.device) as trace:
            run(trace.mark)
        return trace

    def _around(self, m: int, repeats: int) -> tuple[float, float, float, int]:
        """Seconds of a trajectory's end, of encoding new prompts, of decoding; bytes of that."""
        whole, new, decode = [], [], []
        for number in range(repeats):
            watch = Stopwatch(self.device)
            self._last_step(m, watch)
            times = watch.read()
            whole.append(sum(times.values()))
            decode.append(times.get("decode", 0.0))
            watch.reset()
            # spaces: the same tokens, but a prompt that has not been encoded yet
            self._last_step(m, watch, self.prompt + " " * (number + 1))
            new.append(sum(watch.read().values()))
        with peak_memory(self.device) as trace:
            self._last_step(m, _Marks(self.device, trace))
        peak = max((p.peak for p in trace.phases if p.name == "decode"), default=0)
        around = statistics.median(whole)
        encode = max(0.0, statistics.median(new) - around)
        return around, encode, statistics.median(decode), peak

    @property
    def _direct(self) -> bool:
        """Whether a trajectory can be begun at its last step: a pipeline that begins late, or
        steps several latents, is walked from its start."""
        plan = self.policy.plan(replace(self.policy.sampling, flash=None))
        return plan.voices == 1 and not plan.begin

    @property
    def last_steps(self) -> int:
        """How many steps `_last_step` runs."""
        plan = self.policy.plan(replace(self.policy.sampling, flash=None))
        return 1 if self._direct else len(plan.std)

    def _last_step(self, m: int, watch: Stopwatch, prompt: str | None = None) -> Tensor:
        """Pictures `(m, ...)` from the last step of a trajectory, which is nobody's."""
        policy = self.policy
        sampling = replace(policy.sampling, flash=None)
        plan = policy.plan(sampling)
        latents = torch.zeros(1, *plan.shape, dtype=torch.float32, device=self.device)
        keys = [SampleKey(0, 0, g) for g in range(m)]
        prompts = [self.prompt if prompt is None else prompt] * m
        prefix = Prefix(len(plan.std) - 1, latents) if self._direct else None
        before, policy.watch = policy.watch, watch
        try:
            made = policy.sample(prompts, keys, prefix=prefix, sampling=sampling)
        finally:
            policy.watch = before
        assert made.images is not None
        return made.images

    def picture(self) -> Tensor:
        """Something to score, `(1, C, H, W)` or `(1, F, C, H, W)`."""
        return self._last_step(1, Stopwatch(self.device))

    # what does not depend on the micro-batch

    def gradient_bytes(self) -> tuple[int, int, int]:
        """Bytes of a whole gradient, of an advantage-weighted sum, and of what is stepped."""
        compute = self.policy.dtype
        whole = stepped = 0
        for p in self.policy.parameters:
            size = (compute or p.dtype).itemsize
            whole += p.numel() * size
            stepped += sum(storages([p]).values())
        return whole, sum_bytes(self.policy.parameters), stepped

    def resident(self, optimizer: torch.optim.Optimizer, others: Sequence[Tensor] = ()) -> int:
        """Bytes that stay from update to update: weights, buffers, the optimizer's moments."""
        moments = sum(storages(self.policy.parameters).values()) * 2
        known = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        moments -= sum(t.numel() * t.element_size() for t in known if t.ndim)
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) + moments
        modules = [c for c in self.policy.pipe.components.values() if isinstance(c, nn.Module)]
        modules += list((self.policy._reference or {}).values())
        held = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        return sum(storages([*held, *known, *others]).values()) + moments

    def check(self) -> float:
        """Seconds of comparing the weights with those an update has begun with."""
        guard = self.policy.guard

        def run(mark: Mark) -> None:
            guard.mark("probe", needs_graph=False)
            mark("check")
            guard.check("probe")
            mark("end")

        return _median([self._timed(run) for _ in range(REPEATS[0])], "check")

    def transition_bytes(self) -> int:
        """Bytes that are remembered of a sample's step without its graph."""
        taken = self.plain(1, lambda name: None)[-1].without_graph()
        fields = [getattr(taken, n) for n in ("latents", "next_latents", "mean", "reference")]
        return sum(storages([t for t in fields if isinstance(t, Tensor)]).values())

    def optimizer(self, max_norm: float) -> tuple[float, float, int]:
        """Seconds of clipping and an AdamW step, of adding a gradient, and the step's peak bytes.

        On stand-ins for the parameters: a step of the optimizer itself would be a step.
        """
        stand_ins: list[nn.Parameter] = []
        total = taken = 0
        for p in self.policy.parameters:
            total += p.numel()
            if taken < SAMPLE:
                local = getattr(p, "_local_tensor", p)
                size = min(local.numel(), SAMPLE - taken)
                stand_ins.append(nn.Parameter(torch.zeros(size, dtype=p.dtype, device=p.device)))
                taken += p.numel() * size // max(1, local.numel())
        adam = torch.optim.AdamW(stand_ins, fused=True)
        total_sum, more = ([torch.zeros_like(p.detach()) for p in stand_ins] for _ in range(2))
        for p, g in zip(stand_ins, total_sum, strict=True):
            p.grad = g

        def step(mark: Mark) -> None:
            mark("step")
            torch.nn.utils.clip_grad_norm_(stand_ins, max_norm)
            adam.step()
            mark("add")
            torch._foreach_add_(total_sum, more, alpha=0.5)
            mark("end")

        step(lambda name: None)
        times = [self._timed(step) for _ in range(REPEATS[0])]
        peak = next(p.peak for p in self._measured(step).phases if p.name == "step")
        share = total / max(1, taken)
        return _median(times, "step") * share, _median(times, "add") * share, round(peak * share)

    def reduce(self) -> tuple[float, int]:
        """Seconds and peak bytes of adding a whole gradient over the ranks."""
        if self.world.size == 1:
            return 0.0, 0
        g = self.gradients
        before = [p.grad for p in self.policy.parameters]

        def run(mark: Mark) -> None:
            g.begin()
            self.world.any(False)  # all start together
            mark("reduce")
            g.reduce(lambda indices: [None] * len(indices), [True] * len(g.parameters))
            mark("end")
            self._forget()
            for p, grad in zip(self.policy.parameters, before, strict=True):
                p.grad = grad

        run(lambda name: None)
        times = [self._timed(run) for _ in range(REPEATS[0])]
        peaks = {p.name: p.peak for p in self._measured(run).phases}
        return _median(times, "reduce"), peaks["reduce"]

    def host_bandwidth(self) -> float:
        """Bytes a second to pinned memory of the host; infinite where there is no other memory."""
        if self.device.type != "cuda":
            return float("inf")
        here = torch.empty(2**26, dtype=torch.uint8, device=self.device)
        there = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)

        def run(mark: Mark) -> None:
            mark("copy")
            there.copy_(here, non_blocking=True)
            mark("end")

        run(lambda name: None)
        return here.numel() / _median([self._timed(run) for _ in range(REPEATS[0])], "copy")


class _Marks(Stopwatch):
    """A stopwatch that tells a trace of the stages it is switched to."""

    def __init__(self, device: torch.device, trace: Trace) -> None:
        super().__init__(device)
        self.trace = trace

    def switch(self, name: str) -> None:
        """As a stopwatch, and a mark."""
        super().switch(name)
        self.trace.mark(name)


@dataclass(frozen=True, slots=True)
class Left:
    """What one step leaves of a layer: bytes of a gradient for each sample, and the `factors` of
    it by their storage, None where they are larger."""

    formed: int
    factors: dict[int, int] | None


def kept_of(samples: Samples) -> list[Left]:
    """What a batch has of each layer after its first step."""
    found = []
    for layer, kept in samples.kept.items():
        numel = sum(getattr(layer.module, name).numel() for name in layer.names)
        tensors = kept.tensors()
        size = samples.num * numel * tensors[-1].element_size()
        found.append(Left(size, None if kept.formed else storages(tensors)))
    return found


def waiting_bytes(left: Sequence[Left], steps: float) -> int:
    """Bytes of what a batch leaves after `steps` steps, given what the first one has `left`.

    A layer is kept in factors while those of all its steps are smaller than its gradients
    (`Samples.add`); layers share inputs, so that storages are counted once.
    """
    if steps <= 0:
        return 0
    formed, factors = 0, dict[int, int]()
    for one in left:
        if one.factors is None or sum(one.factors.values()) * steps > one.formed:
            formed += one.formed
        else:
            factors |= one.factors
    return round(formed + sum(factors.values()) * steps)


def _median(times: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in times)
