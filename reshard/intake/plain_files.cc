#include <algorithm>

#include "reshard/checkpoint/file_format.h"
#include "reshard/intake/tree_format.h"

namespace ptc {
namespace {

/// What no other row has: each file is what file_format.h says, and of its rank.
class PlainFiles final : public TreeFormat {
 public:
  std::string_view name() const override { return "plain files"; }

  /// Whether files are right here that a framework may have left, as far as this node can tell:
  /// weights may be on another (flat_files.h). `beside_others`: whatever is here, which is looked
  /// at then, as links and sockets are no files that a commit could leave out.
  bool is_there(const NamesThere& names, bool beside_others) const override {
    bool any = false;
    for (const std::string& name : names.top()) {
      if (tree_of_part(name) != nullptr) return false;
      any = any || (name != "layout.json" && name != kConsumedFile &&
                    (beside_others ? names.has(name) : names.has_file(name)));
    }
    return any;
  }

  bool shows(const Found& file) const override {
    return file.at.find('/') == file.at.npos && may_be_torch(file.at);
  }

  bool reads(const std::vector<Found>&) const override { return true; }
  /// Arrays, or where there are none what torch.save wrote.
  Result<> read(const FileReader& files, std::vector<Found>& found, Executor& executor,
                std::stop_token stop) const override {
    const bool torch = torch_files_count(found);
    for (Found& file : found)
      file.has_tensors = torch ? may_be_torch(file.path) : is_one_array(file.path);
    return read_files(files.dir_fd(), found, torch, executor, std::move(stop));
  }
};

}  // namespace

const TreeFormat& plain_files() {
  static const PlainFiles files;
  return files;
}

}  // namespace ptc
