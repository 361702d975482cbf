"""Prompts from files and data sets: what is read, what is refused, what is held out."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from leangrpo.checks import check
from leangrpo.config import load_config
from leangrpo.datasets import Example, digest, read_examples, split
from leangrpo.errors import LeanError
from leangrpo.settings import Prompts


def write(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def refused(file: Path | str, **options: Any) -> str:
    """What is said of a source, without the name of the setting and the source."""
    with pytest.raises(LeanError) as error:
        read_examples(Prompts(train=str(file), **options))
    text = str(error.value)
    begin = f"`prompts.train` is {str(file)!r}: "
    assert text.startswith(begin)
    return text.removeprefix(begin)


def prompts_of(examples: list[Example]) -> list[str]:
    return [example.prompt for example in examples]


# -- formats ---------------------------------------------------------------------------------------


def test_text(tmp_path: Path) -> None:
    file = write(tmp_path / "p.txt", "a cat", "", "  # no prompt", "  a dog ", 'a "#1" sign')
    expected = [Example("a cat"), Example("a dog"), Example('a "#1" sign')]
    assert read_examples(file) == read_examples(str(file), heldout=True) == expected


def test_embedded() -> None:
    train, heldout = read_examples("embedded"), read_examples("embedded", heldout=True)
    assert train
    assert heldout
    assert not {e.prompt for e in train} & {e.prompt for e in heldout}


def test_jsonl(tmp_path: Path) -> None:
    """A line separator inside a string is no end of a line."""
    rows = [
        {"prompt": "a cat\u2028on a mat", "text": "CAT", "boxes": [[0, 1], [2, 3]]},
        {"prompt": "a dog", "weight": 0.5, "note": None},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file = write(tmp_path / "p.jsonl", lines[0], "", lines[1], "")
    assert read_examples(file) == [
        Example("a cat\u2028on a mat", {"text": "CAT", "boxes": [[0, 1], [2, 3]]}),
        Example("a dog", {"weight": 0.5, "note": None}),
    ]


@pytest.mark.parametrize(("name", "mark"), [("p.csv", ","), ("p.tsv", "\t")])
def test_tables(name: str, mark: str, tmp_path: Path) -> None:
    rows = (
        ["text", "prompt"],
        ["CAT", '"a sign that says ""CAT"""'],
        ["", f'"two{mark} or\nthree lines"'],
        ["DOG", "a dog"],
    )
    file = write(tmp_path / name, *(mark.join(row) for row in rows))
    assert read_examples(file) == [
        Example('a sign that says "CAT"', {"text": "CAT"}),
        Example(f"two{mark} or\nthree lines", {"text": ""}),
        Example("a dog", {"text": "DOG"}),
    ]


def test_column(tmp_path: Path) -> None:
    file = write(tmp_path / "p.csv", "caption,prompt", "a cat,x")
    found = read_examples(Prompts(train=str(file), column="caption"))
    assert found == [Example("a cat", {"prompt": "x"})]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    picture = write(tmp_path / "x.png", "no need to be one yet")
    table = pyarrow.table(
        {
            "prompt": ["a cat", "a dog"],
            "boxes": [[1, 2], []],
            "file": ["x.png", str(picture)],
            "inside": [{"bytes": b"abc", "path": None}, {"bytes": None, "path": "x.png"}],
        }
    )
    file = tmp_path / "p.parquet"
    parquet.write_table(table, file)
    images = {"image": "file", "mask_image": "inside"}
    assert read_examples(Prompts(train=str(file), images=images)) == [
        Example("a cat", {"boxes": [1, 2]}, {"image": picture, "mask_image": b"abc"}),
        Example("a dog", {"boxes": []}, {"image": picture, "mask_image": picture}),
    ]
    assert refused(file, column="caption").startswith(
        "row 1 has no 'caption', which prompts.column"
    )
    file.write_bytes(b"PAR1, or is it")
    assert refused(file).startswith("it cannot be read as Parquet after row 0: ")
    assert refused(tmp_path / "none.parquet").startswith("there is no such file.")


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(tmp_path / "p.parquet") == (
        "reading Parquet needs pyarrow, which is not installed. Run: pip install 'leangrpo[data]'."
    )


