// What lies in incoming/<name>, committed as if a user had moved it into checkpoints/: a directory
// as directory_text.h has it, so that what one file says is wrong of another.
#include "directory_text.h"
#include "fuzz.h"
#include "reshard/intake/commit.h"

namespace ptc::fuzz {
namespace {

void check_draft(const CommitDraft& draft) {
  const Manifest& manifest = draft.manifest;
  const Model& model = *manifest.model;
  PTC_CHECK(draft.sources.size() == manifest.files.size());
  PTC_CHECK(manifest.checksums.size() == model.tensors().size());
  for (const TensorInfo& tensor : model.tensors())
    PTC_CHECK(array_bytes(tensor.shape, tensor.dtype).has_value());
  for (const WrittenFile& file : manifest.files)
    if (file.has_tensors) PTC_CHECK(file.header_offset + file.header_bytes <= draft.headers.size());
  (void)model.check(manifest.written_spec);
}

}  // namespace

void run(std::string_view input) {
  static WrittenDirectory directory;
  static Executor executor(1, nullptr);
  [[maybe_unused]] static const bool made_once = (RuleSet::choose({}, {}), true);
  directory.write(input);
  HashCache hashes;
  CommitRequest request{.dir_fd = directory.fd(), .name = "incoming/a"};
  auto draft = draft_commit(request, {}, executor, hashes, {});
  if (!draft) return check_error(draft.error());
  check_draft(draft.value());
}

std::vector<std::string> large_inputs() {
  using namespace std::string_literals;
  constexpr size_t kSize = kMegabyte / 8;  // a commit looks at each tensor more than once
  std::vector<std::string> inputs;
  // Stacks of very many layers, of which a .metadata and an archive say no more than of few.
  const std::string module = "torch.distributed.checkpoint.metadata\n";
  const auto word = [](std::string_view text) {
    const auto size = static_cast<uint32_t>(text.size());
    return "X" + std::string(reinterpret_cast<const char*>(&size), 4) + std::string(text);
  };
  const auto number = [](uint32_t value) {
    return "J" + std::string(reinterpret_cast<const char*>(&value), 4);
  };
  const std::string none = number(0), one = number(1);
  const auto stacks = [&](size_t count, uint32_t layer_count, size_t name_bytes) {
    const std::string layers = number(layer_count);
    const std::string shape = layers + one + "\x86", at = none + none + "\x86";
    const std::string tensor_pickle =
        "\x80\2ctorch._utils\n_rebuild_tensor_v2\n((" + word("storage") + "ctorch\nByteStorage\n" +
        word("0") + word("cpu") + layers + "tQK\0"s + shape + one + one + "\x86\x89Ntq\2R.";
    const std::string archive = archive_of(tensor_pickle, {layer_count});
    std::string state, data;
    for (size_t i = 0; i < count; ++i) {
      const std::string parameter = "decoder.layers.mlp.linear_fc2.weight";
      const std::string own = i == 0 ? parameter
                                     : fmt::format("optimizer.state.{}{}.{}",
                                                   std::string(name_bytes, 's'), i, parameter);
      state += word(own) + "c" + module + "TensorStorageMetadata\n)\x81}(" + word("properties") +
               "c" + module + "TensorProperties\n)\x81(ctorch\nuint8\ntb" + word("size") + shape +
               word("chunks") + "]c" + module + "ChunkStorageMetadata\n)\x81}(" + word("offsets") +
               at + word("sizes") + shape + "ubaub";
      data += "c" + module + "MetadataIndex\n)\x81}(" + word("fqn") + word(own) + word("offset") +
              at + word("index") + "Nub" +
              "ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(" +
              word("relative_path") + word("__0_0.distcp") + word("offset") +
              number(static_cast<uint32_t>(i * archive.size())) + word("length") +
              number(static_cast<uint32_t>(archive.size())) + "ub";
    }
    std::string bytes;
    for (size_t i = 0; i < count; ++i) bytes += archive;
    return file_text(".metadata", "\x80\2c" + module + "Metadata\n)\x81}(" +
                                      word("state_dict_metadata") + "}(" + state + "u" +
                                      word("storage_data") + "}(" + data + "uub.") +
           file_text("__0_0.distcp", bytes);
  };
  for (const uint32_t layer_count : {1000u, 1600u, 2000u, 16384u})
    inputs.push_back(stacks(1, layer_count, 1));
  for (const size_t name_bytes : {1, 100, 1000}) {
    inputs.push_back(stacks(9, 120, name_bytes));
    inputs.push_back(stacks(40, 200, name_bytes));
    inputs.push_back(stacks(100, 16384, name_bytes));
  }
  // Very many names of one tensor.
  const std::string tensor = "ctorch._utils\n_rebuild_tensor_v2\n((" + word("storage") +
                             "ctorch\nFloatStorage\n" + word("0") + word("cpu") +
                             "K\4tQK\0K\4\x85K\1\x85\x89Ntq\2R"s;
  std::string names = "\x80\2}(";
  for (uint32_t i = 0; names.size() < kSize; ++i)
    names += "M"s + static_cast<char>(i) + static_cast<char>(i >> 8) + (i == 0 ? tensor : "h\2"s);
  inputs.push_back(archive_text("model.pt", names + "u.", {16}));
  inputs.push_back(archive_text(
      "model.pt", "\x80\2}" + word("w") + "](" + tensor + repeated("", "h\2", kSize / 2, "es."),
      {16}));
  return inputs;
}

}  // namespace ptc::fuzz
