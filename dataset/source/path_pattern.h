// Patterns of paths, as shells and WebDataset have them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/source/source_access.h"
#include "store/base/error.h"

namespace ptc {

/// What all of "shards" may stand for together: two million paths, 256 MiB of them. Threads: one.
class PathBudget {
 public:
  /// kInvalidArgument: that is more than is left.
  Result<> take(uint64_t paths, uint64_t bytes);

 private:
  uint64_t paths_ = 2'000'000, bytes_ = uint64_t{256} << 20;
};

/// What braces stand for, in order: "{000..012}", "{0..10..2}", "{a..e}", "{train,val}", also
/// within each other. With a leading zero all numbers are as wide as the wider one. Braces that are
/// neither stay as they are. The paths are made one by one; how many they are is known before.
/// Immutable.
class BracePattern {
 public:
  /// kInvalidArgument: more than a million paths, or it, or one of them, is longer than a path can
  /// be (PATH_MAX).
  static Result<BracePattern> parse(const std::string& pattern);
  /// Stands for just this text.
  static Result<BracePattern> literal(const std::string& path);

  uint64_t count() const { return size_.count; }
  uint64_t bytes() const { return size_.bytes; }  // of all paths together, or somewhat more
  /// Until visit() returns false, which this then returns, or an error.
  Result<bool> each(const std::function<Result<bool>(const std::string&)>& visit) const;

 private:
  struct Range;
  struct Piece;
  using Sequence = std::vector<Piece>;
  struct Size {
    uint64_t count = 1, bytes = 0, longest = 0;
  };
  class Parser;
  class Walk;

  std::shared_ptr<const Sequence> pieces_;
  Size size_;
};

/// Whether it has '*', '?' or '['.
bool has_wildcards(std::string_view pattern);

/// The paths that match, sorted; where the pattern ends with '/', directories, without it. A '.' at
/// a name's beginning is matched by nothing but itself. kPermissionDenied: a directory on the way
/// cannot be listed; kInvalidArgument: more than `budget`, of which they are taken; kCancelled:
/// stop.
Result<std::vector<std::string>> matching_paths(const SourceAccess& access,
                                                const std::string& pattern, PathBudget& budget,
                                                const std::stop_token& stop);

}  // namespace ptc
