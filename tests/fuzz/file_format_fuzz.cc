// The pickle of a torch file, in an archive with storages of which it may tell, as a commit reads
// it: an outline, the tensors by that, and the file laid out again with these.
#include "fuzz.h"
#include "reshard/checkpoint/file_format.h"
#include "store/codec/zip.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  ZipWriter writer;
  writer.add("a/data.pkl", input);
  for (int i = 0; i < 16; ++i)
    writer.add("a/data/" + std::to_string(i), std::string(16 * (i + 1), 's'));
  const ZipWriter::Layout archive = std::move(writer).finish();
  PTC_CHECK(archive.pieces.size() == 1);
  const std::string& file = archive.pieces[0].bytes;
  const FileFormat& format = torch_format();
  auto outline = format.outline(read_at(bytes_of(file)), file.size(), {});
  if (!outline) return check_error(outline.error());
  const FileOutline written{outline.value(), file.size()};
  auto found = format.tensors(written, "a.pt", {});
  if (!found) return check_error(found.error());
  std::vector<NewArray> arrays;
  for (const TensorEntry& tensor : found.value().tensors) {
    PTC_CHECK(tensor.offset <= file.size() && tensor.bytes <= file.size() - tensor.offset);
    PTC_CHECK(array_bytes(tensor.shape, tensor.dtype).value() == tensor.bytes);
    found.value().literals.for_each(tensor.offset, tensor.offset + tensor.bytes,
                                    [](uint64_t, std::string_view) { PTC_CHECK(false); });
  }
  if (input.size() > 16 << 10) return;
  for (const TensorEntry& tensor : found.value().tensors)
    arrays.push_back({tensor.name, tensor.dtype, &tensor.shape, arrays.size()});
  for (const size_t left_out : {size_t{0}, size_t{1}}) {  // as it was, and as for another stage
    if (arrays.size() < left_out + 1) return;
    auto made = format.lay_out(std::span(arrays).subspan(left_out), std::span(&written, 1));
    if (!made) {
      check_error(made.error());
      continue;
    }
    for (size_t i = left_out; i < arrays.size(); ++i)
      PTC_CHECK(made.value().offsets[i - left_out] +
                    array_bytes(*arrays[i].shape, arrays[i].dtype).value() <=
                made.value().bytes);
  }
}

std::vector<std::string> large_inputs() {
  using namespace std::string_literals;
  const std::string tensor =
      "ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0"
      "0X\3\0\0\0cpuK\4tQK\0K\4\x85K\1\x85\x89Ntq\2Rq\1"s;
  std::vector<std::string> inputs;
  // Very many names of one tensor: short ones, and such as are long because they lie deep.
  std::string names = "\x80\2}("s;
  for (uint32_t i = 0; names.size() < kMegabyte; ++i)
    names += "M"s + static_cast<char>(i) + static_cast<char>(i >> 8) + (i == 0 ? tensor : "h\1"s);
  inputs.push_back(names + "u.");
  std::string deep = "\x80\2"s, end;
  for (int level = 0; level < 60; ++level) {
    deep += "}X\x0a\0\0\0aaaaaaaaaa"s;
    end = "s" + end;
  }
  inputs.push_back(deep + "](" + tensor + repeated("", "h\1", kMegabyte / 2, "e") + end + ".");
  return inputs;
}

}  // namespace ptc::fuzz
