"""SIGKILL at a point of the story (story.py, faults.cc), with readers beside it; then a start.

PTC_KILL_POINTS=300    how many points, spread over all (or "all")
PTC_KILL_ONLY=117      one point
"""
import os
import signal

import points


def kill(point):
    with points.Telling(f"PTC_KILL_ONLY={point}") as telling:
        telling.faults.set(point, points.SIGNAL, signal.SIGKILL)
        if telling.start():
            error = telling.tell()
            if error is not None and not telling.ended():
                raise AssertionError(f"{error!r}, but the daemon lives") from error
        telling.go_on()
        return telling.reads


def main():
    only = os.environ.get("PTC_KILL_ONLY")
    total = points.count_points()
    chosen = [int(only)] if only else points.spread(total, os.environ.get("PTC_KILL_POINTS", "300"))
    points.survive(kill, chosen)


if __name__ == "__main__":
    main()
