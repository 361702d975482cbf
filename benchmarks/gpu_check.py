"""Verify and time the schedules on one GPU, at true shapes of published models (docs/gpus.md).

    benchmarks/gpu_check.sh [--minutes 8] [--out DIR]
    benchmarks/gpu_check.sh --tiny               # the same without a GPU, on narrow models

Runs `leangrpo bench` and `leangrpo verify` one after another, each in a process of its own with a
limit of time, on models that `make_models.py` draws. What does not fit is left out with its reason.
Ends with 0 when nothing that ran broke a bound or failed otherwise than by memory or time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_budget as budget
import gpu_report
import make_models

HERE = Path(__file__).parent
RESERVE = 8.0
"""Seconds kept for the figure at the end."""
SLACK = 4.0
"""How many times its predicted seconds a command may take, beside a minute."""
VERIFY = 120.0
"""Seconds for `verify` on a model of a few layers."""
SHARE_OF_LIMIT = 0.9
"""The least share of the cost model's limit that retain and reweight must reach, not compiled."""
TAIL = 2000

OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)
ABSENT = re.compile(r"No such command")


@dataclass
class Ended:
    """A command that is over; `code` None where its time was up."""

    code: int | None
    output: str
    seconds: float


def run(command: Sequence[str], limit: float) -> Ended:
    """Run a command for so many seconds at most; then it ends with all its processes."""
    start = time.monotonic()
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "COLUMNS": "120"}
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        code: int | None = process.returncode
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        code = None
    return Ended(code, output, time.monotonic() - start)


