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

/// While it lives, a signal that would end the program sets `interrupted`; one that is ignored (by
/// nohup) stays so. kFirst: of each kind only the first, and the next one ends the program.
class Interruptions {
 public:
  enum Which { kAll, kFirst };
  explicit Interruptions(Which which = kAll) {
    struct sigaction note {};
    note.sa_handler = [](int) { interrupted = true; };
    note.sa_flags = which == kFirst ? static_cast<int>(SA_RESETHAND) : 0;
    for (size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &note, nullptr);
    }
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
