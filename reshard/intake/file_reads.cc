#include "reshard/intake/file_reads.h"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <map>
#include <memory>
#include <unordered_map>

#include "reshard/checkpoint/json_numbers.h"
#include "store/base/json.h"

namespace ptc {
namespace {

/// Of a file on another node: what is shorter is read with what is beside it.
constexpr uint64_t kBlockBytes = 64 << 10;
constexpr size_t kMostBlocks = 64;

/// An array or a range that is wanted: by the numbers of its file and in it.
struct AskedOne {
  size_t wanted = 0, number = 0;
  bool is_array = false;
};
using AskedOnes = std::vector<AskedOne>;  // one question

/// What is wanted of a node's files, by questions.
void add_to_questions(size_t wanted, const FileReads& reads, std::vector<AskedOnes>& questions,
                      uint64_t& bytes_of_last) {
  const auto add = [&](size_t number, bool is_array, uint64_t bytes) {
    if (questions.empty() || questions.back().size() == FileReader::kMostAsked ||
        bytes > FileReader::kMostBytesAsked - bytes_of_last) {
      questions.emplace_back();
      bytes_of_last = 0;
    }
    questions.back().push_back({wanted, number, is_array});
    bytes_of_last += bytes;
  };
  for (size_t i = 0; i < reads.arrays.size(); ++i) add(i, true, 0);
  for (size_t i = 0; i < reads.ranges.size(); ++i) add(i, false, reads.ranges[i].length);
}

std::string question_text(const AskedOnes& asked, const std::vector<FileReads>& wanted) {
  json::array files, arrays, ranges;
  std::unordered_map<size_t, size_t> numbers;  // in `files`
  for (const AskedOne& one : asked) {
    const FileReads& reads = wanted[one.wanted];
    const auto [file, is_new] = numbers.try_emplace(one.wanted, numbers.size());
    if (is_new) files.push_back(json::array{reads.file->number, reads.file->version.bytes});
    if (one.is_array) {
      const FileReads::Array& array = reads.arrays[one.number];
      arrays.push_back(json::array{file->second, array.item.offset, array.item.length,
                                   json::value(dtype_name(array.dtype)), to_array(array.shape)});
    } else {
      const FileReads::Range& range = reads.ranges[one.number];
      ranges.push_back(json::array{file->second, range.offset, range.length});
    }
  }
  return json::serialize(json::object{
      {"files", std::move(files)}, {"arrays", std::move(arrays)}, {"ranges", std::move(ranges)}});
}

/// The first line, and what is behind it.
Result<std::pair<json::object, std::string_view>> line_and_rest(std::string_view text) {
  const size_t line = std::min(text.find('\n'), text.size());
  PTC_TRY(auto value, parse_json(text.substr(0, line), {.max_bytes = size_t{1} << 30}));
  if (!value.is_object()) return Error(Code::kCorrupt, "no JSON object");
  return std::pair(std::move(value.as_object()), text.substr(std::min(line + 1, text.size())));
}

Result<FileParts::Array> array_in(const json::value& said, const FileReads& reads, size_t number) {
  FileParts::Array array;
  if (said.is_string()) {
    array.problem = std::string(said.as_string());
    return array;
  }
  array.contiguous = said.is_array();
  if (!array.contiguous) return array;
  array.offset = said.as_array().at(0).to_number<uint64_t>();
  array.bytes = said.as_array().at(1).to_number<uint64_t>();
  const FileReads::Array& asked = reads.arrays[number];
  PTC_TRY(const uint64_t bytes, array_bytes(asked.shape, asked.dtype));
  if (array.bytes != bytes || array.offset > reads.file->version.bytes ||
      bytes > reads.file->version.bytes - array.offset)
    return make_error(Code::kCorrupt, "an array is not in {}", reads.file->source());
  return array;
}

Result<> take_answer(std::string_view answer, const AskedOnes& asked,
                     const std::vector<FileReads>& wanted, std::vector<FileParts>& parts) {
  PTC_TRY(const auto said, line_and_rest(answer));
  std::string_view bytes = said.second;
  size_t arrays = 0;
  try {
    for (const AskedOne& one : asked) {
      const FileReads& reads = wanted[one.wanted];
      if (one.is_array) {
        const json::value& array = said.first.at("arrays").as_array().at(arrays++);
        PTC_TRY(parts[one.wanted].arrays[one.number], array_in(array, reads, one.number));
        continue;
      }
      const uint64_t length = reads.ranges[one.number].length;
      if (length > bytes.size()) return Error(Code::kCorrupt, "it is cut short");
      parts[one.wanted].ranges[one.number] = bytes.substr(0, length);
      bytes.remove_prefix(length);
    }
  } catch (const std::exception& error) {
    return make_error(Code::kCorrupt, "{}", error.what());
  }
  return ok();
}

bool is_within(uint64_t offset, uint64_t length, uint64_t bytes) {
  return offset <= bytes && length <= bytes - offset;
}

Result<FileParts> read_file_parts(int dir_fd, const FileReads& wanted) {
  const Found& found = *wanted.file;
  PTC_TRY(const UniqueFd fd, FileToHash(dir_fd, found.source(), found.version).open());
  const ReadAt read = [&](uint64_t offset, std::span<std::byte> into) -> Result<> {
    Result<> done = read_exactly(fd.get(), into, offset);
    if (done.has_error()) return std::move(done).error().with_context(found.source());
    return ok();
  };
  FileParts parts;
  for (const FileReads::Array& one : wanted.arrays) {
    if (!is_within(one.item.offset, one.item.length, found.version.bytes))
      return invalid_argument("an item is not in {}", found.source());
    FileParts::Array& array = parts.arrays.emplace_back();
    const auto at = find_dcp_array(read, one.item, one.dtype, one.shape);
    if (at.has_error()) {
      if (at.error().code() != Code::kInvalidArgument) return at.error();
      array.problem = at.error().message();
      continue;
    }
    array.offset = at.value().offset;
    array.bytes = at.value().bytes;
    array.contiguous = at.value().contiguous;
  }
  for (const FileReads::Range& range : wanted.ranges) {
    if (!is_within(range.offset, range.length, found.version.bytes))
      return invalid_argument("what is wanted is not in {}", found.source());
    std::string& bytes = parts.ranges.emplace_back(range.length, '\0');
    PTC_TRY(read(range.offset, std::as_writable_bytes(std::span(bytes))));
  }
  return parts;
}

/// What another node has, in blocks.
class BlocksElsewhere {
 public:
  BlocksElsewhere(const FileReader& reader, const Found& file) : reader_(reader), file_(file) {}

