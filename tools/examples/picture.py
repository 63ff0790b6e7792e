"""A picture of a run: its loss and that of the uninterrupted one, how far they are apart, and the layout below. SVG."""
from math import log10
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 760, 60, 20
COLOURS = ["#4477aa", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#66ccee"]


def text_of(layout):
    if layout.get("optimizer") == "fsdp":
        return f"FSDP2 on {layout['dp']}"
    return " · ".join(f"{key}{layout[key]}" for key in ("tp", "pp", "dp") if layout[key] > 1) or "one rank"


def draw(title, steps, expected, killed):
    """`steps`: records of train.py, in order; `expected`: losses; `killed`: steps after which a process was killed."""
    losses = [one["loss"] for one in steps]
    top = max(losses + expected) * 1.05

    def x(step):
        return LEFT + (step - 0.5) / len(steps) * (WIDTH - LEFT - RIGHT)

    def y(loss):
        return 40 + (1 - loss / top) * 200
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 400" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="400" fill="white"/>',
             f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}: loss, step by step</text>']
    for value in (0, top / 2, top):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
                     f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(expected, 1))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#bbb" stroke-width="5"/>')
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses, 1))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#222" stroke-width="1.5"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="16" text-anchor="end" fill="#999">grey: uninterrupted</text>'
                 f'<text x="{WIDTH - RIGHT}" y="31" text-anchor="end">black: with changes</text>')
    # How far apart: powers of ten, equal ones at the bottom.
    parts.append(f'<text x="{LEFT}" y="266">relative difference</text>')
    for step, (a, b) in enumerate(zip(losses, expected), 1):
        apart = abs(a - b) / abs(b)
        height = 330 if apart == 0 else 330 - max(2.0, min(50.0, 50 * (1 + log10(apart) / 9)))
        parts.append(f'<circle cx="{x(step):.1f}" cy="{height:.1f}" r="2" fill="{"#228833" if apart == 0 else "#cc6600"}"/>')
    for value, at in (("equal", 330), ("1e-5", 330 - 50 * 4 / 9)):
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" font-size="10">{value}</text>')
    # The layout.
    begin, seen = 0, []
    for step in range(1, len(steps) + 1):
        key = steps[begin]["layout"], steps[begin]["batch"]
        if step < len(steps) and (steps[step]["layout"], steps[step]["batch"]) == key:
            continue
        left, right = x(begin + 0.5), x(step + 0.5)
        if key[0] not in seen:
            seen.append(key[0])
        parts.append(f'<rect x="{left:.1f}" y="345" width="{right - left - 1:.1f}" height="30" '
                     f'fill="{COLOURS[seen.index(key[0]) % len(COLOURS)]}" opacity="0.35"/>'
                     f'<text x="{(left + right) / 2:.1f}" y="359" text-anchor="middle">{text_of(key[0])}</text>'
                     f'<text x="{(left + right) / 2:.1f}" y="372" text-anchor="middle" font-size="10">batch {key[1]}</text>')
        begin = step
    for step in killed:
        parts.append(f'<line x1="{x(step):.1f}" x2="{x(step):.1f}" y1="40" y2="340" stroke="#cc0000" stroke-dasharray="3 3"/>'
                     f'<text x="{x(step):.1f}" y="392" text-anchor="middle" fill="#cc0000" font-size="10">killed</text>')
    return "\n".join(parts) + "\n</svg>\n"
