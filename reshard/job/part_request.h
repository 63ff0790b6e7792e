// What a node is asked for that makes its part of a plan.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "reshard/move/change.h"
#include "store/base/error.h"

namespace ptc {

struct PartRequest {
  std::string id;  // of the checkpoint
  int64_t generation = 0;
  std::string stored;  // the file that says where its bytes lie
  int64_t revision = 0;
  WantedState wanted;  // without nothing_leaves
  int64_t epoch = 0;   // of who leads
  /// Of a commit, which is not led, and which no edit ends: who commits.
  struct Commit {
    std::string from;
    int64_t fence = 0;
  };
  std::optional<Commit> commit = {};

  /// What shall be made, and of what; not for whom. Who asks and who is asked have the same text.
  std::string plan_text() const;
  std::string to_text() const;
  /// kInvalidArgument: it is damaged.
  static Result<PartRequest> from_text(std::string_view text);
};

}  // namespace ptc
