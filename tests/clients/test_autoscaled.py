"""tools/examples/autoscaled.py: three training jobs share four devices, and ptc autoscale decides who has how many."""
import os
import re
import subprocess
import sys

import mount

HERE = os.path.dirname(os.path.abspath(__file__))
TOOLS = os.path.join(HERE, "../../tools")
mount.require("torch")


class Autoscaled(mount.TestCase):
    def run_it(self, out):
        return subprocess.run([sys.executable, "-B", os.path.join(TOOLS, "examples/autoscaled.py"), self.mount.path, "--out", out],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                              env={**os.environ, "PATH": mount.bin_dir() + os.pathsep + os.environ["PATH"],
                                   "PYTHONPATH": os.path.join(TOOLS, "python")})

    def test_each_learns_as_if_it_were_alone(self):
        told = self.run_it(self.temporary("out"))
        self.assertEqual(told.returncode, 0, told.stdout)
        changes = re.search(r"(\d+) changes of layout and (\d+) of batch in", told.stdout)
        self.assertGreaterEqual(min(map(int, changes.groups())), 4, told.stdout)
        print(told.stdout)
        self.assertEqual(len(re.findall(r"differs by .* at most\. good", told.stdout)), 3, told.stdout)
        self.assertIn("autoscaled-b: it was ended by signal 9; it starts again", told.stdout)
        again = self.run_it(self.temporary("out"))
        self.assertEqual(again.returncode, 1)
        self.assertIn("there is a job of that name already, and it is left alone", again.stdout)


if __name__ == "__main__":
    mount.main()
