import gzip
import json.decoder
import os
import pathlib
import re

import numpy as np
import pytest

from research.data import corpus

NAMES = [f"part{i % 3}/text{i}.txt" for i in range(30)]


def write(root, texts):
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return str(root)


def contents(loaded):
    documents = (*loaded.training, *loaded.validation)
    found = {document.name: document.text.tobytes() for document in documents}
    assert len(found) == len(documents)
    return found


def names(documents):
    return [document.name for document in documents]


@pytest.fixture
def texts():
    return {name: f"this is {name}\n".encode() * (i + 1) for i, name in enumerate(NAMES)}


@pytest.fixture
def folder(tmp_path, texts):
    return write(tmp_path / "corpus", texts)


def test_a_folder_is_read_byte_for_byte_in_order_of_name(folder, texts):
    loaded = corpus.load(folder, 0.3)
    assert contents(loaded) == texts
    for side in (loaded.training, loaded.validation):
        assert names(side) == sorted(names(side))
        assert all(document.text.dtype == np.uint8 and not document.text.flags.writeable for document in side)


def test_the_split_is_disjoint_and_follows_the_fraction(folder):
    loaded = corpus.load(folder, 0.3)
    training, validation = set(names(loaded.training)), set(names(loaded.validation))
    assert not training & validation
    assert training | validation == set(NAMES)
    assert 4 <= len(validation) <= 14  # 9 expected of 30; hashes are fixed, so this cannot flake
    assert validation < set(names(corpus.load(folder, 0.7).validation))


def test_an_added_file_moves_no_other(folder, texts, tmp_path):
    before = corpus.load(folder, 0.3)
    write(tmp_path / "corpus", {"aaa/first.txt": b"first in order", "zzz.txt": b"last in order"})
    after = corpus.load(folder, 0.3)
    added = {"aaa/first.txt", "zzz.txt"}
    assert set(names(after.validation)) - added == set(names(before.validation))
    assert set(names(after.training)) - added == set(names(before.training))
    assert after.digest != before.digest


def test_the_digest_depends_on_names_and_texts_alone(folder, texts, tmp_path):
    digest = corpus.load(folder, 0.3).digest
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert corpus.load(folder, 0.5).digest == digest

    def digest_of(changed):
        root = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        return corpus.load(write(root, changed), 0.3).digest

    first, second = NAMES[0], NAMES[3]
    assert digest_of(texts) == digest
    assert digest_of({**texts, first: texts[first][:-1] + b"?"}) != digest
    assert digest_of({**{k: v for k, v in texts.items() if k != first}, first + "2": texts[first]}) != digest
    assert digest_of({**texts, first: texts[second], second: texts[first]}) != digest
    # Names and texts strung together are the same here: only their borders differ.
    apart, joined = {"a": b"1", "b": b"2"}, {"a": b"1b2"}
    assert digest_of({**texts, **apart}) != digest_of({**texts, **joined})


def test_a_folder_skips_hidden_binary_and_empty_files(folder, texts, tmp_path):
    digest = corpus.load(folder, 0.3).digest
    extra = {".git/config": b"hidden", ".hidden": b"hidden", "image.png": b"\x89PNG\0\0", "empty.txt": b""}
    write(tmp_path / "corpus", extra)
    loaded = corpus.load(folder, 0.3)
    assert contents(loaded) == texts
    assert loaded.digest == digest


def test_the_same_text_is_never_on_both_sides(tmp_path):
    """40 texts, each in two folders: by name, 12 of 14 held-out documents would be training documents as well."""
    texts = {f"doc{i:02}": f"text {i} ".encode() * (i + 3) for i in range(40)}
    twice = {f"{copy}/{name}.txt": text for name, text in texts.items() for copy in "ab"}
    loaded = corpus.load(write(tmp_path / "twice", twice), 0.25)
    sides = [{document.text.tobytes() for document in side} for side in (loaded.training, loaded.validation)]
    assert not sides[0] & sides[1]
    assert len(loaded.training) + len(loaded.validation) == 80
    assert loaded.duplicates == 40
    # A text's side is its own: not that of its name, nor of its copies.
    once = corpus.load(write(tmp_path / "once", texts), 0.25)
    assert {document.text.tobytes() for document in once.validation} == sides[1]
    assert once.duplicates == 0


SAME = [b"\xef\xbb\xbfone\ntwo", b"one\ntwo\n\n", b"one\r\ntwo\r\n", b"one\rtwo", b"  one\ntwo ", b"one\ntwo"]


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_texts_that_are_written_alike_are_the_same_text(tmp_path, fraction):
    alike = {f"{i}": text for i, text in enumerate(SAME)} | {"6.gz": gzip.compress(SAME[0])}
    others = {f"other{i}": f"other {i}".encode() for i in range(30)}
    loaded = corpus.load(write(tmp_path, alike | others), fraction)
    assert loaded.duplicates == len(SAME)
    assert len(set(alike) & set(names(loaded.validation))) in (0, len(alike))
    assert contents(loaded)["2"] == SAME[2]  # it is read as it stands


