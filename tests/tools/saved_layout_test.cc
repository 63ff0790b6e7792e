#include "tools/ptc/saved_layout.h"

#include <gtest/gtest.h>

namespace ptc::cli {
namespace {

json::object fields(const char* text) { return parse_json(text).value().as_object(); }

TEST(SavedLayout, WhatWasMadeOfTheSameTextUndoesAnEdit) {
  const json::object before = fields(R"({"tp": 1, "pp": 1})"),
                     ours = fields(R"({"tp": 2, "pp": 1})");
  EXPECT_TRUE(undoes(fields(R"({"tp": 1, "pp": 4})"), before, ours));
  EXPECT_FALSE(undoes(fields(R"({"tp": 2, "pp": 4})"), before, ours)) << "it is kept";
  EXPECT_FALSE(undoes(fields(R"({"tp": 8, "pp": 1})"), before, ours)) << "meant otherwise";
  EXPECT_FALSE(undoes(before, before, before)) << "there is nothing to undo";
}

TEST(SavedLayout, FieldsThatComeAndGoAreEditsToo) {
  const json::object none = fields(R"({"tp": 1})"), some = fields(R"({"tp": 1, "keep": 3})");
  EXPECT_TRUE(undoes(fields(R"({"tp": 4})"), none, some));
  EXPECT_FALSE(undoes(fields(R"({"tp": 4, "keep": 3})"), none, some));
  EXPECT_TRUE(undoes(fields(R"({"tp": 4, "keep": 3})"), some, none));
  EXPECT_FALSE(undoes(fields(R"({"tp": 4})"), some, none));
}

TEST(SavedLayout, OfOneThatWasRemovedTheNameIsLeft) {
  SavedLayout removed;
  removed.removed = true;
  removed.wanted = "tp2-pp1-dp1";
  EXPECT_EQ(removed.layout().value(),
            fields(R"({"format": "ptc-layout/1", "tp": 2, "pp": 1, "dp": 1})"));
  removed.wanted = "tp2-pp1-dp1+0123abcd";
  EXPECT_FALSE(removed.layout());
  EXPECT_NE(removed.removed_text("llama").find("ptc layout llama set"), std::string::npos);
}

}  // namespace
}  // namespace ptc::cli
