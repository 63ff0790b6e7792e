#include "store/codec/tensor_path.h"

#include <random>
#include <set>

#include "expect_error.h"

namespace ptc {
namespace {

struct Pair {
  std::string name, path;
};

class TensorPath : public testing::TestWithParam<Pair> {};
TEST_P(TensorPath, BothWays) {
  EXPECT_EQ(tensor_path(GetParam().name).value(), GetParam().path);
  EXPECT_EQ(tensor_name_of_path(GetParam().path).value(), GetParam().name);
}
INSTANTIATE_TEST_SUITE_P(
    Names, TensorPath,
    testing::Values(Pair{"model.layers.0.q_proj.weight", "model/layers/0/q_proj/weight.npy"},
                    Pair{"w", "w.npy"}, Pair{"a/b", "a%2Fb.npy"}, Pair{"100%", "100%25.npy"},
                    Pair{".", "%2E.npy"}, Pair{"..", "%2E%2E.npy"},
                    Pair{"a..b.c", "a%2E%2Eb/c.npy"},
                    Pair{"../../etc/passwd", "%2E%2E%2F%2E%2E%2Fetc%2Fpasswd.npy"},
                    Pair{".a.", "%2Ea%2E.npy"}, Pair{"a.npy", "a/npy.npy"},
                    Pair{"a.npy.b", "a/npy/b.npy"},
                    Pair{std::string("a\0b\n\x7f", 5), "a%00b%0A%7F.npy"}, Pair{"é 权", "é 权.npy"},
                    Pair{"%2E", "%252E.npy"}));

TEST(TensorPathOf, RandomNamesAreOneToOneAndStayInside) {
  std::mt19937_64 random(31);
  std::string_view alphabet = "..../%a0\n";
  std::set<std::string> names, paths;
  for (int trial = 0; trial < 20000; ++trial) {
    std::string name;
    for (uint64_t k = 1 + random() % 7; k > 0; --k) name += alphabet[random() % alphabet.size()];
    auto path = tensor_path(name);
    ASSERT_TRUE(is_ok(path));
    EXPECT_EQ(tensor_name_of_path(path.value()).value(), name);
    EXPECT_EQ(("/" + path.value()).find("/."), std::string::npos) << path.value();
    EXPECT_EQ(path.value().find("//"), std::string::npos);
    EXPECT_EQ(path.value().find('.'), path.value().size() - 4);  // so files and directories differ
    names.insert(name);
    paths.insert(path.value());
  }
  EXPECT_EQ(names.size(), paths.size());
}

TEST(TensorPathOf, Limits) {
  EXPECT_TRUE(has_error(tensor_path(""), Code::kInvalidArgument, "empty"));
  EXPECT_TRUE(is_ok(tensor_path(std::string(251, 'a'))));
  EXPECT_TRUE(has_error(tensor_path(std::string(252, 'a')), Code::kInvalidArgument, "256 bytes"));
  EXPECT_TRUE(is_ok(tensor_path(std::string(255, 'a') + ".b")));
  EXPECT_TRUE(has_error(tensor_path(std::string(256, 'a') + ".b"), Code::kInvalidArgument));
  std::string deep = "a";
  while (deep.size() < 2047) deep += ".a";
  EXPECT_TRUE(is_ok(tensor_path(deep)));
  EXPECT_TRUE(has_error(tensor_path(deep + ".a"), Code::kInvalidArgument, "2049 bytes"));
}

TEST(TensorPathOf, OtherSpellingsAreNotPaths) {
  for (const char* path :
       {"", ".npy", "a", "a.npz", "/a.npy", "a//b.npy", "a/.npy", "a.b.npy", "../a.npy", "./a.npy",
        "a%2eb.npy", "a%61.npy", "%.npy", "%2.npy", "%2", "a%2Eb.npy", "a\nb.npy", "a/b.npy/"})
    EXPECT_TRUE(has_error(tensor_name_of_path(path), Code::kInvalidArgument)) << path;
}

}  // namespace
}  // namespace ptc