  Result<> read(uint64_t offset, std::span<std::byte> into) {
    if (!is_within(offset, into.size(), file_.version.bytes))
      return make_error(Code::kCorrupt, "{} ends before that", file_.source());
    while (!into.empty()) {
      const uint64_t number = offset / kBlockBytes, within = offset % kBlockBytes;
      PTC_TRY(const std::string* const block, block_of(number, into.size() + within));
      const size_t length = std::min<size_t>(into.size(), block->size() - within);
      std::copy_n(block->data() + within, length, reinterpret_cast<char*>(into.data()));
      into = into.subspan(length);
      offset += length;
    }
    return ok();
  }

 private:
  /// It is longer than a block where more is wanted.
  Result<const std::string*> block_of(uint64_t number, uint64_t wanted) {
    if (const auto known = blocks_.find(number); known != blocks_.end()) return &known->second;
    const uint64_t begin = number * kBlockBytes;
    const uint64_t length = std::min(
        {std::max(wanted, kBlockBytes), FileReader::kMostBytesAsked, file_.version.bytes - begin});
    PTC_TRY(auto parts, reader_.read({{&file_, {}, {{begin, length}}}}));
    if (length > kBlockBytes) {
      large_ = std::move(parts.front().ranges.front());
      return &large_;
    }
    if (blocks_.size() == kMostBlocks) blocks_.clear();
    return &(blocks_[number] = std::move(parts.front().ranges.front()));
  }

  const FileReader& reader_;
  const Found& file_;
  std::map<uint64_t, std::string> blocks_;
  std::string large_;
};

}  // namespace

Result<> FileReader::read_elsewhere(const std::vector<FileReads>& wanted,
                                    std::vector<FileParts>& parts) const {
  struct OfNode {
    std::vector<AskedOnes> questions;
    uint64_t bytes_of_last = 0;
  };
  std::map<const FilesElsewhere*, OfNode> nodes;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].file->node == nullptr) continue;
    parts[i].arrays.resize(wanted[i].arrays.size());
    parts[i].ranges.resize(wanted[i].ranges.size());
    OfNode& node = nodes[wanted[i].file->node];
    add_to_questions(i, wanted[i], node.questions, node.bytes_of_last);
  }
  for (size_t round = 0;; ++round) {
    std::vector<std::string> names, questions;
    std::vector<const AskedOnes*> asked;
    for (const auto& [node, own] : nodes) {
      if (round >= own.questions.size()) continue;
      names.push_back(node->node);
      asked.push_back(&own.questions[round]);
      questions.push_back(question_text(*asked.back(), wanted));
    }
    if (names.empty()) return ok();
    if (stop_.stop_requested()) return Error(Code::kCancelled, "cancelled");
    std::vector<Result<std::string>> answers = ask_(names, questions);
    for (size_t i = 0; i < names.size(); ++i) {
      PTC_TRY(const std::string answer, std::move(answers[i]));
      const auto taken = take_answer(answer, *asked[i], wanted, parts);
      if (taken.has_error())
        return make_error(Code::kCorrupt, "node {}: what it has read is damaged: {}", names[i],
                          taken.error().message());
    }
  }
}

