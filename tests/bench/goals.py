"""How a figure stands to its goal: reached, or missed and why."""


def verdict(value, goal, reason, at_least=False, form=".2f"):
    """As it is printed. Judged is what is printed, so that 1.004 has reached 1.00. `reason` is of those that are missed."""
    shown, limit = (float(format(one, form).rstrip("%")) for one in (value, goal))
    is_reached = shown >= limit if at_least else shown <= limit
    return f"{value:{form}} (goal: {goal:{form}}, " + ("reached)" if is_reached else f"missed: {reason})")
