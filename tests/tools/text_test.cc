#include "tools/ptc/text.h"

#include <gtest/gtest.h>

#include <ctime>

namespace ptc::cli {
namespace {

TEST(Text, WidthCountsCodePoints) {
  EXPECT_EQ(text_width("größe"), 5u);
  EXPECT_EQ(padded("ü", 3), "ü  ");
}

TEST(Text, WrapsAtSpacesAndBreaksOnlyWordsLongerThanALine) {
  EXPECT_EQ(wrapped("one two three", 2, 9), "one two\n  three");
  EXPECT_EQ(wrapped("a words b", 0, 5), "a\nwords\nb");
  EXPECT_EQ(wrapped("a averylongword b", 0, 5), "a\navery\nlongw\nord b");
  EXPECT_EQ(wrapped("größergröße", 2, 7), "größe\n  rgröß\n  e");
  EXPECT_EQ(wrapped("", 2, 9), "");
  EXPECT_EQ(wrapped("two  spaces\nand a line", 0, 80), "two spaces and a line");
}

TEST(Text, NamesDoNothingToATerminal) {
  EXPECT_EQ(printable("a\033[2Jb\n\r\x7f\xc2\x9b größe"), "a?[2Jb????\u0020größe");
  EXPECT_EQ(wrapped("a\033b c", 0, 80), "a?b c");
  Table table({{"NAME"}});
  table.add({"a\nb"});
  EXPECT_EQ(table.to_string(0, 80), "NAME\na?b\n");
}

TEST(Text, Durations) {
  EXPECT_EQ(format_duration(0), "0 ms");
  EXPECT_EQ(format_duration(0.9994), "999 ms");
  EXPECT_EQ(format_duration(0.9999), "1.0 s");
  EXPECT_EQ(format_duration(59.96), "1 min 0 s");
  EXPECT_EQ(format_duration(3 * 3600 + 125), "3 h 2 min");
  EXPECT_EQ(format_clock(7), "0:07");
  EXPECT_EQ(format_clock(3661), "1:01:01");
}

TEST(Text, Ages) {
  auto age = [](double seconds) {
    json::value time = static_cast<double>(std::time(nullptr)) - seconds;
    return format_age(&time);
  };
  EXPECT_EQ(age(-5), "just now");
  EXPECT_EQ(age(600), "10 min");
  EXPECT_EQ(age(86400 * 3 + 60), "3 d");
  json::value text = "2001-02-03T04:05:06.123Z", other = "yesterday";
  EXPECT_TRUE(format_age(&text).ends_with(" d"));
  EXPECT_EQ(format_age(&other), "");
  EXPECT_EQ(format_age(nullptr), "");
}

TEST(Text, TablesAlign) {
  Table table({{"NAME"}, {"SIZE", Table::Align::kRight}, {"LAYOUTS"}});
  table.add({"a", "1 B", "tp1"});
  table.add({"bcdef", "12 KiB", ""});
  EXPECT_EQ(table.to_string(2, 80),
            "  NAME     SIZE  LAYOUTS\n"
            "  a         1 B  tp1\n"
            "  bcdef  12 KiB\n");
}

TEST(Text, ColumnsThatDoNotFitAreLeftOut) {
  Table table({{"NAME"}, {"SIZE", Table::Align::kRight}, {"LAYOUTS"}});
  table.add({"a-name-of-some-length", "123.4 KiB", "tp1-pp1-dp1"});
  EXPECT_EQ(table.to_string(0, 30),
            "NAME           SIZE  LAYOUTS\n"
            "a-nam...  123.4 KiB  tp1-pp...\n");
  EXPECT_EQ(table.to_string(0, 20),
            "NAME            SIZE\n"
            "a-name...  123.4 KiB\n");
}

TEST(Text, WhatIdentifiesARowStaysWhole) {
  const auto table = [] {
    Table made({{"NAME"}, {"SIZE", Table::Align::kRight, 2}, {"HOW"}, {"WHERE", {}, 1, 6}});
    made.add({"a-name-of-some-length", "123.4 KiB", "tp1-pp1-dp1", "w0:0-7 w1:0-7"});
    return made;
  };
  const auto narrowed = [&](size_t width) {
    Table made = table();
    std::string gone;
    for (const std::string& title : made.narrow(width)) gone += title + " ";
    return gone + "\n" + made.to_string(0, SIZE_MAX);
  };
  EXPECT_EQ(narrowed(80), "\n" + table().to_string(0, 80));
  EXPECT_EQ(narrowed(55),
            "\nNAME                        SIZE  HOW          WHERE\n"
            "a-name-of-some-length  123.4 KiB  tp1-pp1-dp1  w0...0-7\n");
  EXPECT_EQ(narrowed(50),
            "SIZE \nNAME                   HOW          WHERE\n"
            "a-name-of-some-length  tp1-pp1-dp1  w0:0-7 w1:0-7\n");
  EXPECT_EQ(narrowed(35),
            "SIZE WHERE \nNAME                   HOW\na-name-of-some-length  tp1-pp1-dp1\n");
  EXPECT_EQ(narrowed(26), "SIZE WHERE \nNAME           HOW\na-nam...ength  tp1-pp1-dp1\n");
  EXPECT_EQ(shortened_in_the_middle("abc", 3), "abc");
  EXPECT_EQ(shortened_in_the_middle("abcdefgh", 6), "a...gh");
}

TEST(Text, TheLastColumnIsCut) {
  Table table({{"A"}, {"B"}});
  table.add({"x", "0123456789abcdef"});
  for (size_t width : {11, 13, 15}) {
    std::string text = table.to_string(0, width);
    EXPECT_LE(text_width(text.substr(text.find('\n') + 1)), width + 1);
  }
}

}  // namespace
}  // namespace ptc::cli
