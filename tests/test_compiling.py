"""Compiled blocks: the schedules stay exact, files and names the same, and no fall back is silent.

Most tests compile with a backend that generates no code: "eager" where wiring is tested, and
"aot_eager" where autograd is, whose graphs, forward and backward, are those of every backend. One
test compiles with the default, inductor, by the fewest graphs; the others that do are slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_exactness as exactness
import tiny
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from train_ranks import python_path

from leangrpo import bench as benching
from leangrpo import compiling, setup
from leangrpo.bench import bench
from leangrpo.checkpoint import newest
from leangrpo.compiling import VARIANTS, compile_blocks, repeated, require_compiler
from leangrpo.config import Config, load_config
from leangrpo.data import SampleKey
from leangrpo.errors import LeanError
from leangrpo.export import export_run
from leangrpo.inference import evaluate_run, load_run, sample_run
from leangrpo.loading import copy_denoisers, load_pipeline, make_trainable
from leangrpo.oracle import float64_throughout
from leangrpo.parallel import join, leave, shard_denoiser, whole
from leangrpo.policy import Policy, Sampling
from leangrpo.reweight import Reweight
from leangrpo.runfolder import read_run
from leangrpo.schedules import Native, Retain
from leangrpo.streaming import Streaming
from leangrpo.train import train

# torch hides this warning of its own tracing where it is shown, not where it is made an error
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # an import of inductor's, on its first use
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method:DeprecationWarning"),
]

KEY = [SampleKey(0, 0, 0)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No graph of another test counts, and none stays."""
    donated = torch._functorch.config.donated_buffer
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = donated


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def make_policy(name: str = "sd", train: str = "full", **options: Any) -> Policy:
    pipe = exactness.pipeline(name, train, torch.float32, **options.pop("pipe", {}))
    reference = copy_denoisers(pipe) if options.pop("copied", False) else None
    size = {k: v for k, v in tiny.CALL[name].items() if k != "num_inference_steps"}
    kernel = exactness.KERNEL[name]
    return Policy(
        pipe, Sampling(3, guidance=1.0, call=size), kernel=kernel,
        noise_level=exactness.LEVEL[kernel], reference=reference, **options,
    )  # fmt: skip


def sample(policy: Policy, keys: list[SampleKey] = KEY, **options: Any) -> Any:
    return policy.sample(["a red cube"] * len(keys), keys, decode=False, **options)


def gradient(
    policy: Policy, kind: type, selected: Sequence[int] = (1,), *, kl: float = 0.0
) -> dict[str, Tensor | None]:
    """What an update of one trajectory leaves in `.grad`, which it empties again."""
    options: dict[str, Any] = {"kl": kl}
    schedule = kind(policy, **options, **({"replay": policy.replay} if kind is Native else {}))
    schedule.begin(1, len(selected))
    rollout = sample(policy, selected=selected, noisy=selected, grad=schedule.needs_graph)
    for t in rollout.transitions:
        schedule.transition(policy.with_kl(t) if kl else t)
    schedule.rewards({KEY[0]: [0.7]})
    schedule.advantages({KEY[0]: 0.7})
    statistics = schedule.finish()
    assert kl or statistics.ratio_error == 0.0
    found = {k: None if p.grad is None else whole(p.grad) for k, p in policy.named_parameters()}
    for p in policy.parameters:
        p.grad = None
    return found


def same(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    """Bitwise, and of the same parameters."""
    pairs = [(a[k], b[k]) for k in a]
    return a.keys() == b.keys() and all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs
    )


def compare(monkeypatch: pytest.MonkeyPatch, backend: str, case: tuple[Any, ...]) -> dict[str, Any]:
    """An update under each schedule with compiled blocks, and native's without."""
    plain, update = exactness.make_policy, exactness.update
    found = {"eager": update(Native, *case)}

    def compiled(*args: Any, **kwargs: Any) -> Policy:
        policy = plain(*args, **kwargs)
        compile_blocks(policy, graphs_used_twice=False, backend=backend)
        return policy

    monkeypatch.setattr(exactness, "make_policy", compiled)
    for kind in (Native, Retain, Reweight, Streaming):
        found[kind.name] = update(kind, *case)
    return found


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    return exactness.relative(a["gradient"], b["gradient"])


