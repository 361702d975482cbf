"""Which rank samples which (prompt, generation) of an update, and when; integers only.

Counts, as in the whole package: P prompts (groups) of an update, M generations of a prompt, R
ranks, and micro-batches of at most m generations. Source: the shared-prompt layout of arXiv
2609.03528, section 4.1 and appendix A; the uneven cases are ours.

The ranks are cut into R // W teams of W neighbours; a team samples one prompt at a time. Team i
takes prompts i, i + teams, ..., one a wave, and its rank number r owns generations r, r + W,
r + 2W, ..., run in that order in chunks of m (the round-robin comes first, the chunks second).
Shared layout: W = min(M, R). Classic layout: W = 1.

Under sharding every forward and backward is a collective, so **all ranks run the same number of
slots in every wave**. Whoever has nothing to do runs an idle slot: a copy of what the first rank of
its team runs in that slot, to be given weight zero. Without a prompt (the last wave when P is not a
multiple of the teams; the R % W ranks in no team) it copies from the first team, which always has
one. So an idle slot never needs a shape, a prompt or a key that no real slot has.

Equal micro-batch shape is what makes samples bitwise the same for any R. The shape of a forward is
`len(slot.generations)`: the last slot of a rank may be short, also shorter than another rank's at
the same time, nobody pads it, and none exceeds ceil(M / W), however large m is. With m = 1 all
shapes are equal, for every R and layout.

Why R % W ranks idle rather than join: a team of more than M ranks has no work for the rest, and one
of fewer needs more rounds, hence more live graphs or gradients a rank, which is what the shared
layout is there to avoid. No cut into teams with ceil(M / R) generations a rank has fewer waves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import LeanError, problem


@dataclass(frozen=True, slots=True)
class Slot:
    """One forward of one rank: `generations` (1 to m of them, ascending) of `prompt`, 0-based.

    `idle`: a stand-in, run only to take part in the collectives; its samples are another rank's,
    and must count neither in a gradient nor in a reward.
    """

    prompt: int
    generations: tuple[int, ...]
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Wave:
    """What one rank does until the next rewards: `slots`, as many as every other rank has.

    `prompt` is the one whose rewards are gathered afterwards among `Layout.peers(prompt)`, which
    have all finished it by then; None for a rank with no part in the wave (all its slots idle).
    """

    prompt: int | None
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan of an update, the same object on every rank; see the module for the rules.

    `teams` are the ranks that share a prompt, disjoint, ascending and of equal size W; build the
    process groups from it, in order, on all ranks.
    """

    prompts: int
    generations: int
    ranks: int
    micro_batch: int
    teams: tuple[tuple[int, ...], ...]

    @property
    def waves(self) -> int:
        """Number of waves of an update, the same on every rank: ceil(P / teams)."""
        return -(-self.prompts // len(self.teams))

    @property
    def held(self) -> int:
        """Most generations of a prompt that one rank owns, Q = ceil(M / W) (rounds of sec. 4.1)."""
        return -(-self.generations // len(self.teams[0]))

    def of(self, rank: int) -> tuple[Wave, ...]:
        """The waves of `rank` (0-based), in order; slot k of wave w is simultaneous on all ranks.

        Three prompts of two generations on four ranks, then one of three on two ranks:

        >>> [wave.prompt for wave in shared_layout(3, 2, 4).of(3)]
        [1, None]
        >>> shared_layout(1, 3, 2).of(1)[0].slots[1]
        Slot(prompt=0, generations=(2,), idle=True)
        """
        if not 0 <= rank < self.ranks:
            raise LeanError(f"There is no rank {rank}: the layout has ranks 0 to {self.ranks - 1}.")
        team, place = divmod(rank, len(self.teams[0]))
        return tuple(self._wave(w * len(self.teams), team, place) for w in range(self.waves))

    def peers(self, prompt: int) -> tuple[int, ...]:
        """The ranks that sample `prompt` and gather its rewards, ascending; one of `teams`."""
        if not 0 <= prompt < self.prompts:
            raise LeanError(f"There is no prompt {prompt}: the update has {self.prompts}.")
        return self.teams[prompt % len(self.teams)]

    def places(self) -> tuple[tuple[int, int], ...]:
        """Where the rewards of generations 0 to M - 1 lie after the all-gather among the peers.

        Each peer gives a row of `held` numbers: its own rewards in the order it ran them, filled up
        at the end. Generation g is `rows[i][j]` with `i, j = places()[g]`; row i is from rank
        `peers(prompt)[i]`. The same for every prompt (the re-indexing of appendix A).

        >>> shared_layout(1, 3, 2).places()
        ((0, 0), (1, 0), (0, 1))
        """
        size = len(self.teams[0])
        return tuple((g % size, g // size) for g in range(self.generations))

    def _wave(self, first: int, team: int, place: int) -> Wave:
        """The wave whose first prompt is `first`, as rank number `place` of `team` sees it."""
        prompt = first + team
        active = team < len(self.teams) and prompt < self.prompts
        leader = self._slots(prompt if active else first, 0)  # owns most, so is never idle
        own = self._slots(prompt, place) if active else ()
        idle = tuple(replace(slot, idle=True) for slot in leader[len(own) :])
        return Wave(prompt if active else None, own + idle)

    def _slots(self, prompt: int, place: int) -> tuple[Slot, ...]:
        """The real slots of rank number `place` of a team."""
        own = tuple(range(place, self.generations, len(self.teams[0])))
        m = self.micro_batch
        return tuple(Slot(prompt, own[i : i + m]) for i in range(0, len(own), m))


def shared_layout(prompts: int, generations: int, ranks: int, micro_batch: int = 1) -> Layout:
    """A prompt's generations over all ranks, or over teams of M (arXiv 2609.03528, sec. 4.1).

    `prompts` P an update, `generations` M a prompt, `micro_batch` m generations a forward. Every
    combination of counts of at least 1 can be laid out; one rank gives the order of a single
    process. Raises LeanError for a count below 1.
    """
    return _layout(prompts, generations, ranks, micro_batch, width=min(generations, ranks))


def classic_layout(prompts: int, generations: int, ranks: int, micro_batch: int = 1) -> Layout:
    """Each rank its own prompts and all their generations: the baseline of arXiv 2609.03528.

    Arguments and errors as in `shared_layout`.
    """
    return _layout(prompts, generations, ranks, micro_batch, width=1)


def _layout(prompts: int, generations: int, ranks: int, micro_batch: int, width: int) -> Layout:
    named = {"prompts": prompts, "generations": generations, "micro_batch": micro_batch}
    for setting, count in {**{f"rollout.{k}": v for k, v in named.items()}, "ranks": ranks}.items():
        if count < 1:
            raise problem(setting, count, "it must be at least 1")
    teams = tuple(tuple(range(i * width, (i + 1) * width)) for i in range(ranks // width))
    return Layout(prompts, generations, ranks, micro_batch, teams)
