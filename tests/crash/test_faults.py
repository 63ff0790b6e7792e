"""Faults that the daemon lives to tell, at points of the story (story.py, faults.cc), with readers beside it.

  stop       SIGSTOP, and SIGCONT a moment later: nobody notices
  end        SIGTERM: it unmounts and ends, and after a start all is in order
  EIO        one call fails, or all from there on: told to whoever asked, and never a success that is none
  ENOSPC     the same

PTC_FAULT_POINTS=12    how many points of each (or "all")
PTC_FAULT_ONLY=EIO-on:117
"""
import errno
import os
import signal
import threading

import points
from points import FAIL_FROM_HERE_ON, FAIL_ONCE, SIGNAL

FAULTS = {"stop": (SIGNAL, signal.SIGSTOP), "end": (SIGNAL, signal.SIGTERM),
          "EIO": (FAIL_ONCE, errno.EIO), "EIO-on": (FAIL_FROM_HERE_ON, errno.EIO),
          "ENOSPC": (FAIL_ONCE, errno.ENOSPC), "ENOSPC-on": (FAIL_FROM_HERE_ON, errno.ENOSPC)}


def wake_when_stopped(daemon, ended):
    while not ended.wait(0.02):
        if daemon.process is None:
            continue
        with open(f"/proc/{daemon.process.pid}/stat", encoding="utf-8") as file:
            if file.read().rpartition(")")[2].split()[0] == "T":
                ended.wait(0.05)
                daemon.process.send_signal(signal.SIGCONT)
                return


def stop_and_wake(telling):
    ended = threading.Event()
    waker = threading.Thread(target=wake_when_stopped, args=(telling.daemon, ended))
    waker.start()
    try:
        assert telling.start(), "ptcfs does not start"
        error = telling.tell()
        if error is not None:
            raise error
    finally:
        ended.set()
        waker.join()


def end(telling):
    if not telling.start():
        return
    telling.tell_through_handle()
    if not telling.faults.struck:  # a story has now and then a few points less than the one counted
        telling.daemon.process.terminate()
    telling.daemon.process.wait(timeout=15)


def fail(telling):
    if not telling.start():
        return
    error = telling.tell()
    if telling.ended_now():
        raise AssertionError("the daemon is gone") from error
    if error is not None:
        telling.faults.set(0, 0, 0)
        telling.story.check(settles=False)  # what was acknowledged is there at once


def befall(fault_and_point):
    fault, point = fault_and_point
    with points.Telling(f"PTC_FAULT_ONLY={fault}:{point}") as telling:
        telling.faults.set(point, *FAULTS[fault])
        {"stop": stop_and_wake, "end": end}.get(fault, fail)(telling)
        telling.faults.set(0, 0, 0)
        telling.go_on()
        return telling.reads


def main():
    only = os.environ.get("PTC_FAULT_ONLY")
    if only:
        fault, _, point = only.partition(":")
        chosen = [(fault, int(point))]
    else:
        total = points.count_points()
        spread = points.spread(total, os.environ.get("PTC_FAULT_POINTS", "12"))
        chosen = [(fault, point) for point in spread for fault in FAULTS]
    points.survive(befall, chosen)


if __name__ == "__main__":
    main()