class ImageFeature:
    """Stands in for `datasets.Image`."""

    def __init__(self, decode: bool = True) -> None:
        self.decode = decode


class Table:
    """Stands in for `datasets.Dataset`, as far as it is used."""

    def __init__(self, rows: list[dict[str, Any]], features: dict[str, Any]) -> None:
        self.rows, self.features = rows, features

    def cast_column(self, column: str, feature: Any) -> Table:
        assert not feature.decode
        features = {**self.features, column: feature}
        files = {"decoded": {"bytes": b"file", "path": "a.png"}}
        return Table([{**r, column: files[r[column]]} for r in self.rows], features)

    def __iter__(self) -> Any:
        return iter(self.rows)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("hf:owner/some-set", ("owner/some-set", None, "train")),
        ("hf:owner/some-set:test", ("owner/some-set", None, "test")),
        ("hf:owner/some-set:en:train[:10%]", ("owner/some-set", "en", "train[:10%]")),
        ("hf:squad:train[5:9]", ("squad", None, "train[5:9]")),
    ],
)
def test_hub(source: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, config: str | None, *, split: str) -> Table:
        calls.append((name, config, split))
        rows = [{"prompt": "a cat", "text": "CAT", "source": "decoded"}]
        return Table(rows, {"prompt": None, "text": None, "source": ImageFeature()})

    stand_in = types.SimpleNamespace(load_dataset=load_dataset, Image=ImageFeature)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    found = read_examples(Prompts(train=source, images={"image": "source"}))
    assert found == [Example("a cat", {"text": "CAT"}, {"image": b"file"})]
    assert calls == [call]


def test_hub_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str | None, *, split: str) -> Table:
        if name == "o/empty":
            return Table([{"caption": "a cat"}], {})
        raise ConnectionError("no\nnetwork")

    stand_in = types.SimpleNamespace(load_dataset=load_dataset, Image=ImageFeature)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    assert refused("hf:o/n") == "it cannot be loaded: ConnectionError: no network."
    assert refused("hf:o/empty") == (
        "row 1 has no 'prompt', which prompts.column names; it has caption."
    )
    for source in ("hf:", "hf:a/b/c", "hf:o/n:", "hf:o/n:a:b:c", "hf:o/n::train"):
        assert refused(source) == (
            "it must be hf:owner/name, hf:owner/name:split or hf:owner/name:config:split."
        )
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused("hf:o/n") == (
        "reading it needs the datasets library, which is not installed. "
        "Run: pip install 'leangrpo[data]'."
    )


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.txt", "\n# none\n", "it holds no prompt. Write one a line."),
        ("p.jsonl", "\n", "it holds no prompt. Write one a line."),
        ("p.csv", "prompt\n", "it holds no prompt. Write one a line."),
        ("p.csv", "", "it holds no prompt. Write one a line."),
        (
            "p.json",
            "[]",
            "JSON Lines are read, an object a line. Write such a file and name it .jsonl.",
        ),
        (
            "p.jsonl",
            '{"prompt": "a"}\n\n{"prompt": "b"',
            "line 3, column 15 is not valid JSON: Expecting ',' delimiter.",
        ),
        (
            "p.jsonl",
            '{"prompt": "a"}\n"b"',
            'line 2 is no JSON object. Write lines like {"prompt": "a cat"}.',
        ),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"text": "b", "x": 1}',
            "line 2 has no 'prompt', which prompts.column names; it has text, x.",
        ),
        ("p.jsonl", '{"prompt": " "}', "line 1: its 'prompt' is empty, and text is needed."),
        ("p.jsonl", '{"prompt": null}', "line 1: its 'prompt' is empty, and text is needed."),
        ("p.jsonl", '{"prompt": 7}', "line 1: its 'prompt' is 7, and text is needed."),
        ("p.csv", "prompt,x\na,1\n,2", "line 3: its 'prompt' is empty, and text is needed."),
        (
            "p.csv",
            "caption\na",
            "line 2 has no 'prompt', which prompts.column names; it has caption.",
        ),
        ("p.csv", "prompt,x\na,1\nb", "line 3 has 1 fields, and the header 2."),
        ("p.csv", "prompt,x\na,1,2,3", "line 2 has 4 fields, and the header 2."),
        ("p.csv", "prompt,x,x\na,1,2", "line 1 names the column 'x' twice."),
        ("p.csv", 'prompt\n"a"b', "line 2 cannot be read: ',' expected after '\"'."),
        ("p.csv", 'prompt\n"a', "line 2 cannot be read: unexpected end of data."),
    ],
)  # fmt: skip
def test_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    assert refused(write(tmp_path / name, text)) == said


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p.csv", "p.tsv"])
def test_not_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b"prompt\na cat\nna\xefve")
    assert refused(file) == "it is not UTF-8 text (line 3, byte 15). Save it as UTF-8."
    assert refused(tmp_path) == "it is a folder, not a text file."


