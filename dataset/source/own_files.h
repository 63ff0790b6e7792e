// Shards that ptcfs itself shows cannot be read: reading a sample would wait for a read through a
// mount, perhaps this one, and with enough of those nothing would be left to answer them.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// The mounts of ptcfs when it was made. Threads: one.
class OwnFiles {
 public:
  /// As /proc/self/mountinfo says; the other: as this text of that form does.
  OwnFiles();
  explicit OwnFiles(std::string_view mountinfo);

  /// kInvalidArgument where the path leads, symbolic links followed, into such a mount. Nothing
  /// below one is looked at. A path that is not there is ok.
  Result<> refuse(const std::string& path);
  /// The same for a text of "shards": also where a glob would look there.
  Result<> refuse_pattern(const std::string& pattern);

 private:
  /// The mount in which the path ends, nullptr: in none.
  const std::string* mount_of(const std::string& path);

  std::vector<std::string> mounts_;
  std::set<std::string> elsewhere_;  // directories known to lie in none
};

}  // namespace ptc
