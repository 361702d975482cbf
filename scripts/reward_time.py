"""A reward that takes as long as sampling, waited for or hidden: step times, and the same weights.

    python scripts/reward_time.py [KEY.PATH=VALUE ...]

Trains a few updates of the embedded pipeline three times from the same start: with a reward that
takes no time, with one that sleeps after every forward as long as the first run's step took, waited
for before the next forward, and with the same one while up to `--ahead` forwards are sampled.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from leangrpo.checkpoint import weights_sha256
from leangrpo.config import load_config
from leangrpo.rewards import Scorer
from leangrpo.setup import set_up
from leangrpo.train import one_update

SMALL = (
    "rollout={prompts: 8, generations: 8, micro_batch: 2}",
    "prompts.heldout=null",
    "run.threads=1",
)


class Slow:
    """The mean brightness, after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
        time.sleep(self.seconds)
        return images.mean(dim=(1, 2, 3))


class Waiting(Scorer):
    """Scores before it returns: nothing is hidden."""

    def submit(self, *args: Any) -> Any:
        future = super().submit(*args)
        future.exception()
        return future


def run(
    overrides: list[str], updates: int, ahead: int, seconds: float, kind: type[Scorer]
) -> tuple[float, str]:
    """The median step time, without the first, and the digest of the weights at the end."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [*SMALL, *overrides, f"rollout.ahead={ahead}", f"run.dir={Path(folder) / 'run'}"]
        s = set_up(load_config("embedded", settings), quiet=True)
        s.scorer.close()
        s.scorer = kind([(Slow(seconds), 1.0)])
        times = []
        with s.scorer, s.judge:
            for update in range(updates):
                began = time.perf_counter()
                one_update(s, update)
                times.append(time.perf_counter() - began)
        s.record.close()
        return statistics.median(times[1:] or times), weights_sha256(s.policy)


def main() -> None:
    """Print the three step times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--ahead", type=int, default=1)
    parser.add_argument("settings", nargs="*", metavar="KEY.PATH=VALUE")
    a = parser.parse_args()
    rollout = load_config("embedded", [*SMALL, *a.settings]).rollout
    forwards = rollout.prompts * rollout.generations // rollout.micro_batch
    free, digest = run(a.settings, a.updates, a.ahead, 0.0, Scorer)
    print(f"step without reward time        {free:6.3f} s")
    print(f"reward of all {forwards} forwards        {free:6.3f} s (slept)")
    waited, same = run(a.settings, a.updates, 0, free / forwards, Waiting)
    print(f"waited for after every forward  {waited:6.3f} s, {waited / free:.2f} of the longer one")
    hidden, also = run(a.settings, a.updates, a.ahead, free / forwards, Scorer)
    print(f"hidden, {a.ahead} forward ahead        {hidden:6.3f} s, {hidden / free:.2f}")
    equal = "the same" if digest == same == also else "DIFFERENT"
    print(f"weights after {a.updates} updates: {equal} bit by bit ({digest[:12]})")


if __name__ == "__main__":
    main()
