#include "store/base/file_kind.h"

#include <algorithm>
#include <cctype>

namespace ptc {
namespace {

using namespace std::string_view_literals;

struct Kind {
  std::string_view begins, what;
};
constexpr Kind kKinds[] = {
    {"version https://git-lfs.github.com/"sv,
     "it is a git-lfs pointer, not the file that it stands for: git lfs pull"sv},
    {"PK\3\4"sv, "it is a zip archive, as torch.save writes it: give it a name that ends in .pt"sv},
    {"\x80\2"sv,
     "it is a pickle, as torch.save once wrote it: save with safetensors.torch.save_file"sv},
    {"\x1f\x8b"sv, "it is compressed (gzip): gunzip it"sv},
    {"\x28\xb5\x2f\xfd"sv, "it is compressed (zstd): unzstd it"sv},
    {"GGUF"sv, "it is a GGUF file, which is for inference alone"sv},
    {"\x89HDF\r\n"sv, "it is an HDF5 file: save its arrays as .npy or safetensors"sv},
};

bool begins_without_case(std::string_view text, std::string_view beginning) {
  return text.size() >= beginning.size() &&
         std::equal(beginning.begin(), beginning.end(), text.begin(), [](char a, char b) {
           return a == std::tolower(static_cast<unsigned char>(b));
         });
}

}  // namespace

std::string_view other_kind_of(std::string_view beginning) {
  for (const Kind& kind : kKinds)
    if (beginning.starts_with(kind.begins)) return kind.what;
  if (beginning.starts_with("\xef\xbb\xbf")) beginning.remove_prefix(3);
  beginning.remove_prefix(std::min(beginning.find_first_not_of(" \t\r\n"), beginning.size()));
  for (const std::string_view html : {"<!doctype html"sv, "<html"sv, "<head"sv})
    if (begins_without_case(beginning, html))
      return "it is an HTML page, perhaps what a server said in place of the file: download it "
             "again";
  if (beginning.starts_with("<?xml"))
    return "it is an XML text, perhaps what a server said in place of the file: download it again";
  return {};
}

}  // namespace ptc
