// Signals that would end the program, while it has something to put right first.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <string>
#include <utility>

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

/// While it lives, a signal that ends the program says this before.
class LastWords {
 public:
  explicit LastWords(std::string words) {
    words_ = std::move(words);
    struct sigaction say {};
    say.sa_handler = [](int signal) {
      (void)!::write(2, words_.data(), words_.size());
      ::raise(signal);
    };
    say.sa_flags = static_cast<int>(SA_RESETHAND);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::sigaction(signal, &say, nullptr);
  }
  LastWords(const LastWords&) = delete;
  ~LastWords() {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_DFL);
  }

 private:
  static inline std::string words_;
};

}  // namespace ptc::cli
