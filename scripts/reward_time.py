"""A reward that takes as long as sampling, waited for or hidden: step times, and the same weights.

    python scripts/reward_time.py [--updates 5] [--ahead 4] [KEY.PATH=VALUE ...]

Trains the embedded pipeline three times from the same start, an update of each in turn: with a
reward that takes no time, with one that sleeps after every forward, waited for before the next
forward, and with the same one while up to `--ahead` further forwards are sampled. In an update it
sleeps as long as the update before took without it.
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
from leangrpo.scoring import Scorer
from leangrpo.setup import Setup, set_up
from leangrpo.train import one_update

SMALL = (
    "rollout={prompts: 8, generations: 8, micro_batch: 2}",
    "prompts.heldout=null",
    "sampling.steps=6",
    "selection.steps=[1, 2]",
    "run.threads=1",
)


class Slow:
    """The mean brightness, after `seconds`."""

    seconds = 0.0

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
        time.sleep(self.seconds)
        return images.mean(dim=(1, 2, 3))


class Waiting(Scorer):
    """Scores before it returns: nothing is hidden."""

    def submit(self, *args: Any) -> Any:
        future = super().submit(*args)
        future.exception()
        return future


def ready(folder: Path, overrides: list[str], ahead: int, scorer: Scorer) -> Setup:
    """A run at its start, with a scorer of its own."""
    settings = [*SMALL, *overrides, f"rollout.ahead={ahead}", f"run.dir={folder}"]
    s = set_up(load_config("embedded", settings), quiet=True)
    s.scorer.close()
    s.scorer = scorer
    return s


def measure(overrides: list[str], updates: int, ahead: int) -> dict[str, Any]:
    """Median seconds of a step for each of the three, and whether their weights are the same."""
    rewards = {name: Slow() for name in ("free", "waited", "hidden")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {
            "free": ready(folder / "0", overrides, ahead, Scorer([(rewards["free"], 1.0)])),
            "waited": ready(folder / "1", overrides, 0, Waiting([(rewards["waited"], 1.0)])),
            "hidden": ready(folder / "2", overrides, ahead, Scorer([(rewards["hidden"], 1.0)])),
        }
        rollout = runs["free"].config.rollout
        forwards = rollout.prompts * rollout.generations // rollout.micro_batch
        times: dict[str, list[float]] = {name: [] for name in runs}
        for update in range(updates):
            for kind, s in runs.items():
                if kind != "free":
                    rewards[kind].seconds = times["free"][-1] / forwards
                began = time.perf_counter()
                one_update(s, update)
                times[kind].append(time.perf_counter() - began)
        digests = {weights_sha256(s.policy) for s in runs.values()}
        for s in runs.values():
            s.scorer.close()
            s.judge.close()
            s.record.close()
    # the first update prepares much
    seconds = {kind: statistics.median(found[1:] or found) for kind, found in times.items()}
    return {"seconds": seconds, "forwards": forwards, "digests": sorted(digests)}


def main() -> None:
    """Print the three step times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--ahead", type=int, default=4)
    parser.add_argument("settings", nargs="*", metavar="KEY.PATH=VALUE")
    a = parser.parse_args()
    found = measure(a.settings, a.updates, a.ahead)
    free, waited, hidden = (found["seconds"][k] for k in ("free", "waited", "hidden"))
    print(f"a step without reward time      {free:7.3f} s")
    print(f"a reward of {found['forwards']:3d} forwards        {free:7.3f} s (slept)")
    print(f"waited for after every forward  {waited:7.3f} s, {waited / free:.2f} of the longer one")
    print(f"hidden, {a.ahead} forwards ahead       {hidden:7.3f} s, {hidden / free:.2f}")
    same = len(found["digests"]) == 1
    equal = "the same" if same else "DIFFERENT"
    print(f"weights after {a.updates} updates: {equal} bit by bit ({found['digests'][0][:12]})")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
