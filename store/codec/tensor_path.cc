#include "store/codec/tensor_path.h"

#include <algorithm>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kSuffix = ".npy";
constexpr size_t kMaxName = 2048;
constexpr size_t kMaxComponent = 255;
constexpr std::string_view kHex = "0123456789ABCDEF";

/// Whether the dot at `i` parts two components; others belong to a name and are escaped.
bool is_separator(std::string_view name, size_t i) {
  return name[i] == '.' && i > 0 && i + 1 < name.size() && name[i - 1] != '.' && name[i + 1] != '.';
}

bool is_escaped(char c) {
  auto byte = static_cast<unsigned char>(c);
  return byte < 0x20 || byte == 0x7F || c == '%' || c == '/' || c == '.';
}

Error bad_path(std::string_view path) {
  return invalid_argument("{} is not the path of a tensor", quoted(path));
}

}  // namespace

Result<std::string> tensor_path(std::string_view tensor_name) {
  if (tensor_name.empty()) return invalid_argument("a tensor with an empty name has no path");
  if (tensor_name.size() > kMaxName)
    return invalid_argument("a tensor's name has {} bytes, but at most {} are allowed: {}",
                            tensor_name.size(), kMaxName, quoted(tensor_name));
  std::string path;
  for (size_t i = 0; i < tensor_name.size(); ++i) {
    char c = tensor_name[i];
    auto byte = static_cast<unsigned char>(c);
    if (is_separator(tensor_name, i)) path += '/';
    else if (is_escaped(c)) (path += '%') += {kHex[byte >> 4], kHex[byte & 15]};
    else path += c;
  }
  path += kSuffix;
  for (size_t begin = 0; begin < path.size();) {
    size_t end = std::min(path.find('/', begin), path.size());
    if (end - begin > kMaxComponent) {
      return invalid_argument(
          "a part of a tensor's name makes a file name of {} bytes, but at "
          "most {} are allowed: {}",
          end - begin, kMaxComponent, ptc::quoted(path.substr(begin, 200)));
    }
    begin = end + 1;
  }
  return path;
}

Result<std::string> tensor_name_of_path(std::string_view path) {
  if (!path.ends_with(kSuffix)) return bad_path(path);
  std::string name;
  std::string_view stem = path.substr(0, path.size() - kSuffix.size());
  for (size_t i = 0; i < stem.size(); ++i) {
    if (stem[i] == '/') {
      name += '.';
    } else if (stem[i] == '%') {
      size_t high = i + 2 < stem.size() ? kHex.find(stem[i + 1]) : std::string_view::npos;
      size_t low = i + 2 < stem.size() ? kHex.find(stem[i + 2]) : std::string_view::npos;
      if (high == std::string_view::npos || low == std::string_view::npos) return bad_path(path);
      name += static_cast<char>(high << 4 | low);
      i += 2;
    } else {
      name += stem[i];
    }
  }
  // Many spellings decode to one name; only the one that tensor_path writes is a path.
  auto canonical = tensor_path(name);
  if (!canonical || canonical.value() != path) return bad_path(path);
  return name;
}

}  // namespace ptc
