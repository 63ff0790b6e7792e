#include "store/codec/name_order.h"

#include <algorithm>
#include <numeric>

namespace ptc {
namespace {

class NameOrder {
 public:
  explicit NameOrder(std::span<const std::string_view> names) : names_(names) {}

  void sort(std::span<uint32_t> order) {
    keyed_.reserve(order.size());
    for (const uint32_t i : order) keyed_.push_back({0, i});
    sort_from(0, keyed_);
    for (size_t i = 0; i < order.size(); ++i) order[i] = keyed_[i].name;
  }

 private:
  struct Keyed {
    uint64_t key;
    uint32_t name;
  };
  static constexpr size_t kMostBytesInCommon = 1024;
  static constexpr size_t kKeyBytes = 7;  // the eighth says how many there are: "a" before "a\0"

  uint64_t key_of(std::string_view name, size_t from) const {
    const size_t bytes = from < name.size() ? std::min(kKeyBytes, name.size() - from) : 0;
    uint64_t key = 0;
    for (size_t i = 0; i < kKeyBytes; ++i)
      key = key << 8 | (i < bytes ? static_cast<unsigned char>(name[from + i]) : 0);
    return key << 8 | bytes;
  }
  /// Those of which the names are the same up to `from`.
  void sort_from(size_t from, std::span<Keyed> same) {
    if (from > kMostBytesInCommon)  // no stack for whoever names tensors so
      return std::sort(same.begin(), same.end(), [&](const Keyed& a, const Keyed& b) {
        return names_[a.name] < names_[b.name];
      });
    for (size_t i = 0; i < same.size(); ++i) {
      constexpr size_t kAhead = 16;  // names lie here and there: fetched before they are looked at
      if (i + kAhead < same.size()) __builtin_prefetch(names_[same[i + kAhead].name].data() + from);
      same[i].key = key_of(names_[same[i].name], from);
    }
    const auto before = [](const Keyed& a, const Keyed& b) { return a.key < b.key; };
    if (!std::is_sorted(same.begin(), same.end(), before))
      std::sort(same.begin(), same.end(), before);
    for (size_t begin = 0, end = 0; begin < same.size(); begin = end) {
      while (end < same.size() && same[end].key == same[begin].key) ++end;
      const bool goes_on = (same[begin].key & 0xff) == kKeyBytes;
      if (end - begin > 1 && goes_on) sort_from(from + kKeyBytes, same.subspan(begin, end - begin));
    }
  }

  const std::span<const std::string_view> names_;
  std::vector<Keyed> keyed_;
};

}  // namespace

std::vector<uint32_t> places_by_name(std::span<const std::string_view> names) {
  std::vector<uint32_t> order(names.size());
  std::iota(order.begin(), order.end(), 0);
  if (!std::is_sorted(names.begin(), names.end())) NameOrder(names).sort(order);
  std::vector<uint32_t> places(names.size());
  uint32_t place = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && names[order[i]] != names[order[i - 1]]) ++place;
    places[order[i]] = place;
  }
  return places;
}

}  // namespace ptc
