// What nodes can rely on when they ask many at the same time, however these are reached: by calls
// of functions, over TCP, in the simulator.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "reshard/cluster/cluster.h"

namespace ptc::testing {

/// What it takes, and of what row: it answers at once, and may be asked `deadline` long.
struct ManyAsked {
  static constexpr size_t kSilent = 300, kWell = 50;
  static_assert(kSilent > kAtWorkAtOnce, "some of them wait for their turn");

  /// As Cluster::ask_all(), of that row.
  std::function<std::vector<Result<std::string>>(const std::vector<Cluster::Question>&,
                                                 std::chrono::milliseconds at_most, AfterAnswer)>
      ask_all;
  std::string silent, well;  // nodes
  std::chrono::milliseconds deadline;

  std::vector<Cluster::Question> questions() const {
    std::vector<Cluster::Question> all(kSilent, {silent, ""});
    all.insert(all.end(), kWell, {well, ""});
    return all;
  }

  /// The time of each begins when it is asked.
  std::string those_that_are_well_answer() const {
    const auto answers = ask_all(questions(), {}, {});
    if (answers.size() != kSilent + kWell) return "not one answer each";
    for (size_t i = 0; i < answers.size(); ++i) {
      if (answers[i].has_value() == (i >= kSilent)) continue;
      return fmt::format("{}: {}", i, answers[i] ? "answered" : answers[i].error().message());
    }
    return "";
  }

  /// Who asks waits no longer than he said, whoever has not been asked by then.
  std::string who_asks_waits_no_longer_than_he_said() const {
    const auto begun = std::chrono::steady_clock::now();
    const auto answers = ask_all(questions(), deadline, {});
    const auto took = std::chrono::steady_clock::now() - begun;
    if (took > deadline + deadline / 2) return "it took longer";
    for (const Result<std::string>& answer : answers)
      if (answer.has_error() && answer.error().code() != Code::kUnavailable)
        return answer.error().message();
    if (answers.back().has_value()) return "there was time to ask the last one";
    if (answers.back().error().message().find("no time left") == std::string::npos)
      return answers.back().error().message();
    return "";
  }

  /// Whom the answer before brings another question is asked that, whatever the others do.
  std::string each_is_asked_on_by_itself() const {
    constexpr size_t kTimes = 3;
    std::vector<Cluster::Question> all(kWell, {well, ""});
    all.push_back({silent, ""});
    std::vector<size_t> answered(all.size());
    std::atomic<bool> silent_is_last = false;
    std::atomic<size_t> done = 0;
    const auto answers = ask_all(all, {}, [&](size_t i, const auto& answer) {
      std::optional<NextCall> next;
      if (answer.has_value() && ++answered[i] < kTimes) next = NextCall{"", kFor1Ms};
      else if (answer.has_value()) ++done;
      else silent_is_last = done == kWell;
      return next;
    });
    for (size_t i = 0; i < kWell; ++i)
      if (answered[i] != kTimes || answers[i].has_error())
        return fmt::format("{} has answered {} times", i, answered[i]);
    if (answers.back().has_value() || answered.back() != 0) return "who is silent answers";
    return silent_is_last ? "" : "they wait for the one that is silent";
  }
  static constexpr std::chrono::milliseconds kFor1Ms{1};
};

}  // namespace ptc::testing