@dataclass
class Check:
    """What is run on which machine, and what came of it."""

    machine: dict[str, Any]
    minutes: float
    tiny: bool
    scratch: list[Path]
    work: Path
    say: Callable[[str], None] = print
    run: Callable[[Sequence[str], float], Ended] = run
    clock: Callable[[], float] = time.monotonic
    jobs: list[dict[str, Any]] = field(default_factory=list)
    later: dict[str, list[budget.Attempt]] = field(default_factory=dict)
    folders: dict[tuple[str, str], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.known = make_models.workloads()

    @property
    def left(self) -> float:
        """Seconds until everything has to be over."""
        return self.started + 60 * self.minutes - RESERVE - self.clock()

    def all(self, jobs: Sequence[str]) -> None:
        """Every job, as `bench sd35-medium-full`; a model is kept until its last one."""
        for number, job in enumerate(jobs):
            stage, name = job.split()
            self._job(stage, name)
            later = {self._model(*other.split()) for other in jobs[number + 1 :]}
            for key in [k for k in self.folders if k not in later]:
                shutil.rmtree(self.folders.pop(key), ignore_errors=True)

    def _model(self, stage: str, name: str) -> tuple[str, str]:
        """Model and size that a job needs."""
        size = "tiny" if self.tiny else "short" if stage == "verify" else "true"
        return self.known["workloads"][name]["model"], size

    def _job(self, stage: str, name: str) -> None:
        if stage == "retain" and not self.later.get(name):
            return  # `bench` has had room for it
        if self.left <= 0:
            self._skip(stage, name, "no time left", "out of time")
            return
        if stage == "verify":
            self._verify(name)
        elif stage == "retain":
            self._attempts("bench", name, self.later.pop(name), self._bytes("bench", name))
        elif stage == "ledger":
            self._ledger(name)
        else:
            self._bench(name, compiled=stage == "compiled")

    def _bench(self, name: str, *, compiled: bool) -> None:
        stage, workload = "compiled" if compiled else "bench", self.known["workloads"][name]
        size = self._bytes("bench", name)
        schedules = workload.get("schedules", ("native", "reweight") if compiled else budget.ALL)
        free = None if self.tiny else self.machine.get("free")
        waiting = budget.attempts(workload, schedules, free=free, size=size)
        if not waiting:
            least = budget.need(workload, ("native",), size=size, checkpointing=True)
            reason = f"needs {gib(least)} of the GPU's memory, and {gib(free or 0)} are free"
            self._skip(stage, name, reason, "out of memory")
        if compiled:
            waiting = waiting[:1]
        later = [a for a in waiting[1:] if "retain" in a.schedules]
        self._attempts(stage, name, [a for a in waiting if a not in later], size)
        self.later.setdefault(name, []).extend(later)

    def _attempts(self, stage: str, name: str, waiting: list[budget.Attempt], size: int) -> None:
        """One after another, and less where memory runs out after all."""
        while waiting:
            attempt = waiting.pop(0)
            job = self._attempt(stage, name, attempt, size)
            if job["status"] == "out of memory" and job.get("seconds") is not None:
                waiting += [a for a in budget.after_memory_ran_out(attempt) if a not in waiting]

    def _attempt(self, stage: str, name: str, attempt: budget.Attempt, size: int) -> dict[str, Any]:
        workload = self.known["workloads"][name]
        facts = {"tflops": self.machine["tflops"], "size": size}
        expected: float | None = None
        rounds = 1
        if not self.tiny:
            rounds = budget.rounds_for(workload, attempt, self.left, **facts)
            expected = budget.seconds(workload, attempt, max(1, rounds), **facts)
        about: dict[str, Any] = {
            "checkpointing": attempt.checkpointing,
            "schedules": list(attempt.schedules),
            "expected_bytes": budget.need(
                workload, attempt.schedules, size=size, checkpointing=attempt.checkpointing
            ),
        }
        if self.tiny:  # the counts are of the true shapes
            del about["expected_bytes"]
        if not rounds:
            reason = f"needs about {expected:.0f} s, and {self.left:.0f} s are left"
            return self._skip(stage, name, reason, "out of time", **about)
        settings = [f"model.activation_checkpointing={str(attempt.checkpointing).lower()}"]
        settings += [f"model.compile={str(stage == 'compiled').lower()}"]
        flags = ["--schedules", ",".join(attempt.schedules), "--rounds", str(rounds)]
        compiling = 60.0 if stage == "compiled" else 0.0
        expected = None if expected is None else expected + compiling
        job = self._command(stage, name, "bench", settings, flags, expected, **about)
        if job["status"] == "ok" and stage == "bench" and not self.tiny:
            job["broken"] = below_the_limit(job["result"])
        return job

    def _verify(self, name: str) -> None:
        settings = ["model.activation_checkpointing=false"]
        job = self._command("verify", name, "verify", settings, [], None)
        job["broken"] = list((job.get("result") or {}).get("broken", []))

    def _ledger(self, name: str) -> None:
        settings = ["model.activation_checkpointing=false"]
        flags = ["--ledger", "--groups", "2,4"]
        expected = None
        if not self.tiny:
            attempt = budget.Attempt(budget.LEAN, False)
            facts = {"tflops": self.machine["tflops"], "size": self._bytes("ledger", name)}
            # a group of 2 and one of 4, each under native and two schedules: nine of LEAN's updates
            expected = budget.seconds(self.known["workloads"][name], attempt, 1, **facts)
        self._command("ledger", name, "bench", settings, flags, expected)

    def _command(
        self,
        stage: str,
        name: str,
        command: str,
        settings: Sequence[str],
        flags: Sequence[str],
        expected: float | None,
        **about: Any,
    ) -> dict[str, Any]:
        """One command of leangrpo on a workload's model, as an entry of `jobs`."""
        folder = self._folder(stage, name)
        if folder is None:
            return self.jobs[-1]
        result = self.work / "result.json"
        result.unlink(missing_ok=True)
        workload = self.known["workloads"][name]
        words = [workload["recipe"], f"model.pipeline={json.dumps(str(folder))}"]
        words += [*self.known["common"], *workload["settings"], *settings]
        if self.tiny:
            words += [*self.known["tiny"], *workload.get("tiny", [])]
        line = [sys.executable, "-m", "leangrpo", command, *words, *flags, "--json", str(result)]
        limit = self._limit(VERIFY if expected is None else 60 + SLACK * expected)
        self.say(f"{stage} {name}{' with checkpointing' * about.get('checkpointing', False)}")
        ended = self.run(line, limit)
        status, reason = outcome(ended, limit)
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
        job = {
            "stage": stage,
            "workload": name,
            "size": self._model(stage, name)[1],
            **about,
            "status": status,
            "reason": reason,
            "seconds": round(ended.seconds, 2),
            "expected_s": expected,
            "limit_s": round(limit, 1),
            "command": line[1:],
            "result": found,
            "broken": [],
        }
        self.jobs.append(job)
        self.say(f"  {status} after {ended.seconds:.0f} s{f': {reason}' if reason else ''}")
        return job

    def _limit(self, wanted: float) -> float:
        """Seconds for a command: what it may take, what there is; of --tiny nothing is known."""
        return max(1.0, self.left if self.tiny else min(self.left, wanted))

    def _skip(
        self, stage: str, name: str, reason: str, status: str, **about: Any
    ) -> dict[str, Any]:
        self.say(f"{stage} {name}: left out, {reason}")
        job = {"stage": stage, "workload": name, **about, "status": status, "reason": reason}
        self.jobs.append({**job, "seconds": None, "result": None, "broken": []})
        return self.jobs[-1]

    def _bytes(self, stage: str, name: str) -> int:
        """Of a model's weights, without making them."""
        model, size = self._model(stage, name)
        if size == "true":
            return int(make_models.BFLOAT16 * self.known["models"][model]["parameters"])
        return make_models.num_bytes(model, size)

    def _folder(self, stage: str, name: str) -> Path | None:
        """The model of a job, drawn on first use; None where it cannot be, which is recorded."""
        model, size = key = self._model(stage, name)
        if key in self.folders:
            return self.folders[key]
        num = self._bytes(stage, name)
        place, reason = room(num, self.scratch, self.machine.get("host_free"), self._held())
        if place is None:
            self._skip(stage, name, reason, "out of memory")
            return None
        expected = budget.START + num / budget.WRITTEN
        if not self.tiny and expected > self.left:
            reason = f"drawing its weights needs about {expected:.0f} s, {self.left:.0f} s are left"
            self._skip(stage, name, reason, "out of time")
            return None
        folder = place / f"{model}-{size}"
        flags = [] if size == "true" else [f"--{size}"]
        line = [sys.executable, str(HERE / "make_models.py"), model, str(folder), *flags]
        limit = self._limit(60 + SLACK * expected)
        self.say(f"drawing {model} ({size}, {num / 1e9:.2f} GB) in {place}")
        ended = self.run(line, limit)
        status, reason = outcome(ended, limit)
        if status != "ok":
            shutil.rmtree(folder, ignore_errors=True)
            self._skip(stage, name, f"drawing its weights: {reason or status}", status)
            return None
        self.say(f"  done after {ended.seconds:.0f} s")
        self.folders[key] = folder
        return folder

    def _held(self) -> int:
        """Bytes of the models that lie in memory already."""
        return sum(
            int(make_models.BFLOAT16 * self.known["models"][model]["parameters"])
            for (model, size), folder in self.folders.items()
            if size == "true" and is_memory(folder)
        )

    def as_dict(self) -> dict[str, Any]:
        """What `gpu_check.json` holds."""
        return {
            "machine": self.machine,
            "tiny": self.tiny,
            "minutes": self.minutes,
            "seconds": round(self.clock() - self.started, 1),
            "jobs": self.jobs,
            "broken": [
                {"job": f"{j['stage']} {j['workload']}", **one}
                for j in self.jobs
                for one in j["broken"]
            ],
            "failed": [
                f"{j['stage']} {j['workload']}" for j in self.jobs if j["status"] == "failed"
            ],
        }


def outcome(ended: Ended, limit: float) -> tuple[str, str]:
    """ok, out of time, out of memory, absent or failed; and why, from the last of what was said."""
    if ended.code is None:
        return "out of time", f"stopped after {limit:.0f} s"
    if ended.code == 0:
        return "ok", ""
    said = ended.output[-TAIL:].strip()
    last = said.splitlines()[-1].strip() if said else ""
    if OUT_OF_MEMORY.search(ended.output):
        lines = [line.strip() for line in ended.output.splitlines() if OUT_OF_MEMORY.search(line)]
        return "out of memory", lines[-1][:300]
    if ended.code == -signal.SIGKILL:
        return "out of memory", "killed, as the host's memory ran out or by a person"
    if ABSENT.search(ended.output):
        return "absent", "this version has no such command"
    return "failed", f"exit code {ended.code}: {last[:300]}"


def below_the_limit(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of retain and reweight that do not come near what the cost model allows."""
    return [
        {
            "schedule": row["schedule"],
            "share_of_limit": row["share_of_limit"],
            "bound": SHARE_OF_LIMIT,
        }
        for row in result["rows"]
        if row["schedule"] in ("retain", "reweight")
        and row.get("share_of_limit") is not None
        and row["share_of_limit"] < SHARE_OF_LIMIT
    ]


def room(
    num_bytes: int, places: Sequence[Path], host_free: int | None, held: int
) -> tuple[Path | None, str]:
    """The first folder that a model can lie in while it is loaded from there; or why there is none.

    Loading takes its bytes once more on the host; in a memory file system they lie there twice.
    """
    reasons = []
    for place in places:
        if not place.is_dir() or not os.access(place, os.W_OK):
            reasons.append(f"{place} cannot be written to")
            continue
        free = shutil.disk_usage(place).free
        times = 2 if is_memory(place) else 1
        if free < 1.05 * num_bytes:
            reasons.append(f"{place} has {gib(free)} free of {gib(num_bytes)}")
        elif host_free is not None and host_free - held < 1.1 * times * num_bytes:
            wanted = gib(1.1 * times * num_bytes)
            reasons.append(f"{place}: the host has {gib(host_free - held)} free of {wanted}")
        else:
            return place, ""
    return None, "no room for its weights: " + "; ".join(reasons)


def is_memory(place: Path) -> bool:
    """Whether files there lie in memory."""
    return place.resolve().is_relative_to("/dev/shm")


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / budget.GIB:.3g} GiB"


def main() -> int:
    """Run everything and write the results; the exit code."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--minutes", type=float, help="for everything (8; with --tiny 20)")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder of the results")
    parser.add_argument("--tiny", action="store_true", help="narrow, short models: no GPU needed")
    parser.add_argument("--scratch", type=Path, help="folder for the drawn weights, deleted after")
    parser.add_argument("--only", metavar="WORD", help="jobs whose name contains it")
    args = parser.parse_args()
    minutes = args.minutes or (20 if args.tiny else 8)
    jobs = [j for j in make_models.workloads()["jobs"] if (args.only or "") in j]
    if minutes <= 0 or not jobs:
        parser.error("--minutes must be more than 0, and --only part of a job's name")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    probed = run([sys.executable, str(HERE / "gpu_machine.py")], 120)
    if probed.code != 0:
        print(probed.output, file=sys.stderr)
        return 1
    machine = json.loads(probed.output.strip().splitlines()[-1])
    if not args.tiny and not machine["count"]:
        print("torch sees no GPU; --tiny runs the same on narrow models", file=sys.stderr)
        return 2
    print(f"{machine['device']}: {machine['tflops']:.3g} TFLOP/s in a bfloat16 matrix product")
    given = [args.scratch] if args.scratch else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    made = []
    for place in given:
        if place.is_dir() and os.access(place, os.W_OK):
            made.append(Path(tempfile.mkdtemp(prefix="leangrpo-gpu-check-", dir=place)))
    try:
        with tempfile.TemporaryDirectory(prefix="leangrpo-gpu-check-") as work:
            check = Check(machine, minutes, args.tiny, made, Path(work))
            check.started = began
            check.all(jobs)
    finally:
        for place in made:
            shutil.rmtree(place, ignore_errors=True)
    result = check.as_dict()
    gpu_report.write(result, args.out)
    print((args.out / "summary.md").read_text(encoding="utf-8"))
    ran = any(j["status"] == "ok" for j in check.jobs)
    return int(bool(result["broken"] or result["failed"]) or not ran)


if __name__ == "__main__":
    sys.exit(main())
