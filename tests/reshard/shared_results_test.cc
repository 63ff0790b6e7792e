// What is asked for again is the same object, as long as somebody has it.
#include "reshard/checkpoint/shared_results.h"

#include <gtest/gtest.h>

namespace ptc {
namespace {

using Number = std::shared_ptr<const int>;

struct Counter {
  SharedResults& results;
  int made = 0;
  Result<Number> get(const ResultKey& key) {
    return results.get<int>(
        key, [&]() -> Result<Number> { return std::make_shared<const int>(++made); });
  }
};

TEST(SharedResults, OfOneKeyAreOneWhileSomebodyHasThem) {
  SharedResults results;
  Counter counter{results};
  Number first = counter.get(ResultKey("a").add("x")).value();
  EXPECT_EQ(counter.get(ResultKey("a").add("x")).value(), first);
  EXPECT_EQ(results.known<int>(ResultKey("a").add("x")), first);
  first = nullptr;
  EXPECT_EQ(results.known<int>(ResultKey("a").add("x")), nullptr);
  EXPECT_EQ(*counter.get(ResultKey("a").add("x")).value(), 2);
}

TEST(SharedResults, TheLastAreKept) {
  SharedResults results(1);
  Counter counter{results};
  EXPECT_EQ(*counter.get(ResultKey("a")).value(), 1);
  EXPECT_EQ(*counter.get(ResultKey("a")).value(), 1);
  EXPECT_EQ(*counter.get(ResultKey("b")).value(), 2);
  EXPECT_EQ(*counter.get(ResultKey("a")).value(), 3);
}

TEST(SharedResults, AnErrorIsTriedAgain) {
  SharedResults results;
  auto fails = [&] {
    return results.get<int>(ResultKey("a"),
                            []() -> Result<Number> { return Error(Code::kBusy, "no"); });
  };
  EXPECT_TRUE(fails().has_error());
  Counter counter{results};
  EXPECT_EQ(*counter.get(ResultKey("a")).value(), 1);
}

TEST(SharedResults, KeysDifferWhereTextsDo) {
  EXPECT_NE(ResultKey("a").add("b").add("").digest(), ResultKey("a").add("").add("b").digest());
  EXPECT_NE(ResultKey("a").add("12").digest(), ResultKey("a").add(uint64_t{12}).digest());
  EXPECT_NE(ResultKey("a").add(std::string(5000, 'x')).digest(),
            ResultKey("a").add(std::string(5001, 'x')).digest());
}

}  // namespace
}  // namespace ptc
