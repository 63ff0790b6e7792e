#include "tools/log_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <boost/json/parse.hpp>
#include <sstream>

#include "tools/log_format.h"

namespace ptc {
namespace {

using testing::HasSubstr;

class LogLimitTest : public testing::Test {
 protected:
  LogLimitTest()
      : logger_("test", std::make_shared<LimitedSink>(
                            std::make_shared<spdlog::sinks::ostream_sink_st>(out_),
                            LimitedSink::Limit{0.001, 10}, LimitedSink::Limit{0.001, 40})) {
    logger_.set_pattern("%v");
  }
  size_t lines() const {
    const std::string text = out_.str();
    return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  }
  std::ostringstream out_;
  spdlog::logger logger_;
};

TEST_F(LogLimitTest, OneThatRepeatsDoesNotCrowdOutOthers) {
  for (int i = 0; i < 1000; ++i) logger_.warn("reading 'file {}' at byte {} failed", i, 7 * i);
  EXPECT_EQ(lines(), 10u);
  logger_.info("something else");
  EXPECT_THAT(out_.str(), HasSubstr("something else"));
}

TEST_F(LogLimitTest, AllTogetherHaveALimit) {
  const std::string letters = "abcdefghijklmnopqrstuvwxyz";
  for (char a : letters)
    for (char b : letters) logger_.warn("line {}{}", a, b);
  EXPECT_EQ(lines(), 40u);
}

TEST_F(LogLimitTest, ANameIsNoLineOfItsOwn) {
  logger_.warn("'{}' is not kept", "x\n2026-11-23 error the store is lost\x1b[2J\xff");
  logger_.info("caf\u00e9");
  EXPECT_EQ(lines(), 2u);
  for (const char bad : {'\x1b', '\xff'}) EXPECT_EQ(out_.str().find(bad), std::string::npos);
  EXPECT_THAT(out_.str(), HasSubstr("caf\u00e9"));
}

TEST_F(LogLimitTest, ALineMayBeAnObject) {
  set_format(logger_, LogFormat::kJson);
  logger_.warn("'{}' is \"not\" kept", "x\ny\\");
  const std::string text = out_.str();
  const boost::json::object line = boost::json::parse(text).as_object();
  EXPECT_EQ(line.at("level").as_string(), "warning");
  EXPECT_THAT(std::string(line.at("message").as_string()), HasSubstr("is \"not\" kept"));
  // 2026-01-31T12:00:00.123+01:00
  EXPECT_THAT(std::string(line.at("time").as_string()),
              testing::MatchesRegex("....-..-..T..:..:......[+-]..:.."));
  EXPECT_EQ(lines(), 1u);
}

TEST(LogLimit, SaysHowManyWereLeftOut) {
  std::ostringstream out;
  auto inner = std::make_shared<spdlog::sinks::ostream_sink_st>(out);
  LimitedSink sink(inner, {10, 2}, {100, 100});
  sink.set_pattern("%v");
  auto log_at = [&](int ms) {
    spdlog::details::log_msg message("test", spdlog::level::info, "again");
    message.time = spdlog::log_clock::now() + std::chrono::milliseconds(ms);
    sink.log(message);
  };
  for (int i = 0; i < 20; ++i) log_at(0);
  log_at(5000);
  EXPECT_EQ(out.str(), "again\nagain\nagain\n18 more such lines were left out\n");
}

}  // namespace
}  // namespace ptc
