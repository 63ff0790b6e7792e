#include "reshard/exec/incoming_sums.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>

#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr uint64_t kSummedAtOnce = 4 << 20;

template <class Visit>
void for_each_chunk(uint64_t begin, uint64_t end, Visit visit) {
  for (uint64_t chunk = begin / kSummedAtOnce; chunk * kSummedAtOnce < end; ++chunk) visit(chunk);
}

}  // namespace

Result<> IncomingSums::add(const ImageLayout& layout, std::span<const std::byte> memory,
                           const SummedTensors& tensors) {
  PTC_TRY(auto sums, ImageSums::make(layout, tensors));
  images_.push_back({std::move(sums), memory,
                     std::vector<uint32_t>((memory.size() + kSummedAtOnce - 1) / kSummedAtOnce)});
  return ok();
}

Result<> IncomingSums::add_on_device(const ImageLayout& layout, ImageRef image,
                                     const SummedTensors& tensors) {
  PTC_TRY(auto sums, ImageSums::make(layout, tensors));
  images_.push_back({std::move(sums), {}, {}, std::move(image)});
  return ok();
}

void IncomingSums::expect(const ImagePart& part) {
  if (images_[part.image].on_device != nullptr) return;
  for_each_chunk(part.begin, part.end,
                 [&](uint64_t chunk) { ++images_[part.image].expected[chunk]; });
}

void IncomingSums::start() {
  MutexLock lock(mutex_);
  for (size_t image = 0; image < images_.size(); ++image)
    for (size_t chunk = 0; chunk < images_[image].expected.size(); ++chunk)
      if (images_[image].expected[chunk] == 0) whole_.push_back({image, chunk});
  thread_ = std::jthread([this](std::stop_token stop) {
    ::pthread_setname_np(::pthread_self(), "ptcfs-sums");
    give_way();
    hash_all(std::move(stop));
  });
}

void IncomingSums::came(std::span<const ImagePart> parts) {
  MutexLock lock(mutex_);
  std::vector<Chunk> whole;
  for (const ImagePart& part : parts) {
    if (images_[part.image].on_device != nullptr) continue;
    for_each_chunk(part.begin, part.end, [&](uint64_t chunk) {
      if (--images_[part.image].expected[chunk] == 0) whole.push_back({part.image, chunk});
    });
  }
  whole_.insert(whole_.end(), whole.begin(), whole.end());
  if (!whole.empty()) more_.notify_one();
}

void IncomingSums::hash(const Chunk& chunk) {
  ImageChunks& image = images_[chunk.image];
  const uint64_t begin = chunk.number * kSummedAtOnce;
  const auto bytes =
      image.memory.subspan(begin, std::min(kSummedAtOnce, image.memory.size() - begin));
  image.sums.add(begin, bytes);
  // Nobody reads it here again, in most cases: let go of now, while there is time, it need not be
  // at the end.
  ::madvise(const_cast<std::byte*>(bytes.data()), bytes.size(), MADV_DONTNEED);
}

void IncomingSums::hash_all(std::stop_token stop) {
  UniqueLock lock(mutex_);
  while (more_.wait(mutex_, stop, [&]() PTC_REQUIRES(mutex_) { return !whole_.empty(); }) &&
         !stop.stop_requested()) {
    const Chunk chunk = whole_.front();
    whole_.pop_front();
    lock.unlock();
    hash(chunk);
    lock.lock();
  }
}

Result<> IncomingSums::finish(ThreadTeam& team, ChecksumLedger& ledger, std::stop_token stop) {
  thread_ = {};
  std::deque<Chunk> left;
  {
    MutexLock lock(mutex_);
    left.swap(whole_);
  }
  PTC_TRY(team.parallel_for(
      left.size(),
      [&](size_t i) -> Result<> {
        hash(left[i]);
        return ok();
      },
      stop));
  for (ImageChunks& image : images_) {
    if (image.on_device != nullptr) {
      PTC_TRY(image.sums.add_on_device(*image.on_device, stop));
    }
    PTC_TRY(image.sums.give_to(ledger));
  }
  return ok();
}

}  // namespace ptc
