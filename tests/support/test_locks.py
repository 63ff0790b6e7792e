"""Who reads and writes what a mutex guards, holds it; and what is planted is found."""
import os
import re
import sys
import tempfile
import unittest

import thread_safety

INCLUDE = '#include "store/base/mutex.h"\n'
CASE = """#line 1 "case %d"
namespace ptc::case%d {
class Counter {
 public:
  %s

 private:
  void add_locked() PTC_REQUIRES(mutex_) { ++count_; }
  Mutex mutex_;
  SharedMutex gate_;
  ConditionVariable changed_;
  int count_ PTC_GUARDED_BY(mutex_) = 0;
  int shared_ PTC_GUARDED_BY(gate_) = 0;
};
}
"""
STANDARD = re.compile(r"std::((shared_|recursive_|timed_)*mutex|condition_variable(_any)?|(lock_guard|(unique|scoped|shared)_lock))\b")
# What mutex.h is made of, and a library's own sink.
ALLOWED = {"store/base/mutex.h", "tools/log_limit.h"}


class Locks(unittest.TestCase):
    def test_all_are_annotated(self):
        seen = 0
        for folder in thread_safety.FOLDERS:
            for where, _, names in os.walk(os.path.join(thread_safety.ROOT, folder)):
                for name in (name for name in names if name.endswith((".cc", ".h"))):
                    path = os.path.relpath(os.path.join(where, name), thread_safety.ROOT)
                    with open(os.path.join(where, name), encoding="utf-8") as file:
                        found = STANDARD.search(file.read())
                    seen += 1
                    self.assertTrue(found is None or path in ALLOWED,
                                    f"{path}: {found and found.group()}; store/base/mutex.h has one that is checked")
        self.assertGreater(seen, 400)


class Checked(unittest.TestCase):
    def check(self, members):
        """What is said of each, looked at together."""
        with tempfile.TemporaryDirectory() as top:
            path = os.path.join(top, "counter.cc")
            with open(path, "w", encoding="utf-8") as file:
                file.write(INCLUDE + "".join(CASE % (number, number, member) for number, member in enumerate(members)))
            said = thread_safety.check(thread_safety.find_clang(), [path], ["-I", thread_safety.ROOT])
        found = [""] * len(members)
        for about, line in re.findall(r"^case (\d+):(.*)$", said, re.MULTILINE):
            found[int(about)] += line + "\n"
        if said and not any(found):
            raise AssertionError(said)
        return found

    def test_what_is_right_passes(self):
        right = ("void add() { MutexLock lock(mutex_); ++count_; }",
                 "void add() { UniqueLock lock(mutex_); lock.unlock(); lock.lock(); add_locked(); }",
                 "void add() { if (!mutex_.try_lock()) return; MutexLock lock(mutex_, std::adopt_lock); ++count_; }",
                 "void add() PTC_REQUIRES(mutex_) { { const MutexUnlock unlock(mutex_); } ++count_; }",
                 "int get() { SharedLock lock(gate_); return shared_; }",
                 "void set() { ExclusiveLock lock(gate_); shared_ = 1; }",
                 "void wait() { MutexLock lock(mutex_);"
                 " changed_.wait(mutex_, [&]() PTC_REQUIRES(mutex_) { return count_ > 0; }); }")
        for member, said in zip(right, self.check(right)):
            self.assertEqual(said, "", member)

    def test_what_is_wrong_is_found(self):
        wrong = (("void add() { ++count_; }", "writing variable 'count_'"),
                 ("int get() { return count_; }", "reading variable 'count_'"),
                 ("void add() { add_locked(); }", "calling function 'add_locked'"),
                 ("void add() { UniqueLock lock(mutex_); lock.unlock(); ++count_; }", "writing variable 'count_'"),
                 ("void add() { MutexLock lock(mutex_); const MutexUnlock unlock(mutex_); ++count_; }",
                  "writing variable 'count_'"),
                 ("void add() { mutex_.try_lock(); ++count_; mutex_.unlock(); }", "'count_'"),
                 ("void add() { mutex_.lock(); ++count_; }", "'mutex_' is still held"),
                 ("void twice() { MutexLock one(mutex_); MutexLock two(mutex_); }", "'mutex_' that is already held"),
                 ("void set() { SharedLock lock(gate_); shared_ = 1; }", "writing variable 'shared_'"),
                 ("void wait() { changed_.wait(mutex_); }", "calling function 'wait"),
                 ("void wait() { MutexLock lock(mutex_); changed_.wait(mutex_, [&] { return count_ > 0; }); }",
                  "reading variable 'count_'"))
        for (member, says), said in zip(wrong, self.check([member for member, _ in wrong])):
            self.assertIn(says, said, member)
            self.assertIn("-Wthread-safety", said, member)

    def test_names_that_two_sources_have(self):
        """They are looked at one by one then."""
        with tempfile.TemporaryDirectory() as top:
            paths = [os.path.join(top, name) for name in ("one.cc", "other.cc")]
            for number, (path, member) in enumerate(zip(paths, ("", "void add() { ++count_; }"))):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(INCLUDE + CASE % (number, 0, member))
            said = thread_safety.check(thread_safety.find_clang(), paths, ["-I", thread_safety.ROOT])
        self.assertIn("case 1:", said)
        self.assertNotIn("redefinition", said)

    def test_headers_that_are_read_once(self):
        """Change nothing of what is said."""
        clang, includes = thread_safety.find_clang(), ["-I", thread_safety.ROOT]
        with tempfile.TemporaryDirectory() as top:
            paths = [os.path.join(top, f"{number}.cc") for number in range(4)]
            for number, path in enumerate(paths):
                with open(path, "w", encoding="utf-8") as file:
                    file.write("#include <string>\n" + INCLUDE + CASE % (number, number, "void add() { ++count_; }"))
            precompiled = thread_safety.precompile(clang, [paths], includes, top)
            self.assertTrue(precompiled)
            said = thread_safety.check(clang, paths, includes, precompiled)
        for number in range(len(paths)):
            self.assertIn(f"case {number}:", said)

    def test_the_tree(self):
        self.assertGreater(len(list(thread_safety.rooms())), 15)
        self.assertEqual(thread_safety.main([]), 0)


if __name__ == "__main__":
    if thread_safety.find_clang() is None:
        del Checked
        unittest.main(exit=False).result.wasSuccessful() or sys.exit(1)
        sys.exit(thread_safety.main([]))  # which says why it is skipped
    unittest.main()
