"""Locks are used as store/base/mutex.h lets the sources say: clang's -Wthread-safety has nothing to object.

    thread_safety.py [FILE…]     all of store, reshard, dataset, fs and tools, or these; 1 when something is wrong

Looked at is what has locks, includes a header that has, or has members of a class that has. Most of the time goes into
headers: so these sources of a room are looked at as one, rooms side by side, and headers of other libraries are read once for all. 77: there is no clang.
"""
import collections
import concurrent.futures
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDERS = ("store", "reshard", "dataset", "fs", "tools")
# Older ones do not take the coroutines of GCC 12's library.
CLANGS = ("clang++-16", "clang++-17", "clang++-18", "clang++-19", "clang++-15", "clang++")
FLAGS = ["-std=c++20", "-fsyntax-only", "-Wno-everything", "-Wthread-safety", "-Werror=thread-safety", '-DPTC_VERSION=""']
LOCKS = re.compile(r"\b(Mutex|SharedMutex|MutexLock|UniqueLock|SharedLock|ExclusiveLock|PTC_GUARDED_BY|PTC_REQUIRES)\b")
OWN = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
CLASS = re.compile(r"^ *(?:class|struct) (?:[A-Z_]+\([^)]*\) )?(\w+)[^;]*\{", re.MULTILINE)
MEMBER = re.compile(r"\b(\w+)::~?\w+\(")
OTHERS = re.compile(r"^#include (<[^>]+>)", re.MULTILINE)
# It brings std::quoted(), which would be taken for quoted() of store/base where that is called without a namespace.
APART = ("<filesystem>",)


def find_clang():
    """None: there is none that is new enough."""
    for name in CLANGS:
        path = shutil.which(name)
        if path is None:
            continue
        said = subprocess.run([path, "-dumpversion"], capture_output=True, text=True).stdout
        if said.split(".")[0].isdigit() and int(said.split(".")[0]) >= 15:
            return path
    return None


@functools.cache
def text_of(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def has_locks(path):
    return LOCKS.search(text_of(path)) is not None


@functools.cache
def classes_with_locks():
    """Names of the classes of headers that have locks."""
    found = set()
    for folder in FOLDERS:
        for where, _, names in os.walk(os.path.join(ROOT, folder)):
            for path in (os.path.join(where, name) for name in names if name.endswith(".h")):
                if has_locks(path):
                    found.update(CLASS.findall(text_of(path)))
    return found


def meets_locks(path):
    """Whether it has any, names a header that has, or has members of a class that has: what is guarded is its class's own."""
    headers = (os.path.join(ROOT, name) for name in OWN.findall(text_of(path)))
    return (has_locks(path) or any(os.path.exists(header) and has_locks(header) for header in headers)
            or not classes_with_locks().isdisjoint(MEMBER.findall(text_of(path))))


def rooms():
    """The sources of each folder that meet locks."""
    for folder in FOLDERS:
        for where, below, names in os.walk(os.path.join(ROOT, folder)):
            below[:] = sorted(name for name in below if not name.startswith((".", "build")))
            paths = sorted(os.path.join(where, name) for name in names if name.endswith((".cc", ".h")))
            # A program's names are its own.
            mains = [path for path in paths if path.endswith("_main.cc")]
            sources = [path for path in paths if path.endswith(".cc") and path not in mains and meets_locks(path)]
            if sources:
                yield sources
            yield from ([path] for path in mains if meets_locks(path))


def make_headers(top):
    """What CMake makes of a .h.in, with nothing in it."""
    for folder in FOLDERS:
        for where, _, names in os.walk(os.path.join(ROOT, folder)):
            for name in (name for name in names if name.endswith(".h.in")):
                with open(os.path.join(where, name), encoding="utf-8") as file:
                    text = re.sub(r"@\w+@", "", file.read())
                made = os.path.join(top, os.path.relpath(where, ROOT))
                os.makedirs(made, exist_ok=True)
                with open(os.path.join(made, name[:-len(".in")]), "w", encoding="utf-8") as file:
                    file.write(text)


def precompile(clang, groups, includes, top):
    """What other libraries' headers that several sources name are when they were read; empty: that cannot be had."""
    counts = collections.Counter()
    for path in {path for source in sum(groups, []) for path in (source, source[:-len(".cc")] + ".h") if os.path.exists(path)}:
        counts.update(set(OTHERS.findall(text_of(path))))
    header = os.path.join(top, "others.h")
    with open(header, "w", encoding="utf-8") as file:
        file.writelines(f"#include {name}\n" for name in sorted(counts) if counts[name] >= 4 and name not in APART)
    done = subprocess.run([clang, *(flag for flag in FLAGS if flag != "-fsyntax-only"), *includes, "-x", "c++-header", header,
                           "-fpch-instantiate-templates", "-o", header + ".pch"], capture_output=True)
    return ["-include-pch", header + ".pch"] if done.returncode == 0 else []


def check(clang, sources, includes, precompiled=()):
    """What is wrong with these; empty: nothing."""
    text = "".join(f'#include "{source}"\n' for source in sources)
    done = subprocess.run([clang, *FLAGS, *includes, *precompiled, "-x", "c++", "-"], input=text, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    if re.search(r"error: (?!.*-Wthread-safety)", done.stderr):
        if precompiled:
            return check(clang, sources, includes)
        # Two sources may have the same name for something of their own.
        if len(sources) > 1:
            return "".join(check(clang, [source], includes) for source in sources)
    return done.stderr or f"{clang} failed with {done.returncode}\n"


def main(files):
    clang = find_clang()
    if clang is None:
        print("no clang from 15 on; tools/install-deps --tests brings one")
        return 77
    groups = [[os.path.abspath(file)] for file in files] or list(rooms())
    fuse = subprocess.run(["pkg-config", "--cflags", "fuse3"], capture_output=True, text=True).stdout.split()
    with tempfile.TemporaryDirectory() as made, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        make_headers(made)
        includes = ["-I", ROOT, "-I", made, *fuse]
        precompiled = precompile(clang, groups, includes, made) if len(groups) > 1 else []
        wrong = "".join(pool.map(lambda sources: check(clang, sources, includes, precompiled), groups))
    print(wrong, end="")
    print(f"{sum(map(len, groups))} sources in {len(groups)} groups: {'see above' if wrong else 'their locks are right'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
