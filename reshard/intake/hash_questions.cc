#include "reshard/intake/hash_questions.h"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "reshard/checkpoint/json_numbers.h"
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

/// Where an array lies in a file, as the node that leads has been told by others.
Result<TensorEntry> told_array(const json::object& part, const Found& file) {
  const json::array& array = part.at("array").as_array();
  TensorEntry entry;
  PTC_TRY(entry.dtype, parse_dtype(std::string_view(array.at(0).as_string())));
  entry.shape = dims_from(part.at("shape"));
  entry.offset = array.at(1).to_number<uint64_t>();
  PTC_TRY(entry.bytes, array_bytes(entry.shape, entry.dtype));
  if (entry.offset > file.version.bytes || entry.bytes > file.version.bytes - entry.offset)
    return invalid_argument("an array whose checksum is wanted is not in {}", file.source());
  return entry;
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
    const auto elements = num_elements(part.flat->of), local = num_elements(part.local_shape);
    if (!elements || !local || part.flat->begin > elements.value()) return false;
  }
  const Dims& array = part.flat ? part.flat->of : part.local_shape;
  return num_elements(whole).has_value() &&
         std::all_of(part.pieces.begin(), part.pieces.end(), [&](const Piece& piece) {
           return is_inside(piece.global, whole) &&
                  is_inside({piece.local_offset, piece.global.extent}, array);
         });
}

Result<json::object> object_in(std::string_view text) {
  PTC_TRY(auto value, parse_json(text, {.max_bytes = size_t{1} << 30}));
  if (!value.is_object()) return Error(Code::kCorrupt, "no JSON object");
  return std::move(value.as_object());
}

Error was_written(const Found& file) {
  return make_error(Code::kBusy, "{} was written while it was being committed", file.source());
}

}  // namespace

HashQuestions::HashQuestions(const Model& model, const FilesElsewhere& node,
                             std::vector<Found>& found, size_t most)
    : model_(model), node_(node), most_(most) {
  for (Found& file : found)
    if (file.node == &node) files_.push_back(&file);
}

std::string HashQuestions::next() {
  asked_.clear();
  bytes_asked_ = 0;
  size_t count = 0;
  json::array files;
  for (; !over() && count < most_; ++file_) {
    Found& file = *files_[file_];
    json::object text{{"number", file.number}};
    ++count;
    if (!file.has_tensors) {
      asked_.push_back({&file, 0, 0});
      files.push_back(std::move(text));
      continue;
    }
    const size_t begin = tensor_;
    json::array tensors;
    for (; tensor_ < file.tensors.size() && (count < most_ || tensor_ == begin); ++tensor_) {
      json::object part = part_text(file.parts[tensor_]);
      part["global"] = to_array(model_.tensors()[file.model_tensor[tensor_]].shape);
      const TensorEntry& entry = file.tensors[tensor_];
      if (file.told)
        part["array"] = json::array{json::value(dtype_name(entry.dtype)), entry.offset};
      tensors.push_back(std::move(part));
      bytes_asked_ += entry.bytes;
      count += 1 + file.parts[tensor_].pieces.size();
    }
    if (file.told) text["told"] = true;
    text["first"] = begin;
    text["of"] = file.tensors.size();
    text["tensors"] = std::move(tensors);
    files.push_back(std::move(text));
    asked_.push_back({&file, begin, tensor_});
    if (tensor_ < file.tensors.size()) break;
    tensor_ = 0;
  }
  return json::serialize(json::object{{"files", std::move(files)}});
}

Error HashQuestions::not_of(const Found& file) const {
  return make_error(Code::kCorrupt, "node {}: its checksums are not of {}", node_.node,
                    file.source());
}

