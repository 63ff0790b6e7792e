// Who keeps writers away from files while they are committed.
#pragma once

#include <functional>
#include <memory>

#include "store/base/error.h"

namespace ptc {

/// As long as it lives nobody opens a file of the directory for writing, nor changes a directory in
/// it. Threads: any.
class Seal {
 public:
  virtual ~Seal() = default;
  /// For good: the files are part of a checkpoint now, and what the kernel still knows of them is
  /// read-only.
  virtual void committed() = 0;
};

/// Asked when somebody wants to write what is sealed. true: the seal is broken by now, and they go
/// on; else EBUSY.
using GivesWay = std::function<bool()>;
/// kBusy: a file is open or mapped for writing. null: nobody but the job reaches the files.
using MakeSeal = std::function<Result<std::unique_ptr<Seal>>(GivesWay)>;

}  // namespace ptc
