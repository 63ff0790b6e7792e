#include "tools/ptc/layout_edit.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <utility>

namespace ptc::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

json::object parsed(std::string_view text) { return parse_json(text).value().get_object(); }

TEST(LayoutEdit, ChangesOnlyWhatIsGivenAndKeepsTheOrder) {
  LayoutEdit edit;
  edit.tp = 4;
  edit.keep = 2;
  std::vector<std::string> notes;
  auto layout = edited_layout(parsed(R"({"dp":1,"tp":2,"pp":1,"naming":"stage"})"), edit, notes);
  EXPECT_EQ(json::serialize(layout), R"({"dp":1,"tp":4,"pp":1,"naming":"stage","keep":2})");
  EXPECT_THAT(notes, IsEmpty());
}

TEST(LayoutEdit, LeavesOutWhatNoLongerFits) {
  LayoutEdit edit;
  edit.pp = 3;
  std::vector<std::string> notes;
  auto layout = edited_layout(
      parsed(R"({"tp":1,"pp":2,"dp":1,"stages":[1,2],"devices":["w:0","w:1"]})"), edit, notes);
  EXPECT_EQ(json::serialize(layout), R"({"tp":1,"pp":3,"dp":1})");
  EXPECT_THAT(notes, ElementsAre(HasSubstr("stages"), HasSubstr("devices")));
}

TEST(LayoutEdit, StretchesOfLayersGoWithTheStages) {
  LayoutEdit edit;
  edit.pp = 1;
  std::vector<std::string> notes;
  EXPECT_EQ(
      json::serialize(edited_layout(parsed(R"({"tp":1,"pp":2,"dp":1,"vpp":2})"), edit, notes)),
      R"({"tp":1,"pp":1,"dp":1})");
  EXPECT_THAT(notes, ElementsAre(HasSubstr("vpp")));
  edit.pp = 4;
  edit.vpp = 3;
  EXPECT_EQ(json::serialize(edited_layout(parsed(R"({"tp":1,"pp":2,"dp":1})"), edit, notes)),
            R"({"tp":1,"pp":4,"dp":1,"vpp":3})");
  EXPECT_EQ(json::serialize(layout_of_name("tp1-pp2-dp1-vpp2").value()),
            R"({"format":"ptc-layout/1","tp":1,"pp":2,"dp":1,"vpp":2})");
}

TEST(LayoutEdit, KeepsWhatStillFits) {
  LayoutEdit edit;
  edit.tp = 2;
  edit.dp = 1;
  std::vector<std::string> notes;
  auto before =
      parsed(R"({"tp":1,"pp":2,"dp":2,"stages":[1,2],"devices":["a:0","a:1","b:0","b:1"]})");
  auto layout = edited_layout(before, edit, notes);
  EXPECT_EQ(layout["stages"], before["stages"]);
  EXPECT_EQ(layout["devices"], before["devices"]);
  EXPECT_THAT(notes, IsEmpty());
}

TEST(LayoutEdit, GivenStagesAndDevicesAreTakenAsTheyAre) {
  LayoutEdit edit;
  edit.pp = 2;
  edit.stages = {"3", "4"};
  edit.devices = {"w:0", "w:1"};
  std::vector<std::string> notes;
  auto layout = edited_layout(parsed(R"({"tp":1,"pp":1,"dp":1})"), edit, notes);
  EXPECT_EQ(json::serialize(layout),
            R"({"tp":1,"pp":2,"dp":1,"stages":[3,4],"devices":["w:0","w:1"]})");
}

TEST(LayoutEdit, SizesOfAName) {
  auto layout = parsed(R"({"tp":1,"pp":1,"dp":1,"ep":2,"order":"tp-cp-ep-dp-pp"})");
  set_sizes_of_name(layout, "tp4-pp2-dp3-cp5-shard3-zero1+0123abcd");
  EXPECT_EQ(json::serialize(layout),
            R"({"tp":4,"pp":2,"dp":3,"ep":1,"order":"tp-cp-ep-dp-pp","cp":5})");
}

