#include "store/transport/device_landing.h"

#include "store/tensor/packed_copy.h"

namespace ptc {

std::vector<DeviceCopy> DeviceLanding::place(uint64_t bytes, ConstMemoryPointer buffer) {
  std::vector<DeviceCopy> copies;
  cuts_ = next_cuts(bytes);
  for (const Cut& cut : cuts_) {
    const FetchItem& item = *cut.item;
    const uint64_t before = packed_offset(item.copy, item.begin);
    for (StridedCopy& part : cut_to_window(unpacked(item.copy), item.begin, cut.target_end)) {
      part.source_offset -= before;
      part.target_offset -= item.begin;
      copies.push_back({buffer, item.target_at_begin, part});
    }
    buffer += cut.bytes;
  }
  return copies;
}

void DeviceLanding::accept() {
  for (const Cut& cut : cuts_) finish(cut);
}

}  // namespace ptc
