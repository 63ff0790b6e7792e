"""Every source is as .clang-format says."""
import glob
import os
import shutil
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDERS = ("store", "reshard", "dataset", "fs", "tools", "tests")
FORMATTER = shutil.which("clang-format-14")  # others lay out some lines differently


def sources(top):
    return sorted(glob.glob(f"{top}/**/*.cc", recursive=True) + glob.glob(f"{top}/**/*.h", recursive=True))


class Format(unittest.TestCase):
    @unittest.skipUnless(FORMATTER, "there is no clang-format-14 (tools/install-deps --tests)")
    def test_the_tree(self):
        files = [file for folder in FOLDERS for file in sources(os.path.join(ROOT, folder))]
        self.assertGreater(len(files), 400)
        done = subprocess.run([FORMATTER, "--dry-run", "-Werror", *files], capture_output=True, text=True, check=False)
        wrong = sorted({line.split(":")[0] for line in done.stderr.splitlines() if "clang-format-violations" in line})
        self.assertEqual(done.returncode, 0,
                         f"{len(wrong)} files are laid out otherwise; clang-format-14 -i mends them: {' '.join(wrong)}")


if __name__ == "__main__":
    unittest.main()
