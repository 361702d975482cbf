"""Stages nest, exclude one another and add up; the clock is replaced by one that we wind."""

from __future__ import annotations

import contextlib

import pytest

from leangrpo.stopwatch import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("leangrpo.stopwatch.time.perf_counter", clock)
    return clock


def booked(watch: Stopwatch) -> dict[str, float]:
    return {name: seconds for name, seconds in watch.read().items() if seconds}


def test_inner_stage_is_taken_out_of_the_outer(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.stage("rollout"):
        clock.now += 1
        with watch.stage("backward"):
            clock.now += 10
        clock.now += 2
    clock.now += 100
    assert booked(watch) == {"rollout": 3, "backward": 10, "other": 100}


def test_switch_renames_from_now_on(clock: Clock) -> None:
    watch = Stopwatch("cpu")
    with watch.stage("rollout"):
        clock.now += 1
        watch.switch("decode")
        clock.now += 5
    clock.now += 7
    assert booked(watch) == {"rollout": 1, "decode": 5, "other": 7}


def test_switch_without_a_stage_is_ignored(clock: Clock) -> None:
    watch = Stopwatch()
    watch.switch("decode")
    clock.now += 1
    assert booked(watch) == {"other": 1}


def test_switch_inside_a_nested_stage_leaves_the_outer_name(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.stage("a"):
        with watch.stage("b"):
            watch.switch("c")
            clock.now += 1
        clock.now += 2
    assert booked(watch) == {"c": 1, "a": 2}


def test_same_name_adds_up_also_nested_in_itself(clock: Clock) -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch.stage("a"):
            clock.now += 1
            with watch.stage("a"):
                clock.now += 1
    assert booked(watch) == {"a": 4}


def test_reset_forgets_and_open_stages_go_on(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.stage("a"):
        clock.now += 3
        watch.reset()
        clock.now += 1
    assert booked(watch) == {"a": 1}
    watch.reset()
    assert booked(watch) == {}


def test_read_inside_a_stage_counts_up_to_now_once(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.stage("a"):
        clock.now += 1
        assert booked(watch) == {"a": 1}
        assert booked(watch) == {"a": 1}
        clock.now += 1
    assert booked(watch) == {"a": 2}


def test_an_error_closes_its_stage(clock: Clock) -> None:
    watch = Stopwatch()
    with contextlib.suppress(RuntimeError), watch.stage("a"):
        clock.now += 1
        raise RuntimeError
    clock.now += 2
    assert booked(watch) == {"a": 1, "other": 2}


def test_nothing_waits_for_the_device_before_read(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, marks = [], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = 0.0

        def record(self) -> None:
            self.at = 500.0 * len(marks)
            marks.append(self)

        def elapsed_time(self, end: Event) -> float:
            assert waits, "events have no time before the device was waited for"
            return end.at - self.at

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda *_: waits.append(1))
    watch = Stopwatch("cuda")
    with watch.stage("rollout"), watch.stage("backward"):
        pass
    assert not waits and marks
    assert watch.read() == {"other": 1.0, "rollout": 1.0, "backward": 0.5}
    assert len(waits) == 1