TEST(LayoutEdit, RanksAreThoseOfEtp) {
  LayoutEdit edit;
  edit.ep = 2;
  std::vector<std::string> notes;
  const auto before = parsed(R"({"tp":2,"pp":1,"dp":1,"ep":2,"etp":1,"devices":["w:0","w:1"]})");
  EXPECT_EQ(edited_layout(before, edit, notes), before);
  edit.etp = 0;
  EXPECT_EQ(json::serialize(edited_layout(before, edit, notes)),
            R"({"tp":2,"pp":1,"dp":1,"ep":2})");
  EXPECT_THAT(notes, ElementsAre(HasSubstr("devices")));
  auto layout = before;
  set_sizes_of_name(layout, "tp2-pp1-dp1");
  EXPECT_FALSE(layout.contains("etp"));
}

TEST(LayoutEdit, WhatStateIsCutOverStaysWhileItIsCut) {
  LayoutEdit edit;
  edit.shard_over = {"cp"};
  std::vector<std::string> notes;
  const auto before = parsed(R"({"tp":1,"pp":1,"dp":2,"cp":2,"optimizer":"zero1"})");
  const auto over = edited_layout(before, edit, notes);
  EXPECT_EQ(json::serialize(over),
            R"({"tp":1,"pp":1,"dp":2,"cp":2,"optimizer":"zero1","shard_over":["cp"]})");
  edit.shard_over = {"dp"};
  EXPECT_EQ(edited_layout(over, edit, notes), before);
  edit.shard_over.clear();
  edit.dp = 4;
  EXPECT_TRUE(edited_layout(over, edit, notes).contains("shard_over"));
  EXPECT_THAT(notes, IsEmpty());
  edit.optimizer = "replicated";
  EXPECT_FALSE(edited_layout(over, edit, notes).contains("shard_over"));
  EXPECT_THAT(notes, ElementsAre(HasSubstr("\"shard_over\" is left out: nothing is cut")));
}

TEST(LayoutEdit, NamesSayMoreThanSizes) {
  EXPECT_EQ(json::serialize(layout_of_name("tp1-pp1-dp8-shard4-fsdp").value()),
            R"({"format":"ptc-layout/1","tp":1,"pp":1,"dp":8,"optimizer":"fsdp","dp_shard":4})");
  for (const auto& [text, name] : {std::pair("tp2", "tp2-pp1-dp1"),
                                   {"fsdp", "tp1-pp1-dp1-fsdp"},
                                   {"tp2-dp4-zero1", "tp2-pp1-dp4-zero1"},
                                   {"tp1-pp1-dp8-fsdp-shard4", "tp1-pp1-dp8-shard4-fsdp"},
                                   {"tp1-pp1-dp8-shard8-fsdp", "tp1-pp1-dp8-fsdp"},
                                   {"tp1-pp1-dp2-over_cp-cp2-fsdp", "tp1-pp1-dp2-cp2-fsdp-over_cp"},
                                   {"tp1-pp1-dp8-vpp1-naming_stage", "tp1-pp1-dp8-naming_stage"}})
    EXPECT_THAT(layout_of_file_or_name(text).error().message(),
                HasSubstr(fmt::format("; is it {}?", name)))
        << text;
  EXPECT_THAT(layout_of_file_or_name("tp1-pp1-dp8-shard3-fsdp").error().message(),
              HasSubstr("does not divide dp = 8"));
  EXPECT_THAT(layout_of_file_or_name("tp1-pp1-dp8-vpp2").error().message(),
              HasSubstr("pp must be more than 1"));
  EXPECT_THAT(layout_of_file_or_name("nothing.json").error().message(),
              HasSubstr("neither a file nor a layout's name, such as"));
}

TEST(LayoutEdit, OnlyCanonicalNamesAreLayouts) {
  auto layout = layout_of_name("tp2-pp1-dp4-ep8");
  ASSERT_TRUE(layout.has_value());
  EXPECT_EQ(json::serialize(layout.value()),
            R"({"format":"ptc-layout/1","tp":2,"pp":1,"dp":4,"ep":8})");
  for (const char* name : {"", "tp2", "tp02-pp1-dp1", "tp0-pp1-dp1", "pp1-tp2-dp1",
                           "tp2-pp1-dp1+00", "tp2-pp1-dp1-ep4-cp", "tp2-pp1-dp1 "}) {
    EXPECT_FALSE(layout_of_name(name).has_value()) << name;
  }
}

}  // namespace
}  // namespace ptc::cli
