"""Which calls evaluate again what was sampled before: groups, chains, and rows that are alike.

Rows are compared, not calls: trainers sample in batches and shuffle what they train on along
samples and steps. A transition is a row's latent at a time. The rows of classifier-free guidance,
in one doubled batch or in two calls, are one transition with two conditionings.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .audit_calls import LATENT, Call
from .audit_report import Tally

Array = NDArray[np.float32]

ROUNDED = 2.0**-7
"""Relative L2 up to which two latents are one, rounded: a rounding to bfloat16 moves every element
by at most 2**-8 of itself, and there may be two. Samples of a group differ by far more."""
CAPACITY = 100_000
"""Rows that are remembered, the latest ones; some 600 bytes each."""


@dataclass(slots=True, eq=False)
class Read:
    """A call whose rows are on the host. `state` says which weights; `cut` numbers the backwards
    before it."""

    call: Call
    rows: Array
    state: Hashable
    seconds: float
    cut: int
    fold: int = 1

    @property
    def num(self) -> int:
        """Transitions: rows, without those that only guide."""
        return len(self.rows) // self.fold

    @property
    def latents(self) -> Array:
        """Of the transitions, `(num, LATENT + 1)` with the time in the last column."""
        return self.rows[: self.num, : LATENT + 1]

    @property
    def conditions(self) -> Array:
        """`(fold, num, elements)`."""
        return self.rows[:, LATENT + 1 :].reshape(self.fold, self.num, -1)


@dataclass(slots=True, eq=False)
class Unit:
    """The calls that make one step of some rows: more than one where guidance is a call of its own.

    `group` numbers runs of calls on the same rows, `mixed` says that some of those have gradients
    and some have not. `known` says that every row was seen before.
    """

    reads: list[Read]
    group: int
    mixed: bool
    known: bool = False
    chained: bool = False
    starts: bool = False
    kept: bool = False
    keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = [row.tobytes() for row in self.latents]

    @property
    def call(self) -> Call:
        """The first."""
        return self.reads[0].call

    @property
    def latents(self) -> Array:
        """As `Read.latents`."""
        return self.reads[0].latents

    @property
    def seconds(self) -> float:
        """Of all its calls."""
        return sum(read.seconds for read in self.reads)

    @property
    def time(self) -> float | None:
        """The time of all rows, None where they differ."""
        times = self.latents[:, LATENT]
        return float(times[0]) if (times == times[0]).all() else None

    @property
    def shape(self) -> tuple[int, ...]:
        """How its calls were batched: rows of each."""
        return tuple(len(read.rows) for read in self.reads)

    def conditions(self, row: int) -> list[bytes]:
        """Every conditioning of a transition."""
        return [one[row].tobytes() for read in self.reads for one in read.conditions]


@dataclass(slots=True, eq=False)
class Entry:
    """A sampled transition, and how often it was evaluated again."""

    unit: Unit
    row: int
    used: int = 0


@dataclass(slots=True)
class Again:
    """A gradient row with the sampled transition it repeats (None: sampled nowhere here)."""

    unit: Unit
    row: int
    entry: Entry | None
    distance: float = 0.0


class Known:
    """The sampled transitions, by their latents and by their times."""

    def __init__(self) -> None:
        self._exact: dict[bytes, list[Entry]] = {}
        self._timed: dict[tuple[float, int], list[Entry]] = {}
        self._order: deque[tuple[bytes, tuple[float, int], Entry]] = deque()

    def add(self, unit: Unit) -> None:
        """Remember the rows of a unit, and forget the oldest ones."""
        for row, key in enumerate(unit.keys):
            entry = Entry(unit, row)
            timed = (float(unit.latents[row, LATENT]), unit.call.size)
            self._exact.setdefault(key, []).append(entry)
            self._timed.setdefault(timed, []).append(entry)
            self._order.append((key, timed, entry))
        while len(self._order) > CAPACITY:
            key, timed, entry = self._order.popleft()
            _forget(self._exact, key, entry)
            _forget(self._timed, timed, entry)

    def has(self, unit: Unit) -> bool:
        """Whether all rows of a unit were sampled, under one of their conditionings each."""
        return all(
            any(
                not set(e.unit.conditions(e.row)).isdisjoint(unit.conditions(row))
                for e in self._exact.get(key, ())
            )
            for row, key in enumerate(unit.keys)
        )

    def find(self, unit: Unit, row: int) -> tuple[Entry | None, float]:
        """The transition that a row repeats: the same, or else the nearest within rounding."""
        entries = self._exact.get(unit.keys[row], [])
        if entries:
            return _best(entries, unit, row), 0.0
        latent, time = unit.latents[row, :LATENT], float(unit.latents[row, LATENT])
        near: list[tuple[float, Entry]] = []
        for (other, size), some in self._timed.items():
            if size == unit.call.size and abs(other - time) <= ROUNDED * abs(time):
                rows = np.stack([e.unit.latents[e.row, :LATENT] for e in some])
                norm = float(np.linalg.norm(latent)) or 1.0
                distances = np.linalg.norm(rows - latent, axis=1) / norm
                near += [
                    (float(d), e) for d, e in zip(distances, some, strict=True) if d <= ROUNDED
                ]
        if not near:
            return None, 0.0
        least = min(distance for distance, _ in near)
        return _best([e for distance, e in near if distance == least], unit, row), least


def _forget(table: dict[Any, list[Entry]], key: Hashable, entry: Entry) -> None:
    table[key].remove(entry)
    if not table[key]:
        del table[key]


def _best(entries: Iterable[Entry], unit: Unit, row: int) -> Entry:
    """Of equal latents (a group may start from one noise) that of the same prompt, used least."""
    conditions, state = set(unit.conditions(row)), unit.reads[0].state

    def rank(entry: Entry) -> tuple[bool, bool, int]:
        same = not conditions.isdisjoint(entry.unit.conditions(entry.row))
        return not same, entry.unit.reads[0].state != state, entry.used

    return min(entries, key=rank)


class Matcher:
    """Sorts the calls between two optimizer steps; remembers what was sampled before them."""

    def __init__(self) -> None:
        self.known = Known()
        self._rollouts = False  # trajectories without gradients were seen in the latest rollout

    def sort(self, reads: Sequence[Read]) -> tuple[dict[str, Tally], list[Again], int]:
        """Tallies by kind (see `audit_report.KINDS`), the gradient rows, trajectories begun."""
        _fold(reads)
        units = list(_units(reads))
        self._chain(units)
        tallies: dict[str, Tally] = {}
        rows: list[Again] = []
        for unit in units:
            if unit.call.grad and not unit.kept:
                rows += self._gradient(unit, tallies)
                continue
            kind = "kept" if unit.kept else "sampled" if unit.chained else "other"
            _count(tallies, kind, unit, len(unit.keys))
            if kind != "other":
                self.known.add(unit)
        return tallies, rows, sum(len(u.keys) for u in units if u.starts)

    def _gradient(self, unit: Unit, tallies: dict[str, Tally]) -> list[Again]:
        found = [Again(unit, row, *self.known.find(unit, row)) for row in range(len(unit.keys))]
        kinds = Counter(kind_of(again) for again in found)
        for kind, number in kinds.items():
            tally = _count(tallies, kind, unit, number)
            tally.calls -= 0 if kind == kinds.most_common(1)[0][0] else len(unit.reads)
        for again in found:
            if again.entry is not None:
                if kind_of(again) == "redundant":
                    tallies["redundant"].saved += saving(again)
                again.entry.used += 1
        return found

    def _chain(self, units: Sequence[Unit]) -> None:
        """Mark the units that are steps of a trajectory that is sampled here.

        The time of a trajectory goes one way from step to step, for all rows of a call at once.
        Steps that are differentiated while sampling are told from a replay in order by the noise
        that is drawn in between. A reference policy's calls are on rows that are evaluated with
        gradients beside them, or are known, and no new ones follow.
        """
        levels = _levels(units)
        seen: set[bytes] = set()
        for unit in units:
            unit.known = self.known.has(unit) or all(key in seen for key in unit.keys)
            seen.update(unit.keys)
        links = [_direction(a[-1], b[0]) for a, b in pairwise(levels)]
        ways = Counter(direction for direction in links if direction)
        way = ways.most_common(1)[0][0] if ways else 0
        runs: list[list[list[Unit]]] = []
        for number, level in enumerate(levels):
            if number and links[number - 1] == way != 0:
                runs[-1].append(level)
            else:
                runs.append([level])
        chains = [run for run in runs if len(run) > 1]
        pure = [run for run in chains if not any(_graded(level) for level in run)]
        lone = [r[0] for r in runs if len(r) == 1 and not _graded(r[0]) and not r[0][0].mixed]
        if not chains and not self._rollouts:  # a generator of a single step
            chains = [[level] for level in lone]
        if pure or lone:
            self._rollouts = bool(pure)
        for run in chains:
            sampled = any(not _graded(level) for level in run)
            for number, level in enumerate(run):
                following = run[number + 1] if number + 1 < len(run) else []
                starting = bool(following) and not following[0].known
                for unit in level:
                    new = not unit.known or (number == 0 and starting)  # some start from one noise
                    if unit.call.grad:
                        unit.kept = new and (sampled or not self._rollouts)
                    else:
                        unit.chained = new
                    unit.starts = number == 0 and (unit.kept or unit.chained)


def _graded(level: Sequence[Unit]) -> bool:
    return level[0].call.grad


def kind_of(again: Again) -> str:
    """What evaluating this row again is: redundant, changed, elsewhere or fresh."""
    if again.entry is None:
        return "fresh"
    mine, theirs = again.unit.reads[0], again.entry.unit.reads[0]
    if mine.call.owner != theirs.call.owner:
        return "elsewhere"
    return "redundant" if mine.state == theirs.state else "changed"


def saving(again: Again) -> float:
    """Seconds that not evaluating a row again would save.

    The graph has to be built all the same, while sampling. So what falls away is the evaluation
    without one, where both are batched alike; otherwise it is taken to be the second evaluation.
    """
    unit, entry = again.unit, again.entry
    mine = unit.seconds / len(unit.keys)
    if entry is None or entry.used or entry.unit.shape != unit.shape or entry.unit.call.grad:
        return mine
    return min(mine, entry.unit.seconds / len(entry.unit.keys))


def _count(tallies: dict[str, Tally], kind: str, unit: Unit, number: int) -> Tally:
    tally = tallies.setdefault(kind, Tally())
    tally.calls += len(unit.reads)
    tally.transitions += number
    tally.seconds += unit.seconds * number / len(unit.keys)
    return tally


def _fold(reads: Sequence[Read]) -> None:
    """Find the calls whose batch is doubled for guidance.

    By most of the calls alike: the first step of a group that starts from one noise looks so too.
    """
    found: dict[Hashable, Counter[int]] = {}
    kinds = [(r.call.module, len(r.rows), r.call.grad) for r in reads]
    for read, kind in zip(reads, kinds, strict=True):
        found.setdefault(kind, Counter())[_chunks(read)] += 1
    for read, kind in zip(reads, kinds, strict=True):
        fold, number = found[kind].most_common(1)[0]
        if 2 * number > found[kind].total() and _chunks(read) == fold:
            read.fold = fold


def _chunks(read: Read) -> int:
    """Of how many parts with the same latents and other conditionings a batch consists."""
    rows = read.rows.view(np.int32)  # bits: of a run that has failed, NaN is NaN
    for number in (3, 2):
        if len(rows) % number == 0:
            parts = rows.reshape(number, len(rows) // number, -1)
            same = (parts[:, :, : LATENT + 1] == parts[:1, :, : LATENT + 1]).all()
            other = (parts[1:, :, LATENT + 1 :] != parts[:1, :, LATENT + 1 :]).any(axis=(1, 2))
            if same and other.all():
                return number
    return 1


def _units(reads: Sequence[Read]) -> Iterator[Unit]:
    """Steps: calls on the same rows, one after another, that differ in the conditioning."""
    groups: list[list[Read]] = []
    for read in reads:
        before = groups[-1][-1] if groups else None
        if before is not None and before.cut == read.cut and _same_rows(before, read):
            groups[-1].append(read)
        else:
            groups.append([read])
    split = [(n, g, list(_apart(g))) for n, g in enumerate(groups)]
    votes: dict[bool, Counter[bool]] = {}
    for _, group, parts in split:
        if len({r.call.grad for r in group}) == 1:
            votes.setdefault(group[0].call.grad, Counter())[len(parts[0]) > 1] += 1
    for number, group, parts in split:
        mixed = len({read.call.grad for read in group}) > 1
        for part in parts:
            # Samples that start from one noise, called one by one, look like guidance once.
            vote = votes.get(part[0].call.grad, Counter({True: 1}))
            together = vote[True] > vote[False] or mixed
            for calls in [part] if together else [[read] for read in part]:
                yield Unit(calls, number, mixed)


def _apart(group: Sequence[Read]) -> Iterator[list[Read]]:
    """Calls that may be one step: with or without gradients, and each conditioned otherwise."""
    part: list[Read] = []
    for read in group:
        again = any(
            a.call.grad != read.call.grad
            or a.state != read.state
            or a.conditions.tobytes() == read.conditions.tobytes()
            for a in part
        )
        if again:
            yield part
            part = []
        part.append(read)
    yield part


def _same_rows(a: Read, b: Read) -> bool:
    return a.call.size == b.call.size and a.latents.tobytes() == b.latents.tobytes()


def _levels(units: Sequence[Unit]) -> list[list[Unit]]:
    """Neighbours at the same step: samples that are called one by one, all of them step by step.

    Of a call with gradients the calls beside it without any are left out, which are no steps.
    """
    levels: list[list[Unit]] = []
    previous: Unit | None = None
    for unit in units:
        alike = (
            previous is not None
            and unit.time is not None
            and unit.time == previous.time
            and unit.call.grad == previous.call.grad
            and unit.mixed == previous.mixed
        )
        if alike:
            levels[-1].append(unit)
        else:
            levels.append([unit])
        previous = unit
    return levels


def _direction(a: Unit, b: Unit) -> int:
    """-1 or 1 where `b` may be the step after `a`, by where the time goes; 0 where it is not."""
    if a.time is None or b.time is None or a.time == b.time or a.mixed:
        return 0
    if len(a.keys) != len(b.keys) or a.call.size != b.call.size or (b.mixed and b.call.grad):
        return 0
    if a.call.grad or b.call.grad:
        if b.call.drawn - a.call.drawn < len(b.keys) * b.call.size:
            return 0
    elif a.reads[0].cut != b.reads[0].cut:
        return 0
    return 1 if b.time > a.time else -1


def differences(again: Again) -> dict[str, Any]:
    """What makes reusing the rollout's graph another computation than evaluating it again."""
    assert again.entry is not None
    mine, theirs = again.unit, again.entry.unit
    a, b = theirs.call, mine.call
    found: dict[str, Any] = {}
    if a.dropout or b.dropout:
        found["dropout"] = "active"
    for name in ("dtype", "autocast"):
        if getattr(a, name) != getattr(b, name):
            found[name] = f"{getattr(a, name)} sampled, {getattr(b, name)} evaluated again"
    if a.compiled != b.compiled:
        words = {True: "compiled", False: "eager"}
        found["compiled"] = f"{words[a.compiled]} sampled, {words[b.compiled]} evaluated again"
    if again.distance:
        found["rounding"] = again.distance
    before, after = (
        theirs.conditions(again.entry.row),
        mine.conditions(again.row),
    )
    if len(before) != len(after):
        found["guidance"] = f"{len(before)} conditionings sampled, {len(after)} evaluated again"
    elif set(before) != set(after) and not again.distance and a.dtype == b.dtype:
        found["conditioning"] = "other values"
    if theirs.shape != mine.shape:
        found["batch"] = f"{sum(theirs.shape)} rows sampled, {sum(mine.shape)} evaluated again"
    return found
