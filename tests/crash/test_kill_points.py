"""SIGKILL at a point of the story (story.py, faults.cc), with readers beside it; then a start.

PTC_KILL_POINTS=300    how many points, spread over all (or "all")
PTC_KILL_ONLY=117      one point
"""
import os

import points


def main():
    only = os.environ.get("PTC_KILL_ONLY")
    total = points.count_points()
    chosen = [int(only)] if only else points.spread(total, os.environ.get("PTC_KILL_POINTS", "300"))
    points.survive(points.kill, chosen)


if __name__ == "__main__":
    main()
