# ruff: noqa: E501 (what is hostile is long)
"""Hostile input by the thousand: no traceback reaches a user, nothing hangs, nothing is executed.

    python tests/fuzz.py --configs 2000 --prompts 500 --checkpoints 500 --answers 300 --requests 200

Each case has `LIMIT_S` seconds and a bound on memory, and must end in success or in a LeanError, the
one kind of error that the command line prints as a line. Prints how many of each there were.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from leangrpo.errors import LeanError

LIMIT_S = 20.0
MEMORY = 3 << 30
"""Bytes a case may take beyond what is taken already."""


class TookTooLongError(BaseException):
    """A case hangs; no `except Exception` may take it for its own."""


class Tally:
    """What became of the cases of a kind."""

    def __init__(self, kind: str) -> None:
        self.kind, self.outcomes, self.failures = kind, Counter[str](), list[str]()
        self.slowest = 0.0

    def run(self, what: str, case: Callable[[], Any]) -> str:
        """One case; returns its outcome: accepted, refused, or failed."""
        began = time.monotonic()
        try:
            with limited():
                case()
            outcome = "accepted"
        except LeanError as error:
            outcome = "refused"
            if not str(error).strip():
                outcome = "failed"
                self.failures.append(f"{what}: an empty message")
        except (Exception, TookTooLongError) as error:
            outcome = "failed"
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {str(error)[:300]}"
            own = [f for f in traceback.extract_tb(error.__traceback__) if "leangrpo" in f.filename]
            at = f"{own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno}" if own else ""
            self.failures.append(f"{what[:400]}\n    {said} ({at} {where.filename}:{where.lineno})")
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.outcomes[outcome] += 1
        return outcome

    def line(self) -> str:
        o, total = self.outcomes, sum(self.outcomes.values())
        return (
            f"| {self.kind} | {total} | {o['accepted']} | {o['refused']} | {o['failed']} "
            f"| {self.slowest:.1f} s |"
        )


@contextmanager
def limited() -> Iterator[None]:
    """Raise TookTooLongError for what hangs, and MemoryError for what explodes."""

    def late(*_: Any) -> None:
        raise TookTooLongError(f"more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def each(strategy: Any, num: int, seed_: int, act: Callable[[Any], None]) -> None:
    """Call `act` with so many of hypothesis's draws."""

    @seed(seed_)
    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def all_of_them(value: Any) -> None:
        act(value)

    all_of_them()


# -- settings --------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "", " ", "~", "null", "../../../etc/passwd", "/dev/zero", "/dev/random", "a" * 5000,
            "\u202e", "\x00", "${HOME}", "{{x}}", "%s%n", "!!python/object/apply:os.system [true]",
            "hf:..", "hf:a/b:c:d:e", "http://[::1", "http://x:99999999", "file:///etc/passwd", "os:",
            ":system", "a:b:c", "os:nothing", "1e999", "0x10", "12:30:45", "2001-01-01", ".inf", "auto",
            "cuda:99", "embedded", "99999GiB",
        ]
    ),
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-5, 20),
    st.sampled_from([10**6, 2**31, 2**63, 2**64, 10**30, 10**400, -1, 0, -(10**18)]),
    st.floats(),
    st.sampled_from([float("nan"), float("inf"), -0.0, 1e-320, 1e308]),
)
SCALARS = st.one_of(NUMBERS, TEXTS, st.booleans(), st.none(), st.dates(), st.binary(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(TEXTS, NUMBERS, st.booleans()), inner, max_size=4),
    ),
    max_leaves=12,
)