# -- pictures --------------------------------------------------------------------------------------


def test_pictures(tmp_path: Path) -> None:
    """From the data file's folder, upright, in RGB, and an argument each."""
    folder = tmp_path / "data"
    (folder / "in").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn it by 90 degrees
    Image.new("L", (4, 2), 7).save(folder / "in" / "a.jpg", exif=exif, quality=100)
    Image.new("RGBA", (3, 3), (1, 2, 3, 4)).save(tmp_path / "b.png")
    line = {"prompt": "a", "source": "in/a.jpg", "mask": str(tmp_path / "b.png"), "text": "x"}
    file = write(folder / "p.jsonl", json.dumps(line))
    images = {"image": "source", "mask_image": "mask"}
    (found,) = read_examples(Prompts(train=str(file), images=images))
    assert found == Example(
        "a", {"text": "x"}, {"image": folder / "in" / "a.jpg", "mask_image": tmp_path / "b.png"}
    )
    opened = found.open_images()
    assert [(p.mode, p.size) for p in opened.values()] == [("RGB", (2, 4)), ("RGB", (3, 3))]
    assert opened["mask_image"].getpixel((0, 0)) == (1, 2, 3)
    about = found.about(opened)
    assert about == {"text": "x", "images": opened}
    about["text"] = "changed"
    assert found.about({}) == {"text": "x"}, "each sample has a dictionary of its own"
    inside = Example("a", images={"image": (tmp_path / "b.png").read_bytes()})
    assert inside.open_images()["image"].size == (3, 3)


def test_pictures_refused(tmp_path: Path) -> None:
    images = {"image": "source"}
    write(tmp_path / "a.png", "no picture")
    rows: list[Any] = [{"prompt": "a", "source": "a.png"}]

    def last(**row: Any) -> str:
        file = write(tmp_path / "p.jsonl", *(json.dumps(r) for r in [*rows, row]))
        return refused(file, images=images)

    assert last(prompt="b", source="none.png") == (
        f"line 2: there is no picture {str(tmp_path / 'none.png')!r}."
    )
    assert (
        last(prompt="b")
        == "line 2 has no 'source', which prompts.images.image names; it has prompt."
    )
    for value in (None, "", 3, {"bytes": None, "path": None}):
        assert last(prompt="b", source=value) == (
            f"line 2: its 'source' is {value!r}, and a picture's file is needed."
        )
    rule = "line 2 has a column 'images', and rewards find the pictures there. Rename it."
    assert last(prompt="b", source="a.png", images=1) == rule
    file = write(tmp_path / "p.jsonl", json.dumps(rows[0]))
    (found,) = read_examples(Prompts(train=str(file), images=images))
    with pytest.raises(
        LeanError, match=r"prompts.images.image.*a.png.*no picture that can be read"
    ):
        found.open_images()


