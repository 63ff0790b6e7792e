// The pickle of a file of DeepSpeed's, in an archive of torch_archive.h, read as each of its kinds.
#include "fuzz.h"
#include "reshard/checkpoint/deepspeed_file.h"
#include "store/codec/torch_path.h"
#include "torch_archive.h"

namespace ptc::fuzz {
namespace {

void check_array(const FlatArray& array, uint64_t file_bytes) {
  const uint64_t bytes = array.elements * dtype_bits(array.dtype) / 8;
  PTC_CHECK(array.elements <= file_bytes && array.offset <= file_bytes &&
            bytes <= file_bytes - array.offset);
}

void check_values(const DeepSpeedValues& values) {
  for (const auto& [path, archive] : values) PTC_CHECK(parse_torch_path(path).has_value());
}

void check_zero(const ReadAt& read, uint64_t file_bytes) {
  auto file = ZeroFile::read(read, file_bytes);
  if (!file) return check_error(file.error());
  for (const ZeroFile::Group& group : file.value().groups) {
    check_array(group.master, file_bytes);
    for (const auto& [key, array] : group.state) check_array(array, file_bytes);
  }
  check_values(file.value().values);
}

void check_model(const ReadAt& read, uint64_t file_bytes) {
  auto file = DeepSpeedModel::read(read, file_bytes, /*with_values=*/true);
  if (!file) return check_error(file.error());
  for (const auto& [name, array] : file.value().frozen_parts) check_array(array, file_bytes);
  for (const DeepSpeedModel::Buffer& buffer : file.value().buffers) {
    check_array(buffer.array, file_bytes);
    PTC_CHECK(num_elements(buffer.shape).value() == buffer.array.elements);
  }
  check_values(file.value().values);
}

void check_universal(const ReadAt& read, uint64_t file_bytes) {
  auto file = UniversalState::read(read, file_bytes);
  if (!file) return check_error(file.error());
  if (file.value().array) {
    check_array(*file.value().array, file_bytes);
    PTC_CHECK(num_elements(file.value().shape).value() == file.value().array->elements);
  }
  check_values(file.value().values);
}

}  // namespace

void run(std::string_view input) {
  const TorchArchive archive(input, /*has_tensors=*/true);
  check_zero(archive.read(), archive.layout.file_bytes);
  check_model(archive.read(), archive.layout.file_bytes);
  check_universal(archive.read(), archive.layout.file_bytes);
}

std::vector<std::string> large_inputs() {
  constexpr size_t kSize = kMegabyte / 8;  // a value that holds others costs a look at all
  using namespace std::string_literals;
  const std::string tensor =
      "ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0"
      "0X\3\0\0\0cpuK\4tQK\0K\4\x85K\1\x85\x89Ntq\2Rq\1"s;
  const auto word = [](std::string_view text) {
    return "X"s + static_cast<char>(text.size()) + "\0\0\0"s + std::string(text);
  };
  std::vector<std::string> inputs;
  // Groups, states of one group, and shapes, as many as fit.
  const std::string state = "\x80\2}" + word("optimizer_state_dict") + "}(" + word("zero_stage") +
                            "K\2" + word("single_partition_of_fp32_groups") + "](";
  inputs.push_back(repeated(state + tensor, "h\1", kSize / 2, "e") + "us.");
  inputs.push_back(repeated(state, "]", kSize, "e") + "us.");
  const std::string shapes = "\x80\2}(" + word("module") + "}" + word("param_shapes") + "](";
  inputs.push_back(repeated(shapes, "}", kSize, "e") + "u.");
  inputs.push_back(repeated(shapes + "}(", word("a") + "(K\1K\1t", kSize / 12, "ue") + "u.");
  inputs.push_back(
      repeated("\x80\2}(" + word("param") + tensor + word("more") + "](", "N", kSize, "e") + "u.");
  return inputs;
}

}  // namespace ptc::fuzz
