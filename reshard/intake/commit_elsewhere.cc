// What nodes tell each other of the files of a checkpoint that they commit together: a line of
// JSON, then the headers.
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

json::object part_text(const SubTensor& part) {
  json::array pieces;
  for (const Piece& piece : part.pieces)
    pieces.push_back(json::array{to_array(piece.global.offset), to_array(piece.global.extent),
                                 to_array(piece.local_offset)});
  json::object text{{"shape", to_array(part.local_shape)}, {"pieces", std::move(pieces)}};
  if (part.flat) text["flat"] = json::array{to_array(part.flat->of), part.flat->begin};
  return text;
}

SubTensor part_from(const json::object& text) {
  SubTensor part;
  part.local_shape = dims_from(text.at("shape"));
  for (const json::value& value : text.at("pieces").as_array()) {
    const json::array& piece = value.as_array();
    part.pieces.push_back({box_from(piece.at(0), piece.at(1)), dims_from(piece.at(2))});
  }
  if (const json::value* flat = text.if_contains("flat"))
    part.flat = SubTensor::Flat{dims_from(flat->as_array().at(0)),
                                flat->as_array().at(1).to_number<uint64_t>()};
  return part;
}

/// What lies where in a file, as the node that leads has been told by others.
Result<> take_arrays(const json::array& said, Found& file) {
  file.told = true;
  file.tensors.clear();
  for (const json::value& value : said) {
    const json::object& part = value.as_object();
    const json::array& array = part.at("array").as_array();
    TensorEntry entry;
    PTC_TRY(entry.dtype, parse_dtype(std::string_view(array.at(0).as_string())));
    entry.shape = dims_from(part.at("shape"));
    entry.offset = array.at(1).to_number<uint64_t>();
    PTC_TRY(entry.bytes, array_bytes(entry.shape, entry.dtype));
    if (entry.offset > file.version.bytes || entry.bytes > file.version.bytes - entry.offset)
      return invalid_argument("an array whose checksum is wanted is not in {}", file.source());
    file.tensors.push_back(std::move(entry));
  }
  return ok();
}

bool is_inside(const Box& box, const Dims& shape) {
  if (box.offset.size() != shape.size() || box.extent.size() != shape.size()) return false;
  for (size_t axis = 0; axis < shape.size(); ++axis)
    if (box.offset[axis] > shape[axis] || box.extent[axis] > shape[axis] - box.offset[axis])
      return false;
  return true;
}

