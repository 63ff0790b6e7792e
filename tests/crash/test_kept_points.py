"""SIGKILL at a point of the story (story.py, faults.cc), under `ptcfs --keep`: nobody notices.

Every step returns as if nothing had happened, readers beside it get no error and no other byte, and what was
asked just then is done once.

PTC_KEPT_POINTS=60    how many points, spread over all (or "all")
PTC_KEPT_ONLY=117     one point
"""
import os
import signal

import points


class Telling(points.Telling):
    OPTIONS = ("--keep",)

    def start(self):
        os.environ["PTC_FAULTS_OF_DAEMON"] = "1"  # and not of who keeps its mount
        try:
            return super().start()
        finally:
            del os.environ["PTC_FAULTS_OF_DAEMON"]


def count():
    points.warm_up()
    with Telling("no fault") as telling:
        assert telling.start(), "ptcfs does not start"
        before = telling.faults.passed
        error = telling.tell()
        if error is not None:
            raise error
        return before, telling.faults.passed


def kill(point):
    with Telling(f"PTC_KEPT_ONLY={point}") as telling:
        telling.faults.set(point, points.SIGNAL, signal.SIGKILL)
        if not telling.start():
            return 0  # there was no mount yet
        error = telling.tell(kept=True)
        if error is not None:
            raise AssertionError(f"{error!r}, and the mount is kept") from error
        telling.faults.set(0, 0, 0)
        assert not telling.ended_now(), "the keeper has ended"
        telling.story.check()
        telling.story.clear()
        telling.daemon.stop()
        assert telling.daemon.process is None
        return telling.reads


def main():
    only = os.environ.get("PTC_KEPT_ONLY")
    first, last = count()
    chosen = [int(only)] if only else [first + point for point in points.spread(
        last - first, os.environ.get("PTC_KEPT_POINTS", "60"))]
    points.survive(kill, chosen)


if __name__ == "__main__":
    main()
