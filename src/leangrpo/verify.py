"""Whether a schedule is exact: one optimizer update under each of them, from one state.

Two protocols. *Fixed trajectory*: native samples, and every schedule is given the recorded steps,
rewards and advantages; kernels are deterministic where torch has such. *End to end*: each makes
its own rollout and has it rewarded. Compared with native's are the gradient (after correction,
synchronisation and accumulation, before clipping), the optimizer's update, and AdamW's moments;
each gradient is also compared with plain autograd in a higher precision (`witness`), and native
with itself. (Paper, tables 2 to 4.)
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .alignment import QUANTITIES, alignment, judge
from .aside import set_up_aside
from .checks import check_capture
from .config import Config
from .data import Transition
from .diagnosis import Suspects
from .errors import LeanError, StaleGraphError, problem
from .gradients import Gradients
from .memory import is_out_of_memory
from .oracle import float64_throughout
from .parallel import local, scatter_like, world_size
from .rollout import roll_out
from .schedules import Schedule
from .scoreboard import Scoreboard
from .setup import Setup, gradients_of, make_schedule
from .train import step
from .witness import Witness

OFFLOAD_BYTES = 1 << 20

SMALL = 1e-5
"""Below this a difference is rounding, and no mistake is looked for."""
SPOKEN = {"fixed": "fixed trajectory", "end_to_end": "end to end"}

Event = tuple[str, Any]
Outcome = dict[str, list[Tensor]]
"""What an update left on this rank, on the CPU: tensors of all parameters for each quantity."""


@dataclass
class Recorder:
    """Native, and a record of all that a loop tells it."""

    schedule: Schedule
    events: list[Event] = field(default_factory=list)
    streams = True  # so that the means of groups are told as well

    def __getattr__(self, name: str) -> Any:
        return getattr(self.schedule, name)

    def transition(self, transition: Transition) -> None:
        self.events.append(("transition", transition.without_graph()))
        self.schedule.transition(transition)

    def rewards(self, rewards: Mapping[Hashable, Sequence[float]]) -> None:
        self.events.append(("rewards", dict(rewards)))
        self.schedule.rewards(rewards)

    def centre(self, deviations: Mapping[Hashable, Sequence[float]]) -> None:
        self.events.append(("centre", dict(deviations)))
        self.schedule.centre(deviations)

    def advantages(self, advantages: Mapping[Hashable, float]) -> None:
        self.events.append(("advantages", dict(advantages)))
        self.schedule.advantages(advantages)


@dataclass
class Verification:
    """Everything `verify` found; `as_dict` is what `--json` writes."""

    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    broken: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """`rows`, the broken bounds with their diagnoses, and who refused to take part."""
        return {
            **self.about,
            "rows": self.rows,
            "broken": self.broken,
            "refused": self.refused,
            "notes": self.notes,
        }


def default_schedules(ranks: int) -> list[str]:
    """All variants there are, native first."""
    lean = ["native", "retain", "retain:offload", "reweight", "streaming"]
    return lean if ranks == 1 else [*lean, "native:step", "retain:group", "reweight:group"]


def verify(
    config: Config,
    names: Sequence[str] | None = None,
    *,
    oracle: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Compare one update of every schedule with native's; a collective of all ranks.

    `names` are schedules, with `:step`, `:group` or `:update` for their synchronisation, or
    `:offload` for retain within a budget; `MODULE:FUNCTION` is one of yours, made by
    `FUNCTION(policy, kl=, gradients=, watch=)`. A native update comes first, so that AdamW's
    moments and the second factors of LoRA are not zero. Without `oracle` there is no copy of the
    pipeline in a higher precision, and 16-bit schedules have no bound but retain's. `say` is told
    what is under way.

    Raises LeanError for a schedule that does not exist, and where there is nothing to compare.
    """
    wanted = [n for n in names or default_schedules(world_size()) if n != "native"]
    variants = {name: _varied(config, name) for name in wanted}
    with ExitStack() as stack:
        if config.model.dtype == "float64":
            stack.enter_context(float64_throughout())
        s = stack.enter_context(set_up_aside(_varied(config, "native")))
        return _Trial(s, variants, say, named=bool(names)).run(oracle=oracle)


