#include "reshard/checkpoint/file_format.h"

#include <algorithm>

#include "reshard/checkpoint/megatron_buckets.h"
#include "store/codec/dcp_sharding.h"
#include "store/codec/npy.h"
#include "store/codec/tensor_path.h"

namespace ptc {
namespace {

constexpr std::string_view kTorchEndings[] = {".pt", ".pth", ".bin", ".ckpt"};

Result<std::string> beginning(const ReadAt& file, uint64_t bytes) {
  std::string text(bytes, '\0');
  PTC_TRY(file(0, std::as_writable_bytes(std::span(text))));
  return text;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

class SafetensorsFormat final : public FileFormat {
 public:
  Result<std::string> outline(const ReadAt& file, uint64_t file_bytes,
                              std::optional<DType>) const override {
    PTC_TRY(auto first, beginning(file, std::min<uint64_t>(8, file_bytes)));
    PTC_TRY(auto header_bytes, safetensors_header_bytes(bytes_of(first), file_bytes));
    return beginning(file, header_bytes);
  }

  Result<FileTensors> tensors(const FileOutline& outline, std::string_view,
                              std::optional<DType>) const override {
    FileTensors found;
    PTC_TRY(auto header, parse_safetensors(bytes_of(outline.text), outline.file_bytes));
    PTC_TRY(auto sharding, dcp_sharding(header));
    if (sharding) {
      for (size_t i = 0; i < sharding->wholes.size(); ++i)
        found.said.push_back(SaidPart{sharding->boxes[i], sharding->wholes[i]});
      found.boxes = std::move(sharding->boxes);
    }
    found.tensors = std::move(header.tensors);
    found.literals = std::string(outline.text);
    return found;
  }

  Result<FileLayout> lay_out(std::span<const NewArray> arrays, std::span<const FileOutline>,
                             std::span<const NewArgument>) const override {
    std::vector<SafetensorsArray> all;
    all.reserve(arrays.size());
    for (const NewArray& array : arrays)
      all.push_back({array.name, array.dtype, array.shape, array.place});
    PTC_TRY(auto made, lay_out_safetensors(all, {{"format", "pt"}}));
    FileLayout layout;
    layout.literals = std::move(made.header);
    layout.bytes = made.bytes;
    layout.offsets = std::move(made.offsets);
    layout.order = std::move(made.order);
    return layout;
  }
};

class NpyFormat final : public FileFormat {
 public:
  Result<std::string> outline(const ReadAt& file, uint64_t file_bytes,
                              std::optional<DType> declared) const override {
    PTC_TRY(auto header, beginning(file, std::min(file_bytes, kMaxNpyHeaderBytes)));
    PTC_TRY(const auto entry, parse_npy(bytes_of(header), file_bytes, declared));
    header.resize(entry.offset);
    return header;
  }

  Result<FileTensors> tensors(const FileOutline& outline, std::string_view path,
                              std::optional<DType> declared) const override {
    FileTensors found;
    PTC_TRY(auto entry, parse_npy(bytes_of(outline.text), outline.file_bytes, declared));
    auto name = tensor_name_of_path(path);
    entry.name = name.has_value() ? name.value() : std::string(path.substr(0, path.size() - 4));
    if (!name.has_value()) std::replace(entry.name.begin(), entry.name.end(), '/', '.');
    found.tensors.push_back(std::move(entry));
    found.literals = std::string(outline.text);
    return found;
  }

  Result<FileLayout> lay_out(std::span<const NewArray> arrays, std::span<const FileOutline>,
                             std::span<const NewArgument>) const override {
    if (arrays.size() != 1)
      return make_error(Code::kInternal, "an .npy would have to hold {} tensors", arrays.size());
    std::string header = write_npy_header(arrays[0].dtype, *arrays[0].shape);
    PTC_TRY(auto bytes, array_bytes(*arrays[0].shape, arrays[0].dtype));
    FileLayout layout;
    layout.offsets.push_back(header.size());
    layout.bytes = header.size() + bytes;
    layout.literals = std::move(header);
    return layout;
  }
};

}  // namespace

const FileFormat& safetensors_format() {
  static const SafetensorsFormat format;
  return format;
}

const FileFormat& npy_format() {
  static const NpyFormat format;
  return format;
}

bool may_be_torch(std::string_view path) {
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (name.starts_with("rng") || name.starts_with("random_states")) return false;
  return std::any_of(std::begin(kTorchEndings), std::end(kTorchEndings),
                     [&](std::string_view ending) { return path.ends_with(ending); });
}

namespace {

/// The first that takes a file is its format.
constexpr FormatRow kFormats[] = {
    {"distributed checkpointing",
     [](std::string_view path, bool in_set) {
       return path.ends_with(kDcpEnding) || (in_set && may_be_torch(path));
     },
     dcp_format, ""},
    {"NumPy", [](std::string_view path, bool in_set) { return !in_set && path.ends_with(".npy"); },
     npy_format, ".npy", /*keeps_values=*/false, /*is_one_array=*/true},
    {"Megatron's distributed optimizer",
     [](std::string_view path, bool in_set) { return !in_set && is_megatron_buckets(path); },
     megatron_buckets_format, "", /*keeps_values=*/true},
    {"torch.save", [](std::string_view path, bool in_set) { return !in_set && may_be_torch(path); },
     torch_format, "", /*keeps_values=*/true},
    {"safetensors", [](std::string_view, bool) { return true; }, safetensors_format,
     ".safetensors"}};

}  // namespace

const FormatRow& format_row(std::string_view path, bool in_set) {
  return *std::find_if(std::begin(kFormats), std::end(kFormats),
                       [&](const FormatRow& row) { return row.takes(path, in_set); });
}

bool is_named_for_tensors(std::string_view path) {
  const std::string_view ending = format_row(path, false).ending;
  return !ending.empty() && path.ends_with(ending);
}

}  // namespace ptc
