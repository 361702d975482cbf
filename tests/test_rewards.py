"""Rewards: what they give, what they refuse, and the threads they run in."""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

import leangrpo.ocr as ocr_module
from leangrpo.catalogue import CATALOGUE
from leangrpo.errors import LeanError, RewardError
from leangrpo.ocr import FLOOR, Recogniser, recogniser
from leangrpo.rewards import (
    REWARDS,
    check_prompts,
    edit_distance,
    jpeg_compressibility,
    jpeg_incompressibility,
    load_reward,
    ocr_exact,
    ocr_formula,
    ocr_log_prob,
    wanted_text,
)
from leangrpo.scoring import Scorer
from leangrpo.settings import Scoring

FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
COLOURS = ("red", "green", "blue", "orange", "purple", "black", "brown", "teal")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def picture(text: str, colour: str = "black", size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    """`text` in DejaVu on white, `(3, H, W)` in [0, 1]."""
    canvas = Image.new("RGB", size, "white")
    font = ImageFont.truetype(str(FONT), 22)
    middle = (size[0] / 2, size[1] / 2)
    ImageDraw.Draw(canvas).text(middle, text, font=font, fill=colour, anchor="mm")
    return torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1).float() / 255


def blank(count: int) -> torch.Tensor:
    return torch.full((count, 3, 8, 8), 0.5)


def constant(images, prompts, metadata):
    return [1.0] * len(prompts)


def returning(value):
    def given(images, prompts, metadata):
        return value

    return given


@pytest.fixture(scope="module")
def numbers():
    """24 two-digit numbers, their pictures `(24, 3, 32, 32)` and prompts."""
    draw = random.Random(1)
    texts = [str(draw.randint(10, 99)) for _ in range(24)]
    colours = [COLOURS[i % 8] for i in range(24)]
    images = torch.stack([picture(t, c) for t, c in zip(texts, colours, strict=True)])
    return texts, images, [f"the number {t} in {c}" for t, c in zip(texts, colours, strict=True)]


# -- the recogniser --------------------------------------------------------------------------------


def test_reads_rendered_digits(numbers) -> None:
    _, images, prompts = numbers
    about = [{}] * 24
    assert np.mean(ocr_exact(images, prompts, about)) >= 0.95
    assert np.mean(REWARDS["ocr"](images, prompts, about)) >= 0.95
    assert min(ocr_log_prob(images, prompts, about)) > -0.05


def test_log_prob_falls_with_distance(numbers) -> None:
    texts, images, prompts = numbers
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    about = [{}] * 24
    right = np.array(ocr_log_prob(images, prompts, about))
    hidden = np.array(ocr_log_prob(images.lerp(noise, 0.75), prompts, about))
    others = [f"{int(t[0]) % 9 + 1}{t[1]}" for t in texts]
    one_off = np.array(ocr_log_prob(images, others, about))
    both_off = np.array(ocr_log_prob(images, ['"XY"'] * 24, about))
    assert (right > one_off).all()
    assert right.mean() > hidden.mean() > both_off.mean()
    assert one_off.mean() > both_off.mean()
    assert both_off.min() >= FLOOR


def test_log_prob_is_the_sum_over_alignments() -> None:
    """Two steps, one character: blank-a, a-blank, a-a are its three alignments."""
    reader = recogniser()
    steps = np.zeros((2, len(reader._characters)), dtype=np.float32)
    a = reader.classes("7")[0]
    steps[:, 0], steps[0, a], steps[1, a] = 0.25, 0.75, 0.5
    expected = 0.25 * 0.5 + 0.75 * 0.25 + 0.75 * 0.5
    assert reader._log_prob(steps, "7") == pytest.approx(np.log(expected))
    steps[:, a] = 0
    assert reader._log_prob(steps, "7") == FLOOR  # probability 0 stays finite


def test_reading_is_the_same_in_any_batch(numbers) -> None:
    texts, images, _ = numbers
    together = recogniser().read(images, texts)
    alone = [recogniser().read(images[i : i + 1], texts[i : i + 1])[0] for i in range(24)]
    assert [r.text for r in together] == [r.text for r in alone]
    assert [r.log_prob for r in together] == pytest.approx([r.log_prob for r in alone], abs=1e-4)
    assert recogniser().read(images, texts) == together


