// The few threads that wait for the network, whatever the number of peers.
#pragma once

#include <memory>

#include "store/net/task.h"

namespace ptc {

/// Threads: any. It is destroyed when nothing runs on it any more.
class IoThreads {
 public:
  /// As many as there are cores, from 2 to 4: an idle node has 16 threads at most. kUnavailable:
  /// this machine lacks threads or descriptors.
  static Result<std::shared_ptr<IoThreads>> start();
  /// `name`: of each, as `top` shows it.
  static Result<std::shared_ptr<IoThreads>> start(unsigned count, const char* name = "ptcfs-net");
  ~IoThreads();

  /// That of one of the threads, each in turn: for a connection, or a stream and its connection. No
  /// thread ever wakes another one (a shared queue cost a stream a tenth of its speed).
  IoExecutor next();

 private:
  struct Impl;
  explicit IoThreads(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
