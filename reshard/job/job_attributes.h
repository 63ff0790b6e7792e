// Owner, group and mode of what ptcfs itself names in a job: agreed on, so that they are the same
// on all nodes.
//
// In the metadata under jobs/<job>/attributes: {"": {"uid": 1000, "gid": 1000, "mode": 488},
// "layout.json": {"mode": 384, "changes": 2}, …}. Names are below the job's directory, which is "".
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// What is not there was never changed.
struct FileAttributes {
  std::optional<uint32_t> uid, gid, mode;  // mode: of 07777
  std::optional<std::string>
      quota;  // of the job, and its alone: what it may have on each node; empty: as the mount says
  std::optional<uint32_t> changes;  // of a text: how often these were decided
  friend bool operator==(const FileAttributes&, const FileAttributes&) = default;
  bool empty() const { return !uid && !gid && !mode && !quota; }
  void update(const FileAttributes& change) {
    if (change.uid) uid = change.uid;
    if (change.gid) gid = change.gid;
    if (change.mode) mode = change.mode;
    if (change.quota) quota = change.quota;
    if (change.changes) changes = change.changes;
  }
};

/// A text's mode that lets less than it did.
struct NarrowedMode {
  uint32_t before = 0;
  FileAttributes left;  // what there is now; another, and somebody has decided since
};

/// Of layout.json and its like, unless another is agreed on.
inline constexpr uint32_t kTextMode = 0644;

/// A value.
class JobAttributes {
 public:
  FileAttributes of(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? FileAttributes() : found->second;
  }
  bool has(std::string_view name) const { return by_name_.contains(name); }
  void update(const std::string& name, const FileAttributes& change) {
    by_name_[name].update(change);
  }

  /// The same as somebody's decision; of a text it shows that there was one, whatever it changes.
  void decide(const std::string& name, const FileAttributes& change) {
    update(name, change);
    FileAttributes& now = by_name_[name];
    if (is_text(name)) now.changes = (now.changes.value_or(0) + 1) % UINT16_MAX;
  }

  /// False: there was nothing.
  bool erase(std::string_view name) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return false;
    by_name_.erase(found);
    return true;
  }

  /// While texts change from what they were with `before` to what they are with these: nobody reads
  /// one that is closed to him.
  JobAttributes meanwhile(const JobAttributes& before) const {
    JobAttributes both = *this;
    for (const auto* all : {&before.by_name_, &by_name_})
      for (const auto& [name, attributes] : *all)
        if (is_text(name))
          both.by_name_[name].mode =
              before.of(name).mode.value_or(kTextMode) & of(name).mode.value_or(kTextMode);
    return both;
  }

  /// Texts that somebody may read now who could not with `before`, perhaps: by their own modes,
  /// owners and groups, or those of the directories that lead to them. The job's owner reads what
  /// status.json quotes of them, whatever their modes.
  std::vector<std::string> opened_since(const JobAttributes& before) const;

  std::string to_text() const;
  /// kCorrupt.
  static Result<JobAttributes> from_text(std::string_view text);
  friend bool operator==(const JobAttributes&, const JobAttributes&) = default;

 private:
  static bool is_text(std::string_view name) {
    return name.find_first_of("./") != std::string_view::npos;
  }
  bool opens(std::string_view text, const JobAttributes& before) const;
  std::map<std::string, FileAttributes, std::less<>> by_name_;
};

}  // namespace ptc