/// Whether a part that another node says can be one of a tensor of this shape.
bool is_part_of(const SubTensor& part, const Dims& whole) {
  if (part.flat) {
    const auto elements = num_elements(part.flat->of);
    if (!elements || part.local_shape.size() != 1 || part.flat->begin > elements.value())
      return false;
  }
  const Dims& array = part.flat ? part.flat->of : part.local_shape;
  return num_elements(whole).has_value() &&
         std::all_of(part.pieces.begin(), part.pieces.end(), [&](const Piece& piece) {
           return is_inside(piece.global, whole) &&
                  is_inside({piece.local_offset, piece.global.extent}, array);
         });
}

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
      file.rank = text.at("rank").to_number<uint64_t>();
      file.path = std::string(text.at("path").as_string());
      if (const json::value* at = text.if_contains("at")) file.at = std::string(at->as_string());
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
      file.index = text.at("index").as_bool();
      file.set = std::string(text.at("set").as_string());
      file.set_index = std::string(text.at("set_index").as_string());
      for (const json::value& name : text.at("promised").as_array())
        file.promised.emplace_back(name.as_string());
      if (const json::value* asked = text.if_contains("asked")) {
        for (const auto& [path, names] : asked->as_object())
          for (const json::value& name : names.as_array())
            file.asked[std::string(path)].emplace_back(name.as_string());
      }
      if (const json::value* problem = text.if_contains("problem"))
        file.problem = std::string(problem->as_string());
      file.header_bytes = text.at("header").to_number<uint64_t>();
      if (file.header_bytes > headers.size())
        return Error(Code::kCorrupt, "its list of files is cut short");
      file.header = std::string(headers.substr(0, file.header_bytes));
      headers.remove_prefix(file.header_bytes);
      for (const json::value& tensor : text.at("tensors").as_array()) {
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

std::string hash_request(const Model& model, const FilesElsewhere& node,
                         const std::vector<Found>& found) {
  json::array files;
  for (const Found& file : found) {
    if (file.node != &node) continue;
    json::object text{{"number", file.number}};
    if (file.has_tensors) {
      json::array tensors;
      for (size_t i = 0; i < file.tensors.size(); ++i) {
        json::object part = part_text(file.parts[i]);
        part["global"] = to_array(model.tensors()[file.model_tensor[i]].shape);
        if (file.told)
          part["array"] =
              json::array{json::value(dtype_name(file.tensors[i].dtype)), file.tensors[i].offset};
        tensors.push_back(std::move(part));
      }
      if (file.told) text["told"] = true;
      text["tensors"] = std::move(tensors);
    }
    files.push_back(std::move(text));
  }
  return json::serialize(json::object{{"files", std::move(files)}});
}

Result<> take_hashes(const FilesElsewhere& node, const std::string& answer,
                     std::vector<Found>& found) {
  const auto not_of = [&](const Found& file) {
    return make_error(Code::kCorrupt, "node {}: its checksums are not of {}", node.node,
                      file.source());
  };
  try {
    PTC_TRY(auto object, parse_line(answer));
    std::map<uint32_t, Found*> by_number;  // that it has not answered
    for (Found& file : found)
      if (file.node == &node) by_number.emplace(file.number, &file);
    for (const json::value& value : object.at("files").as_array()) {
      const json::object& text = value.as_object();
      const auto number = text.at("number").to_number<uint32_t>();
      Found& file = *by_number.at(number);
      by_number.erase(number);
      const json::value* const whole = text.if_contains("whole");
      if ((whole != nullptr) == file.has_tensors) return not_of(file);
      if (whole != nullptr) {
        PTC_TRY(file.whole, Checksum::from_hex(std::string_view(whole->as_string())));
        continue;
      }
      for (const json::value& tensor : text.at("tensors").as_array()) {
        std::vector<Checksum>& sums = file.sums.emplace_back();
        for (const json::value& sum : tensor.as_object().at("sums").as_array()) {
          PTC_TRY(auto checksum, Checksum::from_hex(std::string_view(sum.as_string())));
          sums.push_back(checksum);
        }
        std::vector<FoundPadding>& pads = file.padding.emplace_back();
        for (const json::value& pad : tensor.as_object().at("padding").as_array()) {
          const json::array& fields = pad.as_array();
          PTC_TRY(auto checksum, Checksum::from_hex(std::string_view(fields.at(2).as_string())));
          pads.push_back({box_from(fields.at(0), fields.at(1)), checksum});
        }
        const size_t i = file.sums.size() - 1;
        if (i >= file.parts.size() || sums.size() != file.parts[i].pieces.size() ||
            !std::all_of(pads.begin(), pads.end(), [&](const FoundPadding& pad) {
              return is_inside(pad.local, file.parts[i].local_shape);
            }))
          return not_of(file);
      }
      if (file.sums.size() != file.parts.size()) return not_of(file);
    }
    if (!by_number.empty()) return not_of(*by_number.begin()->second);
  } catch (const std::exception& error) {
    return make_error(Code::kCorrupt, "node {}: its checksums are damaged: {}", node.node,
                      error.what());
  }
  return ok();
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
    // In the place of rank/ a number is this node's alone.
    files.push_back(json::object{{"rank", in_place_of_ranks(file) ? 0 : file.rank},
                                 {"path", file.path},
                                 {"at", file.at},
                                 {"bytes", file.version.bytes},
                                 {"uid", rights.uid},
                                 {"gid", rights.gid},
                                 {"mode", rights.mode},
                                 {"index", file.index},
                                 {"set", file.set},
                                 {"set_index", file.set_index},
                                 {"promised", std::move(promised)},
                                 {"problem", file.problem},
                                 {"header", file.header.size()},
                                 {"tensors", std::move(tensors)}});
    json::object asked;
    for (const auto& [path, names] : file.asked)
      asked[path] = json::array(names.begin(), names.end());
    if (!asked.empty()) files.back().as_object()["asked"] = std::move(asked);
  }
  root["files"] = std::move(files);
  return json::serialize(root) + "\n" + headers;
}