def check(found: dict[str, Any], reweight: float, eager: float) -> None:
    """float32: 5e-6, derived in `test_exactness`, and the same for the fused sums of a compiled
    block, which are no longer than those of the plain one but in another order."""
    native, retain = found["native"], found["retain"]
    assert graphs() >= 2, "with and without gradients"
    assert native["statistics"].num_replays == 6
    assert native["statistics"].ratio_error == 0.0
    for name in ("retain", "reweight", "streaming"):
        assert torch.equal(found[name]["latents"], native["latents"])
    for what in ("gradient", "weights"):
        for key, value in native[what].items():
            assert value is None or torch.equal(value, retain[what][key]), (what, key)
    assert distance(found["reweight"], native) <= reweight
    assert distance(found["streaming"], native) <= reweight
    assert distance(native, found["eager"]) <= eager


@pytest.mark.slow
@pytest.mark.parametrize("train", ["full", "lora"])
def test_schedules_agree(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(monkeypatch, "aot_eager", ("sd", train, torch.float32))
    check(found, reweight=5e-6, eager=5e-6)


@pytest.mark.slow
def test_generated_code() -> None:
    """All weights and every step with gradients: one graph, of the only kind of block there is."""
    policy, steps = make_policy(), (0, 1, 2)
    eager = gradient(policy, Native, steps)
    compile_blocks(policy, graphs_used_twice=True)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # what else takes seconds to try
        native = gradient(policy, Native, steps)
        retain = gradient(policy, Retain, steps)
        for kind in (Reweight, Streaming):
            assert exactness.relative(gradient(policy, kind, steps), native) <= 5e-6
        (t, *_) = sample(policy, selected=steps, grad=True).transitions
        once, twice = (
            torch.autograd.grad(t.log_prob.sum(), policy.parameters, retain_graph=keep)
            for keep in (True, False)
        )
    assert graphs() == 1
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert same(retain, native)
    assert exactness.relative(native, eager) <= 5e-6
    assert not same(native, eager), "another order of sums, or nothing was compiled"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "dtype"),
    [
        ("sd3", "full", "f32"),
        ("flux", "lora", "f32"),
        ("wan", "full", "f32"),
        ("sd", "full", "f64"),
    ],
)
def test_schedules_agree_in_generated_code(
    name: str, train: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused sums are added in another order: eager is as far as two orders of a float32 sum.

    Of the tiny models the blocks of Stable Diffusion 1 alone compute nothing in float32 when the
    weights are float64; the casts inside a graph cannot be exchanged (`float64_throughout`).
    """
    case = (name, train, exactness.DTYPE[dtype])
    if dtype == "f64":
        with float64_throughout():
            check(compare(monkeypatch, "inductor", case), reweight=1e-12, eager=1e-12)
    else:
        check(compare(monkeypatch, "inductor", case), reweight=5e-6, eager=5e-6)


@pytest.mark.slow
def test_bfloat16_needs_the_graph_that_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits the graph without gradients keeps its intermediates in float32 where the other
    rounds what it saves: the ratio of one to the other is beyond the clip range of FlowGRPO."""
    found = compare(monkeypatch, "inductor", ("sd3", "lora", torch.bfloat16))
    check(found, reweight=0.03, eager=0.03)
    monkeypatch.setattr(Policy, "compiled", property(lambda _: False, lambda *_: None))
    other = exactness.update(Native, "sd3", "lora", torch.bfloat16)
    assert other["statistics"].ratio_error > 1e-4
    assert distance(other, found["native"]) > 0.1


def test_native_samples_by_the_graph_it_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend whose graph without gradients is off by a thousandth."""

    def exact(graph: Any, _: Any) -> Any:
        return graph.forward

    def off(graph: Any, _: Any) -> Any:
        def run(*args: Tensor) -> Any:
            return [o * 1.001 if o.is_floating_point() else o for o in graph(*args)]

        return run

    boxed: Any = torch._functorch.aot_autograd.make_boxed_func
    backend = aot_autograd(
        fw_compiler=lambda g, x: boxed(exact(g, x)),
        bw_compiler=lambda g, x: boxed(exact(g, x)),
        inference_compiler=lambda g, x: boxed(off(g, x)),
    )
    policy = make_policy()
    compile_blocks(policy, graphs_used_twice=False, backend=backend)  # type: ignore[arg-type]
    (t,) = sample(policy, selected=[1], noisy=[0, 1]).transitions
    assert not any(
        v.requires_grad for v in (t.log_prob, t.mean, t.std, t.output) if v is not None
    ), "as if sampled without gradients"
    assert torch.equal(policy.replay(t).log_prob, t.log_prob)
    with_graph = sample(policy, selected=[1], noisy=[0, 1], grad=True)
    assert torch.equal(with_graph.transitions[0].log_prob, t.log_prob)
    policy.compiled = False  # what would be without
    (t,) = sample(policy, selected=[1], noisy=[0, 1]).transitions
    assert (policy.replay(t).log_prob - t.log_prob).abs() > 1e-6


def test_names_and_weights_stay() -> None:
    policy = make_policy("sd3", "lora", copied=False)
    (module,) = policy.denoisers
    names, modules = list(module.state_dict()), [n for n, _ in module.named_modules()]
    blocks = repeated(module)
    assert [type(b).__name__ for b in blocks] == ["JointTransformerBlock"] * 2
    compile_blocks(policy, graphs_used_twice=False, backend="eager")
    assert list(module.state_dict()) == names
    assert [n for n, _ in module.named_modules()] == modules
    assert all("forward" in b.__dict__ for b in blocks)
    policy.detach()
    assert not any("forward" in b.__dict__ for b in blocks)
    policy.detach()  # twice is once


def test_which_blocks() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

    class Outer(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

    model: Any = nn.Sequential(Outer(), Inner())
    model._repeated_blocks = ["Inner", "Outer"]
    assert repeated(model) == [model[0], model[1]]
    model._repeated_blocks = ["Absent"]
    model._no_split_modules = ["Inner"]
    assert repeated(model) == [model[0].inner, model[1]]
    unet = tiny.tiny_sd().unet
    assert {type(b).__name__ for b in repeated(unet)} == {"BasicTransformerBlock"}


@pytest.mark.parametrize("train", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_reference_copy_and_switched_adapters(train: str) -> None:
    """The KL of compiled blocks is that of the plain ones, to rounding: it is a square of a mean's
    difference, itself a few percent of the mean, so 1e-4 is 1e3 times 6e-8 over some 0.05."""
    values = []
    for compiled in (False, True):
        policy = make_policy(train=train, copied=train == "full")
        if train == "full":
            with torch.no_grad():
                policy.parameters[0].mul_(1.5)
        if compiled:
            compile_blocks(policy, graphs_used_twice=False, backend="eager")
        (t,) = sample(policy, selected=[1], noisy=[1], grad=True).transitions
        kl = policy.with_kl(t).kl
        assert kl is not None
        assert kl.requires_grad
        values.append(float(kl.detach()))
    assert values[0] > 0
    assert values[1] == pytest.approx(values[0], rel=1e-4)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_graph_differentiated_twice(backend: str) -> None:
    """Reweight with a KL in the loss: a compiled graph must keep what it saved.

    The KL of a policy that is its own reference pulls nowhere, so the adapters are off their start.
    """
    policy = make_policy(train="lora")
    compile_blocks(policy, graphs_used_twice=True, backend=backend)
    native = gradient(policy, Native, kl=0.5)
    assert same(gradient(policy, Retain, kl=0.5), native)
    for kind in (Reweight, Streaming):
        assert exactness.relative(gradient(policy, kind, kl=0.5), native) <= 5e-6
    without = gradient(policy, Native)
    assert exactness.relative(without, native) > 1e-3, "a KL that counts"
    assert same(gradient(policy, Retain), without)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_checkpointed_blocks(backend: str) -> None:
    policy = make_policy(pipe={"checkpointing": True})
    eager = gradient(policy, Native)
    compile_blocks(policy, graphs_used_twice=False, backend=backend)
    native = gradient(policy, Native)
    assert graphs() >= 2
    assert same(gradient(policy, Retain), native)
    assert exactness.relative(gradient(policy, Reweight), native) <= 5e-6
    assert exactness.relative(native, eager) <= 5e-6


def test_another_batch_is_compiled_once() -> None:
    """Training, evaluation and its last, smaller batch: one graph each, then no more."""
    policy = make_policy()
    compile_blocks(policy, graphs_used_twice=False, backend="eager")
    seen = []
    for _ in range(2):
        for size in (1, 2, 3):
            sample(policy, [SampleKey(0, 0, g) for g in range(size)])
            seen.append(graphs())
    assert seen[0] < seen[1] < seen[2]
    assert set(seen[3:]) == {seen[2]}


# -- what cannot be compiled -----------------------------------------------------------------------


def test_too_many_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VARIANTS > 8, "torch's own limit, which a run may reach"
    monkeypatch.setattr(compiling, "VARIANTS", 1)
    policy = make_policy()
    compile_blocks(policy, graphs_used_twice=False, backend="eager")
    sample(policy)
    with pytest.raises(LeanError, match=r"model.compile.*BasicTransformerBlock was called in more"):
        sample(policy, [SampleKey(0, 0, g) for g in range(2)])


def test_a_block_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    block = repeated(policy.denoisers[0])[0]
    plain = type(block).forward

    def breaking(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(block), "forward", breaking)
    compile_blocks(policy, graphs_used_twice=False, backend="eager")
    for keys in (KEY, [SampleKey(0, 0, 0), SampleKey(0, 0, 1)]):
        with pytest.raises(LeanError, match=r"cannot compile BasicTransformerBlock.*to false"):
            sample(policy, keys)


def test_no_blocks() -> None:
    policy = make_policy()
    policy.denoisers[0] = nn.Linear(1, 1)
    with pytest.raises(LeanError, match=r"model.compile.*Linear has no repeated blocks.*to false"):
        compile_blocks(policy, graphs_used_twice=False)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before a model is loaded."""
    monkeypatch.setattr(setup, "load_pipeline", lambda *_, **__: pytest.fail("a model is loaded"))
    config = load_config("embedded", ["model.compile=true"])
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(LeanError, match=r"C\+\+ compiler.*Install g\+\+.*model.compile=false"),
    ):
        setup.make_policy(config, torch.device("cpu"))
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: False)
    with pytest.raises(LeanError, match=r"Triton on cuda.*model.compile=false"):
        require_compiler(torch.device("cuda"))


