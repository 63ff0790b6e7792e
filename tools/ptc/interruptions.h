// Signals that would end the program, while it has something to put right first.
#pragma once

#include <array>
#include <atomic>
#include <csignal>

namespace ptc::cli {

inline std::atomic<bool> interrupted = false;

/// While it lives, a signal that would end the program sets `interrupted`.
class Interruptions {
 public:
  Interruptions() {
    struct sigaction note {};
    note.sa_handler = [](int) { interrupted = true; };
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &note, &before_[i]);
  }
  Interruptions(const Interruptions&) = delete;
  ~Interruptions() {
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
  }

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace ptc::cli
