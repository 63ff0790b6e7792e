// Who asked --http for what: a line for each request, in a file or on standard output.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "store/base/error.h"

namespace ptc {

/// A request that was answered.
struct HttpAccess {
  std::chrono::system_clock::time_point when;  // it was there
  std::string client;                          // its address, without the port
  std::string method, path;  // as they came, with the query; empty: it was no request
  unsigned status = 0;
  uint64_t bytes = 0;  // of the answer, with its header; of one that was broken off what was sent
  double seconds = 0;  // until that was sent
};

enum class AccessFormat {
  kText,  // 2026-01-31T12:00:00.123+01:00 127.0.0.1 GET /metrics 200 18211 0.004
  kJson,  // {"time":"2026-01-31T12:00:00.123+01:00","client":"127.0.0.1","method":"GET", …
};

/// Without the end of the line. Text has "-" for what is empty, and what is no text, or would end a
/// word, as \xNN.
std::string access_line(const HttpAccess& access, AccessFormat format);

/// Writes on a thread of its own: a disk that hangs holds up no answer. What it has not written by
/// then is bounded; what goes beyond is left out, and the log says how much. Threads: any.
class AccessLog {
 public:
  /// `path`: a file that is appended to, made with mode 0600, and made anew once it was renamed or
  /// removed, as logrotate does; "-": standard output. Errors say what cannot be opened.
  static Result<std::unique_ptr<AccessLog>> open(const std::string& path, AccessFormat format);
  /// Writes what it has, as far as that is done within a second.
  ~AccessLog();

  /// Waits for nothing.
  void note(HttpAccess access);

 private:
  struct Impl;
  explicit AccessLog(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;  // the writer has it, too
};

}  // namespace ptc