def test_micro_batches_of_reweight_in_a_bench() -> None:
    config = load_config(
        "embedded", ["schedule=retain", "rollout.micro_batch=2", "model.compile=true"]
    )
    with pytest.raises(LeanError, match=r"rollout.micro_batch.* is 2: schedule reweight cannot"):
        bench(config, ["retain", "reweight"], 1)


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    tiny.save(tiny.tiny_sd3(), root / "sd3")
    tiny.save(tiny.tiny_sd(), root / "sd")  # one kind of block: half the graphs
    (root / "prompts.txt").write_text("a cat\na dog\na cup\n", encoding="utf-8")
    return root


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> Callable[..., Config]:
    def make(run: str, *overrides: str) -> Config:
        base = [
            f"model.pipeline={folder / 'sd'}",
            "sampling={steps: 3, height: 16, width: 16, call: {}}",
            "kernel={name: ddim, noise_level: 1.0}",
            "selection={rule: list, steps: [1], outside: deterministic}",
            "rollout={prompts: 1, generations: 2, micro_batch: 1}",
            f"prompts={{train: {folder / 'prompts.txt'}, heldout: {folder / 'prompts.txt'}}}",
            "evaluation={every: 1, batch: 2}",
            "rewards=[{name: 'many_ranks:brightness'}]",
            "optimizer.lr=1e-3",
            "checkpoint={every: 1, keep: 3}",
            "updates=2",
            "model.compile=true",
            f"run.dir={tmp_path / run}",
        ]
        return load_config("embedded", [*base, *overrides])

    return make


