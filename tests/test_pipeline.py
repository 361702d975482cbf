"""What is read from a pipeline beside its pictures."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from leangrpo.data import SampleKey
from leangrpo.errors import LeanError
from leangrpo.pipeline import embedding, remember_prompts
from leangrpo.policy import Policy, Sampling

WIDTHS = {"sd3": 32, "flux": 16, "wan": 16, "sd": 16}


@pytest.mark.parametrize("name", WIDTHS)
def test_the_embedding_is_the_mean_of_what_the_pipeline_encoded(name: str) -> None:
    pipe = tiny.BUILDERS[name]()
    seen: list[Tensor] = []
    encode = pipe.encode_prompt

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = encode(*args, **kwargs)
        seen.append(output[0])
        return output

    watched.__signature__ = inspect.signature(encode)  # type: ignore[attr-defined]
    pipe.encode_prompt = watched
    kernel = "ddim" if name == "sd" else "flow_sde"
    policy = Policy(pipe, Sampling(2, guidance=3.0, call=dict(tiny.CALL[name])), kernel=kernel)
    assert embedding(pipe, [""]).shape == (1, WIDTHS[name])  # the plan's
    batches = [["a dog"], ["a dog", "a red cube"], ["a dog", "a dog"], ["a dog"]]
    for prompts, which in zip(batches, [2, 3, 4, 2], strict=True):  # the last is memoised
        keys = [SampleKey(0, 0, g) for g in range(len(prompts))]
        policy.sample(prompts, keys, selected=(0,), decode=False)
        found = embedding(pipe, prompts)
        assert found.shape == (len(prompts), WIDTHS[name])
        assert found.dtype == torch.float32
        assert torch.allclose(found, seen[which].mean(dim=1), atol=1e-6)
    assert len(seen) == 5  # the plan's, that of the check before training, three of these
    one, two = embedding(pipe, ["a dog"]), embedding(pipe, ["a dog", "a red cube"])
    assert torch.allclose(one[0], two[0], atol=1e-5)  # a batch of another size rounds differently
    assert not torch.allclose(two[0], two[1], atol=1e-3)


def fake(output: Any) -> Any:
    pipe = SimpleNamespace(encode_prompt=lambda prompt, other=None: output, components={})
    remember_prompts(pipe)
    return pipe


def test_outputs_of_every_form() -> None:
    rows = torch.arange(12.0, dtype=torch.float64).reshape(2, 3, 2)
    expected = torch.tensor([[2.0, 3.0], [8.0, 9.0]])
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for output in (
        rows,
        (None, ids, rows, None),
        (rows[:, :, None], ids),
        ((None, rows), rows + 1),
        expected.double(),
        ([rows[0], rows[1]], None),
        ([rows[0], torch.cat([rows[1]] * 2)], [rows[1], rows[0]]),
    ):
        pipe = fake(output)
        pipe.encode_prompt(["x", "y"])
        found = embedding(pipe, ("x", "y"))
        assert torch.equal(found, expected)
        assert found.dtype == torch.float32


def test_one_prompt_may_be_no_list_and_a_negative_one_may_follow() -> None:
    pipe = fake((torch.ones(1, 3, 2), None))
    pipe.encode_prompt(prompt="x")
    pipe.encode_prompt(prompt=[""])
    assert torch.equal(embedding(pipe, ["x"]), torch.ones(1, 2))
    assert torch.equal(embedding(pipe, [""]), torch.ones(1, 2))


def test_the_latest_few_are_kept() -> None:
    pipe = fake(torch.ones(1, 3, 2))
    pipe.encode_prompt(None, torch.ones(1))
    for prompt in "abacde":
        pipe.encode_prompt([prompt])
    assert list(pipe.encode_prompt.latest) == [("a",), ("c",), ("d",), ("e",)]
    with pytest.raises(LeanError, match=r"has not encoded the prompts \['b'\] lately"):
        embedding(pipe, ["b"])


def test_what_has_no_embedding_is_refused() -> None:
    with pytest.raises(LeanError, match=r"no encode_prompt.*another advantage.baseline"):
        embedding(SimpleNamespace(), ["x"])
    for output in (torch.ones(4, 3, 2), torch.ones(3), None, torch.ones(2, 3, dtype=torch.int64)):
        pipe = fake(output)
        pipe.encode_prompt(["x", "y"])
        with pytest.raises(LeanError, match=r"for 2 prompts: one embedding \(L, D\)"):
            embedding(pipe, ["x", "y"])
