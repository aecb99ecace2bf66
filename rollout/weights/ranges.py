"""Reads ranges of a version's files in parallel, from a directory or a URL supported by fsspec.

A failed read is retried a few times; each attempt gets at most half of the remaining time. A flaky link
therefore delays a version, and a dead link is refused within the deadline.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import WeightError
from rollout.weights.verification import Deadline

CONNECTIONS = 8
"""Concurrent reads: a single connection to a distant server does not saturate its link."""
RANGE_BYTES = (256 << 10, 4 << 20)
"""Minimum and maximum size of a range, bytes."""
INDEX_BYTES = 256 << 20
"""Maximum size of a file that is read whole over a network, bytes."""
TRIES = 4
"""Attempts per range."""
CANCELLED_WITHIN_S = 0.02
"""Seconds between cancellation checks of a read."""
PAUSE_S = 0.1
"""Seconds before the second attempt; doubled before each further attempt."""
T = TypeVar("T")
logging.getLogger("fsspec.http").setLevel(logging.INFO)  # debug logs URLs, which may be secret


class RangeReader:
    """Reader of files below a directory or URL until a deadline; created by `range_reader`."""

    def __init__(self, root: str, deadline: Deadline, pool: ThreadPoolExecutor) -> None:
        """Open the file system without reading. Raises WeightError if fsspec cannot open it."""
        self._deadline, self._pool = deadline, pool
        address = urlsplit(root)
        # the path of a URL may be a secret
        self._shown = f"{address.scheme}://{address.hostname}/..." if address.scheme else root
        try:
            self._files, self._root = fsspec.core.url_to_fs(root)
        except Exception as error:  # file system packages raise any exception
            raise WeightError(f"{self._shown}: {error}") from error

    def check_sizes(self, sizes: Iterable[tuple[str, int]]) -> None:
        """Check file sizes against the manifest, by reading the range around each file's end.

        Raises:
            WeightError: a file is missing or has another size; the message names it.
        """

        def check(name: str, nbytes: int) -> None:
            first = max(nbytes - 1, 0)
            found = first + len(self._range(name, first, nbytes + 1))
            if found != nbytes:
                relation = "more" if found > nbytes else "fewer"
                raise WeightError(f"{self._shown}/{name}: {relation} bytes than the manifest says, {nbytes}")

        self._all(check, ((name, nbytes) for name, nbytes in sizes if nbytes))

    def contents(self, names: Iterable[str]) -> list[bytes]:
        """Return the contents of each file. Raises WeightError with the file's name."""
        return self._all(self._range, ((name, 0, None) for name in names))

    def read(self, name: str, target: NDArray[np.uint8], first: int = 0) -> None:
        """Fill `target` with a file's bytes from `first` on. Raises WeightError with the file's name."""
        min_step, max_step = RANGE_BYTES
        step = min(max(-(-len(target) // CONNECTIONS), min_step), max_step)

        def fill(start: int, end: int) -> None:
            data = self._range(name, first + start, first + end)
            if len(data) != end - start:
                raise WeightError(
                    f"{self._shown}/{name}: {len(data)} bytes from byte {first + start} on, "
                    f"expected {end - start}"
                )
            target[start:end] = np.frombuffer(data, np.uint8)

        starts = range(0, len(target), step)
        self._all(fill, ((start, min(start + step, len(target))) for start in starts))

    def _all(self, function: Callable[..., T], calls: Iterable[tuple[Any, ...]]) -> list[T]:
        """Run calls in parallel, and return their results in order; the first error is raised."""
        futures = [self._pool.submit(function, *call) for call in calls]
        return [future.result() for future in futures]

    def _range(self, name: str, start: int, end: int | None) -> bytes:
        """Return bytes of a file, fewer at its end; retries within the deadline."""
        doing, attempt = f"reading {self._shown}/{name}", 0
        while True:
            attempt += 1
            try:
                found = self._answer(f"{self._root}/{name}", start, end, doing)
            except WeightError:
                raise
            except FileNotFoundError as error:
                raise WeightError(f"{self._shown}/{name}: No such file") from error
            except Exception as error:  # file system packages raise any exception
                if attempt == TRIES:
                    text = str(error).replace(self._root, self._shown) or type(error).__name__
                    raise WeightError(f"{self._shown}/{name}: {text}, {TRIES} times") from error
                self._deadline.sleep(PAUSE_S * 2 ** (attempt - 1), doing)
            else:
                return found

    def _answer(self, path: str, start: int, end: int | None, doing: str) -> bytes:
        """Read once. Raises any file system exception, and WeightError if the deadline is cancelled."""
        limit_s = self._deadline.remaining(doing) / 2
        if not self._files.async_impl:  # local reads always end
            return bytes(self._files.cat_file(path, start=start, end=end))
        max_bytes = INDEX_BYTES if end is None else end - start

        async def refuse_whole(answer: Any) -> None:
            """Refuse an oversized response before reading it: a file may be larger than memory."""
            if answer.status == 200 and (answer.content_length or math.inf) > max_bytes:
                answer.close()
                raise WeightError(f"{doing}: the server sends the whole file, it has to serve ranges")

        checks = {"raise_for_status": refuse_whole} if "http" in self._files.protocol else {}
        # fsspec's synchronous call could not be cancelled
        reading = asyncio.run_coroutine_threadsafe(
            self._files._cat_file(path, start=start, end=start + max_bytes, **checks), self._files.loop
        )
        last = time.monotonic() + limit_s
        try:
            while not wait([reading], CANCELLED_WITHIN_S).done:
                self._deadline.remaining(doing)
                if time.monotonic() > last:
                    raise TimeoutError(f"no answer within {limit_s:g} s")
            return bytes(reading.result())
        finally:
            reading.cancel()


@contextmanager
def range_reader(root: str, deadline: Deadline) -> Iterator[RangeReader]:
    """Yield a reader of the files below a directory or URL. Raises WeightError."""
    pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ranges")
    try:
        yield RangeReader(root, deadline, pool)
    finally:
        pool.shutdown(cancel_futures=True)