def deep(levels: int) -> str:
    return "seed: " + "[" * levels + "]" * levels


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
DOCUMENTS = [
    BOMB, BOMB.replace("a: &a", "seed: &a"), f"rewards:\n  - &x {{name: ocr}}\n{BOMB}", deep(30),
    deep(100), deep(5000), "a: &a [*a]", "a: &a {b: *a}", "&a seed: *a", "<<: &a {<<: *a}", "- 1\n- 2",
    "--- 1\n--- 2", "%YAML 9.9\n---\nseed: 1", "seed: !!python/object/apply:os.system [touch owned]",
    "seed: !!python/name:os.system", "!!binary x", "seed: !!set {a, b}", "seed: !!omap [a: 1]",
    "seed: !!timestamp x", "? [1, 2]\n: 3", "? {a: b}\n: 3", "seed: 1\nseed: 2", "\t", "\ufeffseed: 1",
    "seed: " + "9" * 10000, "x" * (1 << 21), "{" * 3000, "a: " + "&x " * 100, "extends: ../../x",
    "extends: [a]", "extends: embedded\nalgorithm: x", "extends: flux1-dev+mixgrpo\nseed: .nan",
    "rewards: {0: {name: ocr}}", "selection: {rule: list, steps: [0x7fffffffffffffffff]}",
    "seed: 1e400", "updates: 1_000_000_000_000_000_000_000", "run: {dir: \"\\0\"}", "seed: 0b1" + "0" * 99,
    "prompts: {train: /dev/zero}", "prompts: {train: /proc/self/mem}", "prompts: {train: .}",
    "recipe: ../../../tmp/x", "recipe: \"\\n\"", "description: \"\\u2028\"", "seed: 190:20:30.15",
]  # fmt: skip


def trees() -> Any:
    """The embedded recipe with some settings, known and unknown, set to something else."""
    from leangrpo.complaints import setting_paths

    paths = sorted(setting_paths())
    change = st.tuples(st.one_of(st.sampled_from(paths), TEXTS), VALUES)
    return st.lists(change, min_size=1, max_size=5)


def planted(changes: list[tuple[str, Any]]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, value in changes:
        node: Any = tree
        parts = path.replace(".N", "").split(".")
        for part in parts[:-1]:
            node = node.setdefault(part, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node[parts[-1]] = value
    return tree


def configs(num: int, seed_: int, root: Path) -> Tally:
    """Settings in files and as overrides, read and checked as `leangrpo train` does."""
    from leangrpo.checks import check
    from leangrpo.cli_options import load
    from leangrpo.config import config_hash, load_config, to_yaml
    from leangrpo.runfolder import run_folder

    tally, file = Tally("settings"), root / "fuzz.yaml"

    def read(text: str, overrides: list[str], *, sure: bool = False) -> None:
        file.write_bytes(text.encode("utf-8", "surrogatepass"))

        def case() -> None:
            config = load([str(file), *overrides])
            check(config)
            again = root / "again.yaml"
            again.write_text(to_yaml(config), encoding="utf-8")
            assert load_config(again) == config, "it is not written as it was read"
            assert len(config_hash(config)) == 64
            folder = run_folder(config).resolve()
            assert config.run.dir or folder.parent == Path("runs").resolve(), folder

        outcome = tally.run(f"{text[:300]!r} {overrides!r}", case)
        if outcome == "refused" and (sure or tally.outcomes["refused"] % 40 == 0):
            tally.run(f"the command line with {text[:200]!r}", lambda: shown(file, overrides))

    for document in DOCUMENTS:
        read(document, [], sure=True)

    def one(changes: list[tuple[str, Any]]) -> None:
        try:
            text = yaml.safe_dump(planted(changes[:-1] or changes), allow_unicode=True)
        except (yaml.YAMLError, ValueError, TypeError):
            text = json.dumps(planted(changes), default=str)
        path, value = changes[-1]
        as_text = yaml.safe_dump(value, default_flow_style=True, width=10**6).split("\n")[0]
        read(text, [f"{path.replace('.N', '.0')}={as_text}"] if len(changes) > 1 else [])

    each(trees(), num - len(DOCUMENTS), seed_, one)
    assert not Path("owned").exists(), "a document was executed"
    return tally


def shown(file: Path, overrides: list[str]) -> None:
    """What the command line makes of it: exit code 2, one `error:`, no traceback."""
    from leangrpo.cli import main

    before, sys.argv = sys.argv, ["leangrpo", "train", str(file), "--", *overrides]
    said, handler = StringIO(), signal.getsignal(signal.SIGINT)
    try:
        with redirect_stderr(said), suppress(SystemExit):
            main()
            raise AssertionError("it was accepted")
    finally:
        sys.argv = before
        signal.signal(signal.SIGINT, handler)
    assert said.getvalue().startswith("error: ") and "Traceback" not in said.getvalue()


# -- prompts ---------------------------------------------------------------------------------------

ROWS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=4) | VALUES, max_size=6)
SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet", ".json", "")


