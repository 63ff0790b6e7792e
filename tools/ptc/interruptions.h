// Signals that would end the program, while it has something to put right first.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <deque>
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

/// While it lives, a signal that ends the program says something before.
class LastWords {
 public:
  explicit LastWords(std::string words) {
    say(std::move(words));
    struct sigaction note {};
    note.sa_handler = [](int signal) {
      const std::string& text = *words_.load();
      (void)!::write(2, text.data(), text.size());
      ::raise(signal);
    };
    note.sa_flags = static_cast<int>(SA_RESETHAND);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::sigaction(signal, &note, nullptr);
  }
  LastWords(const LastWords&) = delete;
  ~LastWords() {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_DFL);
  }
  /// From now on this.
  void say(std::string words) { words_ = &all_.emplace_back(std::move(words)); }

 private:
  static inline std::atomic<const std::string*> words_;
  std::deque<std::string> all_;  // none moves
};

}  // namespace ptc::cli
