// On whose behalf something is done: what a kernel checks permissions by.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

struct User {
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // supplementary
  friend bool operator==(const User&, const User&) = default;

  /// "1000 100 27,44": persisted.
  std::string to_text() const;
  /// kCorrupt.
  static Result<User> from_text(std::string_view text);
};

/// The user of a process that waits for an answer, so that it is there as long as this takes. Where
/// it cannot be seen, or changes its identity meanwhile, the groups are those that the machine's
/// user database has.
User user_of(pid_t pid, uid_t uid, gid_t gid);
User user_by_database(uid_t uid, gid_t gid);

/// As long as it lives, this thread opens, lists and looks up files as that user: file system ids
/// and supplementary groups, no others. The capabilities that overrule permissions are off
/// meanwhile, but for root. Threads that are started meanwhile would keep all that: start none.
/// Within one of the same user another one costs nothing. The user outlives it.
class ActingAs {
 public:
  /// kPermissionDenied: this process may not become somebody else.
  static Result<ActingAs> user(const User& user);
  static ActingAs itself() { return {}; }
  ~ActingAs();
  ActingAs(ActingAs&& other) noexcept;
  ActingAs& operator=(ActingAs&&) = delete;

 private:
  ActingAs() = default;
  const User* before_ = nullptr;
  bool changed_ = false;
};

}  // namespace ptc
