"""Which files a path names: those of a folder, or those that a glob matches, by one rule for both.

Links are followed. One that leads to a folder in which it lies itself would be followed for ever, and is not entered.
Names that start with a dot are hidden: a folder and the wildcards of a glob leave them out.
"""

import dataclasses
import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence

from research.errors import ConfigError

ANYWHERE = "**"  # of a glob: any number of folders, none among them

_Chain = tuple[str, ...]  # where the folders on the way really are, the outermost first


def walk(root: str, skipped: frozenset[str] = frozenset(), whole: bool = True) -> Iterator[str]:
    """Yields the names, relative to `root`, of all files below it.

    Args:
      root: a folder.
      skipped: names of folders that are left out.
      whole: whether a link that leads nowhere is an error; else it is left out.

    Raises:
      ConfigError: a folder cannot be read, or a link leads nowhere; names it.
    """
    return _Search(root, skipped, whole).match("", (ANYWHERE, "*"), (os.path.realpath(root),))


def match(root: str, pattern: str) -> Iterator[str]:
    """Yields the names, relative to `root`, of the files that a glob matches, some of them more than once.

    Args:
      root: a folder.
      pattern: as of `glob`, with `**` for any number of folders; at its end for all the files below them.

    Raises:
      ConfigError: as `walk`.
    """
    parts = [part for part in pattern.split(os.sep) if part]
    if parts[-1] == ANYWHERE:
        parts.append("*")
    distinct = [part for i, part in enumerate(parts) if part != ANYWHERE or parts[i - 1 : i] != [ANYWHERE]]
    return _Search(root).match("", distinct, (os.path.realpath(root),))


def is_wild(path: str) -> bool:
    """Whether a path, or a part of one, has wildcards."""
    return glob.escape(path) != path


@dataclasses.dataclass(frozen=True)
class _Search:
    root: str
    skipped: frozenset[str] = frozenset()
    whole: bool = True

    def match(self, folder: str, parts: Sequence[str], chain: _Chain) -> Iterator[str]:
        """Names of the files that `parts` match below `folder`, itself a name relative to the root."""
        first, *rest = parts
        if first == ANYWHERE:
            yield from self.match(folder, rest, chain)
            for name in self._entries(folder, "*"):
                path = os.path.join(folder, name)
                if name not in self.skipped and (deeper := self._enter(path, chain)):
                    yield from self.match(path, parts, deeper)
            return
        # A name without wildcards is taken as it stands, as '.' and '..' are.
        for name in self._entries(folder, first) if is_wild(first) else (first,):
            path = os.path.join(folder, name)
            if rest and (deeper := self._enter(path, chain)):
                yield from self.match(path, rest, deeper)
            elif not rest and os.path.isfile(os.path.join(self.root, path)):
                yield path

    def _entries(self, folder: str, pattern: str) -> list[str]:
        """What of a folder a pattern with wildcards matches, in order of name."""
        where = os.path.join(self.root, folder) or os.curdir
        try:
            names = sorted(fnmatch.filter(os.listdir(where), pattern))
        except OSError as error:
            raise ConfigError(f"config.data.path: {where!r} cannot be read: {error.strerror}") from error
        if not pattern.startswith("."):
            names = [name for name in names if not name.startswith(".")]
        for path in (os.path.join(where, name) for name in names if self.whole):
            if os.path.islink(path) and not os.path.exists(path):  # to a disk that is not mounted, say
                raise ConfigError(f"config.data.path: {path!r} is a link that leads nowhere, to {os.readlink(path)!r}")
        return names

    def _enter(self, folder: str, chain: _Chain) -> _Chain | None:
        """The chain with a folder added; None for what is none, and for one that holds a folder of the chain."""
        path = os.path.join(self.root, folder)
        if not os.path.isdir(path):
            return None
        real = os.path.realpath(path)
        if any(outer == real or outer.startswith(os.path.join(real, "")) for outer in chain):
            return None
        return (*chain, real)