def test_one_text_under_many_names_cannot_be_split(tmp_path):
    folder = write(tmp_path, {"a": b"text", "b": b"text\n"})
    with pytest.raises(ValueError, match=r"config\.data\.path=.*: its 2 documents hold one text"):
        corpus.load(folder, 0.5)


@pytest.fixture
def linked(tmp_path):
    """40 texts behind a link, and 10 beside it."""
    write(tmp_path / "elsewhere", {f"{i // 20}/doc{i:02}.txt": f"text {i}".encode() for i in range(40)})
    write(tmp_path / "linked", {f"own/doc{i}.txt": f"text {i}".encode() for i in range(10)})
    (tmp_path / "linked" / "part").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "linked"


EVERYTHING = ["", "/", "/**", "/**/*", "/**/*.txt", "/*/**/doc*", "/[op]*/**"]


@pytest.mark.parametrize("pattern", EVERYTHING)
def test_a_folder_and_its_globs_are_the_same_documents(linked, pattern):
    loaded = corpus.load(f"{linked}{pattern}", 0.3)
    assert len(contents(loaded)) == 50
    assert loaded.duplicates == 10
    assert contents(loaded) == contents(corpus.load(str(linked), 0.3))
    assert loaded.digest == corpus.load(str(linked), 0.3).digest


@pytest.mark.parametrize("pattern", EVERYTHING)
def test_hidden_and_binary_files_are_left_out_of_a_folder_and_of_its_globs(linked, pattern):
    expected = contents(corpus.load(str(linked), 0.3))
    write(linked, {"own/doc.txt": b"bin\0ary", "own/.doc.txt": b"hidden", ".git/doc.txt": b"hidden"})
    (linked / "own" / "packed-doc.txt.gz").write_bytes(gzip.compress(b"bin\0ary"))
    loaded = corpus.load(f"{linked}{pattern}", 0.3)
    assert contents(loaded) == expected
    assert loaded.binary_files == (1 if "doc*" in pattern or ".txt" in pattern else 2)


def test_what_is_named_without_a_wildcard_is_read_whatever_it_is(linked):
    write(linked, {"own/doc0.txt": b"bin\0ary", "part/.doc0.txt": b"hidden", ".git/doc0.txt": b"hidden too"})
    assert set(contents(corpus.load(f"{linked}/*/.doc0.txt", 0.5))) == {"part/.doc0.txt[:3]", "part/.doc0.txt[3:]"}
    found = contents(corpus.load(f"{linked}/**/doc0.txt", 0.5))
    assert set(found) == {"own/doc0.txt[:4]", "own/doc0.txt[4:]"}
    assert set(contents(corpus.load(f"{linked}/.g*/*", 0.5))) == {".git/doc0.txt[:5]", ".git/doc0.txt[5:]"}


def test_links_that_lead_round_are_not_followed(linked):
    expected = contents(corpus.load(str(linked), 0.3))
    (linked / "own" / "up").symlink_to(linked)
    (linked / "here").symlink_to(".")
    (linked / "above").symlink_to(linked.parent)  # holds the corpus itself
    (linked.parent / "elsewhere" / "0" / "back").symlink_to(linked / "part")
    (linked.parent / "elsewhere" / "1" / "across").symlink_to(linked / "own")  # no loop: the same files once more
    more = {f"part/1/across/{name}": text for name, text in ((f"doc{i}.txt", f"text {i}".encode()) for i in range(10))}
    for pattern in ("", "/**", "/*/**"):
        assert contents(corpus.load(f"{linked}{pattern}", 0.3)) == expected | more
    few = {name: text for name, text in expected.items() if name.startswith("own/")}
    assert contents(corpus.load(f"{linked}/*/*.txt", 0.3)) == few


def test_links_to_files_and_two_links_to_one_folder(linked):
    expected = contents(corpus.load(str(linked), 0.3))
    (linked / "again").symlink_to(linked.parent / "elsewhere")
    (linked / "one.txt").symlink_to(linked / "own" / "doc3.txt")
    loaded = corpus.load(str(linked), 0.3)
    again = {f"again/{name.removeprefix('part/')}": text for name, text in expected.items() if name.startswith("part/")}
    assert contents(loaded) == expected | again | {"one.txt": b"text 3"}
    assert loaded.duplicates == 10 + 40 + 1
    sides = [{document.text.tobytes() for document in side} for side in (loaded.training, loaded.validation)]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("target", ["nowhere", "gone.txt"])
def test_a_link_that_leads_nowhere_is_told(linked, target):
    (linked / "gone.txt").symlink_to(target)
    for pattern in ("", "/**", "/*.txt", "/**/*.txt"):
        with pytest.raises(
            ValueError, match=rf"config\.data\.path: '.*gone\.txt' is a link that leads nowhere, to '{target}'"
        ):
            corpus.load(f"{linked}{pattern}", 0.3)
    (linked / "gone.txt").rename(linked / ".#gone.txt")  # an editor's lock
    assert len(contents(corpus.load(str(linked), 0.3))) == 50


