// What keeps a log small, whatever happens and however often.
#pragma once

#include <spdlog/sinks/base_sink.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace ptc {

/// Passes lines on to another sink: all of them while there are few; of more than `burst` that came
/// faster than `per_second`, none, and then a line that says how many. Lines that differ in nothing
/// but numbers and what is quoted count apart from the others first: one that repeats does not
/// crowd out the rest.
class LimitedSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  struct Limit {
    double per_second, burst;
  };
  explicit LimitedSink(spdlog::sink_ptr to, Limit one_kind = {5, 50}, Limit all = {50, 500});

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override;
  void flush_() override { to_->flush(); }
  void set_pattern_(const std::string& pattern) override { to_->set_pattern(pattern); }
  void set_formatter_(std::unique_ptr<spdlog::formatter> formatter) override {
    to_->set_formatter(std::move(formatter));
  }

 private:
  using Time = spdlog::log_clock::time_point;
  struct Bucket {
    double left;
    Time since;
    uint64_t left_out = 0;
    /// Whether one more fits.
    bool take(const Limit& limit, Time now);
  };
  void say_left_out(Bucket& bucket, const spdlog::details::log_msg& like);

  const spdlog::sink_ptr to_;
  const Limit one_kind_, all_;
  Bucket bucket_;
  std::unordered_map<size_t, Bucket> kinds_;  // by hash
};

}  // namespace ptc
