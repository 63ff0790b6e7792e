// What other nodes send may be nonsense: then it is refused, and nothing else happens.
#include <gtest/gtest.h>

#include "reshard/intake/found_files.h"
#include "reshard/job/plan_part.h"

namespace ptc {
namespace {

const std::string kManyAxes = "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]";
const std::string kShapes[] = {
    kManyAxes, "[-1]", "[1.5]", "[\"1\"]", "7", "null", "[18446744073709551616]"};

TEST(PeerTexts, PartsOfPlans) {
  auto part = [](const std::string& offset, const std::string& extent) {
    return R"({"plan": "a", "images": [], "copies": [], "sums": [[0, )" + offset + ", " + extent +
           R"(, "00000000000000000000000000000000"]]})";
  };
  Result<PlanPart> right = PlanPart::from_text(part("[0, 2]", "[1, 3]"));
  ASSERT_TRUE(right.has_value()) << right.error().message();
  EXPECT_EQ(right.value().sums[0].box.extent, Dims({1, 3}));
  for (const std::string& shape : kShapes) {
    Result<PlanPart> read = PlanPart::from_text(part(shape, shape));
    ASSERT_TRUE(read.has_error()) << shape;
    EXPECT_EQ(read.error().code(), Code::kInvalidArgument) << shape;
  }
  EXPECT_TRUE(PlanPart::from_text(part("[0]", "[1, 3]")).has_error());
}

TEST(PeerTexts, ListsOfFiles) {
  auto list = [](const std::string& shape) {
    return FilesElsewhere{
        "w1", R"({"files": [{"rank": 0, "path": "model.safetensors", "bytes": 8, "index": false, )"
              R"("set": "", "set_index": "", "promised": [], "header": 0, )"
              R"("tensors": [["a", "F32", )" +
                  shape + ", 0, 8]]}]}\n"};
  };
  const FilesElsewhere right = list("[2]");
  Result<std::vector<Found>> found = read_listing(right);
  ASSERT_TRUE(found.has_value()) << found.error().message();
  EXPECT_EQ(found.value()[0].tensors[0].shape, Shape({2}));
  for (const std::string& shape : kShapes) {
    const FilesElsewhere wrong = list(shape);
    Result<std::vector<Found>> read = read_listing(wrong);
    ASSERT_TRUE(read.has_error()) << shape;
    EXPECT_EQ(read.error().code(), Code::kCorrupt) << shape;
  }
}

}  // namespace
}  // namespace ptc
