"""The cache: files that save time, and nothing else.

Whatever is wrong with it (a full disk, no home, a damaged file, somebody else's folder), a run goes
on without, and says so once. Files of others are not trusted: wrong sizes would break budgets.
"""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from pathlib import Path

from waterflow.common.errors import CacheWarning
from waterflow.common.files import write_atomically

#: Caches that something has been said about.
_told: set[str] = set()


class _NotTrustedError(OSError):
    """A file or folder that somebody else may have written."""


def cache_directory() -> Path | None:
    """Where profiles are kept: ``$WATERFLOW_CACHE``, else ``~/.cache/waterflow``; None where
    ``WATERFLOW_CACHE=off`` says that nothing is.

    Raises:
        OSError: there is no home directory.
    """
    configured = os.environ.get("WATERFLOW_CACHE")
    if configured == "off":
        return None
    if configured:
        return Path(configured)
    try:
        return Path.home() / ".cache" / "waterflow"
    except RuntimeError:  # no $HOME, and no entry for the user in the system's list
        raise OSError("this user has no home directory") from None


def read_cached(folder: str, name: str) -> bytes | None:
    """What is kept under a name in one of the cache's folders; None where nothing can be had."""
    try:
        place = _trusted(folder)
        return None if place is None else _content(place / name)
    except FileNotFoundError:
        return None
    except OSError as error:
        _tell(error)
        return None


def cached_names(folder: str) -> list[str]:
    """The names under which something is kept in one of the cache's folders."""
    try:
        place = _trusted(folder)
        return [] if place is None else os.listdir(place)
    except FileNotFoundError:
        return []
    except OSError as error:
        _tell(error)
        return []


def mark_used(folder: str, name: str) -> None:
    """What was read is the last to go when the folder is trimmed."""
    with contextlib.suppress(OSError):
        root = cache_directory()
        if root is not None:
            os.utime(root / folder / name)


def drop_cached(folder: str, name: str) -> None:
    """Nothing is kept under a name any more."""
    with contextlib.suppress(OSError):
        root = cache_directory()
        if root is not None:
            (root / folder / name).unlink(missing_ok=True)


def trim_cached(folder: str, most: int) -> None:
    """Drops what has not been used for longest, until one of the cache's folders has no more bytes
    than `most`."""
    with contextlib.suppress(OSError):
        place = _trusted(folder)
        files = [] if place is None else [(e.stat(), e.name) for e in os.scandir(place)]
        size = sum(status.st_size for status, _ in files)
        for status, name in sorted(files, key=lambda file: file[0].st_mtime_ns):
            if size <= most:
                return
            drop_cached(folder, name)
            size -= status.st_size


def _trusted(folder: str) -> Path | None:
    """One of the cache's folders; None where there is no cache.

    Raises:
        OSError: it cannot be read, or others may have written there.
    """
    root = cache_directory()
    if root is None:
        return None
    place = root / folder
    for above in (place.parent, place):
        _check(above.stat(), above)
    return place


def write_cached(folder: str, name: str, content: bytes) -> None:
    """Keeps something under a name, where that can be done."""
    try:
        root = cache_directory()
        if root is None:
            return
        place = root / folder
        place.parent.parent.mkdir(parents=True, exist_ok=True)
        for above in (place.parent, place):
            above.mkdir(mode=0o700, exist_ok=True)
            _check(above.stat(), above)
        # Whoever reads it notices damage, and jobs are not to wait for the disk.
        write_atomically(place / name, content, private=True, durable=False)
    except OSError as error:
        _tell(error)


def distrust_cached(folder: str, name: str, why: object) -> None:
    """What has been read is of no use, and will be made anew."""
    _tell(OSError(f"{folder}/{name} in it is damaged or of another version ({why})"))


def _check(status: os.stat_result, path: Path) -> None:
    """Raises _NotTrustedError where others than this user and root may have written there."""
    if status.st_uid not in (os.geteuid(), 0):
        raise _NotTrustedError(
            f"{path} belongs to the user {status.st_uid}, this process to {os.geteuid()}"
        )
    if status.st_mode & stat.S_IWOTH:
        raise _NotTrustedError(f"everybody can write to {path} (chmod o-w makes it trusted)")


def _content(path: Path) -> bytes:
    # A pipe in the file's place would be waited for, for ever.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        status = os.fstat(number)
        _check(status, path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no ordinary file")
        with open(number, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(number)


def _tell(error: OSError) -> None:
    try:
        where = str(cache_directory())
    except OSError:
        where = "~/.cache/waterflow"
    if where in _told:
        return
    _told.add(where)
    warnings.warn(
        f"the cache {where} is not used, or not all of it: {error}. What it would hold is found "
        "anew, which takes time and changes nothing else. Mend it, or name another folder in "
        "WATERFLOW_CACHE, or say WATERFLOW_CACHE=off.",
        CacheWarning,
        stacklevel=2,
    )
