# ruff: noqa: B023 (what is waited for is waited for at once)
"""The fault campaign: what is done to runs, and what is left of them, as a table.

    python tests/faults.py                       all of it, minutes
    python tests/faults.py --kills 5 --only kill,sigterm

Every fault is injected into a real training process (`fault_runs`). `survived`: the run went on, or
ended with one clear message and could be resumed. `lost`: updates that a checkpoint on the disk
held, and that a resume would have to make again. `equal`: after resuming, the lines of metrics
(without seconds and bytes) and the final weights are those, bit by bit, of a run left in peace.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fault_runs import Factory, flips, lines, published, resumable, sha, waited

UPDATES = 8


class Row:
    """What became of one kind of fault."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.injected = self.survived = self.lost = self.compared = self.equal = 0
        self.problems: list[str] = []

    def fault(self, ok: bool, why: str = "", lost: int = 0) -> None:
        self.injected += 1
        self.survived += ok
        self.lost += lost
        if not ok or lost:
            self.problems.append(f"{self.kind}: {why} (lost {lost})")

    def compare(self, run: Path, whole: Path) -> None:
        self.compared += 1
        same = lines(run) == lines(whole) and sha(run) == sha(whole)
        self.equal += same
        if not same:
            self.problems.append(f"{self.kind}: {run} is not the run that {whole} is")

    def line(self) -> str:
        """Of the table."""
        equal = f"{self.equal} of {self.compared}"
        return f"| {self.kind} | {self.injected} | {self.survived} | {self.lost} | {equal} |"

    @property
    def good(self) -> bool:
        whole = self.injected == self.survived and self.compared == self.equal
        return whole and self.lost == 0 and self.injected > 0


