#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <cmath>
#include <map>
#include <set>
#include <stop_token>
#include <thread>

#include "expect_error.h"
#include "small_stack.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/json_problem.h"
#include "store/base/size_text.h"
#include "store/base/utf8.h"
#include "store/base/walk_tree.h"

namespace ptc {
namespace {

Result<int> half(int number) {
  if (number % 2 != 0) return invalid_argument("{} is odd", number);
  return number / 2;
}
Result<int> quarter(int number) {
  PTC_TRY(int once, half(number));
  return half(once);
}

TEST(Error, TryPassesTheErrorUpOrGoesOn) {
  EXPECT_EQ(quarter(8).value(), 2);
  EXPECT_TRUE(has_error(quarter(6), Code::kInvalidArgument, "3 is odd"));
}

TEST(Error, ContextComesFirstAndKeepsTheCode) {
  Error error = errno_error(ENOSPC, "writing x").with_context("committing");
  EXPECT_EQ(error.code(), Code::kNoSpace);
  EXPECT_EQ(error.message(), "committing: writing x: No space left on device");
}

TEST(Utf8, TextForPeople) {
  EXPECT_EQ(printable("a\nb\x7f é \xc3( \xed\xa0\x80 \xf0\x9f\x98\x80 \xc2\x9b", 100),
            "a\\x0ab\\x7f é \\xc3( \\xed\\xa0\\x80 \xf0\x9f\x98\x80 \\xc2\\x9b");
  EXPECT_EQ(printable(std::string(10, 'x'), 10), std::string(10, 'x'));
  EXPECT_EQ(printable(std::string(11, 'x'), 10), "xxxxxxx…");
  EXPECT_EQ(printable("xxxxxx\n", 9), "xxxxxx…");
  EXPECT_EQ(quoted("a\xff"), "'a\\xff'");
  EXPECT_EQ(ptc::quoted(std::string(199, 'x') + "é"), "'" + std::string(197, 'x') + "…'");
}

TEST(Utf8, IsToldFromOtherBytes) {
  for (const char* text : {"", "a", "é", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf", "\xed\x9f\xbf"})
    EXPECT_TRUE(is_utf8(text)) << text;
  for (const char* text : {"\xff", "\x80", "\xc3", "\xc3(", "\xc0\xaf", "\xe0\x80\xaf",
                           "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf0\x9f\x98", "a\xf5"})
    EXPECT_FALSE(is_utf8(text)) << text;
  EXPECT_TRUE(is_utf8(std::string_view("\0a", 2)));
}

TEST(Json, ParsesEveryKindOfValue) {
  auto value = parse_json(R"( {"a": [1, -2, 18446744073709551615, 1.5, true, null, "é"]} )");
  ASSERT_TRUE(is_ok(value));
  EXPECT_EQ(json::serialize(value.value()),
            R"({"a":[1,-2,18446744073709551615,1.5E0,true,null,"é"]})");
}

struct BadJson {
  std::string text;
  const char* message;
};
class JsonRefuses : public testing::TestWithParam<BadJson> {};
TEST_P(JsonRefuses, WithThePlace) {
  EXPECT_TRUE(has_error(parse_json(GetParam().text, {.max_bytes = 1000, .max_depth = 8}),
                        Code::kInvalidArgument, GetParam().message));
}
INSTANTIATE_TEST_SUITE_P(
    Texts, JsonRefuses,
    testing::Values(
        BadJson{"", "line 1, column 1: not valid JSON"},
        BadJson{"{\"a\": 1,\n \"b\": }", "line 2, column 7"},
        BadJson{"{\"é\": x}", "line 1, column 7"}, BadJson{"{\"a\": 1} x", "column 10"},
        BadJson{"{\"a\": NaN}", "column 7"}, BadJson{"[1", "too early"},
        BadJson{"[[[[[[[[[1]]]]]]]]]", "nested deeper than 8"},
        BadJson{std::string(1001, ' '), "1001 bytes of JSON, but at most 1000"},
        BadJson{"{\"a\": \"\xff\"}", "line 1, column 8"},
        BadJson{"// x\n1", "line 1, column 1: not valid JSON: JSON has no comments"},
        BadJson{"{\"a\": 1,\n}",
                "line 2, column 1: not valid JSON: the comma before this '}' is one too many"},
        BadJson{"[1, 2, ]", "column 8: not valid JSON: the comma before this ']' is one too many"},
        BadJson{"\n<!doctype HTML>", "it is an HTML page"},
        BadJson{"version https://git-lfs.github.com/spec/v1\n", "it is a git-lfs pointer"},
        BadJson{"{\"a\": {\"b\": 1, \"c\": \":\",\n  \"b\": 2}}",
                "line 2, column 3: the key 'b' is there twice"},
        BadJson{R"({"ab": {"a": 1}, "x": [{"ab": 1}], "\u0061b": {}})",
                "column 36: the key 'ab' is there twice"},
        BadJson{R"({"a\"": 1, "a\"": [{"z": 1}]})", "is there twice"}));

TEST(Json, EqualKeysOfDifferentObjectsAreNoDuplicates) {
  EXPECT_TRUE(
      is_ok(parse_json(R"({"a": {"a": 1}, "b": [{"a": 1}, {"a": ":{\"a\":"}], ":": "\\"})")));
}

TEST(Json, FindsPlaces) {
  std::string_view text = "{\"x\": [1, 2],\n \"rules\": [ {\"a\": {}},\n  {\"ax\\u0069s\": 7} ]}";
  ASSERT_TRUE(is_ok(parse_json(text)));
  EXPECT_EQ(json_place(text, {}), "line 1, column 1");
  EXPECT_EQ(json_place(text, {"x", "1"}), "line 1, column 11");
  EXPECT_EQ(json_place(text, {"rules"}), "line 2, column 11");
  EXPECT_EQ(json_place(text, {"rules", "1", "axis"}), "line 3, column 17");
  EXPECT_EQ(json_place(text, {"rules", "1", "axis"}, JsonPart::kKey), "line 3, column 4");
  EXPECT_EQ(json_place(text, {"rules", "1", "none"}), "line 3, column 3");
  EXPECT_EQ(json_place(text, {"rules", "5"}), "line 2, column 11");
  EXPECT_EQ(json_place(text, {"x", "1", "deeper"}), "line 1, column 11");
}

TEST(Json, TakesPlacesOffMessages) {
  EXPECT_EQ(without_json_place("line 1, column 31: tp = 3: it does not fit"),
            "tp = 3: it does not fit");
  for (const char* other :
       {"", "line 1", "line 1, column 2", "line 1, column 2 (tp): no", "lines: 2"})
    EXPECT_EQ(without_json_place(other), other);
}

TEST(Json, ReadsUnsignedNumbers) {
  json::value value =
      parse_json(R"({"a": 7, "b": -1, "c": 1.0, "d": "7", "e": 18446744073709551615})").value();
  const json::object& object = value.as_object();
  EXPECT_EQ(json_uint(object, "a").value(), 7u);
  EXPECT_EQ(json_uint(object, "none").value(), std::nullopt);
  EXPECT_EQ(json_uint(object, "e").value(), UINT64_MAX);
  EXPECT_TRUE(has_error(json_uint(object, "a", 6), Code::kInvalidArgument, "from 0 to 6, not 7"));
  for (const char* key : {"b", "c", "d"})
    EXPECT_TRUE(has_error(json_uint(object, key), Code::kInvalidArgument, "whole number")) << key;
}

TEST(Json, NamesTheNearestKey) {
  std::vector<std::string> keys = {"tp", "pp", "dp", "devices", "optimizer", "order"};
  EXPECT_EQ(nearest_name("tpp", keys), "tp");
  EXPECT_EQ(nearest_name("optimiser", keys), "optimizer");
  EXPECT_EQ(nearest_name("ordre", keys), "order");
  EXPECT_EQ(nearest_name("colour", keys), std::nullopt);
  EXPECT_EQ(nearest_name(std::string(100000, 'x'), keys), std::nullopt);
}

TEST(Json, PrettyTextReadsBackAndIsStable) {
  json::value value =
      parse_json(
          R"({"tp":2,"x":1.5,"y":4.0,"devices":["a","b"],"o":{},"l":[],"deep":[{"a":[1,[2]]}],"s":"é\n"})")
          .value();
  std::string text = pretty_json(value);
  EXPECT_EQ(text,
            "{\n  \"tp\": 2,\n  \"x\": 1.5,\n  \"y\": 4.0,\n  \"devices\": [\"a\", \"b\"],\n  "
            "\"o\": {},\n"
            "  \"l\": [],\n  \"deep\": [\n    {\n      \"a\": [\n        1,\n        [2]\n      "
            "]\n    }\n"
            "  ],\n  \"s\": \"é\\n\"\n}\n");
  EXPECT_EQ(parse_json(text).value(), value);
  EXPECT_EQ(pretty_json(json::value(std::nan(""))), "null\n");
}

TEST(Json, LongArraysGetOneLineAnElement) {
  json::array array;
  for (int i = 0; i < 60; ++i) array.push_back(i);
  std::string text = pretty_json(array);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 62);
}

TEST(SizeText, Reads) {
  EXPECT_EQ(parse_size("4096").value(), 4096u);
  EXPECT_EQ(parse_size("64G").value(), uint64_t{64} << 30);
  EXPECT_EQ(parse_size("1.5 GiB").value(), uint64_t{3} << 29);
  EXPECT_EQ(parse_size("1.5t").value(), uint64_t{3} << 39);
  EXPECT_EQ(parse_size("312 B").value(), 312u);
  EXPECT_EQ(parse_size("18446744073709551615").value(), UINT64_MAX);
  for (const char* bad : {"", "G", ".", "-1", "1.2.3", "1X", "64GG", "0x10", "1e3", "64 G x",
                          "99999999999999999999999999 x"})
    EXPECT_TRUE(has_error(parse_size(bad), Code::kInvalidArgument)) << bad;
  for (const char* large : {"18446744073709551616", "16E", "99999999999999999999999999",
                            "99999999999999999999999999G"}) {
    const Result<uint64_t> size = parse_size(large);
    ASSERT_TRUE(has_error(size, Code::kInvalidArgument)) << large;
    EXPECT_NE(size.error().message().find("does not fit into 64 bits"), std::string::npos)
        << size.error().message();
  }
}

TEST(SizeText, Writes) {
  EXPECT_EQ(format_size(312), "312 B");
  EXPECT_EQ(format_size(1024), "1.0 KiB");
  EXPECT_EQ(format_size(uint64_t{3} << 29), "1.5 GiB");
  EXPECT_EQ(format_size((uint64_t{1} << 30) - 1), "1.0 GiB");
  EXPECT_EQ(format_size(UINT64_MAX), "16.0 EiB");
}

class Files : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(::mkdtemp(path_.data()), nullptr);
    dir_ = open_file(AT_FDCWD, path_, O_RDONLY | O_DIRECTORY).value();
  }
  void TearDown() override { EXPECT_TRUE(is_ok(remove_tree(AT_FDCWD, path_))); }
  int dir() const { return dir_.get(); }

  std::string path_ = testing::TempDir() + "ptc-files-XXXXXX";
  UniqueFd dir_;
};

TEST_F(Files, AreReplacedAtomicallyAndReadUpToALimit) {
  ASSERT_TRUE(is_ok(make_directory(dir(), "a")));
  ASSERT_TRUE(is_ok(make_directory(dir(), "a")));
  ASSERT_TRUE(is_ok(write_file_atomically(dir(), "a/f", "old")));
  ASSERT_TRUE(is_ok(write_file_atomically(dir(), "a/f", "newer")));
  EXPECT_EQ(read_text_file(dir(), "a/f", 5).value(), "newer");
  EXPECT_TRUE(has_error(read_text_file(dir(), "a/f", 4), Code::kInvalidArgument, "longer than 4"));
  EXPECT_TRUE(has_error(read_text_file(dir(), "a/g", 4), Code::kNotFound, "a/g"));
  EXPECT_TRUE(has_error(write_file_atomically(dir(), "none/f", "x"), Code::kNotFound, "none/f"));
  EXPECT_TRUE(has_error(make_directory(dir(), "a/f"), Code::kAlreadyExists));
}

TEST_F(Files, ShortReadsAreCorrupt) {
  ASSERT_TRUE(is_ok(write_file_atomically(dir(), "f", "12345")));
  UniqueFd fd = open_file(dir(), "f", O_RDONLY).value();
  std::byte buffer[3];
  EXPECT_TRUE(is_ok(read_exactly(fd.get(), buffer, 2)));
  EXPECT_EQ(buffer[2], std::byte{'5'});
  EXPECT_TRUE(has_error(read_exactly(fd.get(), buffer, 3), Code::kCorrupt, "ends at byte 5"));
}

/// As a thread does that has not heard yet that the directory's owner goes.
TEST_F(Files, WhatSomebodyMakesMeanwhileGoesToo) {
  for (int round = 0; round < 100; ++round) {
    ASSERT_TRUE(is_ok(make_directory(dir(), "busy")));
    const UniqueFd busy = open_file(dir(), "busy", O_RDONLY | O_DIRECTORY).value();
    std::jthread maker([&] {
      for (int i = 0; i < 30; ++i)
        UniqueFd(::openat(busy.get(), fmt::format("{}", i).c_str(), O_WRONLY | O_CREAT, 0600));
    });
    EXPECT_TRUE(is_ok(remove_tree(dir(), "busy")));
    EXPECT_NE(::faccessat(dir(), "busy", F_OK, 0), 0);
  }
}

TEST_F(Files, TreesAreRemovedWithoutFollowingLinks) {
  ASSERT_TRUE(is_ok(make_directory(dir(), "keep")));
  ASSERT_TRUE(is_ok(write_file_atomically(dir(), "keep/f", "x")));
  ASSERT_TRUE(is_ok(make_directory(dir(), "t")));
  ASSERT_TRUE(is_ok(make_directory(dir(), "t/u")));
  ASSERT_TRUE(is_ok(write_file_atomically(dir(), "t/u/f", "x")));
  ASSERT_EQ(::symlinkat("../keep", dir(), "t/link"), 0);
  EXPECT_TRUE(is_ok(remove_tree(dir(), "t")));
  EXPECT_TRUE(is_ok(remove_tree(dir(), "t")));
  EXPECT_EQ(::faccessat(dir(), "t", F_OK, 0), -1);
  EXPECT_EQ(read_text_file(dir(), "keep/f", 10).value(), "x");
}

void make_file(int dir_fd, const std::string& path) {
  ASSERT_TRUE(is_ok(open_file(dir_fd, path, O_WRONLY | O_CREAT | O_EXCL)));
}

/// Directories d/d/d…, and a file in the last.
void nest(int dir_fd, int levels) {
  UniqueFd here(::openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  for (int i = 0; i < levels; ++i) {
    ASSERT_EQ(::mkdirat(here.get(), "d", 0700), 0);
    here = open_file(here.get(), "d", O_RDONLY | O_DIRECTORY).value();
  }
  ASSERT_NO_FATAL_FAILURE(make_file(here.get(), "f"));
}

/// The lowest descriptor that is free.
int next_descriptor() { return UniqueFd(::fcntl(0, F_DUPFD_CLOEXEC, 0)).get(); }

TEST_F(Files, TreesAreRemovedHoweverDeeplyTheyAreNested) {
  ASSERT_TRUE(is_ok(make_directory(dir(), "t")));
  ASSERT_TRUE(is_ok(make_directory(dir(), "t/many")));
  const UniqueFd top = open_file(dir(), "t", O_RDONLY | O_DIRECTORY).value();
  ASSERT_NO_FATAL_FAILURE(nest(top.get(), kNested));
  for (int i = 0; i < 300; ++i) {
    const std::string name = fmt::format("t/many/{}", i);
    ASSERT_TRUE(is_ok(make_directory(dir(), name)));
    ASSERT_TRUE(is_ok(make_directory(dir(), name + "/d")));
    ASSERT_NO_FATAL_FAILURE(make_file(dir(), name + "/d/f"));
  }
  on_small_stack([&] { EXPECT_TRUE(is_ok(remove_tree(dir(), "t"))); });
  EXPECT_EQ(::faccessat(dir(), "t", F_OK, 0), -1);
}

TEST_F(Files, NothingElseIsRemovedWhileSomebodyMovesDirectories) {
  ASSERT_TRUE(is_ok(make_directory(dir(), "keep")));
  ASSERT_NO_FATAL_FAILURE(make_file(dir(), "keep/f"));
  ASSERT_TRUE(is_ok(make_directory(dir(), "out")));
  for (int round = 0; round < 50; ++round) {
    ASSERT_TRUE(is_ok(make_directory(dir(), "t")));
    ASSERT_TRUE(is_ok(make_directory(dir(), "t/a")));
    const UniqueFd a = open_file(dir(), "t/a", O_RDONLY | O_DIRECTORY).value();
    ASSERT_NO_FATAL_FAILURE(nest(a.get(), 20));
    ASSERT_EQ(::symlinkat("../../keep", a.get(), "link"), 0);
    std::jthread mover([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        (void)::renameat2(a.get(), "d", a.get(), "link", RENAME_EXCHANGE);
        (void)::renameat(a.get(), "d", dir(), "out/d");
        (void)::renameat(dir(), "out/d", a.get(), "d");
      }
    });
    EXPECT_TRUE(is_ok(remove_tree(dir(), "t")));
    mover = {};
    EXPECT_EQ(::faccessat(dir(), "keep/f", F_OK, 0), 0);
    EXPECT_TRUE(is_ok(remove_tree(dir(), "t")));  // into which something may have been moved back
    EXPECT_TRUE(is_ok(remove_tree(dir(), "out/d")));
  }
}

TEST_F(Files, TreesAreWalkedHoweverDeeplyTheyAreNested) {
  ASSERT_TRUE(is_ok(make_directory(dir(), "t")));
  ASSERT_TRUE(is_ok(make_directory(dir(), "t/beside")));
  ASSERT_NO_FATAL_FAILURE(make_file(dir(), "t/beside/g"));
  ASSERT_EQ(::symlinkat("/", dir(), "t/beside/link"), 0);
  const UniqueFd top = open_file(dir(), "t", O_PATH | O_DIRECTORY).value();
  ASSERT_NO_FATAL_FAILURE(nest(top.get(), kNested));
  const int before = next_descriptor();
  int most = 0;
  std::map<std::string, int> seen;
  EXPECT_TRUE(is_ok(walk_tree(top.get(), [&](int, const char* name, const struct stat&) {
    most = std::max(most, next_descriptor());
    ++seen[name];
    return true;
  })));
  EXPECT_EQ(seen, (std::map<std::string, int>{
                      {"beside", 1}, {"g", 1}, {"link", 1}, {"d", kNested}, {"f", 1}}));
  EXPECT_LT(most, before + 8);
  int some = 0;
  EXPECT_TRUE(is_ok(
      walk_tree(top.get(), [&](int, const char*, const struct stat&) { return ++some < 100; })));
  EXPECT_EQ(some, 100);
}

TEST_F(Files, AWalkStaysInItsTreeThoughDirectoriesAreMoved) {
  ASSERT_TRUE(is_ok(make_directory(dir(), "t")));
  ASSERT_TRUE(is_ok(make_directory(dir(), "out")));
  ASSERT_NO_FATAL_FAILURE(make_file(dir(), "out/not"));
  for (const char* name : {"t/a", "t/b", "t/a/m", "t/a/n", "t/a/m/d"})
    ASSERT_TRUE(is_ok(make_directory(dir(), name)));
  for (const char* name : {"t/a/m/d/f", "t/a/n/g", "t/b/h"})
    ASSERT_NO_FATAL_FAILURE(make_file(dir(), name));
  const UniqueFd top = open_file(dir(), "t", O_PATH | O_DIRECTORY).value();
  std::set<std::string> seen;
  EXPECT_TRUE(is_ok(walk_tree(top.get(), [&](int, const char* name, const struct stat&) {
    EXPECT_TRUE(seen.insert(name).second) << name;
    if (std::string_view(name) == "f") {  // while it is in there
      EXPECT_EQ(::renameat(dir(), "t/a/m", dir(), "out/m"), 0);
    }
    return true;
  })));
  EXPECT_EQ(seen, (std::set<std::string>{"a", "b", "m", "n", "d", "f", "g", "h"}));
}

}  // namespace
}  // namespace ptc