def test_shapes_grey_wide_narrow_and_video() -> None:
    wide = picture("HELLO", size=(96, 32))[None]
    grey = wide.mean(1, keepdim=True)
    for images in (wide, grey):
        assert ocr_exact(images, ['a sign saying "hello"'], [{}]) == [1.0]
    narrow = torch.ones(1, 3, 64, 8)
    assert ocr_exact(narrow, ["the number 7"], [{}]) == [0.0]
    video = torch.stack([picture("47"), torch.ones(3, 32, 32)])[None]
    assert ocr_exact(video, ["the number 47"], [{}]) == [0.5]
    sizes = jpeg_incompressibility(video.flatten(0, 1), ["", ""], [{}, {}])
    assert jpeg_incompressibility(video, [""], [{}]) == [pytest.approx(np.mean(sizes))]


def test_one_recogniser_for_all_threads() -> None:
    found: list[Recogniser] = []
    threads = [threading.Thread(target=lambda: found.append(recogniser())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(reader is found[0] for reader in found)
    assert recogniser(1) is found[0]
    assert recogniser(2) is not found[0]
    assert recogniser(1).num_threads == 1


def test_nothing_of_rapidocr_is_imported() -> None:
    code = (
        "import sys, torch, leangrpo.rewards as r\n"
        "r.ocr(torch.ones(1, 3, 32, 32), ['47'], [{}])\n"
        "assert not {'rapidocr', 'cv2', 'diffusers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("missing", ["rapidocr", "onnxruntime"])
def test_a_missing_package_is_named(monkeypatch, missing) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        ocr_module.importlib.util, "find_spec", lambda name: None if name == missing else real(name)
    )
    with pytest.raises(LeanError, match=rf'package {missing}.*pip install "leangrpo\[ocr\]"'):
        load_reward("ocr_exact")
    load_reward("jpeg_compressibility")


def test_a_missing_model_file_is_named(monkeypatch) -> None:
    monkeypatch.setattr(ocr_module, "MODEL_FILE", "other.onnx")
    with pytest.raises(LeanError, match=r"no file models/other\.onnx.*rapidocr>=3\.10"):
        load_reward("ocr")


def test_texts_that_can_never_be_read() -> None:
    square = torch.ones(1, 3, 32, 32)
    with pytest.raises(RewardError, match=r'"1234567" takes 7 steps .* has 6 .*wider pictures'):
        ocr_log_prob(square, ["1234567"], [{}])
    with pytest.raises(RewardError, match=r'"1122" takes 6 steps .* has 4'):
        ocr_log_prob(torch.ones(1, 3, 48, 32), ["1122"], [{}])
    with pytest.raises(RewardError, match=r"no character '\\x07'"):
        ocr_log_prob(square, ['"a\x07"'], [{}])
    with pytest.raises(RewardError, match="pictures have 4 channels"):
        ocr_log_prob(torch.ones(1, 4, 32, 32), ["47"], [{}])


# -- the wanted text and the formulas --------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "metadata", "text"),
    [
        ("the number 47 in blue", None, "47"),
        ('a sign with "Open 24 h" on it', {}, "Open 24 h"),
        ('"first" and "second"', {}, "first"),
        ('a "sign" 12', {"text": " other "}, "other"),
        ("nothing", {"text": 47}, "47"),
        ('empty "" then 5', {"text": ""}, "5"),
        ('one " quote and 0', {}, "0"),
    ],
)
def test_wanted_text(prompt, metadata, text) -> None:
    assert wanted_text(prompt, metadata) == text


def test_a_prompt_without_a_text_is_named() -> None:
    with pytest.raises(RewardError, match=r"prompt 'a red fox' names no text.*double quotes"):
        wanted_text("a red fox", {})
    with pytest.raises(RewardError, match=r"reward `ocr`, prompt 'a red fox': .*names no text"):
        check_prompts(["jpeg_compressibility", "ocr"], ["the number 1", "a red fox"])
    with pytest.raises(RewardError, match=r"reward `ocr`, prompt .*no character"):
        check_prompts(["ocr"], ['"\x07"'])
    check_prompts(["ocr"], ["a red fox"], [{"text": "fox"}])
    check_prompts(["jpeg_compressibility"], ["a red fox"])


@pytest.mark.parametrize(
    ("read", "text", "score"),
    [
        ("47", "47", 1),
        ("x4 7y", "47", 1),  # the text is a part of what is read, spaces dropped
        ("hello", "Hel Lo", 1),
        ("41", "47", 0.5),
        ("", "47", 0),
        ("74", "47", 0),
        ("completely other", "47", 0),  # the distance is capped at the text's length
        ("abcx", "abcd", 0.75),
    ],
)
def test_ocr_formula(read, text, score) -> None:
    assert ocr_formula(read, text) == score


def test_edit_distance() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert edit_distance("abc", "abc") == 0
    assert edit_distance("flaw", "lawn") == 2


def test_jpeg_size_orders_noise_over_flat() -> None:
    noise = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    images = torch.stack([torch.full((3, 64, 64), 0.5).lerp(noise, t) for t in (0, 0.1, 0.5, 1)])
    about = ([""] * 4, [{}] * 4)
    sizes = jpeg_incompressibility(images, *about)
    assert sizes == sorted(sizes)
    assert 0.5 < sizes[0] < 2  # kB, not bytes
    assert sizes[3] > 5 * sizes[0]
    assert jpeg_compressibility(images, *about) == [-size for size in sizes]


# -- finding rewards -------------------------------------------------------------------------------


def test_the_names_of_the_settings_exist() -> None:
    assert tuple(REWARDS) == tuple(CATALOGUE)[:5]
    for name in REWARDS:
        assert load_reward(name) is REWARDS[name]


def test_an_unknown_name_suggests_one() -> None:
    with pytest.raises(LeanError) as caught:
        load_reward("ocr_logprob")
    assert str(caught.value) == (
        "`rewards` is 'ocr_logprob': no reward has this name. Did you mean `ocr_log_prob`? "
        f"Names: {', '.join(f'`{name}`' for name in CATALOGUE)}, your own as module:function, or "
        "a server's URL."
    )
    with pytest.raises(LeanError, match=r"no reward has this name\. Names: "):
        load_reward("zzz")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with a module of rewards."""
    (tmp_path / "own_rewards.py").write_text(
        "LIMIT = 3\n"
        "def redness(images, prompts, metadata):\n"
        "    return images[:, 0].mean((1, 2))\n"
        "def short(images, prompts):\n"
        "    return [0.0]\n"
        "class Model:\n"
        "    made = 0\n"
        "    def __init__(self):\n"
        "        Model.made += 1\n"
        "    def __call__(self, images, prompts, metadata):\n"
        "        return [Model.made] * len(prompts)\n"
        "class Broken(Model):\n"
        "    def __init__(self):\n"
        "        raise OSError('no weights')\n"
        "class Plain:\n"
        "    pass\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("own_rewards", None)


def test_own_reward_from_the_working_folder(own) -> None:
    with Scorer([("own_rewards:redness", 2.0), ("own_rewards:Model", 1.0)]) as scorer:
        for _ in range(2):
            scores = scorer(torch.full((2, 3, 4, 4), 0.25), ["a", "b"])
            assert scores.total.tolist() == [1.5, 1.5]
        assert scorer.names == ("own_rewards:redness", "own_rewards:Model")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("own_rewards:nothing", "cannot be imported: AttributeError"),
        ("own_rewards:LIMIT", "not callable but int"),
        (
            "own_rewards:short",
            r"it takes \(images, prompts\), and three arguments are given\. "
            r"A reward is called as reward\(images, prompts, metadata\)",
        ),
        ("own_rewards:Broken", "making it raised OSError: no weights"),
        ("own_rewards:Plain", "its instances are not callable"),
    ],
)
def test_own_rewards_that_cannot_work(own, name, text) -> None:
    with pytest.raises(LeanError, match=text):
        load_reward(name)


# -- the scorer ------------------------------------------------------------------------------------


def ramp(images, prompts, metadata):
    return torch.arange(len(prompts))


def test_weights_and_records() -> None:
    with Scorer([(constant, 0.5), (ramp, -2.0)]) as scorer:
        scores = scorer(blank(3), ["a", "b", "c"], [{}] * 3)
    assert scores.total.dtype == torch.float64
    assert scores.total.tolist() == [0.5, -1.5, -3.5]
    assert {k: v.tolist() for k, v in scores.each.items()} == {
        "constant": [1, 1, 1],
        "ramp": [0, 1, 2],
    }
    assert scores.excluded == 0
    assert scores.seconds > 0
    with Scorer([(constant, 1.0)]) as scorer:
        assert scorer(torch.zeros(0, 3, 8, 8), []).total.shape == (0,)


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        (1.0, 2.0),
        np.array([1, 2], dtype=np.float16),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0, requires_grad=True), np.float32(2)],
    ],
)
def test_anything_like_a_list_of_numbers_is_accepted(value) -> None:
    with Scorer([(returning(value), 1.0)]) as scorer:
        assert scorer(blank(2), ["a", "b"]).total.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.0, 2.0, 3.0], "reward `given` returned 3 scores for 2 images."),
        (None, "reward `given` returned NoneType None, which is no list of numbers."),
        (["1", "2"], "reward `given` returned list ['1', '2'], which is no list of numbers."),
        ([1.0, None], "reward `given` returned list [1.0, None], which is no list of numbers."),
        ([[1], [2, 3]], "reward `given` returned list [[1], [2, 3]], which is no list of numbers."),
        (
            torch.zeros(2, 1),
            "reward `given` returned scores of shape (2, 1) for 2 images, and (2,) is needed.",
        ),
        (1.0, "reward `given` returned scores of shape () for 2 images, and (2,) is needed."),
        (
            ([1.0, 2.0], {}),
            "reward `given` returned list [[1.0, 2.0], {}], which is no list of numbers. "
            "Return the scores alone, without the dictionary.",
        ),
        (
            torch.zeros(2, dtype=torch.complex64),
            "reward `given` returned Tensor tensor([0.+0.j, 0.+0.j]), which is no list of numbers.",
        ),
    ],
)
def test_other_returns_are_refused(value, text) -> None:
    with (
        Scorer([(returning(value), 1.0)], on_bad="exclude") as scorer,
        pytest.raises(RewardError) as caught,
    ):
        scorer(blank(2), ["a", "b"])
    assert str(caught.value) == text


def test_a_reward_that_raises_is_named() -> None:
    def broken(images, prompts, metadata):
        raise KeyError("weights")

    with Scorer([(broken, 1.0)]) as scorer, pytest.raises(RewardError) as caught:
        scorer(blank(1), ["a"])
    assert str(caught.value) == (
        "reward `broken` raised KeyError: 'weights' (test_rewards.py, line 411)"
    )
    assert isinstance(caught.value.__cause__, KeyError)
    with Scorer([("ocr", 1.0)]) as scorer:
        future = scorer.submit(blank(1), ["a red fox"])
        with pytest.raises(RewardError, match="reward `ocr`: the prompt 'a red fox' names no"):
            future.result()


def test_a_reward_that_edits_the_images_is_stopped() -> None:
    def scaling(images, prompts, metadata):
        images.mul_(255)
        return [0.0]

    with Scorer([(scaling, 1.0)]) as scorer, pytest.raises(RewardError, match=r"images\.clone\(\)"):
        scorer(blank(1), ["a"])


def test_bad_scores_stop_or_are_left_out() -> None:
    bad = returning([1.0, float("nan"), float("inf"), 2.0])
    with Scorer([(bad, 1.0)]) as scorer, pytest.raises(RewardError) as caught:
        scorer(blank(4), list("abcd"))
    assert str(caught.value) == (
        "reward `given` gave NaN or infinite scores: 2 of 4, the first for the prompt 'b'. "
        "Setting on_bad_reward to exclude leaves such samples out."
    )
    with Scorer([(bad, 1.0), (ramp, 1.0)], on_bad="exclude") as scorer:
        scores = scorer(blank(4), list("abcd"))
    assert scores.excluded == 2
    assert scores.total.isnan().tolist() == [False, True, True, False]
    assert scores.total[[0, 3]].tolist() == [1, 5]
    assert scores.each["ramp"].tolist() == [0, 1, 2, 3]
    with Scorer([(bad, 0.0), (ramp, 1.0)], on_bad="exclude") as scorer:
        assert scorer(blank(4), list("abcd")).excluded == 0  # measured, not part of the sum


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_never_becomes_a_picture(value) -> None:
    """Case 19: in 8 bits it would be black or white, and its JPEG size is finite."""
    images = blank(3)
    images[1, 0, 2, 2] = value
    seen = []

    def spy(images, prompts, metadata):
        seen.append((images.isfinite().all().item(), prompts, metadata))
        return [1.0] * len(prompts)

    about = [{"n": n} for n in range(3)]
    with Scorer([("jpeg_compressibility", 1.0), (spy, 1.0)], on_bad="exclude") as scorer:
        scores = scorer(images, ["a", "b", "c"], about)
        assert seen == [(True, ["a", "c"], [{"n": 0}, {"n": 2}])]
        for values in (scores.total, *scores.each.values()):
            assert values.isnan().tolist() == [False, True, False]
        assert scores.excluded == 1
        everything = scorer(torch.full((2, 3, 8, 8), value), ["a", "b"])
        assert everything.excluded == 2
        assert len(seen) == 1
    with Scorer([(spy, 1.0)]) as scorer, pytest.raises(RewardError) as caught:
        scorer(images, ["a", "b", "c"], about)
    assert str(caught.value).startswith(
        "the sampled pictures hold NaN or infinite values: 1 of 3, the first for the prompt 'b'."
    )
    assert len(seen) == 1


def test_scoring_overlaps() -> None:
    def slow(images, prompts, metadata):
        time.sleep(0.2)
        return [0.0]

    start = time.perf_counter()
    with Scorer([(slow, 1.0)], scoring=Scoring(workers=4)) as scorer:
        futures = [scorer.submit(blank(1), ["a"]) for _ in range(4)]
        assert time.perf_counter() - start < 0.15
        assert not futures[0].done()
        assert all(future.result().seconds >= 0.2 for future in futures)
    assert time.perf_counter() - start < 0.7


def test_rewards_run_without_gradients_in_their_own_thread() -> None:
    weight = torch.ones(3, requires_grad=True)
    seen = []

    def scored(images, prompts, metadata):
        out = (images.mean((2, 3)) * weight).sum(1)
        seen.append((out.requires_grad, threading.current_thread() is threading.main_thread()))
        return out

    images = torch.full((2, 3, 4, 4), 0.5, requires_grad=True)
    with torch.enable_grad(), Scorer([(scored, 1.0)]) as scorer:
        assert scorer(images.bfloat16(), ["a", "b"]).total.tolist() == [1.5, 1.5]
        assert torch.is_grad_enabled()
        with torch.inference_mode():
            made = torch.full((1, 3, 4, 4), 0.5)
        assert scorer(made, ["a"]).total.tolist() == [1.5]
    assert seen == [(False, False)] * 2


def test_ocr_rewards_share_one_pass(numbers, monkeypatch) -> None:
    _, images, prompts = numbers
    passes = []
    real = Recogniser.read

    def counted(self, images, texts):
        passes.append(len(texts))
        return real(self, images, texts)

    monkeypatch.setattr(Recogniser, "read", counted)
    names = ("ocr", "ocr_log_prob", "ocr_exact")
    with Scorer([(name, 1.0) for name in names]) as scorer:
        scores = scorer(images[:8], prompts[:8])
        assert passes == [8]
        scorer(images[:8], prompts[:8])
        assert passes == [8, 8]  # nothing outlives a call
    assert scores.each["ocr_exact"].tolist() == ocr_exact(images[:8], prompts[:8], [{}] * 8)


def test_a_closed_scorer_takes_no_more() -> None:
    scorer = Scorer([(constant, 1.0)])
    scorer.close()
    with pytest.raises(RuntimeError):
        scorer.submit(blank(1), ["a"])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Scorer([("jpeg_compressibility", 1.0)] * 2), "it is listed twice"),
        (lambda: Scorer([(constant, float("nan"))]), "weight of `constant` must be finite"),
        (lambda: Scorer([(constant, 1.0)], on_bad="skip"), "must be stop or exclude"),
        (lambda: Scorer([(constant, 1.0)])(blank(2), ["a"]), r"shape \(2, 3, 8, 8\), 1 prompts"),
        (lambda: Scorer([(constant, 1.0)])(blank(2)[0], ["a"] * 3), r"\(B, C, H, W\)"),
        (lambda: Scorer([(constant, 1.0)])(blank(1).byte(), ["a"]), r"torch\.uint8: floats"),
    ],
)
def test_scorer_refuses(make, text) -> None:
    with pytest.raises(LeanError, match=text):
        make()


# -- the page --------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_page_lists_the_rewards() -> None:
    rows = re.findall(r"^\| `([a-z0-9_]+)`(?: \| [^|]+){5} \|$", PAGE, re.M)
    assert rows == list(CATALOGUE)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys) -> None:
    module, use = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "my_rewards.py").write_text(module, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        exec(use, {})
    finally:
        sys.modules.pop("my_rewards", None)
    assert "tensor(" in capsys.readouterr().out