class Campaign:
    """All kinds of faults against runs in one folder."""

    def __init__(self, root: Path, *, kills: int, seed: int, updates: int = UPDATES) -> None:
        self.factory, self.root = Factory(root), root
        self.kills, self.updates = kills, updates
        self.random = random.Random(seed)
        self.more = [f"updates={updates}"]
        self._whole: dict[int, float] = {}

    def whole(self, ranks: int) -> tuple[Path, float]:
        """A run that nothing happens to, and the seconds it takes."""
        name = f"whole-{ranks}"
        if ranks not in self._whole:
            if ranks == 1:  # the first process of all pays for what the others find warm
                self.factory.whole("warm", "updates=1")
            self._whole[ranks] = self.factory.whole(name, *self.more, ranks=ranks)
        return self.root / name, self._whole[ranks]

    def fresh(self, name: str) -> Path:
        shutil.rmtree(self.root / name, ignore_errors=True)
        return self.root / name

    def finish(self, row: Row, name: str, ranks: int = 1, whole: Path | None = None) -> None:
        """Go on with a run to its end, and compare."""
        try:
            self.factory.whole(name, *self.more, ranks=ranks)
        except RuntimeError as error:
            row.problems.append(f"{row.kind}: {error}")
            row.compared += 1
            return
        row.compare(self.root / name, whole or self.whole(ranks)[0])

    # -- being killed ------------------------------------------------------------------------------

    def kill(self) -> Iterator[Row]:
        yield self._killed("SIGKILL at any moment, 1 process", 1, self.kills)

    def kill_writing(self) -> Iterator[Row]:
        kind = "SIGKILL while a checkpoint is written, 1 process"
        yield self._killed(kind, 1, max(2, self.kills // 2), writing=True)

    def kill_ranks(self) -> Iterator[Row]:
        yield self._killed("SIGKILL of one or both of 2 ranks", 2, self.kills)

    def kill_ranks_writing(self) -> Iterator[Row]:
        kind = "SIGKILL while a checkpoint is written, 2 ranks"
        yield self._killed(kind, 2, max(2, self.kills // 2), writing=True)

    def _killed(self, kind: str, ranks: int, num: int, *, writing: bool = False) -> Row:
        row, (whole, lasted) = Row(kind), self.whole(ranks)
        name, hook = f"victim-{ranks}", "slow_writes:0.01" if writing else ""
        run, met = self.fresh(name), 0
        while row.injected < num:
            started = self.factory.start(name, *self.more, ranks=ranks, hook=hook)
            if writing:
                partial = run / "checkpoints"
                skip = self.random.randrange(4)  # of the checkpoints, those before are left alone
                first = published(run)

                def reached() -> bool:
                    writes = any(partial.glob(".*.partial"))
                    return (writes and published(run) >= first + skip) or not started.alive

                waited(reached, 120)
                time.sleep(self.random.uniform(0, 0.08))
            else:
                end = time.monotonic() + self.random.uniform(0.05, 1.0) * lasted
                waited(lambda: time.monotonic() > end or not started.alive, 240)
            if not started.alive:  # it has ended before the shot
                started.join(60)
                ended_well = set(started.codes) == {0}
                if not ended_well:
                    row.fault(
                        False, f"it ended by itself with {started.codes}: {started.text()[-800:]}"
                    )
                    break
                row.compare(run, whole)
                run = self.fresh(name)
                continue
            victims = self.random.choice([{0}, {1}, {0, 1}]) if ranks > 1 else {0}
            before = published(run)
            started.kill(lambda rank: rank in victims)
            started.join(90)  # the other ends by itself
            met += any((run / "checkpoints").glob(".*.partial"))
            said = started.text()
            row.fault("Traceback" not in said, said[-800:], max(0, before - resumable(run)))
        if run.exists():
            self.finish(row, name, ranks)
        self.fresh(name)
        if writing:
            row.kind += f" ({met} left one half-written)"
        return row

    def sigterm(self) -> Iterator[Row]:
        """From a scheduler: the update is finished and saved, well within its grace period."""
        for ranks in (1, 2):
            self.whole(ranks)
            row, slowest = Row(f"SIGTERM from a scheduler, {ranks} rank{'s' * (ranks > 1)}"), 0.0
            for i in range(max(2, self.kills // 5)):
                name = f"term-{ranks}-{i}"
                run = self.fresh(name)
                more = [*self.more, "checkpoint.every=1000"]
                started = self.factory.start(name, *more, ranks=ranks)
                after = self.random.randrange(0, self.updates - 2)
                waited(lambda: len(lines(run)) > after or not started.alive, 120)
                sent, had = time.monotonic(), len(lines(run))
                started.signal(signal.SIGTERM)
                started.join(60)
                slowest = max(slowest, time.monotonic() - sent)
                lost = max(0, had - resumable(run))
                ok = set(started.codes) == {130} and "Traceback" not in started.text()
                row.fault(ok, f"{started.codes} {started.text()[-800:]}", lost)
                self.finish(row, name, ranks)
                self.fresh(name)
            row.kind += f" (saved within {slowest:.1f} s)"
            yield row

    # -- disks -------------------------------------------------------------------------------------

    def disk_full(self) -> Iterator[Row]:
        row = Row("no file beyond N bytes (RLIMIT_FSIZE)")
        for i, room in enumerate((0, 700, 3_000, 20_000, 60_000, 150_000)):
            self._refused(row, f"full-{i}", hook=f"small_files:{room}")
        yield row
        with small_disk(self.root / "disk") as disk:
            if disk is None:
                return
            row = Row("disk full (a tmpfs of 2 MiB)")
            for i in range(4):
                run = self.fresh(f"disk-{i}")
                (disk / f"run-{i}").mkdir()
                run.symlink_to(disk / f"run-{i}")
                filler = disk / "filler"
                self.factory.whole(f"disk-{i}", "updates=2")
                left = os.statvfs(disk)
                filler.write_bytes(b"\0" * max(0, left.f_bavail * left.f_bsize - i * 40_000))
                self._refused(row, f"disk-{i}", begin=False, mend=lambda f=filler: f.unlink())
                shutil.rmtree(disk / f"run-{i}", ignore_errors=True)
                run.unlink()
            yield row

    def _refused(
        self, row: Row, name: str, *, hook: str = "", mood: str = "", begin: bool = True,
        mend: Callable[[], Any] = lambda: None, more: tuple[str, ...] = (), code: int = 2,
        says: str = "--resume", whole: Path | None = None,
    ) -> None:  # fmt: skip
        """A run of two updates meets a fault as it goes on, ends with a message, and is mended."""
        run = self.root / name
        if begin:
            run = self.fresh(name)
            self.factory.whole(name, "updates=2", *more)
        before = resumable(run)
        started = self.factory.start(name, *self.more, *more, hook=hook, mood=mood)
        started.join(120)
        said = started.text()
        ok = started.codes == [code] and "Traceback" not in said and says in said
        row.fault(ok, f"{started.codes} {said[-1200:]}", max(0, before - resumable(run)))
        mend()
        self.more, kept = [*self.more, *more], self.more
        try:
            self.finish(row, name, whole=whole)
        finally:
            self.more = kept

    def damage(self) -> Iterator[Row]:
        """Every file of the newest checkpoint, in every way; the one before is gone on from."""
        row, (whole, _) = Row("a file of the newest checkpoint damaged"), self.whole(1)
        base = self.fresh("base")
        self.factory.whole("base", "updates=4")
        names = sorted(
            str(p.relative_to(base / "checkpoints/000004"))
            for p in (base / "checkpoints/000004").rglob("*")
            if p.is_file()
        )
        ways = ("bit", "short", "empty", "gone")
        for name in names:
            for way in ways if self.kills >= 50 else self.random.sample(ways, 1):
                run = self.fresh("damaged")
                shutil.copytree(base, run)
                file = run / "checkpoints/000004" / name
                data = file.read_bytes()
                at = self.random.randrange(len(data))
                if way == "gone":
                    file.unlink()
                else:
                    new = {"bit": flips(data, iter([at])), "short": data[:at], "empty": b""}
                    file.write_bytes(new[way])
                started = self.factory.start("damaged", *self.more)
                started.join(120)
                said = started.text()
                ok = started.codes == [0] and "Using an older one" in said
                row.fault(ok, f"{way} {name}: {started.codes} {said[-800:]}")
                row.compare(run, whole) if started.codes == [0] else None
        yield row

    # -- numbers and rewards -----------------------------------------------------------------------

    def numbers(self) -> Iterator[Row]:
        row = Row("NaN or Inf from a reward")
        for mood in ("nan", "inf"):
            mend = (self.root / "mood").unlink
            self._refused(
                row, f"reward-{mood}", mood=mood, mend=mend, says="NaN or infinite scores"
            )
        yield row
        row = Row("NaN from the model: latents, log-probabilities, pictures, gradients")
        for kind in ("latents", "log_prob", "images", "gradient"):
            hook = f"poisoned:{kind},3"
            for name in (f"nan-{kind}", f"nan-{kind}-again"):
                self.fresh(name)
            self.factory.whole(f"nan-{kind}", *self.more, hook=hook)
            found = [line["excluded"] for line in lines(self.root / f"nan-{kind}")]
            log = (self.root / f"nan-{kind}" / "log.txt").read_text(encoding="utf-8")
            ok = found == [0, 0, 1] + [0] * (self.updates - 3) and "are not finite" in log
            row.fault(ok, f"{kind}: excluded {found}")
            self.factory.whole(f"nan-{kind}-again", "updates=2", hook=hook)
            self.factory.whole(f"nan-{kind}-again", *self.more, hook=hook)
            row.compare(self.root / f"nan-{kind}-again", self.root / f"nan-{kind}")
        yield row

    def rewards(self) -> Iterator[Row]:
        row = Row("a reward raises, returns text or a wrong count")
        for mood, says in (("raise", "is gone"), ("text", "no list"), ("count", "returned 2")):
            mend = (self.root / "mood").unlink
            self._refused(row, f"reward-{mood}", mood=mood, mend=mend, says=says)
        yield row
        row = Row("a reward's server dies, hangs, answers garbage or a wrong count")
        with Server() as server:
            more = (f"rewards=[{{name: '{server.url}'}}]",)
            self.fresh("served")
            self.factory.whole("served", *self.more, *more)
            for mood in ("die", "hang", "garbage", "html", "count", "half", "500", "nan"):
                run = self.fresh(f"served-{mood}")
                self.factory.whole(run.name, "updates=2", *more)
                server.set(mood, after=self.random.randrange(1, 9))
                mend = lambda: server.set("", after=0)  # noqa: E731
                self._refused(
                    row, run.name, begin=False, more=more, says=server.url, mend=mend,
                    whole=self.root / "served",
                )  # fmt: skip
            yield row
            row = Row("a reward's server fails once and is asked again")
            for mood in ("hang", "half", "500"):
                run = self.fresh(f"again-{mood}")
                server.set(mood, after=5, times=1)
                self.factory.whole(run.name, *self.more, *more)
                row.fault(server.mood == "", "the fault was not met")
                row.compare(run, self.root / "served")
            yield row

    # -- clocks, folders, versions -----------------------------------------------------------------

    def clock(self) -> Iterator[Row]:
        row, (whole, _) = Row("the clock jumps, forward and back"), self.whole(1)
        for hours in ("1", "-26", "100000"):
            run = self.fresh("clock")
            self.factory.whole("clock", "updates=3", hook=f"jumping_clock:{hours}")
            self.factory.whole("clock", *self.more, hook=f"jumping_clock:{hours}")
            row.fault((run / "report.html").is_file(), "no report")
            row.compare(run, whole)
        yield row

    def twice(self) -> Iterator[Row]:
        row, (whole, _) = Row("two runs into one folder"), self.whole(1)
        for resume in (False, True):
            run = self.fresh("twice")
            first = self.factory.start("twice", *self.more, hook="slow_writes:0.02")
            waited(lambda: published(run) >= 1, 120)
            second = self.factory.start("twice", *self.more, resume=resume)
            second.join(120)
            says = "another process is training in it" if resume else "it already holds a run"
            ok = second.codes == [2] and says in second.text()
            first.join(240)
            row.fault(ok and first.codes == [0], f"{second.codes} {second.text()[-800:]}")
            row.compare(run, whole)
        yield row


class Server:
    """A reward's server with moods."""

    def __init__(self) -> None:
        self.mood, self.after, self.times = "", 0, -1
        self.released = threading.Event()
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say(200, b"{}")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.answer(self, body)

            def say(self, status: int, body: bytes, length: int | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(length or len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> Server:
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()

    def set(self, mood: str, *, after: int, times: int = -1) -> None:
        """Be in a mood from a request on."""
        with self.lock:
            self.mood, self.after, self.times = mood, after, times

    def answer(self, handler: Any, body: bytes) -> None:
        from leangrpo.wire import decode

        with self.lock:
            self.after -= 1
            mood = self.mood if self.after < 0 and self.times else ""
            if mood and self.times > 0:
                self.times -= 1
                self.mood = ""
        scores = decode(body)[0].double().mean((1, 2, 3)).tolist()
        good = json.dumps({"scores": scores}).encode()
        if mood == "hang":
            self.released.wait(10)
        elif mood == "die":
            handler.connection.close()
        elif mood == "half":
            handler.say(200, good[:-3], len(good))
        else:
            said = {
                "garbage": b"\x80\x04\x95cos\nsystem",
                "html": b"<html>busy</html>",
                "count": json.dumps({"scores": [*scores, 1.0]}).encode(),
                "nan": b'{"scores": [NaN]}',
            }
            handler.say(500 if mood == "500" else 200, said.get(mood, good))


@contextmanager
def small_disk(where: Path) -> Iterator[Path | None]:
    """A disk of 2 MiB, where this process may make one."""
    where.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform != "linux" or libc.mount(
        b"tmpfs", str(where).encode(), b"tmpfs", 0, b"size=2m"
    ):
        yield None
        return
    try:
        yield where
    finally:
        libc.umount2(str(where).encode(), 2)


KINDS = (
    "kill", "kill_writing", "kill_ranks", "kill_ranks_writing", "sigterm", "disk_full", "damage",
    "numbers", "rewards", "clock", "twice",
)  # fmt: skip


def table(rows: list[Row]) -> str:
    """As Markdown."""
    head = "| fault | injected | survived | lost updates | bitwise equal after resume |"
    text = [head, "|---|---|---|---|---|"]
    text += [row.line() for row in rows]
    total = [
        sum(getattr(r, n) for r in rows)
        for n in ("injected", "survived", "lost", "equal", "compared")
    ]
    text.append(f"| all | {total[0]} | {total[1]} | {total[2]} | {total[3]} of {total[4]} |")
    return "\n".join(text)


def run(
    root: Path,
    only: list[str],
    *,
    kills: int,
    seed: int,
    updates: int = UPDATES,
    quiet: bool = False,
) -> list[Row]:
    """Inject faults of some kinds; the rows of the table."""
    campaign, rows = Campaign(root, kills=kills, seed=seed, updates=updates), []
    for kind in only:
        began = time.monotonic()
        for row in getattr(campaign, kind)():
            rows.append(row)
            if not quiet:
                seconds = time.monotonic() - began
                print(f"{row.line()} {seconds:.0f} s", file=sys.stderr, flush=True)
            for problem in row.problems:
                print(f"  {problem}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="kills of each kind")
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := [kind for kind in only if kind not in KINDS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(KINDS)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="leangrpo-faults-") as folder:
        rows = run(Path(folder), only, kills=options.kills, seed=options.seed)
    print(table(rows))
    print(f"\nseed {options.seed}, {time.monotonic() - began:.0f} s")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # of the semaphores of processes that were killed, which is what this is about
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    sys.exit(main())
