"""Buffers of the host, and what a device that copies late requires of whoever uses it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from test_offload import Net, gradient, needed, plain, point, same
from torch import Tensor

from leangrpo.copies import GRAIN, SLAB, Host, Mapped, Pool
from leangrpo.offload import Offload


def test_buffers_are_used_again_by_size() -> None:
    asked: list[int] = []

    def memory(num_bytes: int) -> Tensor:
        asked.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    pool = Pool(memory)
    small, large = pool.take(1), pool.take(GRAIN + 1)
    assert (len(small.data), len(large.data)) == (GRAIN, 2 * GRAIN)
    assert asked == [SLAB]
    pool.give(small)
    assert pool.take(2 * GRAIN) is not large
    assert pool.take(GRAIN) is small
    pool.take(SLAB)  # more than is left of the first
    assert asked == [SLAB, 4 * SLAB]
    assert pool.num_bytes == 5 * SLAB


def test_bytes_come_back_from_a_file() -> None:
    copies = Mapped()
    host = Host(copies.memory(GRAIN))
    source = torch.arange(100, dtype=torch.uint8)
    copies.out(source, host)
    data, _ = copies.back(host, 100)
    host.data.zero_()
    assert torch.equal(data, source)


class Copy:
    """A copy that has not happened yet."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run, self.done = run, False

    def query(self) -> bool:
        return self.done


class Late(Mapped):
    """A device whose copies happen, in order, when somebody waits for one of them, no sooner.

    The memory on the device has to be there until then, as nothing else holds it.
    """

    def __init__(self) -> None:
        self.queue: list[Copy] = []
        self.late = 0

    def _later(self, to: Tensor, source: Tensor, device: Tensor) -> Copy:
        alive = weakref.ref(device)
        others = [None if t is device else t for t in (to, source)]

        def run() -> None:
            on_device = alive()
            assert on_device is not None, "memory was let go of before its copy"
            first, second = (on_device if t is None else t for t in others)
            first.copy_(second)

        self.queue.append(Copy(run))
        return self.queue[-1]

    def out(self, source: Tensor, host: Host) -> Copy:
        return self._later(host.data[: len(source)], source, source)

    def back(self, host: Host, num_bytes: int) -> tuple[Tensor, Copy]:
        data = torch.full((num_bytes,), 255, dtype=torch.uint8)  # not a number, read too early
        return data, self._later(data, host.data[:num_bytes], data)

    def wait(self, event: Copy) -> None:  # type: ignore[override]
        self.late += not event.done
        while not event.done:
            copy = self.queue.pop(0)
            copy.run()
            copy.done = True


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_copies_that_come_late(share: float) -> None:
    """Twice, so that buffers are used again; a graph that was dropped in between."""
    net, copies = Net(), Late()
    offload = Offload([net], int(share * needed(net)), copies=lambda _: copies)
    for seed in (1, 2):
        offload.begin()
        with offload:
            loss = net(point(seed))
            dropped = net(point(3))
        del dropped
        loss.backward()
        assert same(gradient(net), plain(net, seed))
    assert copies.late > 0
