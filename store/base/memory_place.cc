#include "store/base/memory_place.h"

#include <charconv>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kHost = "host", kCuda = "cuda:";

}  // namespace

std::string NodeMemory::to_string() const {
  return is_host() ? std::string(kHost) : fmt::format("{}{}", kCuda, device());
}

Result<NodeMemory> NodeMemory::parse(std::string_view name) {
  if (name == kHost) return NodeMemory();
  if (name.starts_with(kCuda)) {
    const std::string_view digits = name.substr(kCuda.size());
    uint32_t device = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), device);
    // One name each: a number has no zeros in front.
    if (error == std::errc() && device < kMostDevices && cuda(device).to_string() == name)
      return cuda(device);
  }
  return invalid_argument("{} is no memory of a node; \"host\" is one, and \"cuda:0\"",
                          quoted(name));
}

std::string MemoryPlace::to_string() const {
  return memory.is_host() ? node : fmt::format("{}/{}", node, memory.to_string());
}

Result<MemoryPlace> MemoryPlace::parse(std::string_view text) {
  const size_t slash = text.rfind('/');
  MemoryPlace place{std::string(text.substr(0, slash))};
  if (slash != std::string_view::npos) {
    PTC_TRY(place.memory, NodeMemory::parse(text.substr(slash + 1)));
  }
  return place;
}

Error not_in_host_memory(NodeMemory memory) {
  return invalid_argument("the memory of {} is not the host's, which alone can be reached here",
                          memory.to_string());
}

}  // namespace ptc
