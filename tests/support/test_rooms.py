"""What sees what: tools → fs → {reshard, dataset} → store, and within these the rooms, each those below it."""
import glob
import os
import re
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDERS = {
    "store": set(),
    "reshard": {"store"},
    "dataset": {"store"},
    "fs": {"store", "reshard", "dataset"},
    "tools": {"store", "reshard", "dataset", "fs"},
}
CHECKPOINT = {"ptc", "serve", "plan", "exec", "checkpoint"}
ROOMS = {
    "reshard": {
        "ptc": set(),
        "serve": {"ptc"},
        "plan": {"ptc"},
        "exec": {"ptc", "plan"},
        "cluster": set(),
        "checkpoint": {"ptc", "serve", "plan", "exec"},
        "intake": CHECKPOINT,
        "move": CHECKPOINT | {"cluster"},
        "job": CHECKPOINT | {"cluster", "intake", "move"},
        "node": CHECKPOINT | {"cluster", "intake", "move", "job"},
    },
    "fs": {
        "tree": set(),
        "report": {"tree"},
        "nodes": {"tree", "report"},
        "http": {"tree", "report"},
        "mount": set(),
        "kernel": {"tree", "report", "nodes"},
    },
    "store": {
        "base": set(),
        "tensor": {"base"},
        "device": {"base", "tensor"},
        "codec": {"base", "tensor"},
        "image": {"base", "tensor", "device"},
        "tls": {"base"},
        "net": {"base", "tls"},
        "meta": {"base", "tls", "net"},
        "rpc": {"base", "tensor", "device", "image", "tls", "net"},
        "transport": {"base", "tensor", "device", "image", "tls", "net", "rpc"},
    },
}
PLANNER = {  # of tools/planner: what each sees of the others; beside these store and reshard alone
    "profile": set(),
    "price": set(),
    "spase": {"profile"},
    "elastic": {"profile"},
    "sim": {"profile", "price", "spase", "elastic"},
    "run": {"profile", "price", "spase", "elastic", "sim"},
    "library": {"profile", "run"},
}
OF_THE_MOUNT = re.compile(r'"[^"\n]*(?:layout\.json|status\.json|\.ptc\b)[^"\n]*"')
INCLUDE = re.compile(r'^#include "(\w+)/(?:(\w+)/)?[^"]+"', re.MULTILINE)


def wrong(path, text):
    """The includes of a file that lead where it must not look."""
    parts = path.split("/")
    folder, room = parts[0], parts[1] if len(parts) > 2 else None
    for found in INCLUDE.finditer(text):
        other, other_room = found.groups()
        if other == folder and folder in ROOMS:
            if other_room != room and other_room not in ROOMS[folder][room]:
                yield f"{path}: {found.group(0)}"
        elif other != folder and other in FOLDERS and other not in FOLDERS[folder]:
            yield f"{path}: {found.group(0)}"


class Rooms(unittest.TestCase):
    def test_the_tree(self):
        found, looked_at = [], 0
        for folder in FOLDERS:
            for path in glob.glob(f"{ROOT}/{folder}/**/*.[ch]*", recursive=True):
                if not path.endswith((".cc", ".h")):
                    continue
                with open(path, encoding="utf-8") as file:
                    found += wrong(os.path.relpath(path, ROOT), file.read())
                looked_at += 1
        self.assertGreater(looked_at, 400)
        self.assertEqual(found, [])

    def test_the_planner(self):
        """No mount but in run/: the names of its files stand nowhere else."""
        looked_at = 0
        for path in glob.glob(f"{ROOT}/tools/planner/*/*.[ch]*"):
            room, name = path.split("/")[-2:]
            with open(path, encoding="utf-8") as file:
                text = file.read()
            for include in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
                parts = include.split("/")
                sees = parts[2] in PLANNER[room] | {room} if parts[:2] == ["tools", "planner"] else parts[0] in ("store", "reshard")
                self.assertTrue(sees, f"tools/planner/{room}/{name}: {include}")
            if room != "run":
                code = re.sub(r"//.*", "", text)
                self.assertEqual(OF_THE_MOUNT.findall(code), [], f"tools/planner/{room}/{name}")
            looked_at += 1
        self.assertGreater(looked_at, 40)

    def test_what_is_wrong_is_found(self):
        for path, include in (("store/base/a.cc", '#include "store/image/b.h"'), ("reshard/move/a.cc", '#include "reshard/job/b.h"'),
                              ("dataset/run/a.cc", '#include "reshard/ptc/b.h"'), ("fs/a.cc", '#include "tools/b.h"')):
            self.assertEqual(len(list(wrong(path, include))), 1, path)
        self.assertEqual(list(wrong("reshard/node/a.cc", '#include "reshard/job/b.h"\n#include "store/meta/c.h"')), [])


class Loops(unittest.TestCase):
    def test_each_holds_what_it_goes_over(self):
        """Of `for (x : state()->parts)` nothing holds the state: another thread may replace it before the loop is over."""
        loop = re.compile(r"for \([^;]* : [^;]*\)->\w+\)")
        for folder in FOLDERS:
            for path in glob.glob(f"{ROOT}/{folder}/**/*", recursive=True):
                if not path.endswith((".cc", ".h")):
                    continue
                with open(path, encoding="utf-8") as file:
                    text = re.sub(r"\s+", " ", file.read())
                for found in re.findall(r"for \([^;{}]*?->\w+\)", text):
                    if found.count("(") == found.count(")"):
                        self.assertIsNone(loop.fullmatch(found), f"{os.path.relpath(path, ROOT)}: {found}")


if __name__ == "__main__":
    unittest.main()
