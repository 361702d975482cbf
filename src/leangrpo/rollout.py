"""A part of an update's rollout: sample, score meanwhile, hand advantages to the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from .data import SampleKey, Transition
from .layout import Slot
from .noise import generator
from .policy import Prefix
from .rewards import Metadata
from .scoreboard import Scoreboard
from .scoring import Scores
from .setup import Setup

T = TypeVar("T")


@dataclass(slots=True)
class Sampled:
    """A forward whose scores are on their way (None: it has none).

    `left_out` are generations of it that are this rank's and were not sampled, or in vain.
    """

    prompt: int
    generations: list[int]
    scores: Future[Scores] | None = None
    left_out: list[int] = field(default_factory=list)
    group: Group | None = None
    start: int = 0

    def result(self) -> Scores | None:
        """Its scores, when they are there."""
        if self.group is not None:
            assert self.group.scores is not None
            whole = self.group.scores.result()
            return whole.part(self.start, self.start + len(self.generations))
        return None if self.scores is None else self.scores.result()


@dataclass(slots=True)
class Group:
    """A prompt's pictures, collected where a reward has to see them all, then scored at once."""

    images: list[Tensor] = field(default_factory=list)
    about: list[Metadata] = field(default_factory=list)
    scores: Future[Scores] | None = None


def roll_out(
    s: Setup,
    update: int,
    part: int,
    table: Scoreboard,
    stored: list[Transition],
    *,
    last: bool,
) -> None:
    """Sample a part's prompts and score them; the first part's steps go to the schedule.

    Selected steps that a later optimizer step will train on are put into `stored`, without graphs.
    `last`: nothing more is sampled, so all the update's rewards are known.

    Rewards are computed while sampling goes on: `Setup.ahead` forwards more are sampled before
    the last reward of a group is waited for (of each forward, where the schedule streams). So the
    order of events depends on no clock, and all ranks wait, and meet, at the same forward.
    """
    _Part(s, update, part, table, stored, last).run()