def prompts(num: int, seed_: int, root: Path) -> Tally:
    """Prompt files of all formats: bytes, rows, and halves of good files."""
    from leangrpo.datasets import digest, read_examples
    from leangrpo.settings_model import Prompts

    tally, rng = Tally("prompt files"), random.Random(seed_)
    good = {
        ".jsonl": b'{"prompt": "a cat", "image": "cat.png", "n": 1}\n{"prompt": "a dog", "image": "d.png"}\n',
        ".csv": b'prompt,n\n"a ""cat""",1\na dog,2\n',
        ".tsv": b"prompt\tn\na cat\t1\n",
        ".txt": b"a cat\n# no\n\na dog\n",
    }
    with suppress(ImportError):
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(
            pa.table({"prompt": ["a cat", "a dog"], "n": [1, 2]}), root / "g.parquet"
        )
        good[".parquet"] = (root / "g.parquet").read_bytes()

    def read(data: bytes, suffix: str, images: dict[str, str]) -> None:
        path = root / f"prompts{suffix}"
        path.write_bytes(data)

        def case() -> None:
            heldout: Any = rng.choice([None, 1, 0.5, str(path)])
            source = Prompts(train=str(path), heldout=heldout, images=images)
            for half in (False, True):
                digest(read_examples(source, heldout=half))

        tally.run(f"{suffix} {data[:200]!r} {images}", case)

    def one(case: Any) -> None:
        suffix, kind, data, rows = case
        images = {"image": "image"} if rng.random() < 0.2 else {}
        if kind == "rows":
            text = "\n".join(json.dumps(row, default=str) for row in rows)
            data = text.encode("utf-8", "surrogatepass")
        elif kind == "mutated" and suffix in good:
            data = mutated(good[suffix], rng)
        read(data, suffix, images)

    kinds = st.sampled_from(["bytes", "rows", "mutated", "mutated"])
    case = st.tuples(st.sampled_from(SUFFIXES), kinds, st.binary(max_size=400), ROWS)
    each(case, num - 4, seed_, one)
    for data in (b'{"prompt": ' + b"[" * 100_000, b"a" * 10_000_000, b'"' * 200_000, b"\x00" * 100):
        read(data, rng.choice((".jsonl", ".csv")), {})
    return tally


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Bits turned over, cut short, doubled, or with a part of something else in it."""
    found, way = bytearray(data or b"\0"), rng.randrange(5)
    at = rng.randrange(len(found))
    if way == 0:
        for _ in range(rng.choice((1, 1, 8, 64))):
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    elif way == 1:
        del found[at:]
    elif way == 2:
        found[at:at] = rng.randbytes(rng.randrange(1, 64))
    elif way == 3:
        found[at : at + 8] = b"\xff" * 8
    else:
        found += found[at:]
    return bytes(found)


# -- checkpoints -----------------------------------------------------------------------------------

STATES: tuple[Any, ...] = (
    None, [], 1, "x", {}, {"update": None}, float("inf"), float("nan"), -1, 10**30, 1e300, True,
    "../../x", [[]], {"a": {"b": []}}, "9" * 5000,
)  # fmt: skip


def checkpoints(num: int, seed_: int, root: Path) -> Tally:
    """Folders of runs with what is in them changed, half of them with checksums to match."""
    import tiny
    import torch

    from leangrpo.checkpoint import restore
    from leangrpo.config import load_config
    from leangrpo.ema import Ema
    from leangrpo.report import RunRecord, read_run
    from leangrpo.resume import find_checkpoint
    from leangrpo.setup import make_policy
    from leangrpo.train import train

    tally, rng = Tally("checkpoints"), random.Random(seed_)
    tiny.save(tiny.tiny_sd3(), root / "sd3")
    (root / "p.txt").write_text("a cat\na dog\n", encoding="utf-8")
    overrides = [
        "rollout={prompts: 1, generations: 2, micro_batch: 1}",
        "sampling={steps: 2, height: 16, width: 16, call: {max_sequence_length: 16}}",
        "selection={rule: fraction, fraction: 1.0, steps: null}",
        f"model={{pipeline: {root / 'sd3'}, train: lora, lora: {{rank: 2}}}}",
        f"prompts={{train: {root / 'p.txt'}, heldout: null}}",
        "rewards=[{name: jpeg_compressibility}]",
        "advantage={baseline: value, std: none, clip: null}",
        "value={batch: 4, buffer: 8, width: 4}",
        "ema.decay=0.9",
        "checkpoint={every: 1, keep: 2}",
        "updates=2",
    ]
    with redirect_stdout(StringIO()):
        train(load_config("embedded", [*overrides, f"run.dir={root / 'run'}"]), quiet=True)
    config = load_config("embedded", [*overrides, f"run.dir={root / 'mutant'}"])
    policy = make_policy(config, torch.device("cpu"))
    optimizer, ema = torch.optim.AdamW(policy.parameters, fused=True), Ema(policy, 0.9)

    for number in range(num):
        mutant = root / "mutant"
        shutil.rmtree(mutant, ignore_errors=True)
        shutil.copytree(root / "run", mutant)
        what = "; ".join(mutate(mutant, rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))

        def case(mutant: Path = mutant) -> None:
            found = find_checkpoint(config, mutant)
            if found is not None:
                restore(found, policy, optimizer, ema)
                assert all(isinstance(name, str) for name in found.extra)
            read_run(mutant)
            record = RunRecord.resume(mutant, 1, "updates: 2", quiet=True)
            record._page()
            record.close()

        tally.run(f"{number}: {what}", case)
    return tally


def mutate(run: Path, rng: random.Random) -> str:
    """Change something; says what."""
    folder = run / "checkpoints" / rng.choice(("000001", "000002"))
    if not folder.is_dir():
        return "nothing"
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    if not files:
        return "nothing"
    file, way = rng.choice(files), rng.randrange(8)
    name = f"{folder.name}/{file.relative_to(folder)}"
    if way <= 1:
        file.write_bytes(mutated(file.read_bytes(), rng))
        said = f"{name} mutated"
    elif way == 2:
        tensors = [p for p in files if p.suffix == ".safetensors"]
        file = rng.choice(tensors or files)
        file.write_bytes(lying(file.read_bytes(), rng))
        said = f"the header of {file.name} lies"
    elif way == 3:
        other = rng.choice(files)
        file.write_bytes(other.read_bytes())
        said = f"{name} is {other.name}"
    elif way == 4:
        target = rng.choice(
            ("/dev/zero", "/dev/null", "/etc/passwd", str(folder), "nowhere", "/proc/self/mem")
        )
        file.unlink()
        file.symlink_to(target)
        said = f"{name} leads to {target}"
    elif way == 5:
        extra = folder / rng.choice(
            ("x.pkl", "state/x.safetensors", "state/.metadata", "optimizer.safetensors")
        )
        extra.parent.mkdir(exist_ok=True)
        extra.write_bytes(
            rng.choice((b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.", rng.randbytes(90)))
        )
        said = f"{extra.name} added"
    elif way == 6:
        line = rng.choice(
            ('{"update": "x"}', "{}", "[" * 9999, '{"update": 1}', "null", '{"update": NaN}')
        )
        place = run / rng.choice(
            ("metrics.jsonl", "evaluations.jsonl", "config.yaml", "summary.json")
        )
        with place.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
        return f"{place.name} has {line[:20]}"
    else:
        said = swapped(folder, rng)
    if rng.random() < 0.5:
        sign(folder)
        said += ", signed"
    return said


def lying(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file that says of itself what is not so."""
    if len(data) < 8:
        return data
    (length,) = struct.unpack("<Q", data[:8])
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return data
    names = [n for n in header if n != "__metadata__"]
    way = rng.randrange(6)
    if way == 0:
        return struct.pack("<Q", rng.choice((0, 2**40, 2**63, 2**64 - 1, length + 1))) + data[8:]
    entry: dict[str, Any] = header[rng.choice(names)] if names else {}
    if way == 1:
        entry["shape"] = rng.choice(([2**40, 2**40], [-1], [], ["a"], [0], None))
    elif way == 2:
        entry["data_offsets"] = rng.choice(([0, 2**60], [8, 0], [0], None, [-4, 4]))
    elif way == 3:
        entry["dtype"] = rng.choice(("F64", "BOOL", "X", None, "U8"))
    elif way == 4 and names:
        header[rng.choice(("other", "../x", "", "a:b"))] = header.pop(rng.choice(names))
    else:
        header["__metadata__"] = rng.choice(({"lora_adapter_metadata": "{"}, [], {"a": 1}, None))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def swapped(folder: Path, rng: random.Random) -> str:
    """A value of `state.json` is another."""
    path = folder / "state.json"
    if path.is_symlink():
        return "nothing"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        key = rng.choice([*state, "extra", "new"])
        value = rng.choice(STATES)
        state[key] = value
        path.write_text(json.dumps(state), encoding="utf-8")
    except (OSError, ValueError, TypeError, AttributeError):
        return "nothing"
    return f"state.json: {key} is {str(value)[:30]}"