Result<std::string> hash_files(int dir_fd, std::string_view request, Executor& executor,
                               HashCache& hashes, std::stop_token stop) {
  PTC_TRY(auto found, find_files(dir_fd, true));
  PTC_TRY(begin_hashing(dir_fd, found, hashes));
  PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.find_sets(dir_fd, found); }));
  std::vector<ArrayToHash> arrays;
  std::vector<std::pair<size_t, json::array>> pads;  // answer's file, by array
  json::array files;
  try {
    PTC_TRY(auto object, parse_line(request));
    bool any_later = false;
    for (const json::value& value : object.at("files").as_array()) {
      if (!value.as_object().contains("tensors")) continue;
      Found& file = found.at(value.at("number").to_number<uint32_t>());
      if (value.as_object().contains("told")) {
        PTC_TRY(take_arrays(value.at("tensors").as_array(), file));
        continue;
      }
      if (is_read_later(file.path)) {
        any_later = true;
        continue;
      }
      Result<> read = read_header(dir_fd, file);
      if (read.has_error()) return std::move(read).error().with_context(file.source());
    }
    if (any_later) {
      PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.read_rest(dir_fd, found); }));
    }
    for (const json::value& value : object.at("files").as_array()) {
      const json::object& text = value.as_object();
      Found& file = found.at(text.at("number").to_number<uint32_t>());
      json::object answer{{"number", text.at("number")}};
      const json::value* tensors = text.if_contains("tensors");
      if (tensors == nullptr) {
        PTC_TRY(auto whole, hash_file(*to_hash(dir_fd, file), FileState::kSealed, hashes, stop));
        answer["whole"] = whole.to_hex();
        files.push_back(std::move(answer));
        continue;
      }
      if (tensors->as_array().size() != file.tensors.size())
        return make_error(Code::kBusy, "{} was written while it was being committed",
                          file.source());
      const auto source = to_hash(dir_fd, file);
      for (uint32_t i = 0; i < file.tensors.size(); ++i) {
        const json::object& part = tensors->as_array()[i].as_object();
        SubTensor sub = part_from(part);
        if (sub.local_shape != file.tensors[i].shape)
          return make_error(Code::kBusy, "{} was written while it was being committed",
                            file.source());
        Dims whole = dims_from(part.at("global"));
        if (!is_part_of(sub, whole))
          return invalid_argument("the request for checksums says of {} what no part of it is",
                                  ptc::quoted(file.tensors[i].name));
        json::array padding;
        if (file.set.empty() && !file.told && !file.is_other_name(i)) {
          PTC_TRY(auto list, find_padding(*source, file.tensors[i], sub));
          for (const FoundPadding& pad : list)
            padding.push_back(json::array{to_array(pad.local.offset), to_array(pad.local.extent),
                                          json::value(pad.checksum.to_hex())});
        }
        pads.emplace_back(files.size(), std::move(padding));
        arrays.push_back({source, i, file.tensors[i], std::move(sub), std::move(whole)});
      }
      answer["tensors"] = json::array();
      files.push_back(std::move(answer));
    }
  } catch (const std::exception& error) {
    return invalid_argument("the request for checksums is damaged: {}", error.what());
  }
  PTC_TRY(auto sums, hash_arrays(arrays, executor, hashes, stop));
  for (size_t i = 0; i < arrays.size(); ++i) {
    json::array list;
    for (const Checksum& sum : sums[i]) list.push_back(json::value(sum.to_hex()));
    files[pads[i].first].as_object()["tensors"].as_array().push_back(
        json::object{{"sums", std::move(list)}, {"padding", std::move(pads[i].second)}});
  }
  return json::serialize(json::object{{"files", std::move(files)}});
}

}  // namespace ptc
