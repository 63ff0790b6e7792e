"""The processes of a run whose parallelism changes, one for each rank: what an elastic launcher starts and ends."""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import connection, forkserver, process, resource_tracker
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

_CONTEXT = multiprocessing.get_context("forkserver")


def start_server(preload: Sequence[str]) -> None:
    """The process that ranks are forked from; the first to ask says which modules it imports. They begin with SIGTERM
    blocked, as it has it: sent before a rank can save, it waits until the rank can (training.stops_at_sigterm).
    """
    _CONTEXT.set_forkserver_preload(list(preload))
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # it would look for them nowhere else
    resource_tracker.ensure_running()  # it would unblock SIGTERM here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


class Ranks:
    """Processes that call `main`, each with its own arguments; forked from one that has imported `preload`, which takes
    long, and has done nothing else. They do not outlive this process if they call training.end_with_launcher().
    """

    def __init__(self, main: Callable[..., None], arguments: Sequence[Tuple[Any, ...]], preload: Sequence[str] = ()) -> None:
        start_server(preload)
        self.processes: List[process.BaseProcess] = [
            _CONTEXT.Process(target=main, args=its, daemon=True) for its in arguments]
        try:
            for one in self.processes:
                one.start()
        except BaseException:
            self.end(at_once=True)
            raise

    @property
    def codes(self) -> List[Optional[int]]:
        """Their exit codes; None: it runs."""
        return [one.exitcode for one in self.processes]

    def end(self, at_once: bool) -> None:
        """Ends all: they save, unless `at_once`. Where one dies, the others would wait for it for ever, and are killed."""
        started = [one for one in self.processes if one.pid is not None]
        try:
            if not at_once:
                for one in started:
                    one.terminate()
                while not any(one.exitcode for one in started):
                    waiting = [one.sentinel for one in started if one.exitcode is None]
                    if not waiting:
                        return
                    connection.wait(waiting)
        finally:
            for one in started:
                one.kill()
            for one in started:
                one.join()


class Asked(KeyboardInterrupt):
    """Somebody wants all to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_status = 128 + number


@contextlib.contextmanager
def asked_by_signals() -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP are raised as Asked; a second one, while Ranks.end() waits, has it kill them."""
    numbers: List[int] = []

    def asked(number: int, _: Any) -> None:
        numbers.append(number)
        raise Asked(numbers[0])
    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
