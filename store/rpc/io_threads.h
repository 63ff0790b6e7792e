// The few threads that wait for the network, whatever the number of peers.
#pragma once

#include <memory>

#include "store/rpc/task.h"

namespace ptc {

/// Threads: any. It is destroyed when nothing runs on it any more.
class IoThreads {
 public:
  /// As many as there are cores, from 2 to 8. kUnavailable: this machine lacks threads or descriptors.
  static Result<std::shared_ptr<IoThreads>> start();
  ~IoThreads();

  /// One that runs one thing at a time, beside others: for a connection, or a stream and its connection.
  IoExecutor new_strand();

 private:
  struct Impl;
  explicit IoThreads(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
