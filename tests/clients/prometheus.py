"""Prometheus' text format, read strictly: whatever Prometheus, or a linter of its, would not like is an
error. parse(text) gives {(name, ((label, value), …)): number}; check(text) also the rules of naming."""
import math
import re

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
TYPES = ("counter", "gauge", "histogram")
UNITS = ("_bytes", "_seconds", "_info")
UNESCAPED = {'"': '"', "\\": "\\", "n": "\n"}


def _labels(text):
    labels, at = [], 0
    while True:
        found = LABEL.match(text, at)
        assert found, f"no label at byte {at} of {text!r}"
        labels.append((found[1], re.sub(r"\\(.)", lambda m: UNESCAPED[m[1]], found[2])))
        at = found.end()
        if at == len(text):
            break
        assert text[at] == ",", f"',' is missing at byte {at} of {text!r}"
        at += 1
    assert len({name for name, _ in labels}) == len(labels), f"a label twice: {text}"
    return tuple(labels)


def _family_of(name, family, kind):
    endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
    return any(name == family + ending for ending in endings)


def parse(text):
    assert text.endswith("\n"), "the last line has no end"
    samples, families = {}, {}
    family = kind = helped = None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, helped, words = line.split(" ", 3)
            assert words.strip(), f"{helped} has no help"
        elif line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family == helped, f"{family}: HELP does not stand before TYPE"
            assert NAME.fullmatch(family) and kind in TYPES, line
            assert family not in families, f"{family} comes twice"
            families[family] = kind
        else:
            found = re.fullmatch(r"([^ {]+)(?:\{(.*)\})? (\S+)", line)
            assert found, f"no sample: {line!r}"
            assert family and _family_of(found[1], family, kind), f"{line!r} is not of {family}"
            key = found[1], _labels(found[2]) if found[2] is not None else ()
            assert key not in samples, f"{key} comes twice"
            samples[key] = float(found[3])
            assert not math.isnan(samples[key]) and samples[key] >= 0, line
    for family, kind in families.items():
        if kind == "histogram":
            _check_histogram(family, samples)
    return samples, families


def _check_histogram(family, samples):
    buckets = {}
    for (name, labels), value in samples.items():
        if name == family + "_bucket":
            buckets.setdefault(labels[:-1], []).append((labels[-1], value))
    for labels, counts in buckets.items():
        ends = [float(end) for (le, end), _ in counts if le == "le"]
        assert ends == sorted(set(ends)) and ends[-1] == math.inf, f"{family}{labels}: {ends}"
        values = [value for _, value in counts]
        assert values == sorted(values), f"{family}{labels}: buckets do not add up"
        assert values[-1] == samples[(family + "_count", labels)], f"{family}{labels}"
        assert (family + "_sum", labels) in samples, f"{family}{labels} has no sum"


def check(text):
    """parse(), and the names: counters end in _total and nothing else does; base units."""
    samples, families = parse(text)
    for family, kind in families.items():
        assert (kind == "counter") == family.endswith("_total"), f"{family} is a {kind}"
        assert not re.search(r"_(ms|us|ns|kb|mb|gb|kib|mib|percent|minutes)(_|$)", family), family
        if kind == "histogram":
            assert family.endswith(UNITS), f"{family} has no unit"
    return samples