Result<std::vector<FileParts>> FileReader::read(const std::vector<FileReads>& wanted) const {
  std::vector<FileParts> parts(wanted.size());
  PTC_TRY(read_elsewhere(wanted, parts));
  std::vector<size_t> here;
  for (size_t i = 0; i < wanted.size(); ++i)
    if (wanted[i].file->node == nullptr) here.push_back(i);
  const auto read_one = [&](size_t i) -> Result<> {
    PTC_TRY(parts[here[i]], read_file_parts(dir_fd_, wanted[here[i]]));
    return ok();
  };
  // Who reads a single file may be a body of the team's own.
  if (here.size() == 1) {
    PTC_TRY(read_one(0));
  } else if (!here.empty()) {
    PTC_TRY(executor_.team().parallel_for(here.size(), read_one, stop_));
  }
  return parts;
}

Result<std::string> FileReader::text_of(const Found& file) const {
  std::string text;
  while (text.size() < file.version.bytes) {
    const uint64_t length = std::min(kMostBytesAsked, file.version.bytes - text.size());
    PTC_TRY(auto parts, read({{&file, {}, {{text.size(), length}}}}));
    if (text.empty()) text = std::move(parts.front().ranges.front());
    else text += parts.front().ranges.front();
  }
  return text;
}

Result<ReadAt> FileReader::open(const Found& file) const {
  if (file.node != nullptr) {
    const auto blocks = std::make_shared<BlocksElsewhere>(*this, file);
    return ReadAt([blocks](uint64_t offset, std::span<std::byte> into) {
      return blocks->read(offset, into);
    });
  }
  PTC_TRY(UniqueFd fd, FileToHash(dir_fd_, file.source(), file.version).open());
  const auto held = std::make_shared<UniqueFd>(std::move(fd));
  return ReadAt([held](uint64_t offset, std::span<std::byte> into) {
    return read_exactly(held->get(), into, offset);
  });
}

Result<std::shared_ptr<const std::vector<Found>>> ListedFiles::in(int dir_fd) {
  MutexLock lock(mutex_);
  if (found_ == nullptr) {
    PTC_TRY(auto found, find_files(dir_fd, true));
    found_ = std::make_shared<const std::vector<Found>>(std::move(found));
  }
  return found_;
}

Result<std::string> read_parts(int dir_fd, ListedFiles& files, std::string_view request,
                               Executor& executor, std::stop_token stop) {
  PTC_TRY(const auto found, files.in(dir_fd));
  PTC_TRY(const auto said, line_and_rest(request));
  struct Place {
    size_t wanted, number;
  };
  std::vector<FileReads> wanted;
  std::vector<Place> arrays, ranges;
  uint64_t bytes = 0;
  try {
    for (const json::value& file : said.first.at("files").as_array()) {
      const Found& one = found->at(file.as_array().at(0).to_number<size_t>());
      if (one.version.bytes != file.as_array().at(1).to_number<uint64_t>())
        return make_error(Code::kBusy, "{} was written while it was being committed", one.source());
      wanted.push_back({&one, {}, {}});
    }
    for (const json::value& value : said.first.at("arrays").as_array()) {
      const json::array& fields = value.as_array();
      const auto number = fields.at(0).to_number<size_t>();
      FileReads::Array array;
      array.item = {0, fields.at(1).to_number<uint64_t>(), fields.at(2).to_number<uint64_t>()};
      PTC_TRY(array.dtype, parse_dtype(std::string_view(fields.at(3).as_string())));
      array.shape = dims_from(fields.at(4));
      PTC_TRY(array_bytes(array.shape, array.dtype));
      arrays.push_back({number, wanted.at(number).arrays.size()});
      wanted[number].arrays.push_back(std::move(array));
    }
    for (const json::value& value : said.first.at("ranges").as_array()) {
      const json::array& fields = value.as_array();
      const auto number = fields.at(0).to_number<size_t>();
      const FileReads::Range range{fields.at(1).to_number<uint64_t>(),
                                   fields.at(2).to_number<uint64_t>()};
      ranges.push_back({number, wanted.at(number).ranges.size()});
      wanted[number].ranges.push_back(range);
      if (range.length > FileReader::kMostBytesAsked - bytes)
        return invalid_argument("more than {} bytes of files are wanted at a time",
                                FileReader::kMostBytesAsked);
      bytes += range.length;
    }
  } catch (const std::exception& error) {
    return invalid_argument("the request to read is damaged: {}", error.what());
  }
  const AskToRead nobody;
  PTC_TRY(const auto parts, FileReader(dir_fd, nobody, executor, std::move(stop)).read(wanted));
  json::array answers;
  for (const Place& place : arrays) {
    const FileParts::Array& array = parts[place.wanted].arrays[place.number];
    if (!array.problem.empty()) answers.push_back(json::value(array.problem));
    else if (!array.contiguous) answers.push_back(nullptr);
    else answers.push_back(json::array{array.offset, array.bytes});
  }
  std::string answer = json::serialize(json::object{{"arrays", std::move(answers)}}) + "\n";
  for (const Place& place : ranges) answer += parts[place.wanted].ranges[place.number];
  return answer;
}

}  // namespace ptc
