#include "reshard/checkpoint/known_damage.h"

#include <algorithm>
#include <boost/json/array.hpp>

namespace ptc {
namespace {

namespace json = boost::json;

constexpr size_t kMostRanges = 2000, kMostImages = 1000;
constexpr uint32_t kMostNumbers = 1 << 24;

/// [first, last, first, last, …]
json::array ranges_of(const std::vector<uint32_t>& numbers) {
  std::vector<std::pair<uint32_t, uint32_t>> ranges;
  for (const uint32_t number : numbers)
    if (!ranges.empty() && ranges.back().second + 1 == number) ranges.back().second = number;
    else ranges.emplace_back(number, number);
  if (ranges.size() > kMostRanges) ranges = {{ranges.front().first, ranges.back().second}};
  json::array list;
  for (const auto& [first, last] : ranges) {
    list.push_back(first);
    list.push_back(last);
  }
  return list;
}

std::vector<uint32_t> numbers_from(const json::object& object, std::string_view key) {
  std::vector<uint32_t> numbers;
  const json::value* list = object.if_contains(key);
  if (list == nullptr || !list->is_array()) return numbers;
  const json::array& ends = list->get_array();
  for (size_t i = 0; i + 1 < ends.size(); i += 2) {
    boost::system::error_code bad, worse;
    const auto first = ends[i].to_number<uint32_t>(bad),
               last = ends[i + 1].to_number<uint32_t>(worse);
    const bool follows = numbers.empty() || first > numbers.back();
    if (bad || worse || last < first || last - first >= kMostNumbers - numbers.size() || !follows)
      break;
    for (uint64_t number = first; number <= last; ++number)
      numbers.push_back(static_cast<uint32_t>(number));
  }
  return numbers;
}

}  // namespace

bool KnownDamage::has_tensor(uint32_t tensor) const {
  return std::binary_search(tensors.begin(), tensors.end(), tensor);
}

bool KnownDamage::has_file(uint32_t file) const {
  return std::binary_search(files.begin(), files.end(), file);
}

bool KnownDamage::has_image(std::string_view id) const {
  return std::binary_search(images.begin(), images.end(), id);
}

bool KnownDamage::has_copy(std::string_view id) const {
  return std::binary_search(copies.begin(), copies.end(), id);
}

json::object KnownDamage::to_json() const {
  json::object object;
  if (!tensors.empty()) object["tensors"] = ranges_of(tensors);
  if (!files.empty()) object["files"] = ranges_of(files);
  for (const auto& [key, ids] : {std::pair("images", &images), std::pair("copies", &copies)})
    if (!ids->empty())
      object[key] = json::array(
          ids->begin(), ids->begin() + static_cast<ptrdiff_t>(std::min(ids->size(), kMostImages)));
  return object;
}

KnownDamage KnownDamage::from_json(const json::object& object) {
  KnownDamage damage{numbers_from(object, "tensors"), numbers_from(object, "files"), {}, {}};
  for (auto [key, list] :
       {std::pair("images", &damage.images), std::pair("copies", &damage.copies)}) {
    if (const json::value* ids = object.if_contains(key); ids != nullptr && ids->is_array())
      for (const json::value& id : ids->get_array())
        if (id.is_string()) list->emplace_back(std::string_view(id.get_string()));
    std::sort(list->begin(), list->end());
  }
  return damage;
}

}  // namespace ptc