def sha(run: Any) -> str:
    summary = read_run(Path(run)).summary
    assert summary is not None
    return str(summary["weights_sha256"])


def runs_agree(settings: Callable[..., Config], tmp_path: Path) -> None:
    """Resume and evaluation of a run."""
    train(settings("retain", "schedule=retain"), quiet=True)
    train(settings("again", "schedule=retain", "updates=1"), quiet=True)
    text = (tmp_path / "again" / "config.yaml").read_text(encoding="utf-8")
    assert "compile: true" in text
    train(settings("again", "schedule=retain", "updates=2"), resume=True, quiet=True)
    assert sha(tmp_path / "again") == sha(tmp_path / "retain")
    during = read_run(tmp_path / "retain").evaluations[-1]
    after = evaluate_run(settings("retain", "schedule=retain"), tmp_path / "retain", None)
    for key in ("reward", "rewards", "per_prompt"):
        assert after[key] == during[key]


def test_runs(
    settings: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume and evaluation of a whole run, bitwise; the export compiles nothing."""
    monkeypatch.setattr(setup, "compile_blocks", partial(compile_blocks, backend="eager"))
    runs_agree(settings, tmp_path)
    found, _ = newest(tmp_path / "retain" / "checkpoints")
    assert found is not None
    before = graphs()
    assert before > 0
    config = settings("retain", "schedule=retain")
    export_run(config, tmp_path / "retain", tmp_path / "out")
    assert graphs() == before
    exported = load_pipeline(str(tmp_path / "out")).unet.state_dict()
    plain = config.model_copy(update={"model": config.model.model_copy(update={"compile": False})})
    policy, _ = load_run(plain, tmp_path / "retain")
    assert exported.keys() == tiny.tiny_sd().unet.state_dict().keys()
    for key, value in policy.denoisers[0].state_dict().items():
        assert torch.equal(exported[key], value), key
    pictures = [
        sample_run(c, tmp_path / "retain", ["a cat"], tmp_path / n, num=1, seed=0, update=None)
        for n, c in (("compiled", config), ("plain", plain))
    ]
    assert pictures[0][0].read_bytes() == pictures[1][0].read_bytes()


@pytest.mark.slow
def test_runs_in_generated_code(settings: Callable[..., Config], tmp_path: Path) -> None:
    runs_agree(settings, tmp_path)
    torch._dynamo.reset()  # as another process
    train(settings("native", "schedule=native"), quiet=True)
    assert sha(tmp_path / "native") == sha(tmp_path / "retain")
    for line in read_run(tmp_path / "native").metrics:
        assert line["steps"][0]["ratio_error"] == 0.0


def test_bench(settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "compile_blocks", partial(compile_blocks, backend="eager"))
    compiled_at: list[int] = []
    plain = benching.Bench.update

    def update(*args: Any) -> Any:
        found = plain(*args)
        compiled_at.append(graphs())
        return found

    monkeypatch.setattr(benching.Bench, "update", update)
    result = bench(settings("none"), ["native", "retain", "reweight"], 1)
    assert [row["schedule"] for row in result["rows"]] == ["native", "retain", "reweight"]
    assert compiled_at[-4:] == [compiled_at[3]] * 4, "all compiled in the round that warms up"


@pytest.mark.parametrize(
    ("compute", "backend", "bound"),
    [
        (None, "eager", 5e-6),
        pytest.param(torch.bfloat16, "aot_eager", 0.03, marks=pytest.mark.slow),
    ],
)
def test_sharded(compute: torch.dtype | None, backend: str, bound: float) -> None:
    """FSDP2 on one rank: its hooks stay outside, and retain is native bitwise."""
    world = join(1, 1, timeout_s=60, master=True)
    try:
        pipe = tiny.tiny_sd3()
        make_trainable(pipe, "full")
        shard_denoiser(pipe.transformer, world.mesh, compute=compute)
        policy = Policy(pipe, Sampling(3, guidance=1.0, call=tiny.CALL["sd3"]), dtype=compute)
        eager = gradient(policy, Native, (0, 1))
        compile_blocks(policy, graphs_used_twice=False, backend=backend)
        assert len(repeated(pipe.transformer)) == 2
        native = gradient(policy, Native, (0, 1))
        assert graphs() >= 2
        assert same(gradient(policy, Retain, (0, 1)), native)
        assert exactness.relative(native, eager) <= bound
    finally:
        leave()


@pytest.mark.slow
def test_two_ranks(folder: Path, tmp_path: Path) -> None:
    """Weights sharded over two ranks: the same samples, schedules and first gradient as on one.

    A group of two and a forward each, so that the blocks meet the same shapes."""
    settings = [
        f"model={{pipeline: {folder / 'sd3'}, compile: true}}",
        "sampling={steps: 3, height: 16, width: 16, call: {max_sequence_length: 16}}",
        "selection={rule: fraction, fraction: 1.0, steps: null}",
        "rollout={prompts: 2, generations: 2, micro_batch: 1}",
        f"prompts={{train: {folder / 'prompts.txt'}, heldout: null}}",
        "rewards=[{name: 'many_ranks:brightness'}]",
        "optimizer={lr: 1e-3, max_grad_norm: 1e9}",
        "parallel={replicate: 1}",
    ]
    kinds = ("native", "retain", "reweight", "streaming")
    cases = {kind: [*settings, f"schedule={kind}"] for kind in kinds}
    here = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(here)}
    found: dict[int, dict[str, Any]] = {}
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        out.mkdir()
        (out / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command = [sys.executable, *(launch if ranks > 1 else [])]
        command += [str(here / "many_ranks.py"), str(out), str(out / "cases.json")]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{ranks} ranks: {result.stderr[-6000:]}"
        found[ranks] = {k: torch.load(out / f"{k}.pt", weights_only=False) for k in kinds}
    one, two = found[1]["native"], found[2]
    for key, latents in one["samples"].items():
        for kind in kinds:
            assert torch.equal(two[kind]["samples"][key], latents), (kind, key)
    assert torch.equal(two["retain"]["gradient"], two["native"]["gradient"])
    assert torch.equal(two["retain"]["weights"], two["native"]["weights"])
    for kind in kinds:
        off = (two[kind]["gradient"] - one["gradient"]).norm() / one["gradient"].norm()
        assert off <= 5e-6, (kind, float(off))