def sign(folder: Path) -> None:
    """Give a changed checkpoint the checksums that it should have."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        path = folder / "state.json"
        if path.is_symlink():
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state.get("files"), dict):
            for name in state["files"]:
                if (folder / name).is_file() and not (folder / name).is_symlink():
                    data = (folder / name).read_bytes()
                    state["files"][name] = hashlib.sha256(data).hexdigest()
        rest = {k: v for k, v in state.items() if k != "checksum"}
        text = json.dumps(rest, sort_keys=True)
        state["checksum"] = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps(state), encoding="utf-8")


# -- rewards over HTTP -----------------------------------------------------------------------------

JSONS = [
    b'{"scores": [1]}', b'{"scores": [null]}', b'{"scores": [1e999]}', b'{"scores": {}}', b"[]", b"",
    b'{"scores": [' + b"[" * 30000, b'{"scores": [' + b"9" * 9000 + b"]}", b"\x80\x04cos\nsystem\n",
    b'{"scores": [true]}', b'{"error": "' + b"\\ud800" * 9 + b'"}', b'{"scores": ["\xff"]}', b"\x00" * 70000,
]  # fmt: skip


def answers(num: int, seed_: int, root: Path) -> Tally:
    """What a server may answer to a trainer."""
    import torch

    from leangrpo.scoring import Scorer
    from leangrpo.settings import Scoring

    tally, box = Tally("a server's answers"), [b""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with suppress(OSError):
                self.wfile.write(box[0])

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    pictures = torch.zeros(1, 3, 2, 2)
    status = st.sampled_from([200, 200, 200, 100, 204, 301, 307, 401, 404, 422, 429, 500, 999, -1])
    body = st.one_of(
        st.sampled_from(JSONS),
        st.binary(max_size=99),
        VALUES.map(lambda v: json.dumps(v, default=str).encode()),
    )
    headers = st.sampled_from(
        [
            b"",
            b"Content-Length: 5\r\n",
            b"Content-Length: x\r\n",
            b"X: " + b"y" * 70000 + b"\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Location: http://10.0.0.1/\r\n",
            b"Content-Length: 99999999999\r\n",
            b"\xff\xfe: \x00\r\n",
        ]
    )
    raw = st.binary(max_size=99)

    def one(case: Any) -> None:
        code, extra, data, plain = case
        box[0] = plain if code == -1 else b"HTTP/1.1 %d x\r\n%s\r\n%s" % (code, extra, data)

        def ask() -> None:
            scoring = Scoring(retries=0, timeout=3.0)
            with Scorer([(url, 1.0)], on_bad="exclude", scoring=scoring) as scorer:
                scorer(pictures, ["a"])

        tally.run(repr(box[0][:200]), ask)

    each(st.tuples(status, headers, body, raw), num, seed_, one)
    server.shutdown()
    server.server_close()
    return tally


def requests(num: int, seed_: int, root: Path) -> Tally:
    """What anybody may send to a reward's server: it answers, or hangs up, and is there after."""
    import torch

    from leangrpo.serve import RewardServer
    from leangrpo.wire import encode

    tally, rng = Tally("requests to a reward's server"), random.Random(seed_)
    server = RewardServer("jpeg_compressibility", port=0, max_body=1 << 20)
    broken: list[str] = []
    server.handle_error = lambda *_: broken.append(traceback.format_exc())  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    good = json.loads(encode(torch.zeros(1, 3, 4, 4), ["a"], [{}]))

    def one(value: Any) -> None:
        change, data = value
        tree = {**good, rng.choice([*good, "x"]): change}
        body = rng.choice(
            [data, json.dumps(tree, default=str).encode(), mutated(json.dumps(good).encode(), rng)]
        )
        length = rng.choice([len(body)] * 5 + [0, -1, 10**18, len(body) + 7])
        kind = rng.choice(["application/json"] * 5 + ["text/plain", "\x00"])
        head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        whole = rng.choice([head.encode() + body] * 5 + [data, mutated(head.encode() + body, rng)])

        def case() -> None:
            address = server.server_address[:2]
            with suppress(OSError), socket.create_connection(address, timeout=15) as line:
                line.sendall(whole)
                line.shutdown(socket.SHUT_WR)
                while line.recv(1 << 16):
                    pass
            if broken:
                raise AssertionError(broken.pop())

        tally.run(repr(whole[:300]), case)

    with redirect_stderr(StringIO()):
        each(st.tuples(VALUES, st.binary(max_size=200)), num, seed_, one)
        tally.run("a good request after all", lambda: alive(server.url, good))
    server.shutdown()
    server.server_close()
    return tally


