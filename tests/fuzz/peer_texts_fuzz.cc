// What nodes tell each other of the files of a commit. The first byte says what it is: a list of
// files and then their checksums, from a node that has them; what that is asked to hash, or to
// read, behind the directory that it has; the table of a file of dcp.save's; the outline of a
// distributed optimizer, behind the length of its file; the part of a plan.
#include "directory_text.h"
#include "fuzz.h"
#include "reshard/checkpoint/dcp_table.h"
#include "reshard/checkpoint/megatron_buckets.h"
#include "reshard/intake/commit.h"
#include "reshard/intake/file_reads.h"
#include "reshard/intake/hash_questions.h"
#include "reshard/job/plan_part.h"

namespace ptc::fuzz {
namespace {

constexpr uint64_t kFileBytes = 4096;

Executor& executor() {
  static Executor one(1, nullptr);
  return one;
}

std::string_view take_text(std::string_view& input) {
  uint32_t length = 0;
  std::memcpy(&length, input.data(), std::min(sizeof length, input.size()));
  input.remove_prefix(std::min(sizeof length, input.size()));
  const std::string_view taken = input.substr(0, length);
  input.remove_prefix(taken.size());
  return taken;
}

void lead(std::string_view input) {
  const std::string listing(take_text(input));
  const std::string answer(input);
  CommitRequest request{.name = "incoming/a", .node = "w0"};
  request.hash_elsewhere = [&](const std::vector<std::string>&, const auto& next) {
    std::vector<Result<std::string>> answers;
    answers.emplace_back(answer);
    while (next(0, answers[0])) continue;
    return answers;
  };
  request.read_elsewhere = [&](const std::vector<std::string>& nodes,
                               const std::vector<std::string>&) {
    return std::vector<Result<std::string>>(nodes.size(), Result<std::string>(answer));
  };
  HashCache hashes;
  auto draft = draft_commit(request, {{"w1", listing}}, executor(), hashes, {});
  if (!draft) return check_error(draft.error());
  const Manifest& manifest = draft.value().manifest;
  for (const Padding& pad : manifest.padding)
    PTC_CHECK(pad.file < manifest.files.size() && pad.tensor < manifest.model->tensors().size());
}

void follow(std::string_view input) {
  static WrittenDirectory directory;
  directory.write(take_text(input));
  HashCache hashes;
  FilesToHash to_hash;
  auto answer = hash_files(directory.fd(), to_hash, input, executor(), hashes, {});
  if (!answer && answer.error().code() != Code::kBusy) check_error(answer.error());
  ListedFiles listed;
  auto read = read_parts(directory.fd(), listed, input, executor(), {});
  if (!read && read.error().code() != Code::kBusy) check_error(read.error());
}

void check_table(std::string_view text) {
  auto table = parse_dcp_table(text, kFileBytes);
  if (!table) return check_error(table.error());
  for (size_t i = 0; i < table.value().tensors.size(); ++i) {
    const TensorEntry& tensor = table.value().tensors[i];
    PTC_CHECK(array_bytes(tensor.shape, tensor.dtype).value() == tensor.bytes);
    PTC_CHECK(tensor.offset <= kFileBytes && tensor.bytes <= kFileBytes - tensor.offset);
    const Box& box = table.value().boxes[i];
    for (size_t axis = 0; axis < box.axes(); ++axis)
      PTC_CHECK(box.offset[axis] + box.extent[axis] >= box.offset[axis]);
  }
}

void check_outline(std::string_view text) {
  const uint64_t file_bytes = take_number(text) % kMegabyte;
  const FileOutline outline{text, file_bytes};
  auto found = megatron_buckets_format().tensors(outline, kMegatronBuckets, {});
  if (!found) return check_error(found.error());
  for (const TensorEntry& tensor : found.value().tensors)
    PTC_CHECK(tensor.offset <= file_bytes && tensor.bytes <= file_bytes - tensor.offset);
  if (auto absent = megatron_buckets_absent(outline); !absent) check_error(absent.error());
}

void check_part(std::string_view text) {
  auto part = PlanPart::from_text(text);
  if (!part) check_error(part.error());
}

}  // namespace

void run(std::string_view input) {
  [[maybe_unused]] static const bool made_once = (RuleSet::choose({}, {}), true);
  if (input.empty()) return;
  const char kind = input[0];
  input.remove_prefix(1);
  switch (kind) {
    case 'l':
      return lead(input);
    case 'h':
      return follow(input);
    case 't':
      return check_table(input);
    case 'o':
      return check_outline(input);
    default:
      return check_part(input);
  }
}

std::vector<std::string> large_inputs() {
  const auto with_length = [](std::string_view text) {
    return number_text(static_cast<uint32_t>(text.size())) + std::string(text);
  };
  return {
      "l" + with_length(repeated("{\"files\":", "[", kMegabyte, "]}")),
      "l" + with_length(repeated("{\"files\":[0", ",0", kMegabyte / 2, "]}")),
      "h" + with_length(file_text("rank/0/model.safetensors", "")) +
          repeated("{\"files\":[0", ",0", kMegabyte / 2, "]}"),
      "t" + repeated("{\"tensors\":[0", ",0", kMegabyte / 2, "],\"values\":[]}\n"),
      "t" + repeated("{\"tensors\":[", "[\"a\",\"F32\",[0],[0],0,0],", kMegabyte / 23,
                     "[\"a\",\"F32\",[0],[0],0,0]],\"values\":[]}\n"),
      "t" + repeated("{\"tensors\":[],\"values\":[", "[\"a\",0],", kMegabyte / 8, "[\"a\",0]]}\n"),
      "p" + repeated("{\"sums\":[0", ",0", kMegabyte / 2, "]}"),
  };
}

}  // namespace ptc::fuzz
