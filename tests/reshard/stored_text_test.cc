// What a file that says where bytes lie may say.
#include <gtest/gtest.h>

#include "tests/store/expect_error.h"
#include "tests/support/small_checkpoint.h"

namespace ptc {
namespace {

class StoredTexts : public ::testing::Test {
 protected:
  Result<std::shared_ptr<const StoredState>> make(std::string_view spec, std::string_view images) {
    PTC_TRY(auto text,
            StoredText::from_text(fmt::format(
                R"({{"spec": {{{}, "pp": 1, "dp": 1}}, "images": [{}]}})", spec, images)));
    return checkpoint_->make_stored(text.spec, std::move(text.images));
  }
  static std::string written(uint32_t file, uint64_t state) {
    return fmt::format(R"({{"id": "i", "bytes": 1, "state": {}, "path": "", "written": {}}})",
                       state, file);
  }

  SharedResults results_;
  const std::shared_ptr<Checkpoint> checkpoint_ = testing::small_checkpoint(results_);
};

TEST_F(StoredTexts, WhatWasWrittenIsDescribedAgain) {
  const auto made = make(R"("tp": 2)", written(0, 0) + ", " + written(1, 1) + "," + written(2, 0));
  ASSERT_TRUE(is_ok(made));
  ASSERT_EQ(made.value()->images.size(), 3u);
  EXPECT_EQ(made.value()->held->with_lost()[0].arrays.size(), 1u);
  const auto again = StoredText::from_text(made.value()->to_text());
  ASSERT_TRUE(is_ok(again));
  EXPECT_EQ(again.value().images[2].state, 1u);
  EXPECT_EQ(again.value().bytes, std::vector<uint64_t>({104, 3, 104}));
}

TEST_F(StoredTexts, AStateThatTheLayoutHasNotIsDamage) {
  for (const uint64_t state : {uint64_t{2}, uint64_t{7}, uint64_t{UINT32_MAX}})
    EXPECT_TRUE(has_error(make(R"("tp": 2)", written(0, state)), Code::kCorrupt, "is of state"))
        << state;
  const std::string file =
      R"({"id": "i", "bytes": 1, "state": 9, "path": "model.safetensors", "written": -1})";
  EXPECT_TRUE(has_error(make(R"("tp": 1)", file), Code::kCorrupt, "is of no file"));
  EXPECT_TRUE(has_error(make(R"("tp": 2)", written(3, 0)), Code::kCorrupt, "is of no file"));
}

TEST_F(StoredTexts, DamageIsSaidInWords) {
  constexpr std::string_view kSpec = R"({"spec": {"tp": 2, "pp": 1, "dp": 1}, "images": )";
  ASSERT_TRUE(is_ok(StoredText::from_text(std::string(kSpec) + "[]}")));
  std::vector<std::string> texts = {"", "[]", "{}", R"({"spec": {"tp": 0}, "images": []})",
                                    R"({"spec": 1, "images": []})"};
  for (const std::string_view images :
       {"1", "[1]", R"([{"id": 1}])",
        R"([{"id": "i", "bytes": 1, "state": -1, "path": "", "written": 0}])",
        R"([{"id": "i", "state": 0, "path": "", "written": 0}])",
        R"([{"id": "i", "bytes": 1, "state": 0, "path": "", "written": 0, "memory": "tape"}])"})
    texts.push_back(fmt::format("{}{}}}", kSpec, images));
  for (const std::string& text : texts) {
    const auto parsed = StoredText::from_text(text);
    EXPECT_TRUE(has_error(parsed, Code::kCorrupt)) << text;
  }
}

}  // namespace
}  // namespace ptc
