#include "tools/ptc/model_directory.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <regex>
#include <vector>

#include "reshard/checkpoint/file_format.h"
#include "store/base/file.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

constexpr uint64_t kMaxConfigBytes = 4 << 20;

/// "model-00001-of-00004.safetensors" is a part of one file.
std::string file_of_shard(const std::string& name) {
  static const std::regex kShard("-[0-9]{5}-of-[0-9]{5}(?=\\.)");
  return std::regex_replace(name, kShard, "");
}

Result<std::vector<TensorInfo>> tensors_of_file(const std::string& directory,
                                                const std::string& name) {
  // Nobody may ever write into a pipe of such a name.
  PTC_TRY(const UniqueFd fd, open_file(AT_FDCWD, directory + "/" + name, O_RDONLY | O_NONBLOCK));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_error(errno, "cannot read it");
  if (!S_ISREG(info.st_mode)) return invalid_argument("it is not a regular file");
  const auto bytes = static_cast<uint64_t>(info.st_size);
  const FileFormat& format = format_of(name, /*in_set=*/false);
  const ReadAt read = [&fd](uint64_t offset, std::span<std::byte> into) {
    return read_exactly(fd.get(), into, offset);
  };
  PTC_TRY(const std::string outline, format.outline(read, bytes, std::nullopt));
  PTC_TRY(const FileTensors found, format.tensors({outline, bytes}, name, std::nullopt));
  std::vector<TensorInfo> tensors;
  for (size_t i = 0; i < found.tensors.size(); ++i) {
    if (found.is_other_name(i)) continue;
    TensorInfo& tensor = tensors.emplace_back();
    tensor.file = file_of_shard(name);
    tensor.name = found.tensors[i].name;
    tensor.dtype = found.tensors[i].dtype;
    tensor.shape = found.tensors[i].shape;
  }
  return tensors;
}

bool has_tensors(const std::string& name) {
  return name.ends_with(".safetensors") || may_be_torch(name);
}

}  // namespace

bool is_model_directory(const std::string& text) {
  if (text.find('/') == std::string::npos) return false;
  const auto files = list_directory(text);
  return files && std::any_of(files.value().begin(), files.value().end(), has_tensors);
}

Result<Model> model_of_directory(const std::string& directory,
                                 const std::optional<std::string>& rules_text) {
  PTC_TRY(auto files, list_directory(directory));
  std::sort(files.begin(), files.end());
  const bool safetensors = std::any_of(files.begin(), files.end(), [](const std::string& name) {
    return name.ends_with(".safetensors");
  });
  std::vector<TensorInfo> tensors;
  std::vector<std::string> names;
  for (const std::string& file : files) {
    // Beside safetensors, torch's files are copies of the same.
    if (!has_tensors(file) || (safetensors && !file.ends_with(".safetensors"))) continue;
    auto found = tensors_of_file(directory, file);
    if (!found) return std::move(found).error().with_context(file);
    for (TensorInfo& tensor : found.value()) {
      names.push_back(tensor.name);
      tensors.push_back(std::move(tensor));
    }
  }
  if (tensors.empty())
    return invalid_argument("{} has no .safetensors file, and none of torch.save's, with tensors",
                            directory);
  std::string config;
  auto text = read_text_file(AT_FDCWD, directory + "/config.json", kMaxConfigBytes);
  if (text) config = std::move(text).value();
  else if (text.error().code() != Code::kNotFound) return std::move(text).error();
  std::shared_ptr<const RuleSet> rules;
  if (rules_text) {
    PTC_TRY(rules, RuleSet::parse_new(*rules_text));
  } else {
    rules = RuleSet::choose(config.empty() ? std::nullopt : model_type_of(config), names);
    if (rules == nullptr) rules = RuleSet::none();
  }
  PTC_TRY(auto facts, rules->facts(config));
  return Model::bind_as_in_files(std::move(rules), std::move(facts), std::move(tensors));
}

}  // namespace ptc::cli
