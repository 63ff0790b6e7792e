#include "store/base/user.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/securebits.h>
#include <pwd.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>
#include <utility>

#include "store/base/decimal.h"
#include "store/base/file.h"

namespace ptc {
namespace {

constexpr size_t kMostGroups = 65536;  // NGROUPS_MAX

/// As it was when this was first asked, which is before any thread became somebody else.
const User& own_user() {
  static const User user = [] {
    User own{::geteuid(), ::getegid(), {}};
    own.groups.resize(static_cast<size_t>(std::max(0, ::getgroups(0, nullptr))));
    const int count = ::getgroups(static_cast<int>(own.groups.size()), own.groups.data());
    own.groups.resize(static_cast<size_t>(std::max(0, count)));
    return own;
  }();
  return user;
}

/// Who this thread acts as; null: as the process does.
thread_local const User* acting = nullptr;

/// Of this thread alone: glibc's setgroups() would change all.
bool set_groups(const std::vector<gid_t>& groups) {
  return ::syscall(SYS_setgroups, groups.size(), groups.data()) == 0;
}

/// These report no failure, but a number that is none changes nothing and tells what is.
bool set_ids(uid_t uid, gid_t gid) {
  ::setfsgid(gid);
  ::setfsuid(uid);
  return static_cast<gid_t>(::setfsgid(static_cast<gid_t>(-1))) == gid &&
         static_cast<uid_t>(::setfsuid(static_cast<uid_t>(-1))) == uid;
}

/// Whether CAP_DAC_OVERRIDE and its like go with file system id 0, and come back with it.
bool capabilities_follow() {
  static const bool follow = (::prctl(PR_GET_SECUREBITS) & SECBIT_NO_SETUID_FIXUP) == 0;
  return follow;
}

void become_own() {
  const User& own = own_user();
  const bool back = set_ids(own.uid, own.gid) && set_groups(own.groups);
  PTC_CHECK(back);  // it would go on as somebody else
}

/// To less than the process can do from it: the way back is open. False, and as before: it has no
/// right to.
bool become(const User& user) {
  if (!set_groups(user.groups)) return false;
  if (set_ids(user.uid, user.gid)) return true;
  become_own();
  return false;
}

std::vector<std::string_view> words_of(std::string_view text, std::string_view separators) {
  std::vector<std::string_view> words;
  while (true) {
    text.remove_prefix(std::min(text.find_first_not_of(separators), text.size()));
    if (text.empty()) return words;
    const size_t end = std::min(text.find_first_of(separators), text.size());
    words.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
}

/// uid_t and gid_t but for -1, which stands for none.
std::optional<uint32_t> id_of(std::string_view text) {
  const std::optional<uint64_t> number = parse_count(text);
  if (!number || *number >= UINT32_MAX) return std::nullopt;
  return static_cast<uint32_t>(*number);
}

/// The file system id in "Uid:\t<real>\t<effective>\t<saved>\t<file system>".
bool has_id(std::string_view line, uint32_t id) {
  const auto words = words_of(line, " \t");
  return words.size() == 5 && id_of(words[4]) == id;
}

std::optional<std::vector<gid_t>> groups_of_process(pid_t pid, uid_t uid, gid_t gid) {
  if (pid <= 0) return std::nullopt;
  constexpr size_t kMostStatus = 1 << 20;
  const auto status = read_text_file(AT_FDCWD, fmt::format("/proc/{}/status", pid), kMostStatus);
  if (!status) return std::nullopt;
  bool same_user = false, same_group = false;
  std::optional<std::vector<gid_t>> groups;
  for (const std::string_view line : words_of(status.value(), "\n")) {
    if (line.starts_with("Uid:")) same_user = has_id(line, uid);
    if (line.starts_with("Gid:")) same_group = has_id(line, gid);
    if (!line.starts_with("Groups:")) continue;
    groups.emplace();
    const auto words = words_of(line.substr(line.find(':') + 1), " \t");
    for (const std::string_view word : words)
      if (const auto group = id_of(word)) groups->push_back(*group);
  }
  return same_user && same_group ? groups : std::nullopt;
}

}  // namespace

std::string User::to_text() const {
  std::string text = fmt::format("{} {} ", uid, gid);
  for (size_t i = 0; i < groups.size(); ++i)
    fmt::format_to(std::back_inserter(text), "{}{}", i == 0 ? "" : ",", groups[i]);
  return text;
}

Result<User> User::from_text(std::string_view text) {
  const auto words = words_of(text, " ");
  const auto groups = words.size() == 3 ? words_of(words[2], ",") : std::vector<std::string_view>();
  bool good = (words.size() == 2 || words.size() == 3) && groups.size() <= kMostGroups;
  User user;
  const auto take = [&](std::string_view word) {
    const auto id = id_of(word);
    good = good && id.has_value();
    return id.value_or(0);
  };
  if (good) {
    user.uid = take(words[0]);
    user.gid = take(words[1]);
    for (const std::string_view group : groups) user.groups.push_back(take(group));
  }
  if (!good)
    return make_error(Code::kCorrupt, "'{}' does not name a user and groups", text.substr(0, 100));
  return user;
}

User user_by_database(uid_t uid, gid_t gid) {
  User user{uid, gid, {}};
  std::vector<char> buffer(64 << 10);
  passwd entry{};
  passwd* found = nullptr;
  if (::getpwuid_r(uid, &entry, buffer.data(), buffer.size(), &found) != 0 || found == nullptr)
    return user;
  int count = 64;
  do {
    user.groups.resize(static_cast<size_t>(count));
  } while (::getgrouplist(found->pw_name, gid, user.groups.data(), &count) < 0 &&
           count > static_cast<int>(user.groups.size()) && count <= static_cast<int>(kMostGroups));
  user.groups.resize(
      static_cast<size_t>(std::clamp<int>(count, 0, static_cast<int>(user.groups.size()))));
  std::sort(user.groups.begin(), user.groups.end());
  return user;
}

User user_of(pid_t pid, uid_t uid, gid_t gid) {
  auto groups = groups_of_process(pid, uid, gid);
  if (!groups) return user_by_database(uid, gid);
  std::sort(groups->begin(), groups->end());
  return {uid, gid, std::move(*groups)};
}

Result<ActingAs> ActingAs::user(const User& user) {
  ActingAs as;
  as.before_ = acting;
  const User& own = own_user();
  const User& now = acting != nullptr ? *acting : own;
  // Root is root whatever its groups are; a process without rights of root has the groups that it
  // has.
  const bool same = now.uid == user.uid && (now == user || user.uid == 0 || own.uid != 0);
  if (same) return as;
  if (acting == nullptr && own.uid == 0 && capabilities_follow()) {
    as.changed_ = become(user);
    if (as.changed_) {
      acting = &user;
      return as;
    }
  }
  return Error(
      Code::kPermissionDenied,
      fmt::format("ptcfs runs as uid {} here and may not read as uid {}", own.uid, user.uid),
      EACCES);
}

ActingAs::ActingAs(ActingAs&& other) noexcept
    : before_(other.before_), changed_(std::exchange(other.changed_, false)) {}

ActingAs::~ActingAs() {
  if (!changed_) return;
  become_own();
  acting = before_;
}

}  // namespace ptc
