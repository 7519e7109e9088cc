"""One use of an engine: an iterator that one thread steps, and any thread may stop or close."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from ..accounting.results import GenerationResult, Token
from ..errors import BmoeError
from .graphs import Stopped


class Turn(ABC, Iterator[Token]):
    """An iterator of `Token`; `result` is complete once it has ended, also where it ended early.

    A turn stopped by `Engine.cancel()` ends with `result.stop == "cancelled"`. Ctrl-C raises KeyboardInterrupt out of
    the iterator, and a failed read raises ReadError; the engine stays usable. `cancel`: stops the graph that runs.
    """

    def __init__(self, cancel: Callable[[], None], result: GenerationResult) -> None:
        self.result = result
        self.running = True
        self._cancel = cancel
        self._lock = threading.Lock()
        self._stepper = 0  # the thread that is inside `next`
        self._closing = False
        self._process = os.getpid()
        self._steps = self._run()

    @abstractmethod
    def _run(self) -> Generator[Token, None, None]:
        """The tokens, one after the other; sets `running` to False at its end."""

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        check_process(self._process)
        with self._lock:
            if self._closing:
                raise StopIteration
            self._stepper = threading.get_ident()
            try:
                return next(self._steps)
            finally:
                self._stepper = 0

    @property
    def stepping(self) -> bool:
        """True while a thread is inside `next`."""
        return self._lock.locked()

    def close(self) -> None:
        """Ends it where it is; from another thread, after stopping the step that runs."""
        if self._stepper == threading.get_ident():
            raise BmoeError("a generation cannot be closed from inside one of its own steps: use cancel()")
        if not self.running:
            return
        check_process(self._process)
        self._closing = True
        if self._lock.locked():
            self._cancel()
        with self._lock:
            self._steps.close()
            self.result.stop = self.result.stop or "cancelled"
            self.running = False

    @contextmanager
    def _noting_the_end(self) -> Iterator[None]:
        """Notes in the result why what runs inside has ended; a request to stop is no error."""
        try:
            yield
        except Stopped:
            self.result.stop = "cancelled"
        except KeyboardInterrupt:
            self.result.stop = "interrupted"
            raise
        except Exception:
            self.result.stop = "error"
            raise


def check_process(process: int) -> None:
    """Raises BmoeError in a process forked from `process`: the threads that read and compute are not in it."""
    if os.getpid() != process:
        raise BmoeError(
            f"this engine was opened in process {process}, of which this one is a fork: its threads are not here; "
            "open an engine of its own, or start processes by spawn"
        )