def test_a_folder_that_cannot_be_read_is_told(linked, monkeypatch):
    listdir = os.listdir

    def refuse(path):
        if str(path).endswith("elsewhere/1") or str(path).endswith("part/1"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    for pattern in ("", "/**", "/**/*.txt"):
        with pytest.raises(ValueError, match=r"config\.data\.path: '.*/part/1' cannot be read: Permission denied"):
            corpus.load(f"{linked}{pattern}", 0.3)


def test_gzip_files_are_decompressed(tmp_path, texts):
    packed = {f"{name}.gz": gzip.compress(text) for name, text in texts.items()}
    loaded = corpus.load(write(tmp_path / "packed", packed), 0.3)
    assert contents(loaded) == {f"{name}.gz": text for name, text in texts.items()}


def test_a_glob_reads_its_matches_once_named_from_its_fixed_part(folder, texts, tmp_path):
    write(tmp_path / "corpus", {"part0/notes.md": b"no match", "part0/deep/raw.txt": b"binary\0in a folder"})
    loaded = corpus.load(f"{folder}/part0/**/**/*.txt", 0.3)
    expected = {name.removeprefix("part0/"): text for name, text in texts.items() if name.startswith("part0/")}
    assert contents(loaded) == expected
    wide = corpus.load(f"{folder}/part?/*.txt", 0.3)
    assert contents(wide) == texts
    assert wide.digest == corpus.load(f"{folder}/*/text*", 0.3).digest


def test_relative_paths_and_home(folder, texts, tmp_path, monkeypatch):
    digest = corpus.load(folder, 0.3).digest
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert corpus.load("corpus", 0.3).digest == digest
    assert corpus.load("~/corpus", 0.3).digest == digest
    monkeypatch.chdir(folder)
    assert corpus.load("part*/*.txt", 0.3).digest == digest


@pytest.mark.parametrize("size, fraction, cut", [(1000, 0.05, 950), (2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 8)])
@pytest.mark.parametrize("name", ["one.txt", "one.txt.gz", "brackets[1].txt"])
def test_a_single_file_holds_out_its_tail(tmp_path, size, fraction, cut, name):
    text = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    loaded = corpus.load(str(path), fraction)
    assert contents(loaded) == {f"{name}[:{cut}]": text[:cut], f"{name}[{cut}:]": text[cut:]}
    assert names(loaded.validation) == [f"{name}[{cut}:]"]


@pytest.mark.parametrize(
    "path, message",
    [
        ("", r"config\.data\.path='': does not exist; must be 'stdlib', a file, a folder or a glob"),
        ("nowhere", r"config\.data\.path='nowhere': does not exist"),
        ("nowhere/*.txt", r"config\.data\.path='nowhere/\*\.txt': matches no file"),
        ("void", r"config\.data\.path='void': no text in its 0 files"),
        ("blank", r"config\.data\.path='blank': no text in its 2 files"),
        ("blank/empty", r"config\.data\.path='blank/empty': no text in its 1 files"),
        ("byte", r"config\.data\.path='byte': holds a single byte"),
        ("plain.gz", r"config\.data\.path: 'plain\.gz' is not a valid gzip file"),
        ("cut.gz", r"config\.data\.path: 'cut\.gz' is not a valid gzip file"),
        ("checksum.gz", r"config\.data\.path: 'checksum\.gz' is not a valid gzip file: CRC"),
        ("block.gz", r"config\.data\.path: 'block\.gz' is not a valid gzip file: .*invalid block type"),
    ],
)
def test_bad_paths(tmp_path, monkeypatch, path, message):
    packed = gzip.compress(os.urandom(100))
    checksum = packed[:-8] + bytes(8)
    block = packed[:10] + b"\xff" + packed[11:]  # the header of the first block: no such kind
    broken = {"plain.gz": b"not packed", "cut.gz": packed[:-20], "checksum.gz": checksum, "block.gz": block}
    write(tmp_path, {"blank/empty": b"", "blank/binary": b"\0\1\2", "byte": b"x", **broken})
    (tmp_path / "void").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        corpus.load(path, 0.3)


@pytest.mark.parametrize("fraction, held_out, works", [(1e-6, 0, 1), (1 - 1e-6, 30, 2)])
def test_an_empty_side_is_an_error_that_names_fractions_that_work(folder, fraction, held_out, works):
    with pytest.raises(ValueError, match=rf"validation_fraction=.*holds out {held_out} of the 30 documents") as caught:
        corpus.load(folder, fraction)
    suggested = float(re.search(r"must be from ([\d.]+) to ([\d.]+) ", str(caught.value))[works])
    loaded = corpus.load(folder, suggested)
    assert min(len(loaded.training), len(loaded.validation)) == 1


def test_the_standard_library():
    loaded = corpus.load("stdlib", 0.05)
    found = contents(loaded)
    assert {"json/decoder.py", "dataclasses.py"} <= set(found)
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert all(name.endswith(".py") and "sysconfigdata" not in name for name in found)
    assert sum(map(len, found.values())) > 5_000_000
    assert found["json/decoder.py"] == pathlib.Path(json.decoder.__file__).read_bytes()
    assert corpus.load("stdlib", 0.05).digest == loaded.digest
    assert loaded.description.startswith("standard library of Python 3.")