def alive(url: str, good: dict[str, Any]) -> None:
    from urllib.request import Request, urlopen

    body = json.dumps(good).encode()
    request = Request(url, body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=15) as answer:
        assert len(json.loads(answer.read())["scores"]) == 1


KINDS: dict[str, Callable[[int, int, Path], Tally]] = {
    "configs": configs,
    "prompts": prompts,
    "checkpoints": checkpoints,
    "answers": answers,
    "requests": requests,
}


def fuzz(counts: dict[str, int], seed_: int) -> list[Tally]:
    """So many cases of each kind, in a folder of their own."""
    found, here = [], Path.cwd()
    with tempfile.TemporaryDirectory(prefix="leangrpo-fuzz-") as folder:
        os.chdir(folder)
        try:
            for kind, num in counts.items():
                if num:
                    found.append(KINDS[kind](num, seed_, Path(folder)))
                    assert not Path("owned").exists(), "something was executed"
        finally:
            os.chdir(here)
    return found


def table(tallies: list[Tally]) -> str:
    """As Markdown."""
    head = ["| input | cases | accepted | refused in words | traceback or hang | slowest |"]
    return "\n".join([*head, "|---|---|---|---|---|---|", *(t.line() for t in tallies)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {
        "configs": 2000,
        "prompts": 500,
        "checkpoints": 500,
        "answers": 300,
        "requests": 200,
    }
    for kind, num in defaults.items():
        parser.add_argument(f"--{kind}", type=int, default=num)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    began = time.monotonic()
    tallies = fuzz({kind: options[kind] for kind in KINDS}, options["seed"])
    for tally in tallies:
        for failure in tally.failures[:40]:
            print(f"{tally.kind}: {failure}", file=sys.stderr)
    print(table(tallies))
    print(f"\nseed {options['seed']}, {time.monotonic() - began:.0f} s")
    return 1 if any(t.failures for t in tallies) else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
