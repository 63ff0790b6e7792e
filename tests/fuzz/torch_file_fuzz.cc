// The pickle of a torch file, in an archive of torch_archive.h.
#include <unordered_set>

#include "fuzz.h"
#include "store/base/utf8.h"
#include "store/codec/safetensors.h"
#include "store/codec/torch_file.h"
#include "store/codec/torch_layout.h"
#include "torch_archive.h"

namespace ptc::fuzz {
namespace {

constexpr size_t kSmall = 16 << 10;

void check_tensors(const TorchFile& file, uint64_t file_bytes) {
  std::unordered_set<std::string_view> names;
  for (const TorchTensor& tensor : file.tensors()) {
    PTC_CHECK(is_utf8(tensor.name) && names.insert(tensor.name).second);
    PTC_CHECK(file.name(tensor.place) == tensor.name);
    const TorchStorage& storage = file.storages()[tensor.storage];
    PTC_CHECK(storage.offset + storage.bytes <= file_bytes);
    PTC_CHECK(tensor.offset >= storage.offset &&
              tensor.offset + tensor.bytes <= storage.offset + storage.bytes);
    const uint64_t bytes = array_bytes(tensor.shape, tensor.dtype).value();
    if (tensor.contiguous) PTC_CHECK(bytes == tensor.bytes);
    const std::vector<TorchStep> path = file.path(tensor.place);
    PTC_CHECK(parse_torch_path(torch_path_text(path)).value() == path);
    if (tensor.sharding == TorchTensor::kNone) continue;
    const TorchSharding& sharding = file.shardings()[tensor.sharding];
    if (sharding.box) PTC_CHECK(sharding.box->extent == tensor.shape);
  }
  for (const TorchOpaque& opaque : file.opaque())
    check_error(invalid_argument("{}", opaque.reason));
}

}  // namespace

void run(std::string_view input) {
  const TorchArchive archive(input);
  auto read = TorchFile::read(archive.read(), archive.layout.file_bytes);
  if (!read) return check_error(read.error());
  const TorchFile& file = read.value();
  check_tensors(file, archive.layout.file_bytes);
  if (input.size() > kSmall) return;
  auto layout = lay_out_torch_file(file, same_tensors(file));
  if (!layout) return check_error(layout.error());
  for (size_t i = 0; i < file.tensors().size(); ++i)
    PTC_CHECK(layout.value().tensors[i].offset + layout.value().tensors[i].bytes <=
              layout.value().zip.file_bytes);
}

std::vector<std::string> large_inputs() {
  using namespace std::string_literals;
  const std::string tensor =
      "ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0"
      "0X\3\0\0\0cpuK\4tQK\0K\4\x85K\1\x85\x89Ntq\2Rq\1"s;
  std::vector<std::string> inputs;
  for (const char* more :
       {"h\1", "N", "K\1", "]", "}", "h\1\x85", "(h\1h\1t", "(h\1h\1l", "cm\nn\nh\1\x85R"})
    inputs.push_back(
        repeated("\x80\2]q\0("s + tensor, more, kMegabyte / std::string_view(more).size(), "e."));
  std::string keys = "\x80\2}("s + tensor, numbers = keys;
  for (uint32_t i = 0; keys.size() < kMegabyte; ++i)
    keys += "M"s + static_cast<char>(i) + static_cast<char>(i >> 8) + "h\1";
  inputs.push_back("\x80\2}(K\1"s + tensor + keys.substr(4 + tensor.size()) + "u.");
  // Each level is twice the one before.
  std::string twice = "\x80\2" + tensor + "\x85q\3";
  for (int level = 4; level < 60; ++level)
    twice += "h"s + static_cast<char>(level - 1) + "h" + static_cast<char>(level - 1) + "\x86q" +
             static_cast<char>(level);
  inputs.push_back(twice + ".");
  // Objects that hold tensors, one in another; and lists of them.
  inputs.push_back("\x80\2]q\0("s + repeated(tensor, "cm\nn\nh\1\x85R\x85q\1h\1", 10'000, "") +
                   "e.");
  inputs.push_back(
      repeated("\x80\2", "]", kMegabyte / 32, tensor + repeated("", "a", kMegabyte / 32, ".")));
  // Meshes that have long names, or many ranks, of few values.
  const std::string ranks = "("s + repeated("", "K\1", 100, "tq\5("s) +
                            repeated("", "h\5", 100, "tq\6"),
                    names = "(X\x64\0\0\0"s + repeated("", "n", 100, "q\5");
  for (const std::string& mesh :
       {"X\x0f\0\0\0_mesh_dim_names"s + names + repeated("", "h\5", kMegabyte / 2, "t"),
        "X\x11\0\0\0_flatten_rank_map("s + ranks + repeated("", "h\6", 102, "t")})
    inputs.push_back(
        "\x80\2"
        "ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\n"
        "ctorch.distributed.tensor\nDTensor\n)N}(X\x0d\0\0\0_local_tensor"s +
        tensor + "X\5\0\0\0_speccx\nDTensorSpec\n)\x81}(X\4\0\0\0meshcx\nDeviceMesh\n)\x81}("s +
        mesh + "ubX\x0a\0\0\0placementscx\nReplicate\n)\x81\x85X\x0b\0\0\0tensor_meta"s +
        "cx\nTensorMeta\n(K\4\x85K\1\x85" + "ctorch\nfloat32\nt\x81ubu\x86tR.");
  return inputs;
}

}  // namespace ptc::fuzz
