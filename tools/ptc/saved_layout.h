// layout.json of a job, read to be saved again, where others may save it at the same time.
#pragma once

#include <cstdint>
#include <string>

#include "store/base/error.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {

/// layout.json at one moment.
struct SavedLayout {
  std::string text;
  uint64_t revision = 0;  // of status.json: one more with each save of another text
  std::string wanted;     // the name of the layout it says
  bool removed = false;   // the name is gone, by rm or mv: `wanted` is so still; no text
  bool in_force = false;

  /// "layout.json of llama was removed; …", and how it is written again.
  std::string removed_text(const std::string& job) const;
  /// As an object; of one that was removed what its name says of the layout. kInvalidArgument: that
  /// says not all.
  Result<json::object> layout() const;
};

/// kUnavailable: it is saved again and again just now.
Result<SavedLayout> read_saved_layout(const Target& target);

/// Saves as an editor would. Refused: kInvalidArgument. The reason is that of status.json.
/// kConflict: it could not be decided; where somebody else decided first, the revision is another.
/// `make`: the name is gone.
Result<> save_layout(const Target& target, const std::string& text, bool make);

/// After kConflict: until this node, too, knows of another revision than that of `before`, or for a
/// second: then it was something else that kept it from being decided.
void wait_for_another(const Target& target, const SavedLayout& before);

/// Held from reading to saving, so that edits by `ptc layout` on one machine come one after
/// another: a flock(2) of the job's directory, which the kernel keeps. Others do not ask for it:
/// editors, and `ptc` on other nodes. There a save rests on the revision that its node knows when
/// the file is closed, and is refused where another node's came first (kConflict). An edit that
/// comes to this node between our last look and our close is replaced; the revision, which is two
/// more then, tells, and whoever edits is told. Whoever may read the directory may hold the lock,
/// so after some seconds it is gone without.
class LayoutLock {
 public:
  explicit LayoutLock(const Target& target);

 private:
  UniqueFd directory_;
};

/// Whether a text that was saved after `ours`, which was made of `before`, was made of `before`,
/// too: all that ours changed is in it as it was.
bool undoes(const json::object& later, const json::object& before, const json::object& ours);

}  // namespace ptc::cli
