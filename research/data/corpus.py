"""Reads a corpus of real text, byte for byte, and holds part of it out for validation."""

import dataclasses
import glob
import gzip
import hashlib
import math
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator

import numpy as np

STDLIB = "stdlib"
# Not prose of the library itself: installed packages, and tests, which are larger than all the rest.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# Written when Python is built; they hold the machine's paths and would make the digest differ by machine.
_BUILD_FILES = ("_sysconfigdata", "config-")
_SNIFFED_BYTES = 8192


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """One text.

    Attributes:
      name: its path relative to the corpus.
      text: uint8 [bytes], read-only, never empty.
    """

    name: str
    text: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Documents in order of name, each on one side of the split.

    Attributes:
      description: what was read, for people.
      training: documents to learn from, at least one.
      validation: documents held out, at least one.
      digest: SHA-256, in hexadecimal, of all names and texts, whatever the split.
    """

    description: str
    training: tuple[Document, ...]
    validation: tuple[Document, ...]
    digest: str


def load(path: str, validation_fraction: float) -> Corpus:
    """Reads every document once, and splits them.

    A document is held out where the hash of its name falls below the fraction: the split depends neither on the
    seed nor on the other files, so a file that is added moves no other. A corpus of a single document has its tail
    held out instead.

    Args:
      path: 'stdlib', the sources of the running Python's standard library without its tests; or a file; a folder,
        read recursively without hidden and binary files (those with a zero byte near their start); or a glob, whose
        matches are all read. Files named `*.gz` are decompressed; empty ones are left out.
      validation_fraction: expected share of the documents (of the bytes, for a single document) to hold out.

    Raises:
      ValueError: the path leads to no text, a file cannot be read, a gzip file is damaged, or the fraction leaves one
        side empty.
    """
    if not 0.0 < validation_fraction < 1.0:
        raise ValueError(f"config.data.validation_fraction={validation_fraction}: must lie between 0 and 1")
    description, root, names, text_only = _find(path)
    digest = hashlib.sha256()
    documents = []
    for name in sorted(set(names)):
        content = _read(os.path.join(root, name))
        if not content or (text_only and b"\0" in content[:_SNIFFED_BYTES]):
            continue
        # Lengths go in too: moving a byte from a name into its text, or from one text into the next, must show.
        encoded = os.fsencode(name)
        digest.update(len(encoded).to_bytes(8, "little") + encoded + len(content).to_bytes(8, "little"))
        digest.update(content)
        documents.append(Document(name, np.frombuffer(content, np.uint8)))
    if not documents:
        raise ValueError(
            f"config.data.path={path!r}: no text in its {len(names)} files; empty ones do not count, "
            "nor binary ones in a folder"
        )
    training, validation = _split(documents, path, validation_fraction)
    return Corpus(description, tuple(training), tuple(validation), digest.hexdigest())


def _find(path: str) -> tuple[str, str, list[str], bool]:
    """Returns a description, a folder, the names of files below it, and whether binary ones are to be left out."""
    if path == STDLIB:
        root = sysconfig.get_path("stdlib")
        names = [n for n in _walk(root, _SKIPPED_FOLDERS) if n.endswith(".py") and not n.startswith(_BUILD_FILES)]
        return f"standard library of Python {platform.python_version()}", root, names, True
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return path, os.path.dirname(expanded), [os.path.basename(expanded)], False
    if os.path.isdir(expanded):
        return path, expanded, list(_walk(expanded)), True
    if glob.escape(expanded) == expanded:
        raise ValueError(f"config.data.path={path!r}: does not exist; must be {STDLIB!r}, a file, a folder or a glob")
    # Names count from the last folder without a wildcard, so that they do not depend on where the corpus lies.
    parts = expanded.split(os.sep)
    wild = next(i for i, part in enumerate(parts) if glob.escape(part) != part)
    root = os.sep.join([*parts[:wild], ""])
    matches = glob.glob(os.sep.join(parts[wild:]), root_dir=root or None, recursive=True)
    names = [name for name in matches if os.path.isfile(os.path.join(root, name))]
    if not names:
        raise ValueError(f"config.data.path={path!r}: matches no file")
    return path, root, names, False


def _walk(root: str, skipped: frozenset[str] = frozenset()) -> Iterator[str]:
    """Names of the files below `root`, hidden ones and those in folders called `skipped` left out."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        for name in files:
            full = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(full):
                yield os.path.relpath(full, root)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise ValueError(f"config.data.path: {path!r} cannot be read: {error.strerror}") from error
    if not path.endswith(".gz"):
        return content
    try:
        return gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"config.data.path: {path!r} is not a valid gzip file: {error}") from error


def _split(documents: list[Document], path: str, fraction: float) -> tuple[list[Document], list[Document]]:
    """Returns (training, validation), neither empty."""
    if len(documents) == 1:
        return _split_tail(documents[0], path, fraction)
    ranks = [_rank(document.name) for document in documents]
    training = [document for document, rank in zip(documents, ranks, strict=True) if rank >= fraction]
    validation = [document for document, rank in zip(documents, ranks, strict=True) if rank < fraction]
    if not training or not validation:
        least = math.floor(min(ranks) * 1000 + 1) / 1000
        most = math.floor(max(ranks) * 1000) / 1000
        raise ValueError(
            f"config.data.validation_fraction={fraction}: holds out {len(validation)} of the {len(documents)} "
            f"documents of config.data.path={path!r}; must be from {least} to {most} for these names"
        )
    return training, validation


def _split_tail(document: Document, path: str, fraction: float) -> tuple[list[Document], list[Document]]:
    size = len(document.text)
    if size < 2:
        raise ValueError(f"config.data.path={path!r}: holds a single byte, too few to hold one out")
    cut = min(max(round(size * (1.0 - fraction)), 1), size - 1)
    head = Document(f"{document.name}[:{cut}]", document.text[:cut])
    return [head], [Document(f"{document.name}[{cut}:]", document.text[cut:])]


def _rank(name: str) -> float:
    """A number in [0, 1) that depends on the name alone, evenly spread over names."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:6], "big") / 2**48
