#include "store/codec/pickle.h"

#include <cstring>

#include "expect_error.h"
#include "pickle_json.h"

namespace ptc {
namespace {

using namespace std::string_literals;

/// What is read, as JSON; or the error.
std::string read(const std::string& bytes) {
  auto pickle = Pickle::parse(bytes);
  if (!pickle) return pickle.error().message();
  EXPECT_EQ(pickle.value().length_bytes(), bytes.size());
  return pickle_json(pickle.value(), pickle.value().root());
}

struct Case {
  std::string bytes;
  std::string expected;
};
class PickleReads : public testing::TestWithParam<Case> {};
TEST_P(PickleReads, Values) { EXPECT_EQ(read(GetParam().bytes), GetParam().expected); }

INSTANTIATE_TEST_SUITE_P(
    Opcodes, PickleReads,
    testing::Values(
        // Constants and numbers.
        Case{"N.", "null"}, Case{"\x88.", "true"}, Case{"\x89.", "false"}, Case{"I01\n.", "true"},
        Case{"I00\n.", "false"}, Case{"I-7\n.", "-7"}, Case{"I1\n.", "1"}, Case{"K\xff.", "255"},
        Case{"M\xff\xff.", "65535"}, Case{"J\xff\xff\xff\xff.", "-1"}, Case{"L12L\n.", "12"},
        Case{"L-12\n.", "-12"},
        Case{"L123456789012345678901234567890L\n.", R"({"long":"123456789012345678901234567890"})"},
        Case{"\x8a\x00."s, "0"}, Case{"\x8a\x01\xff.", "-1"}, Case{"\x8a\x02\xff\x00."s, "255"},
        Case{"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80."s, "-9223372036854775808"},
        Case{"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00."s, R"({"long":"000000000000008000"})"},
        Case{"\x8b\x01\x00\x00\x00\x80."s, "-128"},
        Case{"G\x3f\xf0\x00\x00\x00\x00\x00\x00."s, R"({"float":"3ff0000000000000"})"},
        Case{"F1.0\n.", R"({"float":"3ff0000000000000"})"},
        Case{"Finf\n.", R"({"float":"7ff0000000000000"})"},
        Case{"F-1e-2\n.", R"({"float":"bf847ae147ae147b"})"},
        // Texts and bytes.
        Case{"X\x03\x00\x00\x00"s + "a\xc3\xa9.", R"("aé")"}, Case{"\x8c\x01z.", R"("z")"},
        Case{"\x8c\x00."s, R"("")"}, Case{"\x8d\x01\x00\x00\x00\x00\x00\x00\x00z."s, R"("z")"},
        Case{"Va\xe9\\u0041\\U0001f600\\n\n.", "\"aéA😀\\\\n\""},
        Case{"S'it\\'s\\x41\\101\\n\\q'\n.", R"("it'sAA\n\\q")"},
        Case{"S\"\\xff\"\n.", R"({"bytes":"ff"})"}, Case{"T\x02\x00\x00\x00"s + "ab.", R"("ab")"},
        Case{"U\x01\xff.", R"({"bytes":"ff"})"},
        Case{"B\x01\x00\x00\x00\xff."s, R"({"bytes":"ff"})"},
        Case{"C\x02"s + "ab.", R"({"bytes":"6162"})"},
        Case{"\x8e\x01\x00\x00\x00\x00\x00\x00\x00z."s, R"({"bytes":"7a"})"},
        Case{"\x96\x01\x00\x00\x00\x00\x00\x00\x00z."s, R"({"bytearray":"7a"})"},
        // Containers.
        Case{").", R"({"tuple":[]})"}, Case{"(t.", R"({"tuple":[]})"},
        Case{"(NNNNt.", R"({"tuple":[null,null,null,null]})"},
        Case{"N\x85.", R"({"tuple":[null]})"}, Case{"K\1K\2\x86.", R"({"tuple":[1,2]})"},
        Case{"K\1K\2K\3\x87.", R"({"tuple":[1,2,3]})"}, Case{"].", "[]"}, Case{"(l.", "[]"},
        Case{"(K\1K\2l.", "[1,2]"}, Case{"]K\1a(K\2K\3eK\4a.", "[1,2,3,4]"}, Case{"](e.", "[]"},
        Case{"}.", R"({"dict":[]})"}, Case{"(K\1K\2d.", R"({"dict":[[1,2]]})"},
        Case{"}K\1K\2s(K\3K\4K\5K\6uK\7NsN0.", R"({"dict":[[1,2],[3,4],[5,6],[7,null]]})"},
        Case{"\x8f(K\1K\2\x90.", R"({"set":[1,2]})"},
        Case{"(K\1K\2\x91.", R"({"frozenset":[1,2]})"}, Case{"]]]K\1a0a.", "[[]]"},
        // What Python would call.
        Case{"cos\nsystem\n(X\x05\x00\x00\x00rm -rtR."s,
             R"({"call":["reduce",{"global":"os system"},{"tuple":["rm -r"]},[]]})"},
        Case{"\x8c\1m\x8c\3n.p\x93.", R"({"global":"m n.p"})"},
        Case{"cm\nn\n)\x81N"
             "b.",
             R"({"call":["new",{"global":"m n"},{"tuple":[]},[["state",null]]]})"},
        Case{"cm\nn\n)}\x92.",
             R"({"call":["new_keyed",{"global":"m n"},{"tuple":[{"tuple":[]},{"dict":[]}]},[]]})"},
        Case{"(K\1im\nn\n.", R"({"call":["old",{"global":"m n"},{"tuple":[1]},[]]})"},
        Case{"(cm\nn\nK\1o.", R"({"call":["old",{"global":"m n"},{"tuple":[1]},[]]})"},
        Case{
            "cm\nn\n)RK\1a(K\2K\3eK\4K\5sNb.",
            R"({"call":["reduce",{"global":"m n"},{"tuple":[]},[["items",1,2,3],["pairs",4,5],["state",null]]]})"},
        Case{"Pname\n.", R"({"id":"name"})"}, Case{"K\1Q.", R"({"id":1})"},
        // Stack, memo, frames.
        Case{"K\1K\2"
             "0.",
             "1"},
        Case{"K\1(0.", "1"}, Case{"K\1(NNN1.", "1"},
        Case{"K\1"
             "2\x86.",
             R"({"tuple":[1,1]})"},
        Case{"]q\1h\1\x86.", R"({"tuple":[[],[]]})"},
        Case{"]r\1\0\0\0j\1\0\0\0\x86."s, R"({"tuple":[[],[]]})"},
        Case{"]p0\ng0\n\x86.", R"({"tuple":[[],[]]})"},
        Case{"]\x94N\x94h\1h\0\x87."s, R"({"tuple":[null,null,[]]})"},
        Case{"\x80\5\x95\2\0\0\0\0\0\0\0N."s, "null"},
        Case{"N\x94\x94\x94h\2\x86.", R"({"tuple":[null,null]})"}));

class PickleRefuses : public testing::TestWithParam<Case> {};
TEST_P(PickleRefuses, AndSaysWhere) {
  auto pickle = Pickle::parse(GetParam().bytes);
  EXPECT_TRUE(has_error(pickle, Code::kInvalidArgument, GetParam().expected));
}
INSTANTIATE_TEST_SUITE_P(
    Pickles, PickleRefuses,
    testing::Values(
        Case{"", "ends at byte 0 without a STOP"}, Case{"N", "without a STOP"},
        Case{"U\1.", "without a STOP"}, Case{".", "byte 0: STOP: it wants more values"},
        Case{"N(.", "byte 2: STOP"}, Case{"NN\xff.", "byte 2: opcode 0xff: no pickle"},
        Case{"\x80\6N.", "byte 0: PROTO: protocol 6"},
        Case{"\x82\1.", "EXT1: numbers in Python's table"}, Case{"\x83\1\0."s, "EXT2"},
        Case{"\x84\1\0\0\0."s, "EXT4"}, Case{"\x97.", "NEXT_BUFFER: its bytes are outside"},
        Case{"N\x98.", "READONLY_BUFFER"}, Case{"K", "BININT1: the pickle ends inside of it"},
        Case{"I12", "INT: its line does not end"}, Case{"Ix\n.", "INT: it is no number"},
        Case{"I-\n.", "no number"}, Case{"F1,5\n.", "FLOAT: it is no number"},
        Case{"X\xff\xff\xff\xff"s + "a.", "BINUNICODE: it has 4294967295 bytes, but 2 are left"},
        Case{"\x8d\xff\xff\xff\xff\xff\xff\xff\xff."s,
             "BINUNICODE8: it has 18446744073709551615 bytes"},
        Case{"\x8e\x00\x00\x00\x00\x00\x00\x00\x80."s, "BINBYTES8"},
        Case{"\x8c\1\xff.", "not UTF-8"}, Case{"P\xff\n.", "not UTF-8"},
        Case{"c\xff\nx\n.", "GLOBAL: the name is not UTF-8"},
        Case{"cm\nn", "its line does not end"}, Case{"NN\x93.", "a name that is no text"},
        Case{"S'a\n.", "no quotes"}, Case{"S'\\x4'\n.", "an escape"},
        Case{"V\\ud800\n.", "an escape"}, Case{"V\\u12\n.", "an escape"},
        Case{"t.", "TUPLE: there is no MARK"}, Case{"(\x85.", "TUPLE1: it wants more values"},
        Case{"N(N\x86.", "TUPLE2: it wants more"}, Case{"Na.", "APPEND: it wants more"},
        Case{"NNa.", "this cannot be done to None"}, Case{"}Na.", "cannot be done to a dict"},
        Case{"]NNs.", "cannot be done to a list"}, Case{"}(Nu.", "a key without a value"},
        Case{"(Ne.", "APPENDS: it wants more"}, Case{")(Ne.", "cannot be done to a tuple"},
        Case{"\x8f(NNu.", "cannot be done to a set"},
        Case{"](N\x90.", "ADDITEMS: this cannot be done to a list"},
        Case{"]Nb.", "BUILD: a state for a list"}, Case{"NR.", "REDUCE: it wants more"},
        Case{"(o.", "OBJ: it wants more"}, Case{"h\1.", "BINGET: nothing is number 1"},
        Case{"q\1.", "BINPUT: there is no value"}, Case{"gx\n.", "GET: it has no number"},
        Case{"Nr\xff\xff\xff\xff.",
             "LONG_BINPUT: number 4294967295 in the memo of a pickle of 7 bytes"},
        Case{"Np99999999999999999999\n.", "PUT: it has no number"},
        Case{"\x95\xff\0\0\0\0\0\0\0N."s, "FRAME: a frame of 255 bytes, but 2"},
        Case{"0.", "POP: there is no MARK"}, Case{"1.", "POP_MARK: there is no MARK"},
        Case{"2.", "DUP: it wants more"}));

TEST(Pickle, WhatFollowsTheEndIsNotLookedAt) {
  auto pickle = Pickle::parse("N.\xff\xff");
  ASSERT_TRUE(is_ok(pickle));
  EXPECT_EQ(pickle.value().length_bytes(), 2u);
}

TEST(Pickle, ListsAreNotLimitedToOneBatch) {
  std::string bytes = "]q\0"s;
  for (int batch = 0; batch < 100; ++batch) {
    bytes += "(";
    for (int i = 0; i < 1000; ++i) bytes += "h\0"s;
    bytes += "e";
  }
  auto pickle = Pickle::parse(bytes + ".");
  ASSERT_TRUE(is_ok(pickle));
  size_t count = 0;
  ASSERT_TRUE(is_ok(pickle.value().for_items(pickle.value().root(), [&](PickleId item) -> Result<> {
    EXPECT_EQ(item, pickle.value().root());  // it contains itself
    ++count;
    return ok();
  })));
  EXPECT_EQ(count, 100'000u);
}

TEST(Pickle, AnErrorOfAWalkEndsIt) {
  auto pickle = Pickle::parse("(NNNl.");
  ASSERT_TRUE(is_ok(pickle));
  int count = 0;
  EXPECT_TRUE(has_error(pickle.value().for_items(pickle.value().root(),
                                                 [&](PickleId) -> Result<> {
                                                   return ++count == 2
                                                              ? Result<>(invalid_argument("two"))
                                                              : Result<>(ok());
                                                 }),
                        Code::kInvalidArgument, "two"));
  EXPECT_EQ(count, 2);
}

TEST(Pickle, SharedValuesAreThereOnce) {
  std::string bytes = "]q\0N"s;  // each level twice the one before: 2^200 for who unpacks it
  bytes += "a";
  for (int level = 1; level < 200; ++level) {
    const char before = static_cast<char>(level - 1), now = static_cast<char>(level);
    bytes += std::string("0]q") + now + "h" + before + "ah" + before + "a";
  }
  auto pickle = Pickle::parse(bytes + ".");
  ASSERT_TRUE(is_ok(pickle));
  EXPECT_LT(pickle.value().size(), 250u);
}

TEST(Pickle, DepthTakesNoStack) {
  const size_t depth = 1'000'000;
  auto repeat = [&](char opcode, size_t times) { return std::string(times, opcode); };
  EXPECT_TRUE(is_ok(Pickle::parse(repeat(']', depth) + repeat('a', depth - 1) + ".")));
  EXPECT_TRUE(is_ok(Pickle::parse(repeat('(', depth) + repeat('t', depth) + ".")));
  EXPECT_TRUE(is_ok(Pickle::parse("N" + repeat('\x85', depth) + ".")));
}

}  // namespace
}  // namespace ptc