Result<> HashQuestions::take(const std::string& answer) {
  size_t taken = 0;
  try {
    PTC_TRY(auto object, object_in(answer));
    for (const json::value& value : object.at("files").as_array()) {
      const json::object& text = value.as_object();
      const Asked& asked = asked_.at(taken++);
      Found& file = *asked.file;
      const json::value* const whole = text.if_contains("whole");
      if (text.at("number").to_number<uint32_t>() != file.number ||
          (whole != nullptr) == file.has_tensors)
        return not_of(file);
      if (whole != nullptr) {
        PTC_TRY(file.whole, Checksum::from_hex(std::string_view(whole->as_string())));
        continue;
      }
      const json::array& tensors = text.at("tensors").as_array();
      if (tensors.size() != asked.end - asked.begin || file.sums.size() != asked.begin)
        return not_of(file);
      for (const json::value& tensor : tensors) {
        const SubTensor& part = file.parts[file.sums.size()];
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
        if (sums.size() != part.pieces.size() ||
            !std::all_of(pads.begin(), pads.end(), [&](const FoundPadding& pad) {
              return is_inside(pad.local, part.local_shape);
            }))
          return not_of(file);
      }
    }
    if (taken != asked_.size()) return not_of(*asked_[taken].file);
  } catch (const std::exception& error) {
    return make_error(Code::kCorrupt, "node {}: its checksums are damaged: {}", node_.node,
                      error.what());
  }
  return ok();
}

Result<FilesToHash::All> FilesToHash::in(int dir_fd, HashCache& hashes) {
  MutexLock lock(mutex_);
  if (found_ == nullptr) {
    PTC_TRY(auto found, find_files(dir_fd, true));
    PTC_TRY(begin_hashing(dir_fd, found, hashes));
    PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.find_sets(dir_fd, found); }));
    found_ = std::make_shared<const std::vector<Found>>(std::move(found));
  }
  return found_;
}

Result<std::shared_ptr<const Found>> FilesToHash::read(int dir_fd, const All& all,
                                                       uint32_t number) {
  if (number >= all->size())
    return invalid_argument("a checksum is wanted of a file that is not there");
  MutexLock lock(mutex_);
  if (is_read_later((*all)[number].path)) {
    if (with_rest_ == nullptr) {
      auto found = std::make_shared<std::vector<Found>>(*all);
      for (Found& file : *found) {
        if (!may_be_torch(file.path) || is_read_later(file.path)) continue;
        Result<> read = read_if_torch(dir_fd, file);
        if (read.has_error()) return std::move(read).error().with_context(file.source());
      }
      PTC_TRY(
          for_each_tree([&](const TreeFormat& tree) { return tree.read_rest(dir_fd, *found); }));
      with_rest_ = std::move(found);
    }
    return std::shared_ptr<const Found>(with_rest_, &(*with_rest_)[number]);
  }
  if (last_ == nullptr || last_number_ != number) {
    auto file = std::make_shared<Found>((*all)[number]);
    Result<> read = read_header(dir_fd, *file);
    if (read.has_error()) return std::move(read).error().with_context(file->source());
    last_ = std::move(file);
    last_number_ = number;
  }
  return last_;
}

void FilesToHash::forget() {
  MutexLock lock(mutex_);
  found_.reset();
  with_rest_.reset();
  last_.reset();
}

namespace {

/// What a node answers to a question of these.
class HashAnswer {
 public:
  HashAnswer(int dir_fd, FilesToHash& files, FilesToHash::All all, HashCache& hashes,
             std::stop_token stop)
      : dir_fd_(dir_fd),
        files_(files),
        all_(std::move(all)),
        hashes_(hashes),
        stop_(std::move(stop)) {}

