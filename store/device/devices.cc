#include "store/device/devices.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>

#include "store/base/json.h"
#include "store/base/size_text.h"
#include "store/device/cuda_device.h"
#include "store/device/cuda_driver.h"
#include "store/device/host_device.h"

namespace ptc {
namespace {

constexpr std::string_view kAuto = "auto", kOff = "off", kHostPrefix = "host:";

/// What "--gpu" says. One of them has more than nothing, or neither does.
struct WantedDevices {
  bool all = false;                  // that there are
  std::vector<uint32_t> numbers;     // of GPUs
  std::vector<uint64_t> host_bytes;  // of HostDevices
};

template <class Add>
Result<> for_each_of_list(std::string_view list, Add add) {
  for (size_t comma = 0; comma != std::string_view::npos;) {
    comma = list.find(',');
    PTC_TRY(add(list.substr(0, comma)));
    list.remove_prefix(comma == std::string_view::npos ? list.size() : comma + 1);
  }
  return ok();
}

Result<WantedDevices> parse_wanted(std::string_view spec) {
  WantedDevices wanted;
  if (spec == kOff) return wanted;
  if (spec == kAuto) {
    wanted.all = true;
    return wanted;
  }
  if (spec.starts_with(kHostPrefix)) {
    PTC_TRY(
        for_each_of_list(spec.substr(kHostPrefix.size()), [&](std::string_view size) -> Result<> {
          const auto bytes = parse_size(size);
          if (bytes.has_error()) return Error(bytes.error());
          if (bytes.value() < Devices::kLeastHostBytes)
            return invalid_argument("a device of {} is too small: {} or more",
                                    format_size(bytes.value()),
                                    format_size(Devices::kLeastHostBytes));
          wanted.host_bytes.push_back(bytes.value());
          return ok();
        }));
    if (wanted.host_bytes.size() > NodeMemory::kMostDevices)
      return invalid_argument("a node has {} devices at most", NodeMemory::kMostDevices);
    return wanted;
  }
  PTC_TRY(for_each_of_list(spec, [&](std::string_view text) -> Result<> {
    uint32_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (text.empty() || error != std::errc() || end != text.data() + text.size() ||
        number >= NodeMemory::kMostDevices)
      return invalid_argument(
          "{} is none of \"auto\", \"off\", numbers of GPUs as \"0,1\", and \"host:SIZE,SIZE\"",
          quoted(spec));
    if (std::find(wanted.numbers.begin(), wanted.numbers.end(), number) != wanted.numbers.end())
      return invalid_argument("GPU {} is named twice", number);
    wanted.numbers.push_back(number);
    return ok();
  }));
  std::sort(wanted.numbers.begin(), wanted.numbers.end());
  return wanted;
}

constexpr std::string_view kOtherwise =
    "; \"off\" does without GPUs, and \"host:SIZE\" has devices in the host's memory instead";

}  // namespace

Devices::Devices(std::vector<std::unique_ptr<Device>> devices) { add(std::move(devices)); }

void Devices::add(std::vector<std::unique_ptr<Device>> devices) const {
  for (std::unique_ptr<Device>& device : devices) {
    auto lanes = std::make_unique<Staging>(*device), waiting = std::make_unique<Staging>(*device);
    devices_.push_back({std::move(device), std::move(lanes), std::move(waiting)});
  }
}

const std::vector<Devices::One>& Devices::all() const {
  std::call_once(found_, [this] {
    if (!finds_all_ || !has_cuda_kernels()) return;
    std::vector<std::unique_ptr<Device>> devices;
    const uint32_t count = std::min(cuda_device_count(), NodeMemory::kMostDevices);
    for (uint32_t number = 0; number < count; ++number) {
      auto device = open_cuda_device(number);
      if (device.has_value()) devices.push_back(std::move(device).value());
      else refused_.push_back(fmt::format("GPU {}: {}", number, device.error().message()));
    }
    add(std::move(devices));
  });
  return devices_;
}

Result<> Devices::check(std::string_view spec) {
  PTC_TRY(parse_wanted(spec));
  return ok();
}

Result<std::unique_ptr<Devices>> Devices::open(std::string_view spec) {
  PTC_TRY(const WantedDevices wanted, parse_wanted(spec));
  std::vector<std::unique_ptr<Device>> devices;
  for (uint32_t i = 0; i < wanted.host_bytes.size(); ++i)
    devices.push_back(std::make_unique<HostDevice>(
        HostDevice::Options{.number = i, .memory_bytes = wanted.host_bytes[i]}));
  for (const uint32_t number : wanted.numbers) {
    auto device = open_cuda_device(number);
    if (device.has_error())
      return make_error(Code::kUnavailable, "GPU {}: {}{}", number, device.error().message(),
                        kOtherwise);
    devices.push_back(std::move(device).value());
  }
  auto opened = std::make_unique<Devices>(std::move(devices));
  opened->finds_all_ = wanted.all;
  return opened;
}

Device* Devices::find(NodeMemory memory) const {
  for (const One& one : all())
    if (one.device->memory() == memory) return one.device.get();
  return nullptr;
}

Result<Device*> Devices::at(NodeMemory memory) const {
  if (Device* const device = find(memory)) return device;
  if (memory.is_host()) return invalid_argument("the host's memory is that of no device");
  return invalid_argument("{} is not here: this node has {} device{}", memory.to_string(), size(),
                          size() == 1 ? "" : "s");
}

std::vector<NodeMemory> Devices::memories() const {
  std::vector<NodeMemory> found;
  for (const One& one : all()) found.push_back(one.device->memory());
  return found;
}

std::vector<Devices::DeviceRoom> Devices::room() const {
  std::vector<DeviceRoom> rooms;
  for (const One& one : all()) {
    const auto told = one.device->room();
    Device::Room room = told.has_value() ? told.value() : Device::Room{};
    room.free -= std::min(room.free, one.lanes->still_to_take() + one.waiting->still_to_take());
    rooms.push_back({one.device->memory(), one.device->name(), room});
  }
  return rooms;
}

Result<Staging::Lane> Devices::lane(NodeMemory memory) const {
  for (const One& one : all())
    if (one.device->memory() == memory) return one.lanes->take();
  return at(memory).error();
}

Result<Staging::Lane> Devices::waiting_lane(NodeMemory memory) const {
  for (const One& one : all())
    if (one.device->memory() == memory) return one.waiting->take();
  return at(memory).error();
}

Result<> Devices::write(MemoryPointer target, std::span<const std::byte> bytes) const {
  if (bytes.empty()) return ok();
  PTC_TRY(Staging::Lane taken, lane(target.memory()));
  for (uint64_t at = 0; at < bytes.size(); at += Staging::kBytes) {
    const auto some = bytes.subspan(at, std::min(Staging::kBytes, bytes.size() - at));
    std::copy(some.begin(), some.end(), taken->host().begin());
    StridedCopy copy;
    copy.run_bytes = some.size();
    const StagedPart part{copy, 0, some.size(), target + at};
    PTC_TRY(taken->up(std::span(&part, 1)));
  }
  return ok();
}

Result<> Devices::read(ConstMemoryPointer source, const StridedCopy& copy, uint64_t begin,
                       uint64_t end, std::byte* out) const {
  if (begin >= end) return ok();
  PTC_TRY(Staging::Lane taken, lane(source.memory()));
  const StridedCopy string = packed(copy);
  for (uint64_t at = begin; at < end; at += Staging::kBytes) {
    const uint64_t to = std::min(end, at + Staging::kBytes);
    const StagedPart part{string, at, to, MemoryPointer(source.memory(), source.address())};
    PTC_TRY(taken->down(std::span(&part, 1)));
    std::copy_n(taken->host().begin(), to - at, out + (at - begin));
  }
  return ok();
}

Result<> Devices::zero(MemoryPointer begin, uint64_t bytes) const {
  PTC_TRY(Staging::Lane taken, lane(begin.memory()));
  return taken->zero(begin, bytes);
}

Result<> Devices::add_checksums(NodeMemory memory, std::span<const DeviceRun> runs,
                                std::span<Checksum> sums) const {
  PTC_TRY(Staging::Lane taken, lane(memory));
  return taken->add_checksums(runs, sums);
}

}  // namespace ptc
