"""No name of the tree is defined twice; and a pair that is planted is found."""
import contextlib
import io
import os
import tempfile
import unittest

import definitions

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDERS = ("store", "reshard", "dataset", "fs", "tools", "tests")


def look(*folders):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = definitions.main(folders)
    return status, said.getvalue()


class Definitions(unittest.TestCase):
    def planted(self, one, other):
        with tempfile.TemporaryDirectory() as top:
            for name, text in (("one.h", one), ("other.cc", other)):
                with open(os.path.join(top, name), "w", encoding="utf-8") as file:
                    file.write(text)
            return look(top)

    def test_the_tree(self):
        status, said = look(*(os.path.join(ROOT, folder) for folder in FOLDERS))
        self.assertEqual(status, 0, said)
        self.assertGreater(int(said.split(" sources, ")[1].split()[0]), 400)

    def test_pairs_are_found(self):
        for one, other, name in (
                ("namespace ptc { class Context final { int a; }; }",
                 "namespace ptc {\nnamespace { int x = 1; }\nclass Context : public B<int> {};\n}", "ptc::Context"),
                ("namespace ptc::rpc { struct [[nodiscard]] A { struct B {}; }; }",
                 "namespace ptc { namespace rpc { // {\nstruct A {}; } }", "ptc::rpc::A"),
                ("namespace ptc { enum class Fate : int { kPass }; }", "namespace ptc { enum class Fate { kNone }; }",
                 "ptc::Fate"),
                ("namespace ptc { inline int count(const A& a) { return 1; } }",
                 "namespace ptc { inline int count(const A& b) { return '}'; } }", "ptc::count"),
                ("template <class T> struct Of { T value; };", "template <class U> struct Of { U u; };", "Of")):
            status, said = self.planted(one, other)
            self.assertEqual(status, 1, (one, said))
            self.assertIn(f"{name}", said)

    def test_what_is_ones_own_is_not(self):
        for one, other in (
                ("namespace ptc { class Context { int a; }; }", "namespace ptc { namespace { class Context {}; } }"),
                ("namespace ptc { class Context; struct Context* of(); }", "namespace ptc { class Context {}; }"),
                ("namespace a { class Context {}; }", "namespace b { class Context {}; }"),
                ("namespace ptc { inline int count(const A&) { struct L {}; return 1; } }",
                 "namespace ptc { inline int count(const B&) { struct L {}; return 1; } }"),
                ("template <> struct Of<int> {};", "template <> struct Of<char> {};"),
                ("// namespace ptc { class Context {}; }", 'class Context {}; auto text = R"(class Context {})";')):
            status, said = self.planted(one, other)
            self.assertEqual(status, 0, (one, said))


if __name__ == "__main__":
    unittest.main()
