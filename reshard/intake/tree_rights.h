// Who may know what lies in a directory of incoming/: others are told no names of it.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>
#include <string_view>

#include "reshard/checkpoint/manifest.h"
#include "store/base/error.h"

namespace ptc {

/// Who may list a directory, or read a file; nullopt: everybody. Its owner always may.
std::optional<ReadRights> rights_of(const struct stat& facts);

/// Who may list every directory and read every file of `name` in `dir_fd`, and of all below it;
/// nullopt: everybody, or it is not there. What cannot be looked at is its owner's
/// alone.
std::optional<ReadRights> rights_of_tree(int dir_fd, const std::string& name);

/// The most that both allow.
std::optional<ReadRights> narrowed(const std::optional<ReadRights>& one,
                                   const std::optional<ReadRights>& other);

/// For another node; of everybody: empty.
std::string rights_text(const std::optional<ReadRights>& rights);
Result<std::optional<ReadRights>> rights_from_text(std::string_view text);

}  // namespace ptc