  Result<> add(const json::object& asked) {
    const auto number = asked.at("number").to_number<uint32_t>();
    json::object answer{{"number", number}};
    const json::value* const tensors = asked.if_contains("tensors");
    if (tensors != nullptr) {
      PTC_TRY(add_arrays(asked, number, tensors->as_array()));
      answer["tensors"] = json::array();
    } else {
      const FileToHashRef source = to_hash(dir_fd_, all_->at(number));
      PTC_TRY(auto whole, hash_file(*source, FileState::kSealed, hashes_, stop_));
      answer["whole"] = whole.to_hex();
    }
    answers_.push_back(std::move(answer));
    return ok();
  }
  Result<std::string> text(Executor& executor) {
    PTC_TRY(auto sums, hash_arrays(arrays_, executor, hashes_, stop_));
    for (size_t i = 0; i < arrays_.size(); ++i) {
      json::array list;
      for (const Checksum& sum : sums[i]) list.push_back(json::value(sum.to_hex()));
      answers_[pads_[i].first].as_object()["tensors"].as_array().push_back(
          json::object{{"sums", std::move(list)}, {"padding", std::move(pads_[i].second)}});
    }
    return json::serialize(json::object{{"files", std::move(answers_)}});
  }

 private:
  /// A run of a file's arrays.
  Result<> add_arrays(const json::object& asked, uint32_t number, const json::array& parts) {
    const bool told = asked.contains("told");
    // Of what is told only those that are asked for are known here.
    std::shared_ptr<const Found> file(all_, &all_->at(number));
    const auto first = asked.at("first").to_number<uint64_t>(),
               count = asked.at("of").to_number<uint64_t>();
    if (!told) {
      PTC_TRY(file, files_.read(dir_fd_, all_, number));
      if (count != file->tensors.size()) return was_written(*file);
    }
    if (first > count || parts.size() > count - first)
      return invalid_argument("checksums are wanted of more arrays than are in {}", file->source());
    const FileToHashRef source = to_hash(dir_fd_, *file);
    for (size_t i = 0; i < parts.size(); ++i) {
      const json::object& text = parts[i].as_object();
      const size_t at = first + i;
      ArrayToHash array;
      array.file = source;
      array.number = static_cast<uint32_t>(at);
      array.part = part_from(text);
      array.global_shape = dims_from(text.at("global"));
      if (told) {
        PTC_TRY(array.entry, told_array(text, *file));
      } else {
        array.entry = file->tensors[at];
        if (array.part.local_shape != array.entry.shape) return was_written(*file);
      }
      if (!is_part_of(array.part, array.global_shape))
        return invalid_argument("the request for checksums says of {} what no part of it is",
                                ptc::quoted(array.entry.name));
      json::array padding;
      if (file->set.empty() && !told && !file->is_other_name(at)) {
        PTC_TRY(auto list, find_padding(*source, array.entry, array.part));
        for (const FoundPadding& pad : list)
          padding.push_back(json::array{to_array(pad.local.offset), to_array(pad.local.extent),
                                        json::value(pad.checksum.to_hex())});
      }
      pads_.emplace_back(answers_.size(), std::move(padding));
      arrays_.push_back(std::move(array));
    }
    return ok();
  }

  const int dir_fd_;
  FilesToHash& files_;
  const FilesToHash::All all_;
  HashCache& hashes_;
  const std::stop_token stop_;
  std::vector<ArrayToHash> arrays_;
  std::vector<std::pair<size_t, json::array>> pads_;  // by array: its file's answer
  json::array answers_;                               // by file
};

Result<std::string> hash_asked(int dir_fd, FilesToHash& files, std::string_view request,
                               Executor& executor, HashCache& hashes, std::stop_token stop) {
  try {
    PTC_TRY(const auto object, object_in(request.substr(0, request.find('\n'))));
    PTC_TRY(auto all, files.in(dir_fd, hashes));
    HashAnswer answer(dir_fd, files, std::move(all), hashes, std::move(stop));
    for (const json::value& asked : object.at("files").as_array()) {
      PTC_TRY(answer.add(asked.as_object()));
    }
    return answer.text(executor);
  } catch (const std::exception& error) {
    return invalid_argument("the request for checksums is damaged: {}", error.what());
  }
}

}  // namespace

Result<std::string> hash_files(int dir_fd, FilesToHash& files, std::string_view request,
                               Executor& executor, HashCache& hashes, std::stop_token stop) {
  auto answer = hash_asked(dir_fd, files, request, executor, hashes, std::move(stop));
  if (answer.has_error()) files.forget();
  return answer;
}

}  // namespace ptc
