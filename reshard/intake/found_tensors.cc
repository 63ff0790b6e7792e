#include <sys/xattr.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <tuple>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/shard_boxes.h"
#include "reshard/intake/box_sets.h"
#include "reshard/intake/found_files.h"
#include "reshard/intake/tree_format.h"
#include "store/base/file.h"
#include "store/base/file_kind.h"
#include "store/codec/tensor_path.h"

namespace ptc {
namespace {

/// What the user attribute says that the elements of an .npy are.
Result<std::optional<DType>> declared_dtype_of(int fd, const Found& file) {
  std::optional<DType> declared;
  if (!is_one_array(file.path)) return declared;
  char text[32];
  const ssize_t length = fgetxattr(fd, "user.ptc.dtype", text, sizeof text);
  if (length > 0) {
    PTC_TRY(declared, parse_dtype({text, static_cast<size_t>(length)}));
  }
  return declared;
}

/// All but the bytes that are in its outline.
void take_what_is_said(FileTensors said, Found& file) {
  said.literals = Literals();
  static_cast<FileTensors&>(file) = std::move(said);
}

Result<> read_outline(int fd, Found& file) {
  const FileFormat& format = format_of(file.path, !file.set.empty());
  const ReadAt read = [fd](uint64_t offset, std::span<std::byte> into) {
    return read_exactly(fd, into, offset);
  };
  PTC_TRY(const auto declared, declared_dtype_of(fd, file));
  PTC_TRY(file.header, format.outline(read, file.version.bytes, declared));
  PTC_TRY(auto tensors, format.tensors({file.header, file.version.bytes}, file.path, declared));
  take_what_is_said(std::move(tensors), file);
  return ok();
}

bool is_same(const TensorEntry& a, const TensorEntry& b) {
  return std::tie(a.name, a.dtype, a.shape, a.offset, a.bytes) ==
         std::tie(b.name, b.dtype, b.shape, b.offset, b.bytes);
}

/// What the file is, if that is known and no array.
std::string_view other_kind(int fd, const Found& file) {
  std::string beginning(std::min<uint64_t>(kFileKindBytes, file.version.bytes), '\0');
  if (!read_exactly(fd, std::as_writable_bytes(std::span(beginning)), 0)) return {};
  return other_kind_of(beginning);
}

}  // namespace

Result<> read_header(int dir_fd, Found& file) {
  PTC_TRY(const UniqueFd fd, FileToHash(dir_fd, file.source(), file.version).open());
  Result<> read = read_outline(fd.get(), file);
  if (read.has_error() && read.error().code() == Code::kInvalidArgument &&
      !may_be_torch(file.path)) {
    if (const std::string_view kind = other_kind(fd.get(), file); !kind.empty())
      return invalid_argument("{}", kind);
  }
  PTC_TRY(std::move(read));
  file.header_bytes = file.header.size();
  for (const TensorEntry& tensor : file.tensors) {
    PTC_TRY(tensor_path(tensor.name));
  }
  return ok();
}

Result<> read_if_torch(int dir_fd, Found& file) {
  Result<> read = read_header(dir_fd, file);
  if (read.has_value() || read.error().code() != Code::kInvalidArgument) return read;
  file.problem = read.error().message();
  file.header.clear();
  file.header_bytes = 0;
  file.tensors.clear();
  PTC_TRY(const UniqueFd fd, FileToHash(dir_fd, file.source(), file.version).open());
  const std::string_view kind = other_kind(fd.get(), file);
  if (kind.starts_with("it is a zip archive") || kind.starts_with("it is a pickle")) return ok();
  // What came in place of the file, as of one shard of several, is not passed over.
  if (kind.starts_with("it is a git-lfs pointer") || kind.starts_with("it is an HTML page"))
    file.problem = kind;
  // Else what is called .bin or .ckpt may be anything, unless it begins as torch's files do.
  else if (!file.path.ends_with(".pt") && !file.path.ends_with(".pth")) file.problem.clear();
  return ok();
}

Result<> read_outline_elsewhere(Found& file) {
  std::optional<DType> declared;  // beside the file, where nobody else sees it
  if (is_one_array(file.path) && !file.tensors.empty()) declared = file.tensors[0].dtype;
  PTC_TRY(auto tensors, format_of(file.path, !file.set.empty())
                            .tensors({file.header, file.version.bytes}, file.path, declared));
  if (!std::equal(tensors.tensors.begin(), tensors.tensors.end(), file.tensors.begin(),
                  file.tensors.end(), is_same))
    return make_error(Code::kCorrupt, "{}: the header is not that of its tensors", file.source());
  take_what_is_said(std::move(tensors), file);
  return ok();
}

void keep_as_it_is(Found& file) {
  file.header.clear();
  file.header_bytes = 0;
  file.tensors.clear();
}

Result<> check_outlines(std::span<const Found* const> files, uint64_t limit) {
  uint64_t bytes = 0;
  const Found* most = nullptr;
  for (const Found* file : files) {
    bytes += file->header.size();
    if (most == nullptr || file->header.size() > most->header.size()) most = file;
  }
  if (bytes <= limit) return ok();
  return invalid_argument(
      "{} bytes of its files are beside their tensors (headers; of what torch.save wrote, also all "
      "values that are no tensors, and states of random generators), and at most {} of a "
      "checkpoint are kept so: {} has {} of them. Save such values in a file that is no .pt, .pth, "
      ".bin or .ckpt, which is kept as it is",
      bytes, limit, most->source(), most->header.size());
}

bool torch_files_count(const std::vector<Found>& found) {
  return std::none_of(found.begin(), found.end(),
                      [](const Found& file) { return is_named_for_tensors(file.path); });
}

namespace {

Result<> read_outlines_elsewhere(std::vector<Found>& found) {
  for (Found& file : found) {
    if (file.node == nullptr || !file.has_tensors) continue;
    PTC_TRY(read_outline_elsewhere(file));
  }
  return ok();
}

/// Names in files of one name are without the same on all ranks; each has told what its own could
/// be without.
Result<> agree_on_names(std::vector<Found>& found) {
  std::map<std::string_view, TorchNaming> namings;  // by path
  // With fewer wrappers left out, names may become the same: once more, then.
  for (bool changed = true; changed;) {
    changed = false;
    for (const Found& file : found) {
      if (!file.has_tensors || file.tensors.empty()) continue;
      const auto [known, is_new] = namings.try_emplace(file.path, file.naming);
      if (!is_new) known->second = in_common(known->second, file.naming);
    }
    for (Found& file : found) {
      if (!file.has_tensors || file.tensors.empty()) continue;
      const TorchNaming& naming = namings.at(file.path);
      if (file.naming.whole == naming.whole && file.naming.inside == naming.inside &&
          (!file.naming.of_model || file.naming.wrappers == naming.wrappers))
        continue;
      changed = true;
      file.header = with_naming(file.header, naming);
      file.header_bytes = file.header.size();
      PTC_TRY(auto tensors,
              torch_format().tensors({file.header, file.version.bytes}, file.path, {}));
      file.tensors = std::move(tensors.tensors);
      file.naming = std::move(tensors.naming);
      for (const TensorEntry& tensor : file.tensors) {
        PTC_TRY(tensor_path(tensor.name));
      }
    }
  }
  return ok();
}

}  // namespace

Result<> read_files(int dir_fd, std::vector<Found>& found, bool torch, Executor& executor,
                    std::stop_token stop) {
  std::atomic<uint64_t> outline_bytes = 0;
  for (const Found& file : found) outline_bytes += file.header.size();
  std::atomic<bool> too_many = false;
  PTC_TRY(executor.team().parallel_for(
      found.size(),
      [&](size_t i) -> Result<> {
        if (!found[i].has_tensors || found[i].node != nullptr || too_many) return ok();
        if (torch && is_read_later(found[i].path)) return ok();
        Result<> read = torch ? read_if_torch(dir_fd, found[i]) : read_header(dir_fd, found[i]);
        if (read.has_error()) return std::move(read).error().with_context(found[i].source());
        outline_bytes += found[i].header.size();
        if (outline_bytes > kMostOutlineBytesRead) too_many = true;
        return ok();
      },
      stop));
  std::set<std::string_view> names;  // of torch's files with tensors: that of another rank has none
  for (const Found& file : found) {
    if (torch && !file.problem.empty())
      return invalid_argument("{}: {}", file.source(), file.problem);
    if (torch && !file.tensors.empty()) names.insert(file.path);
  }
  for (Found& file : found)
    if (torch) file.has_tensors = !file.header.empty() && names.contains(file.path);
  PTC_TRY(read_outlines_elsewhere(found));
  if (torch) {
    PTC_TRY(agree_on_names(found));
    PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.read_rest(dir_fd, found); }));
  }
  std::vector<const Found*> outlines;
  for (const Found& file : found) outlines.push_back(&file);
  PTC_TRY(check_outlines(outlines, kMostOutlineBytesRead));
  return find_box_sets(found);
}

Result<> read_tensors(const FileReader& files, std::vector<Found>& found, Executor& executor,
                      std::stop_token stop) {
  const TreeFormat* tree = find_tree([&](const TreeFormat& one) { return one.reads(found); });
  return tree->read(files, found, executor, std::move(stop));
}

}  // namespace ptc
