"""Reads a corpus of real text, byte for byte, and holds part of it out for validation."""

import dataclasses
import gzip
import hashlib
import math
import os
import platform
import sysconfig
import zlib

import numpy as np

from research.data import files
from research.errors import ConfigError

STDLIB = "stdlib"
# Not prose of the library itself: installed packages, and tests, which are larger than all the rest.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# Written when Python is built; they hold the machine's paths and would make the digest differ by machine.
_BUILD_FILES = ("_sysconfigdata", "config-")
_SNIFFED_BYTES = 8192
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Goes into every digest: a run that was begun under another split must not go on under this one.
_SPLIT = b"split by text\n"


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
      duplicates: how many documents have the text of one before them; they are on its side of the split.
      binary_files: how many files were left out because they are not text.
      digest: SHA-256, in hexadecimal, of all names and texts, whatever the fraction.
    """

    description: str
    training: tuple[Document, ...]
    validation: tuple[Document, ...]
    duplicates: int
    binary_files: int
    digest: str


def load(path: str, validation_fraction: float) -> Corpus:
    """Reads every document once, and splits them.

    A document is held out where the hash of its text falls below the fraction. So the same text is never on both sides,
    under however many names; and the split depends neither on the seed nor on the other files, so a file that is added
    moves no other. Texts that differ in line ends, in white space at their start or end, or in a byte order mark are
    the same here. Any other difference makes them two: a document that quotes, holds or revises another one may be on
    the other side. A corpus of a single document has its tail held out instead.

    Args:
      path: 'stdlib', the sources of the running Python's standard library without its tests; or a file; a folder,
        read recursively; or a glob, whose matches are all read. Files named `*.gz` are decompressed; empty ones are
        left out. A folder and the wildcards of a glob follow links, and leave out hidden and binary files (those with
        a zero byte near their start); files that are named without a wildcard are read whatever they hold.
      validation_fraction: expected share of the texts (of the bytes, for a single document) to hold out.

    Raises:
      ConfigError: the path leads to no text, a file or folder cannot be read, a link leads nowhere, a gzip file is
        damaged, or the fraction leaves one side empty.
    """
    description, root, names, text_only = _find(path)
    digest = hashlib.sha256(_SPLIT)
    documents, hashes, binary = [], [], 0
    for name in sorted(set(names)):
        content = _read(os.path.join(root, name))
        if text_only and b"\0" in content[:_SNIFFED_BYTES]:
            binary += 1
            continue
        if not content:
            continue
        # Lengths go in too: moving a byte from a name into its text, or from one text into the next, must show.
        encoded = os.fsencode(name)
        digest.update(len(encoded).to_bytes(8, "little") + encoded + len(content).to_bytes(8, "little"))
        digest.update(content)
        documents.append(Document(name, np.frombuffer(content, np.uint8)))
        hashes.append(_hash(content))
    if not documents:
        raise ConfigError(
            f"config.data.path={path!r}: no text in its {len(names)} files; empty ones do not count, "
            "nor binary ones in a folder or found by wildcards"
        )
    training, validation = _split(documents, hashes, path, validation_fraction)
    duplicates = len(hashes) - len(set(hashes))
    return Corpus(description, tuple(training), tuple(validation), duplicates, binary, digest.hexdigest())


def _find(path: str) -> tuple[str, str, list[str], bool]:
    """Returns a description, a folder, the names of files below it, and whether binary ones are to be left out."""
    if path == STDLIB:
        root = sysconfig.get_path("stdlib")
        found = files.walk(root, _SKIPPED_FOLDERS, whole=False)  # systems leave parts of it out, never a source
        names = [name for name in found if name.endswith(".py") and not name.startswith(_BUILD_FILES)]
        return f"standard library of Python {platform.python_version()}", root, names, True
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return path, os.path.dirname(expanded), [os.path.basename(expanded)], False
    if os.path.isdir(expanded):
        return path, expanded, list(files.walk(expanded)), True
    if not files.is_wild(expanded):
        raise ConfigError(f"config.data.path={path!r}: does not exist; must be {STDLIB!r}, a file, a folder or a glob")
    # Names count from the last folder without a wildcard, so that they do not depend on where the corpus lies.
    parts = expanded.split(os.sep)
    wild = next(i for i, part in enumerate(parts) if files.is_wild(part))
    root = os.sep.join([*parts[:wild], ""])
    names = list(files.match(root, os.sep.join(parts[wild:]))) if os.path.isdir(root or os.curdir) else []
    if not names:
        raise ConfigError(f"config.data.path={path!r}: matches no file")
    return path, root, names, files.is_wild(parts[-1])


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"config.data.path: {path!r} cannot be read: {error.strerror}") from error
    if not path.endswith(".gz"):
        return content
    try:
        return gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"config.data.path: {path!r} is not a valid gzip file: {error}") from error


def _split(
    documents: list[Document], hashes: list[bytes], path: str, fraction: float
) -> tuple[list[Document], list[Document]]:
    """Returns (training, validation), neither empty."""
    if len(documents) == 1:
        return _split_tail(documents[0], path, fraction)
    if len(set(hashes)) == 1:
        raise ConfigError(
            f"config.data.path={path!r}: its {len(documents)} documents hold one text, none of which could be held "
            "out; must be several texts, or a single file, whose tail is"
        )
    ranks = [int.from_bytes(hashed[:6], "big") / 2**48 for hashed in hashes]  # even from 0 to 1
    training = [document for document, rank in zip(documents, ranks, strict=True) if rank >= fraction]
    validation = [document for document, rank in zip(documents, ranks, strict=True) if rank < fraction]
    if not training or not validation:
        least = math.floor(min(ranks) * 1000 + 1) / 1000
        most = math.floor(max(ranks) * 1000) / 1000
        raise ConfigError(
            f"config.data.validation_fraction={fraction}: holds out {len(validation)} of the {len(documents)} "
            f"documents of config.data.path={path!r}; must be from {least} to {most} for these texts"
        )
    return training, validation


def _split_tail(document: Document, path: str, fraction: float) -> tuple[list[Document], list[Document]]:
    size = len(document.text)
    if size < 2:
        raise ConfigError(f"config.data.path={path!r}: holds a single byte, too few to hold one out")
    cut = min(max(round(size * (1.0 - fraction)), 1), size - 1)
    head = Document(f"{document.name}[:{cut}]", document.text[:cut])
    return [head], [Document(f"{document.name}[{cut}:]", document.text[cut:])]


def _hash(content: bytes) -> bytes:
    """SHA-256 of what is written, however its lines end and whatever blank stands around it."""
    written = content.removeprefix(_BYTE_ORDER_MARK).replace(b"\r\n", b"\n").replace(b"\r", b"\n").strip()
    return hashlib.sha256(written).digest()