def _varied(config: Config, name: str) -> Config:
    """The config of a variant, with one optimizer step an update. Raises LeanError for no such."""
    schedule, _, more = name.partition(":")
    if schedule not in ("native", "retain", "reweight", "streaming"):
        _factory(name)
        schedule, more = "native", ""
    if more not in ("", "step", "group", "update", *["offload"] * (schedule == "retain")):
        rule = "after the schedule comes step, group or update, or after retain offload"
        raise problem("--schedules", name, rule, "For example native:step or retain:offload.")
    budget = (config.memory.activations or OFFLOAD_BYTES) if more == "offload" else None
    sync = {} if more in ("", "offload") else {"sync": more}
    parts = config.rollout.parts
    prompts = config.rollout.prompts // parts
    return config.model_copy(
        update={
            "schedule": schedule,
            "parallel": config.parallel.model_copy(update=sync),
            "memory": config.memory.model_copy(update={"activations": budget}),
            "rollout": config.rollout.model_copy(
                update={"parts": 1, "epochs": 1, "prompts": prompts}
            ),
        }
    )


def _factory(name: str) -> Callable[..., Schedule]:
    """A schedule of the user's own, `MODULE:FUNCTION`."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        rule = (
            "it must be native, retain, reweight, streaming or MODULE:FUNCTION that can be "
            f"imported ({error})"
        )
        raise problem("--schedules", name, rule) from error
    return found  # type: ignore[no-any-return]


class _Trial:
    """One state of a run, and what every schedule makes of it."""

    def __init__(
        self,
        s: Setup,
        variants: Mapping[str, Config],
        say: Callable[[str], None],
        *,
        named: bool,
    ) -> None:
        self.s, self.say, self.named = s, say, named
        self.native = s.schedule
        self.witness: Witness | None = None
        c = s.config
        self.result = Verification(
            {
                "pipeline": c.model.pipeline,
                "train": c.model.train,
                "dtype": c.model.dtype,
                "ranks": s.world.size,
                "shards": s.world.shards,
                "prompts": c.rollout.prompts,
                "generations": c.rollout.generations,
                "micro_batch": c.rollout.micro_batch,
                "parameters": sum(p.numel() for p in s.policy.parameters),
            }
        )
        # All before the first update: what keeps a copy of the weights has one of those then.
        self.schedules: dict[str, tuple[Schedule, Gradients]] = {}
        for name, varied in variants.items():
            try:
                self.schedules[name] = self._make(name, varied)
            except LeanError as error:
                self._refuse(name, error)

    def _make(self, name: str, varied: Config) -> tuple[Schedule, Gradients]:
        s = self.s
        for refusal in check_capture(varied):
            raise refusal
        gradients = gradients_of(varied, s.policy, s.world)
        if name.partition(":")[0] == varied.schedule:
            return make_schedule(varied, s.policy, s.watch, gradients), gradients
        kl = varied.objective.kl
        made = _factory(name)(s.policy, kl=kl, gradients=gradients, watch=s.watch)
        return made, gradients

    def run(self, *, oracle: bool) -> Verification:
        s, result = self.s, self.result
        self.before = self._weights()
        self.remembered = s.memory()
        self.say("native, an update to start from")
        self._roll_out(self.native, 0)
        step(s, 0)
        self.start, self.state = self._weights(), self._optimizer()
        self.remembered = s.memory()
        self.say("native, end to end")
        recorder = Recorder(self.native)
        self._roll_out(recorder, 1)
        self.events = recorder.events
        reference = {"end_to_end": self._finish()}
        if not s.world.any(any(bool(g.any()) for g in reference["end_to_end"]["gradient"])):
            raise LeanError(
                "There is nothing to compare: all rewards of each group are equal, so native's "
                "gradient is zero. Choose rewards that tell the samples apart, or more generations."
            )
        result.about["selected"] = len(s.select(1).selected)
        self.oracle = self._ask_the_oracle() if oracle else None
        self.say("native, fixed trajectory")
        reference["fixed"] = self._run(self.native, "fixed")
        for protocol in ("fixed", "end_to_end"):
            self._protocol(protocol, reference[protocol])
        return result

    def _protocol(self, protocol: str, native: Outcome) -> None:
        """Native again, then every schedule, compared with native's first update."""
        self.say(f"native again, {SPOKEN[protocol]}")
        again = self._run(self.native, protocol)
        noise = self._compare("native", protocol, again, native)
        for name, (schedule, gradients) in list(self.schedules.items()):
            self.say(f"{name}, {SPOKEN[protocol]}")
            try:
                outcome = self._run(schedule, protocol)
            except (LeanError, RuntimeError) as error:
                if not isinstance(error, LeanError) and not is_out_of_memory(error):
                    raise
                gradients.take()
                gradients.finish()
                self._restore()
                self._refuse(name, error)
                del self.schedules[name]
                continue
            rows = self._compare(name, protocol, outcome, native)
            for broken in judge(rows, noise):
                broken["diagnosis"] = self._diagnose(broken, outcome, native)
                self.result.broken.append(broken)

    def _run(self, schedule: Schedule, protocol: str) -> Outcome:
        if protocol == "end_to_end":
            self._roll_out(schedule, 1)
        else:
            with _deterministic():
                self._replay(schedule)
        return self._finish()

    def _begin(self, schedule: Schedule, update: int) -> None:
        c = self.s.config.rollout
        num_samples = c.prompts * (self.s.credit.kept or c.generations)
        num_steps = len(self.s.select(update).selected)
        self.scale = 1.0 / (num_samples * num_steps)
        schedule.begin(num_samples, num_steps)

    def _roll_out(self, schedule: Any, update: int) -> None:
        """An update's rollout and rewards, up to the gradient in `.grad`."""
        s, c = self.s, self.s.config.rollout
        s.credit.history.load_state_dict(self.remembered.get("history", {}))
        s.schedule = schedule
        self._begin(schedule, update)
        table = Scoreboard(c.prompts, c.generations, s.scorer.names)
        roll_out(s, update, 0, table, [], last=True)
        schedule.finish()

    def _replay(self, schedule: Schedule) -> None:
        """The recorded events, the steps evaluated again where the schedule wants their graphs."""
        self._begin(schedule, 1)
        for event, value in self.events:
            if event != "transition":
                getattr(schedule, event)(value)
                continue
            given = replace(value)
            if schedule.needs_graph:
                with schedule.sampling():
                    given = self.s.policy.replay(value, capture=schedule.capture)
                given.weight, given.baseline = value.weight, value.baseline
            schedule.transition(given)
        schedule.finish()

    def _finish(self) -> Outcome:
        """Take the gradient, step the optimizer, take what it did, and go back to the start."""
        s, parameters = self.s, self.s.policy.parameters
        gradient = [_kept(p.grad, like=p) for p in parameters]
        step(s, 1)
        moved = [a - b for a, b in zip(self._weights(), self.start, strict=True)]
        states = [s.optimizer.state.get(p, {}) for p in parameters]
        first, second = (
            [_kept(state.get(name), like=p) for state, p in zip(states, parameters, strict=True)]
            for name in ("exp_avg", "exp_avg_sq")
        )
        self._restore()
        return dict(zip(QUANTITIES, (gradient, moved, first, second), strict=True))

    def _weights(self) -> list[Tensor]:
        return [_kept(p, like=p) for p in self.s.policy.parameters]

    def _optimizer(self) -> list[dict[str, Tensor]]:
        states = (self.s.optimizer.state.get(p, {}) for p in self.s.policy.parameters)
        return [{k: local(v).cpu().clone() for k, v in state.items()} for state in states]

    @torch.no_grad()
    def _restore(self) -> None:
        """The weights and the optimizer's state that every schedule starts from."""
        optimizer = self.s.optimizer
        optimizer.zero_grad(set_to_none=True)
        self._place(self.start)
        for parameter, saved in zip(self.s.policy.parameters, self.state, strict=True):
            if not saved:
                optimizer.state.pop(parameter, None)
            for name, value in saved.items():
                local(optimizer.state[parameter][name]).copy_(value)

    @torch.no_grad()
    def _place(self, weights: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.s.policy.parameters, weights, strict=True):
            local(parameter).copy_(value)
        self.s.policy.guard.bump("the start was restored")

    @property
    def _transitions(self) -> list[Transition]:
        return [value for event, value in self.events if event == "transition"]

    @property
    def _advantages(self) -> dict[Hashable, float]:
        every = (value for event, value in self.events if event == "advantages")
        return {key: a for some in every for key, a in some.items()}

    def _ask_the_oracle(self) -> list[Tensor] | None:
        """This rank's part of the gradient by plain autograd, None where it cannot be had."""
        self.say("the oracle")
        try:
            self.witness = Witness(self.s.config, self.s.policy, self.s.world)
            found = self.witness.gradient(self._transitions, self._advantages, self.scale)
        except (RuntimeError, TypeError, ValueError) as error:
            first = str(error).partition("\n")[0]
            self.result.notes.append(f"no oracle: {type(error).__name__}: {first}")
            self.witness = None
            return None
        self.result.about["oracle"] = self.witness.dtype
        return self._own(found)

    def _own(self, whole: Sequence[Tensor]) -> list[Tensor]:
        parameters = self.s.policy.parameters
        return [local(scatter_like(g, p)).cpu() for g, p in zip(whole, parameters, strict=True)]

    def _compare(
        self, name: str, protocol: str, outcome: Outcome, native: Outcome
    ) -> dict[str, dict[str, Any]]:
        """Rows of the result, one a quantity."""
        rows = {}
        for quantity in QUANTITIES:
            found = alignment(outcome[quantity], native[quantity], self.s.world)
            row = {
                "schedule": name,
                "protocol": protocol,
                "quantity": quantity,
                "dtype": self.s.config.model.dtype,
                **found,
                "oracle_rel_l2": None,
            }
            if quantity == "gradient" and self.oracle is not None:
                away = alignment(outcome[quantity], self.oracle, self.s.world)
                row["oracle_rel_l2"] = away["rel_l2"]
            rows[quantity] = row
        self.result.rows += rows.values()
        return rows

    def _refuse(self, name: str, error: Exception) -> None:
        """A schedule that cannot run this at all: an answer, unless it was asked for by name."""
        reason = str(error).partition("\n")[0]
        if self.named or isinstance(error, StaleGraphError):
            self.result.broken.append(
                {"schedule": name, "protocol": None, "quantity": None, "diagnosis": reason}
            )
        else:
            self.result.refused.append({"schedule": name, "reason": reason})

    def _diagnose(self, broken: dict[str, Any], outcome: Outcome, native: Outcome) -> str:
        """Why a bound is broken."""
        s, name, protocol = self.s, broken["schedule"], broken["protocol"]
        known = [b for b in self.result.broken if b["schedule"] == name]
        if known:
            return str(known[0]["diagnosis"])
        if broken["quantity"] != "gradient":
            return "the gradient is right: the optimizer was given another one, or other weights"
        if protocol == "end_to_end":
            return (
                "on recorded steps its gradient is right, so its own rollout is another one: look "
                "at the noise it draws, the steps it samples and the rewards it is given"
            )
        if broken["rel_l2"] <= SMALL:
            return "a difference of rounding: the same terms in another order, or other kernels"
        if self.witness is None:
            return "not looked for, as there is no oracle"
        self.say(f"{name} is off: looking for the mistake")
        suspects = Suspects(native["gradient"], outcome["gradient"], s.world)
        suspects.factor()
        some = self._transitions, self._advantages, self.scale
        suspects.steps(self.witness.columns(*some), s.policy.parameters)
        self._place(self.before)
        self.witness.follow(s.policy)
        suspects.stale(self._own(self.witness.gradient(*some)))
        self._place(self.start)
        self.witness.follow(s.policy)
        return suspects.best()


def _kept(tensor: Tensor | None, *, like: Tensor) -> Tensor:
    """This rank's part on the CPU; zeros for what got nothing."""
    if tensor is None:
        return torch.zeros_like(local(like.detach()), device="cpu")
    return local(tensor.detach()).to("cpu", copy=True)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Kernels that give the same result twice, where torch has such."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
