// A run of a shard as a file.
#pragma once

#include <algorithm>

#include "dataset/tree/sample_form.h"
#include "dataset/tree/virtual_file.h"

namespace ptc {

class ExtentFile : public VirtualFile {
 public:
  ExtentFile(SampleSourceRef source, Payload payload) : source_(std::move(source)), payload_(std::move(payload)) {}

  uint64_t size() const override { return payload_.bytes(); }
  bool read_through() const override { return true; }
  Result<size_t> read(uint64_t offset, std::span<std::byte> out) const override {
    if (offset >= size()) return size_t{0};
    out = out.first(std::min<uint64_t>(out.size(), size() - offset));
    Window window(*source_, offset, out);
    PTC_TRY(render_payload(payload_, window));
    PTC_TRY(window.flush());
    return out.size();
  }
  Result<std::optional<WholeFile>> whole() const override {
    const Extent& extent = payload_.extent;
    if (payload_.newline || extent.offset != 0 || extent.bytes != source_->shard_bytes(extent.shard))
      return std::optional<WholeFile>();
    PTC_TRY(auto fd, source_->open_shard(extent.shard));
    return std::optional<WholeFile>({source_->shard_path(extent.shard), std::move(fd)});
  }

 private:
  const SampleSourceRef source_;
  const Payload payload_;
};

}  // namespace ptc
