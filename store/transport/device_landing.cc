#include "store/transport/device_landing.h"

#include "store/tensor/packed_copy.h"

namespace ptc {

Result<std::vector<DeviceCopy>> DeviceLanding::place(uint64_t bytes, ConstMemoryPointer buffer) {
  std::vector<DeviceCopy> copies;
  bool fits = true;
  cuts_ = next_cuts(bytes);
  for (const Cut& cut : cuts_) {
    const FetchItem& item = *cut.item;
    const uint64_t before = packed_offset(item.copy, item.begin);
    const MemoryPointer target(item.target_at_begin.memory(),
                               item.target_at_begin.address() - item.begin);
    for_each_rectangle(unpacked(item.copy), item.begin, cut.target_end, [&](StridedCopy rectangle) {
      rectangle.source_offset -= before;
      fits = fits && lies_within(rectangle, cut.bytes, item.begin, cut.target_end);
      copies.push_back({buffer, target, rectangle});
    });
    buffer += cut.bytes;
  }
  if (!fits) return make_error(Code::kInternal, "runs that leave their chunk or their target");
  return copies;
}

void DeviceLanding::accept() {
  for (const Cut& cut : cuts_) finish(cut);
}

}  // namespace ptc
