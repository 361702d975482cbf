"""Checkpoints: bitwise, atomic, verified, and readable by plain diffusers."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from leangrpo import checkpoint, sound
from leangrpo.data import SampleKey
from leangrpo.errors import LeanError
from leangrpo.loading import make_trainable
from leangrpo.policy import Policy, Sampling

BUILD = {"sd3": tiny.tiny_sd3, "flux": tiny.tiny_flux, "wan": tiny.tiny_wan, "sd": tiny.tiny_sd}


def make(name: str, train: str, seed: int = 0) -> tuple[Policy, torch.optim.Optimizer]:
    pipe = BUILD[name]()
    make_trainable(pipe, train, rank=4, alpha=8, seed=seed)
    kernel = "ddim" if name == "sd" else "flow_sde"
    policy = Policy(pipe, Sampling(2, guidance=1.0, call=dict(tiny.CALL[name])), kernel=kernel)
    optimizer = torch.optim.AdamW(policy.parameters, lr=1e-2)
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return policy, optimizer


def image(policy: Policy) -> torch.Tensor:
    images = policy.sample(["a red cube"], [SampleKey(0, 0, 0)]).images
    assert images is not None
    return images


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("name", BUILD)
def test_round_trip_is_bitwise(name, train, tmp_path) -> None:
    policy, optimizer = make(name, train)
    checkpoint.Checkpoints(tmp_path, 2).save(policy, optimizer, {"update": 3})
    found, complaints = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.update, complaints) == (3, [])
    other, fresh = make(name, train, seed=1)
    assert checkpoint.weights_sha256(other) != checkpoint.weights_sha256(policy)
    version = other.version
    checkpoint.restore(found, other, fresh)
    assert other.version > version, "a kept graph must notice"
    assert checkpoint.weights_sha256(other) == checkpoint.weights_sha256(policy)
    for mine, theirs in zip(policy.parameters, other.parameters, strict=True):
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, fresh.state[theirs][key])


@pytest.mark.parametrize("name", BUILD)
def test_plain_diffusers_loads_the_lora(name, tmp_path) -> None:
    """Rank and alpha travel in the file: without them the picture would be another (4e-3)."""
    policy, _ = make(name, "lora")
    checkpoint.save_weights(policy, tmp_path)
    expected = image(policy)
    file = tmp_path / checkpoint.LORA_FILE
    adapter = sum(p.numel() * p.element_size() for p in policy.parameters)
    assert file.stat().st_size < 2 * adapter + 60_000  # names and metadata
    plain = BUILD[name]()
    base = image(Policy(plain, policy.sampling, kernel=policy.kernel.name))
    plain._leangrpo.detach()
    plain.load_lora_weights(tmp_path)
    loaded = image(Policy(plain, policy.sampling, kernel=policy.kernel.name))
    assert not torch.equal(base, expected)
    assert torch.equal(loaded, expected)


def test_plain_diffusers_loads_the_full_weights(tmp_path) -> None:
    policy, _ = make("sd3", "full")
    checkpoint.save_weights(policy, tmp_path)
    kind = type(policy.denoisers[0])
    loaded = kind.from_pretrained(tmp_path / "transformer")
    for key, value in policy.denoisers[0].state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key])


def test_a_wrong_prefix_is_an_error(tmp_path) -> None:
    """diffusers only logs it, and trains or samples on without the adapter."""
    policy, _ = make("sd3", "lora")
    checkpoint.save_weights(policy, tmp_path)
    file = tmp_path / checkpoint.LORA_FILE
    save_file({f"unet.{k}": v for k, v in load_file(file).items()}, file)
    with pytest.raises(LeanError, match="does not fit this model: it lacks"):
        checkpoint.load_weights(policy, tmp_path)


def damage_bytes(folder: Path) -> None:
    file = next((folder / "state").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def damage_length(folder: Path) -> None:
    file = next(folder.rglob("diffusion_pytorch_model.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def damage_state(folder: Path) -> None:
    (folder / "state.json").write_text('{"update": ')


def damage_number(folder: Path) -> None:
    """JSON all the same, and another update."""
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text.replace('"update": 2', '"update": 3'))


def damage_format(folder: Path) -> None:
    """An older format had no checksum of `state.json`."""
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text.replace('"format": 4', '"format": 0'))


def damage_by_more(folder: Path) -> None:
    save_file({"ema:x": torch.ones(1)}, folder / "state" / "more.safetensors")


def damage_by_a_link(folder: Path) -> None:
    file = next((folder / "state").glob("*.safetensors"))
    (folder / "elsewhere").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(folder / "elsewhere")


def damage_by_a_device(folder: Path) -> None:
    """Its size is 0, and it never ends."""
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to("/dev/zero")


DAMAGES = [
    damage_by_a_device,
    damage_bytes,
    damage_length,
    damage_state,
    damage_number,
    damage_format,
    damage_by_more,
    damage_by_a_link,
]


def damage_missing(folder: Path) -> None:
    (next((folder / "state").glob("*.safetensors"))).unlink()


@pytest.mark.parametrize("damage", [*DAMAGES, damage_missing])
def test_a_damaged_checkpoint_is_passed_over(damage, tmp_path) -> None:
    policy, optimizer = make("sd3", "full")
    for update in (1, 2):
        checkpoint.Checkpoints(tmp_path, 2).save(policy, optimizer, {"update": update})
    damage(tmp_path / "000002")
    found, complaints = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.update == 1
    assert len(complaints) == 1
    assert "000002" in complaints[0]


def test_the_newest_are_kept_and_a_half_written_one_is_no_checkpoint(tmp_path) -> None:
    policy, optimizer = make("sd3", "lora")
    (tmp_path / ".000009.partial").mkdir(parents=True)
    for update in (1, 2, 3):
        checkpoint.Checkpoints(tmp_path, 2).save(policy, optimizer, {"update": update})
    assert sorted(p.name for p in tmp_path.glob("[0-9]*")) == ["000002", "000003"]
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.update == 3


def test_a_format_of_the_future_is_named(tmp_path) -> None:
    policy, optimizer = make("sd3", "lora")
    folder = checkpoint.Checkpoints(tmp_path, 1).save(policy, optimizer, {"update": 1})
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(LeanError, match="has format 99; this version reads up to 4"):
        checkpoint.open_checkpoint(folder)


def test_a_full_disk_leaves_the_older_ones(tmp_path, monkeypatch) -> None:
    policy, optimizer = make("sd3", "lora")
    checkpoint.Checkpoints(tmp_path, 2).save(policy, optimizer, {"update": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(LeanError, match=r"No space left.*--resume"):
        checkpoint.Checkpoints(tmp_path, 2).save(policy, optimizer, {"update": 2})
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.update == 1
    assert [p.name for p in tmp_path.iterdir()] == ["000001"]


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("room", [0, 3_000])
def test_a_file_that_cannot_be_written(train, room, tmp_path) -> None:
    """Whoever writes it, and however much of it has found room."""
    policy, optimizer = make("sd3", train)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(LeanError, match=r"could not be written.*--resume"):
            checkpoint.Checkpoints(tmp_path, 2).save(policy, optimizer, {"update": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_the_one_that_is_kept_is_never_a_damaged_one(tmp_path) -> None:
    """A run that went on from before a damaged checkpoint leaves it behind."""
    policy, optimizer = make("sd3", "lora")
    checkpoints = checkpoint.Checkpoints(tmp_path, 1)
    checkpoints.save(policy, optimizer, {"update": 10})
    damage_missing(tmp_path / "000010")
    checkpoints.save(policy, optimizer, {"update": 9})
    assert [p.name for p in checkpoint.folders(tmp_path)] == ["000009"]


def test_checkpoints_are_ordered_by_number(tmp_path) -> None:
    policy, optimizer = make("sd3", "lora")
    (tmp_path / "000001 copy").mkdir()
    for update in (999_999, 1_000_000):
        checkpoint.Checkpoints(tmp_path, 2).save(policy, optimizer, {"update": update})
    found, complaints = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.update, complaints) == (1_000_000, [])
    assert checkpoint.Checkpoints(tmp_path, 2).published == 1_000_000


def test_what_a_kill_has_left_is_removed(tmp_path) -> None:
    (tmp_path / ".000003.partial" / "state").mkdir(parents=True)
    checkpoint.Checkpoints(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_signed_lie_is_told_in_words(tmp_path) -> None:
    """Checksums that fit are no proof: what does not fit the model is refused, not raised."""
    policy, optimizer = make("sd3", "lora")
    checkpoint.Checkpoints(tmp_path, 2).save(policy, optimizer, {"update": 1})
    folder = tmp_path / "000001"
    shard = next((folder / "state").glob("*.safetensors"))
    save_file({name: torch.ones(3) for name in load_file(shard)}, shard)
    state = json.loads((folder / "state.json").read_text())
    state["files"][f"state/{shard.name}"] = sound.sha256(shard)
    state["checksum"] = sound.checksum(state)
    (folder / "state.json").write_text(json.dumps(state))
    found = checkpoint.open_checkpoint(folder)
    with pytest.raises(LeanError, match="000001 cannot be read, or is of another model"):
        checkpoint.restore(found, policy, optimizer)
    state["files"]["../../outside"] = state["files"].pop(f"state/{shard.name}")
    state["checksum"] = sound.checksum(state)
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(LeanError, match=r"damaged: \.\./\.\./outside is missing or was changed"):
        checkpoint.open_checkpoint(folder)


def test_what_else_a_run_remembers_is_bitwise(tmp_path) -> None:
    """Tensors of any shape and dtype, and what JSON can write, as it was when it was given."""
    policy, optimizer = make("sd3", "lora")
    tensors = {
        "value.buffer": torch.randn(3, 4).T,
        "value.none": torch.zeros(0, 5),
        "value.round": torch.tensor(7),
        "half": torch.randn(2).half(),
    }
    history = {"a dog": [1.0, 0.1 + 0.2], "": []}
    extra = {**tensors, "history": history, "count": 3}
    checkpoints = checkpoint.Checkpoints(tmp_path, 2)
    folder = checkpoints.save(policy, optimizer, {"update": 1}, extra=extra)
    history["a dog"].append(9.0)
    found = checkpoint.open_checkpoint(folder)
    assert found.extra.keys() == extra.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found.extra[name], tensor)
        assert found.extra[name].dtype == tensor.dtype
    assert found.extra["history"] == {"a dog": [1.0, 0.1 + 0.2], "": []}
    assert found.extra["count"] == 3
    checkpoint.restore(found, *make("sd3", "lora", seed=1))  # none of its business
    assert (
        checkpoint.open_checkpoint(checkpoints.save(policy, optimizer, {"update": 2})).extra == {}
    )


def test_plain_diffusers_passes_over_the_extra(tmp_path) -> None:
    policy, optimizer = make("sd3", "lora")
    folder = checkpoint.Checkpoints(tmp_path, 1).save(
        policy, optimizer, {"update": 1}, extra={"value": torch.ones(3)}
    )
    plain = tiny.tiny_sd3()
    plain.load_lora_weights(folder)
    assert checkpoint.is_lora(plain.transformer)


def test_damage_to_the_extra_is_noticed(tmp_path) -> None:
    policy, optimizer = make("sd3", "lora")
    folder = checkpoint.Checkpoints(tmp_path, 1).save(
        policy, optimizer, {"update": 1}, extra={"value": torch.ones(3)}
    )
    save_file({"value": torch.zeros(3)}, folder / checkpoint.EXTRA)
    with pytest.raises(LeanError, match=r"extra/tensors.safetensors is missing or was changed"):
        checkpoint.open_checkpoint(folder)


def test_a_checkpoint_from_before_the_extra_is_read(tmp_path) -> None:
    policy, optimizer = make("sd3", "lora")
    folder = checkpoint.Checkpoints(tmp_path, 1).save(policy, optimizer, {"update": 4})
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    del state["checksum"]
    (folder / "state.json").write_text(json.dumps({**state, "format": 2}))
    found, complaints = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.update, found.extra, complaints) == (4, {}, [])
    other, fresh = make("sd3", "lora", seed=1)
    checkpoint.restore(found, other, fresh)
    assert checkpoint.weights_sha256(other) == checkpoint.weights_sha256(policy)
