// A run of a shard as a file.
#pragma once

#include <algorithm>

#include "dataset/tree/sample_form.h"
#include "dataset/tree/virtual_file.h"

namespace ptc {

class ExtentFile : public VirtualFile {
 public:
  ExtentFile(SampleSourceRef source, Payload payload)
      : source_(std::move(source)), payload_(std::move(payload)) {}

  uint64_t size() const override { return payload_.bytes(); }
  Result<> may_read() const override {
    PTC_TRY(source_->open_shard(payload_.extent.shard));
    return ok();
  }
  bool read_through() const override { return true; }
  Result<size_t> read(uint64_t offset, std::span<std::byte> out) const override {
    return fill(offset, out, Stores::kPlain);
  }
  Result<size_t> gather(uint64_t offset, std::span<std::byte> out) const override {
    return fill(offset, out, Stores::kPastCaches);
  }
  Result<std::optional<WholeFile>> whole() const override {
    const Extent& extent = payload_.extent;
    if (payload_.newline || extent.offset != 0 ||
        extent.bytes != source_->shard_bytes(extent.shard))
      return std::optional<WholeFile>();
    PTC_TRY(auto fd, source_->open_shard_fd(extent.shard));
    return std::optional<WholeFile>({source_->shard_path(extent.shard), std::move(fd)});
  }

 private:
  Result<size_t> fill(uint64_t offset, std::span<std::byte> out, Stores stores) const {
    if (offset >= size()) return size_t{0};
    out = out.first(std::min<uint64_t>(out.size(), size() - offset));
    Window window(*source_, offset, out, stores);
    PTC_TRY(render_payload(payload_, window));
    PTC_TRY(window.flush());
    return out.size();
  }

  const SampleSourceRef source_;
  const Payload payload_;
};

}  // namespace ptc
