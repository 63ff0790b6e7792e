// What nodes tell each other of the files of a checkpoint that they commit together: a line of
// JSON, then the headers. What they hash for each other: hash_questions.h.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <map>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/json_numbers.h"
#include "reshard/intake/flat_files.h"
#include "reshard/intake/found_files.h"
#include "reshard/intake/tree_format.h"
#include "store/base/json.h"

namespace ptc {
namespace {

Result<json::object> parse_line(std::string_view text) {
  PTC_TRY(auto value, parse_json(text.substr(0, text.find('\n')), {.max_bytes = size_t{1} << 30}));
  if (!value.is_object()) return Error(Code::kCorrupt, "no JSON object");
  return std::move(value.as_object());
}

}  // namespace

Result<std::optional<std::string>> text_in_listing(const std::string& listing,
                                                   std::string_view key) {
  PTC_TRY(auto object, parse_line(listing));
  const json::value* text = object.if_contains(key);
  if (text == nullptr || !text->is_string()) return std::optional<std::string>();
  return std::optional(std::string(text->as_string()));
}

Result<std::vector<Found>> read_listing(const FilesElsewhere& node) {
  std::vector<Found> found;
  try {
    PTC_TRY(auto object, parse_line(node.listing));
    std::string_view headers = node.listing;
    headers.remove_prefix(std::min(headers.find('\n') + 1, headers.size()));
    for (const json::value& value : object.at("files").as_array()) {
      const json::object& text = value.as_object();
      Found file;
      file.node = &node;
      file.number = static_cast<uint32_t>(found.size());
      file.path = std::string(text.at("path").as_string());
      if (const json::value* rank = text.if_contains("rank"))
        file.rank = rank->to_number<uint64_t>();
      for (const auto& [key, into] : {std::pair("at", &file.at),
                                      {"set", &file.set},
                                      {"set_index", &file.set_index},
                                      {"problem", &file.problem}})
        if (const json::value* one = text.if_contains(key)) *into = std::string(one->as_string());
      // What is in the place of rank/ is of no rank of the layout, and nobody looks whether it is.
      if (file.rank != 0 && !file.at.empty() && !file.at.starts_with("rank/"))
        return make_error(Code::kCorrupt, "its list of files has {} of rank {}", file.at,
                          file.rank);
      file.version.bytes = text.at("bytes").to_number<uint64_t>();
      if (const json::value* mode = text.if_contains("mode")) {
        file.rights =
            ReadRights{text.at("uid").to_number<uint32_t>(), text.at("gid").to_number<uint32_t>(),
                       mode->to_number<uint32_t>() & 0444};
      }
      if (const json::value* index = text.if_contains("index")) file.index = index->as_bool();
      if (const json::value* promised = text.if_contains("promised")) {
        for (const json::value& name : promised->as_array())
          file.promised.emplace_back(name.as_string());
      }
      if (const json::value* asked = text.if_contains("asked")) {
        for (const auto& [path, names] : asked->as_object())
          for (const json::value& name : names.as_array())
            file.asked[std::string(path)].emplace_back(name.as_string());
      }
      if (const json::value* header = text.if_contains("header"))
        file.header_bytes = header->to_number<uint64_t>();
      if (file.header_bytes > headers.size())
        return Error(Code::kCorrupt, "its list of files is cut short");
      file.header = std::string(headers.substr(0, file.header_bytes));
      headers.remove_prefix(file.header_bytes);
      static const json::array none;
      const json::value* const tensors = text.if_contains("tensors");
      for (const json::value& tensor : tensors != nullptr ? tensors->as_array() : none) {
        const json::array& fields = tensor.as_array();
        TensorEntry entry;
        entry.name = std::string(fields.at(0).as_string());
        PTC_TRY(entry.dtype, parse_dtype(std::string_view(fields.at(1).as_string())));
        entry.shape = dims_from(fields.at(2));
        entry.offset = fields.at(3).to_number<uint64_t>();
        entry.bytes = fields.at(4).to_number<uint64_t>();
        file.tensors.push_back(std::move(entry));
      }
      found.push_back(std::move(file));
    }
  } catch (const std::exception& error) {
    return make_error(Code::kCorrupt, "its list of files is damaged: {}", error.what());
  }
  return found;
}

Result<std::string> list_files(int dir_fd) {
  PTC_TRY(auto found, find_files(dir_fd, true));
  PTC_TRY(check_closed(dir_fd, found));
  PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.find_sets(dir_fd, found); }));
  json::object root;
  json::array files;
  std::string headers;
  struct stat st {};
  if (fstatat(dir_fd, "layout.json", &st, AT_SYMLINK_NOFOLLOW) == 0) {
    PTC_TRY(auto text, read_text_file(dir_fd, "layout.json", 1 << 20, FileKind::kOwn));
    root["layout"] = text;
  }
  PTC_TRY(const auto consumed, find_consumed(dir_fd, found, {}));
  if (consumed) root["consumed"] = fmt::format("{} {}", consumed->count, consumed->file);
  const bool torch = torch_files_count(found);
  for (Found& file : found) {
    if (!file.index && is_named_for_tensors(file.path)) {
      Result<> read = read_header(dir_fd, file);
      if (read.has_error()) return std::move(read).error().with_context(file.source());
    } else if (torch && may_be_torch(file.path) && !is_read_later(file.path)) {
      Result<> read = read_if_torch(dir_fd, file);
      if (read.has_error()) return std::move(read).error().with_context(file.source());
    }
  }
  if (torch) {
    PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.read_rest(dir_fd, found); }));
  }
  for (Found& file : found) {
    if (file.path == "config.json" && !root.contains("config")) {
      PTC_TRY(auto text, read_text_file(dir_fd, file.source(), kMaxConfigBytes, FileKind::kOwn));
      root["config"] = text;
    }
    json::array promised, tensors;
    for (const std::string& name : file.promised) promised.push_back(json::value(name));
    for (const TensorEntry& tensor : file.tensors) {
      json::array shape;
      for (uint64_t extent : tensor.shape) shape.push_back(extent);
      tensors.push_back(json::array{json::value(tensor.name), json::value(dtype_name(tensor.dtype)),
                                    std::move(shape), tensor.offset, tensor.bytes});
    }
    headers += file.header;
    if (headers.size() > kMostOutlineBytesSent) {
      std::vector<const Found*> outlines;
      for (const Found& one : found) outlines.push_back(&one);
      PTC_TRY(check_outlines(outlines, kMostOutlineBytesSent));
    }
    const ReadRights rights = file.rights.value_or(ReadRights());
    // A million files are one answer: what is so of most of them is not said.
    json::object said{{"path", file.path},
                      {"bytes", file.version.bytes},
                      {"uid", rights.uid},
                      {"gid", rights.gid},
                      {"mode", rights.mode}};
    // In the place of rank/ a number is this node's alone.
    if (!in_place_of_ranks(file) && file.rank != 0) said["rank"] = file.rank;
    if (!file.at.empty()) said["at"] = file.at;
    if (file.index) said["index"] = true;
    if (!file.set.empty()) said["set"] = file.set;
    if (!file.set_index.empty()) said["set_index"] = file.set_index;
    if (!promised.empty()) said["promised"] = std::move(promised);
    if (!file.problem.empty()) said["problem"] = file.problem;
    if (!file.header.empty()) said["header"] = file.header.size();
    if (!tensors.empty()) said["tensors"] = std::move(tensors);
    files.push_back(std::move(said));
    json::object asked;
    for (const auto& [path, names] : file.asked)
      asked[path] = json::array(names.begin(), names.end());
    if (!asked.empty()) files.back().as_object()["asked"] = std::move(asked);
  }
  root["files"] = std::move(files);
  return json::serialize(root) + "\n" + headers;
}

}  // namespace ptc
