"""How a figure stands to its goal: reached, or missed and why."""
import statistics


def verdict(value, goal, reason, at_least=False, form=".2f"):
    """As it is printed. Judged is what is printed, so that 1.004 has reached 1.00. `reason` is of those that are missed."""
    shown, limit = (float(format(one, form).rstrip("%")) for one in (value, goal))
    is_reached = shown >= limit if at_least else shown <= limit
    return f"{value:{form}} (goal: {goal:{form}}, " + ("reached)" if is_reached else f"missed: {reason})")


def judge(ratios, goals, reason, at_least=False, form=".2f"):
    """A line for each of the goals, by the median of what was measured of it (bench.Ratios)."""
    for what, goal in goals.items():
        print(f"{what}: {verdict(statistics.median(ratios.values[what]), goal, reason, at_least, form)}")