def test_checked_before_a_model_is_loaded(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", json.dumps({"prompt": "a", "source": "none.png"}))
    words = [f"prompts.train={file}", "prompts.images.image=source", "prompts.images.height=x"]
    words += ["prompts.heldout=0.5", f"run.dir={tmp_path / 'run'}", "sampling.call.image=1"]
    with pytest.raises(LeanError) as error:
        check(load_config(None, words))
    assert str(error.value).splitlines() == [
        "`prompts.images.height` is 'x': this argument is given by sampling.height. Remove one.",
        "`prompts.images.image` is 'source': this argument is given by sampling.call.image. "
        "Remove one.",
        f"`prompts.train` is '{file}': line 1 has no 'x', which prompts.images.height names; "
        "it has prompt, source.",
    ]


# -- held out --------------------------------------------------------------------------------------

MANY = [Example(f"prompt {i}", {"row": i}) for i in range(40)]


@pytest.mark.parametrize(("wanted", "num"), [(0.1, 4), (7, 7), (0.001, 1), (39, 39)])
def test_held_out(wanted: float | int, num: int) -> None:
    train, held = split(MANY, wanted)
    assert len(held) == num
    assert [e for e in MANY if e not in held] == train
    again = split(MANY[::-1], wanted)
    assert again == (train[::-1], held), "whatever the order of the rows"


def test_held_out_grows_by_hash() -> None:
    """More held out are the same and more."""
    few, many = (split(MANY, n)[1] for n in (3, 9))
    assert many[:3] == few


def test_copies_stay_together(tmp_path: Path) -> None:
    """What the pipeline is called with is on one side, whatever its metadata."""
    copies = [Example(e.prompt, {"row": 99}) for e in MANY]
    train, held = split([*MANY, *copies], 10)
    assert len(held) == 20
    assert not {e.prompt for e in train} & {e.prompt for e in held}
    files = [write(tmp_path / name, "x") for name in ("a.png", "b.png")]
    same = [Example("a", {}, {"image": file}) for file in files]
    train, held = split(same, 1)
    assert len(train) == len(held) == 1, "the same prompt for another picture is another call"


def test_held_out_settings(tmp_path: Path) -> None:
    file = write(tmp_path / "p.txt", *(e.prompt for e in MANY))
    for heldout in (0.25, 10):
        settings = Prompts(train=str(file), heldout=heldout)
        train, held = read_examples(settings), read_examples(settings, heldout=True)
        assert len(held) == 10
        assert sorted([*prompts_of(train), *prompts_of(held)]) == sorted(prompts_of(MANY))
    assert read_examples(Prompts(train=str(file)), heldout=True) == []
    with pytest.raises(LeanError, match="has 40 different examples, and none would be left"):
        read_examples(Prompts(train=str(file), heldout=40))


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "0.0", "true", "''", "[a]", "-0.5"])
def test_held_out_refused(value: str) -> None:
    with pytest.raises(LeanError, match=r"`prompts.heldout` is .*: it must be a source"):
        load_config(None, [f"prompts.heldout={value}"])


# -- digest ----------------------------------------------------------------------------------------


def test_digest(tmp_path: Path) -> None:
    picture = write(tmp_path / "a.png", "one")
    base = [Example("a", {"x": 1, "y": 2}, {"image": picture}), Example("b")]
    same = [Example("a", {"y": 2, "x": 1}, {"image": picture}), Example("b")]
    assert digest(base) == digest(same)
    (tmp_path / "moved").mkdir()
    moved = write(tmp_path / "moved" / "a.png", "one")
    assert digest([Example("a", {"x": 1, "y": 2}, {"image": moved}), base[1]]) == digest(base)
    others = [
        base[::-1],
        base[:1],
        [Example("a", {"x": 1, "y": 3}, {"image": picture}), base[1]],
        [Example("a", {"x": 1, "y": 2}, {"mask": picture}), base[1]],
        [Example("a", {"x": 1, "y": 2}, {"image": b"one"}), base[1]],
        [Example("A", {"x": 1, "y": 2}, {"image": picture}), base[1]],
    ]
    before = digest(base)
    assert len({before, *map(digest, others)}) == len(others) + 1
    write(picture, "three")
    assert digest(base) != before, "another picture of the same name"