class _Part:
    def __init__(
        self,
        s: Setup,
        update: int,
        part: int,
        table: Scoreboard,
        stored: list[Transition],
        last: bool,
    ) -> None:
        self.s, self.update, self.table, self.stored, self.last = s, update, table, stored, last
        self.schedule = s.schedule if part == 0 else None
        self.keep = part > 0 or s.config.rollout.epochs > 1
        self.offset = part * s.layout.prompts
        self.drawn = draw(s.examples, s.config.seed, update, s.config.rollout.prompts)
        self.waves = s.layout.of(s.world.rank)
        self.slots = [(w, slot) for w, wave in enumerate(self.waves) for slot in wave.slots]
        self.pictures = {
            p: self.drawn[p].open_images()
            for p in {self.offset + slot.prompt for _, slot in self.slots}
        }
        self.prefix: tuple[int, Prefix] | None = None
        self.group = Group()
        self.own: list[list[tuple[int, int]]] = [[] for _ in self.waves]
        self.scored: list[list[tuple[int, int]]] = [[] for _ in self.waves]
        self.finite: list[Tensor] = []  # of the forward underway, `(B,)` of each step

    def run(self) -> None:
        """All forwards in order, and behind them their rewards and advantages."""
        streams = self.schedule is not None and self.schedule.streams
        ends = {wave: i for i, (wave, _) in enumerate(self.slots)}  # the last forward of each
        sampled: list[Sampled] = []
        entered = 0
        for n, (wave, slot) in enumerate(self.slots):
            sampled.append(self._sample(wave, slot))
            if n == ends[wave]:
                self._score_group(wave)
            while entered <= n:
                behind = self.slots[entered][0]
                due = (entered if streams else ends[behind]) + self.s.ahead
                if n < min(due, len(self.slots) - 1):
                    break
                self._enter(behind, sampled[entered])
                if entered == ends[behind]:
                    self._close(behind)
                entered += 1

    def _sample(self, wave: int, slot: Slot) -> Sampled:
        """A forward: its transitions go to the schedule, its pictures to the rewards."""
        s, schedule, update = self.s, self.schedule, self.update
        p, generations = self.offset + slot.prompt, list(slot.generations)
        example, pictures = self.drawn[p], self.pictures[p]
        selection = s.select(update, p, generations[0])
        left_out: list[int] = []
        if gone := [g for g in generations if SampleKey(update, p, g) in s.left_out]:
            left_out = [] if slot.idle else gone
            generations = [g for g in generations if g not in gone]
        if not generations and s.world.size == 1:
            return Sampled(p, [], None, left_out)
        if not generations:  # others wait for its collectives: a stand-in, with noise of its own
            slot = replace(slot, idle=True)
            generations = [g + s.config.rollout.generations for g in gone]
        self.finite = []
        first = selection.stochastic[0]
        if s.shares_prefix and first and (self.prefix is None or self.prefix[0] != wave):
            key = SampleKey(update, p, 0)
            shared = s.policy.prefix(example.prompt, key, first, inputs=pictures)
            self.prefix = wave, shared
        with nullcontext() if schedule is None else schedule.sampling():
            rollout = s.policy.sample(
                [example.prompt] * len(generations),
                [SampleKey(update, p, g) for g in generations],
                selected=selection.selected,
                noisy=selection.stochastic,
                grad=schedule is not None and schedule.needs_graph,
                capture=None if schedule is None else schedule.capture,
                decode=not slot.idle,
                same_noise=s.config.rollout.initial_noise == "group",
                prefix=self.prefix[1] if s.shares_prefix and first and self.prefix else None,
                inputs=pictures,
                on_transition=None if s.needs_kl or s.deferred else partial(self._take, slot),
            )
        for transition in rollout.transitions:
            if s.needs_kl:
                transition = s.policy.with_kl(transition)
            if transition.kl is not None and not slot.idle:
                kl = transition.kl.detach().to("cpu", torch.float64)
                self.table.kl[p, generations] += kl
            self._take(slot, transition)
        if slot.idle:
            return Sampled(p, [], None, left_out)
        assert rollout.images is not None
        finite = [*self.finite, rollout.latents.isfinite().flatten(1).all(1)]
        whole = torch.stack(finite).all(0).cpu() & rollout.images.isfinite().flatten(1).all(1)
        if not whole.all():  # the update is going to be repeated without these
            bad = [g for g, good in zip(generations, whole.tolist(), strict=True) if not good]
            self.table.bad |= {SampleKey(update, p, g) for g in bad}
            return Sampled(p, generations, None, left_out)
        about = [example.about(pictures) for _ in generations]
        if s.scorer.groupwise:
            return self._with_group(p, generations, rollout.images, about, left_out)
        scores = s.scorer.submit(rollout.images, rollout.prompts, about)
        return Sampled(p, generations, scores, left_out)

    def _with_group(
        self,
        prompt: int,
        generations: list[int],
        images: Tensor,
        about: list[Metadata],
        left_out: list[int],
    ) -> Sampled:
        """A forward of a group that is scored when its last forward is there; one rank has all."""
        group, start = self.group, len(self.group.about)
        group.images.append(images.detach().to(device="cpu", dtype=torch.float32))
        group.about += about
        return Sampled(prompt, generations, None, left_out, group, start)

    def _score_group(self, wave: int) -> None:
        """Give the pictures collected of a wave's prompt to the rewards, if there are any."""
        group, prompt = self.group, self.waves[wave].prompt
        if group.about and prompt is not None:
            prompts = [self.drawn[self.offset + prompt].prompt] * len(group.about)
            group.scores = self.s.scorer.submit(torch.cat(group.images), prompts, group.about)
        self.group = Group()

    def _take(self, slot: Slot, transition: Transition) -> None:
        transition.weight = 0.0 if slot.idle else self.s.weights[transition.step]
        values = transition.log_prob, transition.kl
        self.finite += [v.detach().isfinite() for v in values if v is not None]
        if self.s.critic is not None:
            self.s.critic.attach(transition)
        if self.keep:
            self.stored.append(transition.without_graph())
        if self.schedule is not None:
            self.schedule.transition(transition)

    def _enter(self, wave: int, one: Sampled) -> None:
        """Wait for a forward's rewards."""
        sampled = one.generations
        with self.s.watch.stage("reward"):
            scores = one.result()
        if scores is None:
            self.table.leave_out(one.prompt, sampled)
        else:
            self.table.enter(one.prompt, sampled, scores)
        self.table.leave_out(one.prompt, one.left_out)
        own = [(one.prompt, g) for g in sampled]
        self.scored[wave] += own
        self.own[wave] += sorted([*own, *((one.prompt, g) for g in one.left_out)])
        if self.schedule is not None:
            credit, table = self.s.credit, self.table
            self.schedule.rewards({self._key(k): credit.rewards(table, *k) for k in own})

    def _close(self, number: int) -> None:
        """A wave's rewards are all there: the advantages of its group, or of all of them."""
        s, table, own = self.s, self.table, self.own[number]
        prompt = self.waves[number].prompt
        groups = [] if prompt is None else [self.offset + prompt]
        centre = s.credit.centres and self.schedule is not None and self.schedule.streams
        if centre or not s.credit.whole:
            for p in groups:
                table.gather_group(s.world, s.layout, p, [g for _, g in own])
        if centre and self.schedule is not None:
            scored = self.scored[number]
            self.schedule.centre({self._key(k): s.credit.centred(table, *k) for k in scored})
        if s.credit.whole:
            if number + 1 < len(self.waves) or not self.last:
                return
            table.gather_all(s.world)
            groups = list(range(len(self.drawn)))
        if groups:
            s.whole = s.whole and not s.credit.remembers  # what it remembers is of this update now
            each = {name: values[groups] for name, values in table.each.items()}
            names = [self.drawn[p].name for p in groups]
            table.advantages[groups] = s.credit.advantages(
                table.rewards[groups], each, table.kl[groups], names
            )
        if self.schedule is not None:
            some = self.scored if s.credit.whole else [self.scored[number]]
            keys = [self._key(k) for one in some for k in one]
            self.schedule.advantages({key: table.advantage(key) for key in keys})

    def _key(self, sample: tuple[int, int]) -> SampleKey:
        return SampleKey(self.update, *sample)


def draw(examples: Sequence[T], seed: int, update: int, num: int) -> list[T]:
    """The examples of an update: a keyed shuffle of all, epoch after epoch, each once in each.

    Depends on (seed, update) only, so that a resumed run needs no position.
    """
    first, end = update * num, (update + 1) * num
    epochs = range(first // len(examples), (end - 1) // len(examples) + 1)
    orders = {e: generator(seed, -2, e).permutation(len(examples)) for e in epochs}
    places = [divmod(position, len(examples)) for position in range(first, end)]
    return [examples[int(orders[epoch][place])] for epoch, place in places]
