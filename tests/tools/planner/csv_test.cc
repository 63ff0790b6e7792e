#include "tools/planner/profile/csv.h"

#include <gmock/gmock.h>

namespace ptc::planner {
namespace {

using testing::ElementsAre;

std::string csv_complaint(std::string_view text) {
  const auto csv = Csv::parse(text, "t.csv");
  return csv.has_error() ? csv.error().message() : "taken";
}

TEST(Csv, ReadsWhatSpreadsheetsWrite) {
  const auto csv = Csv::parse(
      "\xef\xbb\xbf"
      "a, b ,\"c,\"\"x\"\"\"\r\n1,,\"two\nlines\"\r\n\r\n4",
      "t.csv");
  ASSERT_TRUE(csv.has_value()) << csv.error().message();
  EXPECT_THAT(csv.value().columns(), ElementsAre("a", "b", "c,\"x\""));
  ASSERT_EQ(csv.value().rows(), 2u);
  EXPECT_EQ(csv.value().at(0, 1), "");
  EXPECT_EQ(csv.value().at(0, 2), "two\nlines");
  EXPECT_EQ(csv.value().at(1, 0), "4");
  EXPECT_EQ(csv.value().at(1, 2), "");
  // Lines are those of the file, also behind a field that has two.
  EXPECT_EQ(csv.value().error(1, 0, "no").message(), "t.csv: line 5, column 1 (a): no");
}

TEST(Csv, SaysWhereWhatIsWrong) {
  EXPECT_EQ(csv_complaint(""), "t.csv: it is empty: the first line names the columns");
  EXPECT_EQ(csv_complaint("a,b\n1,\"x"), "t.csv: line 2, column 3: a quote that does not end");
  EXPECT_EQ(csv_complaint("a,a"), "t.csv: line 1, column 3: a second column 'a'");
  EXPECT_EQ(csv_complaint("a,b\n1,2,3"),
            "t.csv: line 2, column 5: the header has 2 columns, and this is one more");
  EXPECT_EQ(csv_complaint("a,b\n1,2,,\n"), "taken");  // as some write it
  EXPECT_EQ(csv_complaint("a\n1,2"),
            "t.csv: line 2, column 3: the header has 1 column, and this is one more");
  EXPECT_EQ(
      csv_complaint("a,b\n\xe9,2"),
      "t.csv: line 2: it is not UTF-8, Latin-1 perhaps: iconv -f LATIN1 -t UTF-8 makes it so");
  EXPECT_EQ(csv_complaint("\xff\xfe"
                          "a"),
            "t.csv: it is UTF-16, and must be UTF-8: iconv -f UTF-16 -t UTF-8 makes it so");
  EXPECT_EQ(csv_complaint(std::string_view("a\0,\0b\0", 6)),
            "t.csv: it is UTF-16LE, and must be UTF-8: iconv -f UTF-16LE -t UTF-8 makes it so");
  EXPECT_EQ(csv_complaint("a;b\n1;2"),
            "t.csv: line 1: its columns are separated by ';', and must be by commas");
  EXPECT_EQ(csv_complaint("a\tb\n1\t2"),
            "t.csv: line 1: its columns are separated by tabs, and must be by commas");
  EXPECT_EQ(csv_complaint("# made by me\na,b\n1,2"),
            "t.csv: line 1: it begins with '#': the first line names the columns, and none is a "
            "comment");
  EXPECT_EQ(csv_complaint(std::string(5000, ',')), "t.csv: line 1: more than 4096 columns");
  const auto csv = Csv::parse("model,iteration\nx,1e999", "t.csv");
  EXPECT_EQ(csv.value().needed("iteration_s").error().message(),
            "t.csv: line 1: there is no column 'iteration_s' (is it 'iteration'? rename it)");
  EXPECT_THAT(Csv::parse("Batch,Batch size\n", "t.csv").value().needed("batch").error().message(),
              testing::HasSubstr("(is it 'Batch'? rename it)"));
  for (const char* bad : {"1e999", "nan", "inf", "1 2", "0x10", ""}) {
    const auto one = Csv::parse(std::string("a,b\n") + bad + ",1", "t.csv");
    EXPECT_TRUE(one.value().number(0, 0).has_error()) << bad;
  }
}

TEST(Csv, WritesWhatItReads) {
  for (const std::string text : {"plain", " blanks ", "a,b", "say \"x\"", "two\nlines"}) {
    const auto csv = Csv::parse("x,y\n" + csv_field(text) + ",1", "t.csv");
    EXPECT_EQ(csv.value().at(0, 0), text);
  }
}

}  // namespace
}  // namespace ptc::planner
