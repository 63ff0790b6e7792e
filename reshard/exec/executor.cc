#include "reshard/exec/executor.h"

#include <algorithm>
#include <memory>

#include "reshard/exec/image_sums.h"

namespace ptc {

const CommonCuts SummedTensors::kNotCut;
namespace {

// Large enough that a chunk's set-up does not count, small enough that the team stays busy to the
// end and a cancelled reshard stops at once.
constexpr uint64_t kChunkBytes = 16 << 20;
// What is gathered and hashed before it leaves the second-level cache.
constexpr uint64_t kWindowBytes = 256 << 10;
// A huge page: the kernel does not clear a fresh one that is written all at once.
constexpr uint64_t kBlockBytes = 2 << 20;

/// Part of an image, for one thread.
struct Chunk {
  size_t image;
  uint64_t begin, end;
};

void add_chunks(std::vector<Chunk>& chunks, size_t image, uint64_t bytes) {
  for (uint64_t begin = 0; begin < bytes; begin += kChunkBytes)
    chunks.push_back({image, begin, std::min(begin + kChunkBytes, bytes)});
}

}  // namespace

Result<> ChecksumLedger::add(uint32_t tensor, const Box& box, const Checksum& checksum) {
  if (tensors_.size() <= tensor) tensors_.resize(tensor + 1);
  Tensor& sums = tensors_[tensor];
  auto [known, is_new] = sums.parts.try_emplace(box, checksum);
  if (is_new) {
    sums.total += checksum;
    sums.elements += box.volume();
  } else if (known->second != checksum) {
    return make_error(Code::kCorrupt, "two copies of {} differ", box.to_string());
  }
  return ok();
}

Checksum ChecksumLedger::total(uint32_t tensor) const {
  return tensor < tensors_.size() ? tensors_[tensor].total : Checksum();
}

uint64_t ChecksumLedger::elements(uint32_t tensor) const {
  return tensor < tensors_.size() ? tensors_[tensor].elements : 0;
}

Executor::Executor(unsigned threads, std::unique_ptr<Transport> transport)
    : transport_(std::move(transport)), team_(threads) {}

Result<std::vector<ImageRef>> Executor::materialise(
    ImageStore& images, const std::vector<Target>& targets, const SummedTensors& tensors,
    ChecksumLedger& ledger, std::atomic<uint64_t>& bytes_done, std::stop_token stop) {
  std::vector<ImageWriter> writers;
  std::vector<ImageSums> sums;
  std::vector<Chunk> chunks;
  writers.reserve(targets.size());
  sums.reserve(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    PTC_TRY(auto image_sums, ImageSums::make(*targets[i].layout, tensors));
    PTC_TRY(auto writer, images.create(targets[i].layout->bytes, ImageStore::TakeSpace::kNow,
                                       targets[i].layout->memory));
    sums.push_back(std::move(image_sums));
    writers.push_back(std::move(writer));
    add_chunks(chunks, i, targets[i].layout->bytes);
  }
  // One file is written by one thread at a time, so the threads begin with different ones.
  std::stable_sort(chunks.begin(), chunks.end(),
                   [](const Chunk& a, const Chunk& b) { return a.begin < b.begin; });
  PTC_TRY(team_.parallel_for(
      chunks.size(),
      [&](size_t i) -> Result<> {
        const Chunk& chunk = chunks[i];
        thread_local const std::unique_ptr<std::byte[]> buffer(new std::byte[kBlockBytes]);
        for (uint64_t begin = chunk.begin; begin < chunk.end; begin += kBlockBytes) {
          if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
          const std::span block(buffer.get(), std::min(kBlockBytes, chunk.end - begin));
          std::vector<std::span<const std::byte>> pieces;
          for (uint64_t at = 0; at < block.size(); at += kWindowBytes) {
            const auto window = block.subspan(at, std::min(kWindowBytes, block.size() - at));
            size_t next = pieces.size();
            PTC_TRY(targets[chunk.image].program->read_in_place(*transport_, begin + at, window,
                                                                pieces, stop));
            for (uint64_t to = begin + at; next < pieces.size(); to += pieces[next++].size())
              sums[chunk.image].add(to, pieces[next]);
          }
          PTC_TRY(writers[chunk.image].write(begin, pieces));
          bytes_done += block.size();
        }
        return ok();
      },
      stop));
  for (const ImageSums& image_sums : sums) {
    PTC_TRY(image_sums.give_to(ledger));
  }

  std::vector<ImageRef> published;
  for (ImageWriter& writer : writers) {
    ImageId id = writer.id();
    Result<ImageRef> image = images.publish(std::move(writer));
    if (image.has_error()) {
      (void)images.remove(id);
      for (const ImageRef& earlier : published) (void)images.remove(earlier->id());
      return std::move(image).error();
    }
    published.push_back(std::move(image).value());
  }
  return published;
}

Result<> Executor::hash_images(const std::vector<StoredArrays>& images,
                               const SummedTensors& tensors, ChecksumLedger& ledger,
                               std::stop_token stop) {
  std::vector<std::span<const std::byte>> bytes;
  std::vector<ImageSums> sums;
  std::vector<Chunk> chunks;
  std::vector<size_t> on_device;
  for (size_t i = 0; i < images.size(); ++i) {
    std::span<const std::byte> mapped;  // stays empty of an image that is elsewhere
    if (images[i].image->has_host_bytes()) {
      PTC_TRY(mapped, images[i].image->host_bytes());
    }
    if (images[i].image->bytes() < images[i].layout->bytes)
      return make_error(Code::kCorrupt, "an image has {} bytes, {} are needed",
                        images[i].image->bytes(), images[i].layout->bytes);
    PTC_TRY(auto image_sums, ImageSums::make(*images[i].layout, tensors));
    bytes.push_back(mapped);
    sums.push_back(std::move(image_sums));
    if (images[i].image->device() == nullptr) add_chunks(chunks, i, images[i].layout->bytes);
    else on_device.push_back(i);
  }
  for (const size_t i : on_device) {
    PTC_TRY(sums[i].add_on_device(*images[i].image, stop));
  }
  PTC_TRY(team_.parallel_for(
      chunks.size(),
      [&](size_t i) -> Result<> {
        const Chunk& chunk = chunks[i];
        if (stop.stop_requested())
          return make_error(Code::kCancelled, "nobody waits for it any more");
        if (!images[chunk.image].image->has_host_bytes()) {
          std::vector<std::byte> buffer(chunk.end - chunk.begin);
          FetchItem item{
              images[chunk.image].image, {}, chunk.begin, chunk.end, in_host_memory(buffer.data())};
          item.copy.run_bytes = images[chunk.image].layout->bytes;
          PTC_TRY(transport_->fetch(std::span(&item, 1), stop));
          sums[chunk.image].add(chunk.begin, buffer);
          return ok();
        }
        sums[chunk.image].add(chunk.begin,
                              bytes[chunk.image].subspan(chunk.begin, chunk.end - chunk.begin));
        return ok();
      },
      stop));
  for (const ImageSums& image_sums : sums) {
    PTC_TRY(image_sums.give_to(ledger));
  }
  return ok();
}

namespace {

Result<> compare(const ChecksumLedger& ledger, const std::vector<TensorFacts>& tensors,
                 const std::function<std::string(uint32_t)>& name, bool all) {
  std::string wrong;
  size_t count = 0;
  for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
    PTC_TRY(auto elements, num_elements(tensors[tensor].shape));
    if (!all && ledger.elements(tensor) != elements) continue;
    if (ledger.elements(tensor) == elements && ledger.total(tensor) == tensors[tensor].checksum)
      continue;
    if (++count <= 3) wrong += fmt::format("{}{}", wrong.empty() ? "" : ", ", name(tensor));
  }
  if (count == 0) return ok();
  return make_error(Code::kCorrupt,
                    "the bytes of {} tensor{} do not have the checksum they had when "
                    "they were committed: {}{}",
                    count, count == 1 ? "" : "s", wrong, count > 3 ? ", …" : "");
}

}  // namespace

Result<> compare_checksums(const ChecksumLedger& ledger, const std::vector<TensorFacts>& tensors,
                           const std::function<std::string(uint32_t)>& name) {
  return compare(ledger, tensors, name, /*all=*/true);
}

Result<> compare_whole_tensors(const ChecksumLedger& ledger,
                               const std::vector<TensorFacts>& tensors,
                               const std::function<std::string(uint32_t)>& name) {
  return compare(ledger, tensors, name, /*all=*/false);
}

}  // namespace ptc
