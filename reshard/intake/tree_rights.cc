#include "reshard/intake/tree_rights.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/walk_tree.h"

namespace ptc {

std::optional<ReadRights> rights_of(const struct stat& facts) {
  uint32_t mode = facts.st_mode & 0444;
  if (S_ISDIR(facts.st_mode))  // its names, and what they stand for
    mode &= (facts.st_mode & 0111) << 2;
  else if (S_ISLNK(facts.st_mode)) return std::nullopt;
  if ((mode | 0400) == 0444) return std::nullopt;
  return ReadRights{facts.st_uid, facts.st_gid, mode | 0400};
}

std::optional<ReadRights> narrowed(const std::optional<ReadRights>& one,
                                   const std::optional<ReadRights>& other) {
  if (!one || !other) return one ? one : other;
  return one->narrowed_to(*other);
}

std::optional<ReadRights> rights_of_tree(int dir_fd, const std::string& name) {
  struct stat facts = {};
  if (::fstatat(dir_fd, name.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) return std::nullopt;
  std::optional<ReadRights> rights = rights_of(facts);
  if (!S_ISDIR(facts.st_mode)) return rights;
  const Result<UniqueFd> top = open_file(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  const bool all = top.has_value() &&
                   walk_tree(top.value().get(), [&](int, const char*, const struct stat& entry) {
                     rights = narrowed(rights, rights_of(entry));
                     return true;
                   }).has_value();
  if (!all) rights = narrowed(rights, ReadRights{facts.st_uid, facts.st_gid, 0400});
  return rights;
}

std::string rights_text(const std::optional<ReadRights>& rights) {
  if (!rights) return "";
  return json::serialize(
      json::object{{"uid", rights->uid}, {"gid", rights->gid}, {"mode", rights->mode}});
}

Result<std::optional<ReadRights>> rights_from_text(std::string_view text) {
  if (text.empty()) return std::optional<ReadRights>();
  PTC_TRY(const auto value, parse_json(text));
  try {
    const json::object& object = value.as_object();
    return std::optional(ReadRights{object.at("uid").to_number<uint32_t>(),
                                    object.at("gid").to_number<uint32_t>(),
                                    (object.at("mode").to_number<uint32_t>() & 0444) | 0400});
  } catch (const std::exception& error) {
    return make_error(Code::kCorrupt, "rights that are none: {}", error.what());
  }
}

}  // namespace ptc
