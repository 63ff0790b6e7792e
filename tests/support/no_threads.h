// A machine on which no further thread can be had.
#pragma once

namespace ptc::testing {

/// While it lives, pthread_create() fails with EAGAIN, in the whole process, once `more` have been
/// made.
class NoThreads {
 public:
  explicit NoThreads(int more = 0);
  ~NoThreads();
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

  /// How often it has failed so far.
  static int refused();
};

}  // namespace ptc::testing
